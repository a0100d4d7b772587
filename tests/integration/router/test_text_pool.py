"""The pool of text processes: what dies is replaced, templates are bounded, errors of a call reach its caller."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from common.errors import InvalidRequest, Unavailable
from services.router.text.bodies import EmbeddingsBody, decode
from services.router.text.pool import TextPool
from services.router.text.templates import Template
from tests.support.chat import asks, post
from tests.support.mesh import Mesh
from tests.support.scripted_generator import FINGERPRINT, TEMPLATE, Generator, generator

BOMB = "bomb"
HELLO = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[TextPool]:
    made = TextPool(1)
    await made.start()
    yield made
    made.stop()


async def test_a_crashed_text_process_is_replaced(pool: TextPool) -> None:
    """A call that kills its process is an error; the next call is served."""
    with pytest.raises(Unavailable) as caught, capture_logs() as lines:
        await pool.run(partial(os._exit, 9))
    assert [line["event"] for line in lines] == ["text_process_replaced"] * 2
    assert caught.value.code == "text_pool_broken"
    assert await pool.run(partial(abs, -3)) == 3
    assert pool.restarts == 2
    with pytest.raises(InvalidRequest) as wrong:
        await pool.run(partial(decode, b'{"input": {}}', EmbeddingsBody))
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "input")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, "ran for more than"),
        ("{{ 9**(9**9) }}", "ran for more than"),
        ("{{ (messages|length + 8)**(9**9) }}", "ran for more than"),
        ("{{ 'x' * 8000000000 }}", "more memory"),
        ("{{ ('x' * 8000000000) | length }}", "more memory"),
    ],
)
async def test_a_hostile_template_harms_its_request_alone(
    pool: TextPool, source: str, why: str
) -> None:
    """Loops and slow C calls end, a huge text is not made, and calls beside them are answered by another process."""
    template = Template("f", source, "", "", 1000)
    hostile = asyncio.ensure_future(pool.run(partial(template.render, HELLO)))
    await asyncio.sleep(0)
    assert await pool.run(partial(abs, -3)) == 3
    with pytest.raises(Unavailable, match=why) as caught:
        await hostile
    assert caught.value.code == "template_broken"
    assert await pool.run(partial(abs, -3)) == 3


async def test_a_cancelled_call_gives_its_answer_to_nobody(pool: TextPool) -> None:
    """The call after a cancelled one gets its own answer."""
    given_up = asyncio.ensure_future(pool.run(partial(sum, range(3_000_000))))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await pool.run(partial(abs, -3)) == 3


async def test_a_bomb_over_http(mesh: Mesh, http: aiohttp.ClientSession, model: Generator) -> None:
    """One chat sets a template off and gets 503; chats of other models, and its model's other chats, are answered."""
    source = (
        f"{{% if '{BOMB}' in messages[-1].content %}}{{{{ (messages|length + 8)**(9**9) }}}}{{% endif %}}"
        + TEMPLATE
    )
    changes: dict[str, Any] = {
        "name": "armed",
        "family": "chat.armed",
        "fingerprint": FINGERPRINT[:-2] + "ab",
        "chat_template": source,
    }
    async with generator(mesh.redis.url, mesh.directory, **changes):
        async with asyncio.timeout(60):
            while True:
                if (await post(http, asks("one") | {"model": "armed"}))[0] == 200:
                    break
                await asyncio.sleep(0.1)
        hostile = asyncio.ensure_future(post(http, asks(BOMB) | {"model": "armed"}))
        beside = [post(http, asks("one two")), post(http, asks("one two") | {"model": "armed"})]
        assert [status for status, _, _ in await asyncio.gather(*beside)] == [200, 200]
        status, answer, _ = await hostile
        assert (status, answer["error"]["code"]) == (503, "template_broken")
