"""A clock that goes on only as its test tells it to."""

from __future__ import annotations


class ManualClock:
    """All times of `common.clock.Clock`, from one number of seconds that the test sets."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        """Return the seconds."""
        return self.now_s

    def perf_s(self) -> float:
        """Return the seconds."""
        return self.now_s

    def now_ms(self) -> int:
        """Return the milliseconds."""
        return int(1000 * self.now_s)
