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


async def test_a_callback_of_the_loop_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it must: what is raised while a callback runs goes to the loop, and the test waits on."""
    loop, lost = asyncio.get_running_loop(), asyncio.Event()
    monkeypatch.setattr(loop, "_exception_handler", lambda *_: lost.set())

    def is_late() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05, TIMEOUT_AGAIN_S)  # this test's own alarm, now
        time.sleep(5)

    loop.call_soon(is_late)
    await asyncio.wait_for(lost.wait(), 10)
