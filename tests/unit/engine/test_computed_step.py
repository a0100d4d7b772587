"""What a step in stages left idle, and how much of it operators are shown."""

from __future__ import annotations

import pytest

from engine.decoder.executor.interface import StageTime
from engine.decoder.offload.computed_step import ComputedStep
from services.adapters.generate.step_reporter import MOST_STAGES, record_of


def step(stages: list[StageTime]) -> ComputedStep:
    return ComputedStep("two batches", 8, 5, 0.9, 1.1, 0.1, -0.2, stages)


def test_idle_seconds_of_both_sides() -> None:
    """Each side's are the seconds from the first stage to the last less those of its own stages."""
    found = step(
        [
            StageTime("before", 0, 0, 10.0, 10.2),
            StageTime("device", 0, 0, 10.2, 10.3),
            StageTime("host", 0, 0, 10.2, 10.6),
            StageTime("after", 0, 0, 10.7, 11.0),
        ]
    )

    assert found.span_s == pytest.approx(1.0)
    assert found.device_idle_s == pytest.approx(0.4)
    assert found.host_idle_s == pytest.approx(0.6)


def test_a_step_without_stages_was_never_idle() -> None:
    """A step that only copied pages has no stages."""
    assert (step([]).device_idle_s, step([]).host_idle_s) == (0.0, 0.0)
    assert record_of(step([]), host_share=0.0, at_ms=1, resumed={}).stages == []


def test_whole_layers_are_shown_up_to_the_bound() -> None:
    """Stages begin at 0 seconds; those of the last layers are left out where there would be too many."""
    stages = [
        StageTime(name, part, layer, 5.0 + layer, 5.5 + layer)
        for layer in range(80)
        for part in (0, 1)
        for name in ("before", "host", "after")
    ]
    shown = record_of(step(stages), host_share=0.5, at_ms=1, resumed={"attend": 3, "fetch": 1})

    assert (shown.why, shown.resumed) == ("two batches", {"attend": 3, "fetch": 1})
    assert shown.layers == 80
    assert len(shown.stages) <= MOST_STAGES < len(stages)
    assert {each.layer for each in shown.stages} == set(range(len(shown.stages) // 6))
    assert shown.stages[0].begin_s == 0.0
