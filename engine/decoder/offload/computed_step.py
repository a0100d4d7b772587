"""A step in stages as it was planned and as it was computed: for metrics, and for the timeline that operators see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.decoder.executor.interface import StageTime
from engine.decoder.offload.plan import Choice


class ComputedStep(NamedTuple):
    """Why it was computed so, its decoding rows and those attended on the host, and its seconds.

    `long_slack_s` and `short_slack_s` are the seconds by which its plan has the host done before the device in either
    half of a layer (see `StageTimes`). `stages` are those it had, in the order in which they ended.
    """

    why: Choice
    decoded: int
    on_host: int
    predicted_s: float
    measured_s: float
    long_slack_s: float
    short_slack_s: float
    stages: Sequence[StageTime]

    @property
    def span_s(self) -> float:
        """Seconds from the begin of its first stage to the end of its last one."""
        begin_s = min((each.begin_s for each in self.stages), default=0.0)
        return max((each.end_s for each in self.stages), default=0.0) - begin_s

    @property
    def device_idle_s(self) -> float:
        """Seconds between these in which the device computed no stage: it waited for the host, or for its next work."""
        return self.span_s - self._busy_s(on_host=False)

    @property
    def host_idle_s(self) -> float:
        """Seconds between these in which nothing was attended on the host."""
        return self.span_s - self._busy_s(on_host=True)

    def _busy_s(self, *, on_host: bool) -> float:
        return sum(
            each.end_s - each.begin_s for each in self.stages if (each.stage == "host") is on_host
        )
