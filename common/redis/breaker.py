"""A circuit breaker: after a failure nobody tries for a while, then one does for all."""

from __future__ import annotations

from common.clock import Clock


class CircuitBreaker:
    """Open for `again_s` after a failure; then one try, of at most `probe_s`, decides. `why` says what failed."""

    def __init__(self, clock: Clock, *, again_s: float, probe_s: float) -> None:
        self._clock, self._again_s, self._probe_s = clock, again_s, probe_s
        self.why = ""
        self._again_at = 0.0

    @property
    def failed(self) -> bool:
        """True from a failure until the next success."""
        return bool(self.why)

    @property
    def refuses(self) -> bool:
        """True while nobody is to try."""
        return self.failed and self._clock.monotonic() < self._again_at

    def probe(self) -> None:
        """Begin a try; where the last one failed, it finds out for all others."""
        if self.failed:
            self._again_at = self._clock.monotonic() + self._probe_s

    def close(self) -> None:
        """Note a success."""
        self.why = ""

    def open(self, why: str) -> None:
        """Note a failure; `why` must not be empty."""
        self.why = why
        self._again_at = self._clock.monotonic() + self._again_s
