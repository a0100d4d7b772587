"""The record of a step in stages, as planned and as computed: for metrics, and for the operators' timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.decoder.executor.interface import StageTime
from engine.decoder.offload.plan import Choice


class ComputedStep(NamedTuple):
    """A computed step: the reason of its plan, its decoding rows, the rows attended on the host, and its seconds.

    `long_slack_s` and `short_slack_s` are the planned seconds between the host's end and the device's later end in the
    two halves of a layer (see `StageTimes`). `stages` are its timed stages, in the order of their ends.
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
        """Seconds from the begin of the first stage to the end of the last stage."""
        begin_s = min((each.begin_s for each in self.stages), default=0.0)
        return max((each.end_s for each in self.stages), default=0.0) - begin_s

    @property
    def device_idle_s(self) -> float:
        """Seconds of this span in which the device computed no stage: it waited for the host, or for its next work."""
        return self.span_s - self._busy_s(on_host=False)

    @property
    def host_idle_s(self) -> float:
        """Seconds of this span in which the host attended to nothing."""
        # Fronts and other pages may be attended at the same time, by this process and by a helper.
        return max(0.0, self.span_s - self._busy_s(on_host=True))

    def _busy_s(self, *, on_host: bool) -> float:
        return sum(
            each.end_s - each.begin_s for each in self.stages if (each.stage == "host") is on_host
        )
