"""Clocks: the only module that calls `time`. A component takes a `Clock`, so that its tests can set the time.

The mesh's absolute times are milliseconds of the bus' Redis; `common.bus.connection` measures the offset.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The times that a component may ask for."""

    def monotonic(self) -> float:
        """Return seconds that never go back, for deadlines; only differences mean anything."""

    def perf_s(self) -> float:
        """Return seconds of the finest clock, for measuring durations."""

    def now_ms(self) -> int:
        """Return milliseconds since the epoch, by the bus' clock."""


class SystemClock:
    """The machine's clocks, with a measured offset to Redis' TIME.

    Between two measurements the monotonic clock counts, so a step of the machine's clock has no effect.
    """

    def __init__(self) -> None:
        self.offset_ms = (time.time() - time.monotonic()) * 1000

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()

    def perf_s(self) -> float:
        """Return seconds of the finest clock."""
        return time.perf_counter()

    def now_ms(self) -> int:
        """Return milliseconds since the epoch, by the bus' clock."""
        return int(time.monotonic() * 1000 + self.offset_ms)

    def unix_ns(self) -> int:
        """Return nanoseconds since the epoch, by the machine's own clock: for traces and ids."""
        return time.time_ns()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread; for threads only, since a coroutine awaits `asyncio.sleep`."""
        time.sleep(seconds)


SYSTEM: SystemClock = SystemClock()  # for default arguments; a bus corrects a clock of its own
