"""What ends a test that hangs."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from tests.conftest import TIMEOUT_AGAIN_S


def test_a_timeout_that_is_lost_comes_again() -> None:
    """The alarm of this test is one that repeats."""
    assert signal.getitimer(signal.ITIMER_REAL)[1] == TIMEOUT_AGAIN_S


@pytest.mark.timeout(0.2)
async def test_a_callback_of_the_loop_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it must: what is raised while a callback runs goes to the loop, and the test waits on."""
    loop, lost = asyncio.get_running_loop(), asyncio.Event()
    monkeypatch.setattr(loop, "_exception_handler", lambda *_: lost.set())
    loop.call_soon(time.sleep, 1.0)
    await asyncio.wait_for(lost.wait(), 10)
