"""An event loop whose time passes only while everybody waits: what takes minutes is told exactly, at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Moves its own time to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Instant(self))

    def time(self) -> float:
        """Seconds since the loop was made, as those who wait in it count them."""
        return self._now_s

    def pass_over(self, seconds: float) -> None:
        """Let so much time have passed."""
        self._now_s += seconds


class _Instant(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever come")
        self._loop.pass_over(max(0.0, timeout))
        return super().select(0)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop of its own."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
