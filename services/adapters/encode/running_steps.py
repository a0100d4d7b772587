"""The device steps that one worker runs at once; its heartbeat is overdue as soon as one of them is."""

from __future__ import annotations

from common.clock import Clock
from common.redis.heartbeat import OVERDUE_S
from common.worker.incarnation import Incarnation

# As a heartbeat's: a step is overdue after so many times its prediction, or after OVERDUE_S.
_OVERDUE_TIMES = 5


class RunningSteps:
    """Steps by name, each with the time at which it is overdue; the heartbeat is told of the earliest."""

    def __init__(self, incarnation: Incarnation, clock: Clock) -> None:
        self._incarnation, self._clock = incarnation, clock
        self._overdue_s: dict[str, float] = {}
        self._told = ""  # the step that the heartbeat knows

    def begin(self, name: str, predicted_s: float) -> None:
        """Record that a step has begun, which should take `predicted_s` seconds."""
        now_s = self._clock.monotonic()
        self._overdue_s[name] = now_s + max(OVERDUE_S, _OVERDUE_TIMES * predicted_s)
        self._tell(now_s, began=name)

    def end(self, name: str) -> None:
        """Record that a step has ended."""
        self._overdue_s.pop(name, None)
        self._tell(self._clock.monotonic())

    def _tell(self, now_s: float, began: str = "") -> None:
        """Tell the heartbeat of the step that is overdue first, unless it knows."""
        heartbeat = self._incarnation.heartbeat
        if not self._overdue_s:
            self._told = ""
            heartbeat.idle()
            return
        first = min(self._overdue_s, key=self._overdue_s.__getitem__)
        if first == self._told and first != began:
            return
        self._told = first
        if self._overdue_s[first] > now_s:  # else the limit of the step before, overdue too, stays
            heartbeat.working((self._overdue_s[first] - now_s) / _OVERDUE_TIMES)
