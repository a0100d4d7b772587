"""Time, passed in so that tests own it; the mesh's absolute times are Redis' milliseconds."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What a component may know of time."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean anything."""
        ...

    def now_ms(self) -> int:
        """Milliseconds since the epoch by the bus' clock."""
        ...


class SystemClock:
    """The machine's clocks, with a measured offset to Redis' TIME (see `common.bus.connection`).

    Between measurements time goes on by the monotonic clock, so a step of the machine's clock changes nothing.
    """

    def __init__(self) -> None:
        self.offset_ms = (time.time() - time.monotonic()) * 1000

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def now_ms(self) -> int:
        """Milliseconds since the epoch by the bus' clock."""
        return int(time.monotonic() * 1000 + self.offset_ms)
