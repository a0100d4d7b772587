"""The record of a request's stages: runs that follow each other, overlap, fail, and are counted."""

from __future__ import annotations

import pytest

from services.router.workflows.timeline import StageRun, StageTimeline


class Hands:
    """A clock that is set by hand; the bus' clock is 5,000 ms ahead of the finest one."""

    def __init__(self) -> None:
        self.at_s = 1.0

    def monotonic(self) -> float:
        return self.at_s

    def perf_s(self) -> float:
        return self.at_s

    def now_ms(self) -> int:
        return int(5000 + 1000 * self.at_s)


def test_runs_are_told_from_the_acceptance_of_the_request() -> None:
    """In the order in which they end, overlapping ones too; a stage that raised is not among them."""
    clock = Hands()
    timeline = StageTimeline(clock)
    with timeline.stage("embed"):
        clock.at_s += 0.5
    with timeline.stage("generate"):
        clock.at_s += 0.25
        for nth in (0, 1):
            with timeline.stage("search", nth):
                clock.at_s += 0.125
        with pytest.raises(RuntimeError), timeline.stage("rerank"):
            raise RuntimeError

    assert timeline.times(5900) == [
        StageRun("embed", 100.0, 600.0),
        StageRun("search", 850.0, 975.0),
        StageRun("search", 975.0, 1100.0, 1),
        StageRun("generate", 600.0, 1100.0),
    ]


def test_nothing_begins_before_its_request() -> None:
    """Clocks of two processes may differ by a little."""
    clock = Hands()
    timeline = StageTimeline(clock)
    with timeline.stage("embed"):
        clock.at_s += 0.25

    assert timeline.times(6100) == [StageRun("embed", 0.0, 150.0)]
