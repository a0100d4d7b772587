"""The virtual event loop: hours of timers at once, in order, and no time while a thread works."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bench.simulation import virtual_loop


async def test_these_tests_run_on_it() -> None:
    """A day passes at once; timers fire in the order of their times, at the very times they were set to."""
    loop = asyncio.get_running_loop()
    fired: list[float] = []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        fired.append(loop.time())

    began = loop.time()
    await asyncio.gather(*(wait(seconds) for seconds in (86_400.0, 0.001, 60.0)))

    assert [at - began for at in fired] == pytest.approx([0.001, 60.0, 86_400.0])


async def test_a_timer_never_overtakes_a_thread() -> None:
    """A timeout of a millisecond does not strike while a thread is still at work, and strikes where none is."""
    loop = asyncio.get_running_loop()
    go_on = threading.Event()
    began = loop.time()
    asyncio.get_running_loop().call_soon(go_on.set)

    async with asyncio.timeout(0.001):
        assert await asyncio.to_thread(go_on.wait)
    assert loop.time() == began
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await asyncio.Event().wait()


def test_run_uses_it() -> None:
    """asyncio.run, too, makes a virtual loop in this tier, and its executor's end costs no time."""

    async def day() -> float:
        await asyncio.to_thread(int)
        await asyncio.sleep(86_400.0)
        return asyncio.get_running_loop().time()

    assert asyncio.run(day()) == pytest.approx(86_400.0)


def test_waiting_for_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no timer, task or thread can wake a task, the loop says so instead of waiting for ever."""

    async def stuck() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(threading, "active_count", lambda: 1)  # another test may have left a thread
    with pytest.raises(RuntimeError, match="no timer or thread"):
        virtual_loop.run(stuck())
