"""The probes of a step's stages: which steps are timed, and whether steps in one piece have a cost of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from engine.decoder.executor.interface import (
    HomeMoves,
    ModelShape,
    SequenceInput,
    StagedExecutor,
    StageTime,
)
from engine.decoder.offload.probes import measure_stages
from tests.support.clock import ManualClock

LAYERS, STAGE_S, WHOLE_S = 2, 1e-3, 1.5e-3


class _StepTimer:
    """An executor whose every stage takes STAGE_S, and whose step in one piece takes WHOLE_S."""

    def __init__(self, device: str, clock: ManualClock) -> None:
        self.device, self._clock = device, clock
        self.shape = ModelShape([None], [1], 40, 1000, 100, host_pages=80)
        self.stage_times: list[StageTime] = []
        self.in_one_piece = list[int]()

    def execute(self, batch: Sequence[SequenceInput]) -> None:
        self.in_one_piece.append(len(batch))
        self._clock.now_s += WHOLE_S

    def execute_staged(
        self, batch: Sequence[SequenceInput], *, moves: HomeMoves | None = None
    ) -> None:
        self.stage_times = []
        at_s = 0.0
        for layer in range(LAYERS if batch else 0):
            for stage in ("before", batch[0].attended, "after"):
                self.stage_times.append(StageTime(stage, 0, layer, at_s, at_s + STAGE_S))
                at_s += STAGE_S
        self._clock.now_s += at_s + (moves is not None) * STAGE_S


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_a_device_with_graphs_has_a_cost_of_whole_steps(device: str) -> None:
    """A graph takes less than its stages; on the CPU both are the same kernels, and nothing more is timed."""
    clock = ManualClock()
    timer = _StepTimer(device, clock)

    points = measure_stages(cast("StagedExecutor", timer), 256, 8, clock)

    assert points.layers == LAYERS
    assert {round(seconds, 9) for _, seconds in points.linear} == {2 * STAGE_S}
    assert points.page_s > 0
    if device == "cpu":
        assert (points.whole, timer.in_one_piece) == ([], [])
        return
    assert {round(probe.seconds, 9) for probe in points.whole} == {WHOLE_S}
    assert {probe.items for probe in points.whole} == {1, 2, 4, 8}
    assert {probe.tokens for probe in points.whole} > {1}
