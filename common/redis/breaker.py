"""A circuit breaker: after a failure no caller tries for a while, then one caller tries for all."""

from __future__ import annotations

from common.clock import Clock


class CircuitBreaker:
    """Open for `again_s` after a failure, `why`; then one try, of at most `probe_s`, closes it or opens it again."""

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
        """True while no caller may try."""
        return self.failed and self._clock.monotonic() < self._again_at

    def probe(self) -> None:
        """Begin a try; after a failure, refuse all other tries for `probe_s`."""
        if self.failed:
            self._again_at = self._clock.monotonic() + self._probe_s

    def close(self) -> None:
        """Record a success."""
        self.why = ""

    def open(self, why: str) -> None:
        """Record a failure; `why` must not be empty."""
        self.why = why
        self._again_at = self._clock.monotonic() + self._again_s
