"""The pool of text processes: a process that dies is replaced, and the errors of a call reach its caller."""

from __future__ import annotations

import os
from functools import partial

import pytest
from structlog.testing import capture_logs

from common.errors import InvalidRequest, Unavailable
from services.router.text.bodies import EmbeddingsBody, decode
from services.router.text.pool import TextPool
from services.router.text.templates import Template


async def test_a_crashed_text_process_is_replaced() -> None:
    """A call that kills its process is an error; the next call is served."""
    pool = TextPool(1)
    await pool.start()
    with pytest.raises(Unavailable) as caught, capture_logs() as lines:
        await pool.run(partial(os._exit, 9))
    assert [line["event"] for line in lines] == ["text_pool_replaced"] * 2
    assert caught.value.code == "text_pool_broken"
    assert await pool.run(partial(abs, -3)) == 3
    assert pool.restarts == 2
    with pytest.raises(InvalidRequest) as wrong:
        await pool.run(partial(decode, b'{"input": {}}', EmbeddingsBody))
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "input")
    pool.stop()


async def test_an_endless_template_is_stopped() -> None:
    """In the pool a template has two seconds."""
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    template = Template("f", loops, "", "", 1000)
    pool = TextPool(1)
    try:
        with pytest.raises(Unavailable, match="ran for more than"):
            await pool.run(partial(template.render, [{"role": "user", "content": "hello"}]))
    finally:
        pool.stop()
