"""An event loop on a virtual clock: its time passes only while every task waits for a timer, and then at once."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Moves its own time to the next timer instead of waiting for it.

    While threads of an executor work for the loop, its time stands still and the loop waits for them, however long the
    machine takes: a timer never overtakes them.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._in_threads = 0
        super().__init__(_Instant(self))

    def time(self) -> float:
        """Return the seconds since the loop was made, as its timers count them."""
        return self._now_s

    def pass_over(self, seconds: float) -> None:
        """Move the loop's time forward."""
        self._now_s += seconds

    @property
    def waits_for_threads(self) -> bool:
        """Tell whether a thread still works for the loop."""
        return self._in_threads > 0

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run a function in a thread, during which no time passes."""
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._in_threads += 1
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, _future: object) -> None:
        self._in_threads -= 1

    async def shutdown_default_executor(self, *args: Any) -> None:
        """Wait for the executor's threads to end, during which no time passes."""
        self._in_threads += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._in_threads -= 1


class _Instant(selectors.SelectSelector):
    """Answers at once, and counts the time that a real selector would have waited."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self._loop.waits_for_threads:
            return super().select(None)  # a thread that ends wakes the loop
        if timeout is None:
            if threading.active_count() > 1:
                return super().select(None)  # so does a thread that nobody counts
            raise RuntimeError("every task waits, and no timer or thread will wake one")
        self._loop.pass_over(max(0.0, timeout))
        return ready


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop of its own."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
