"""V3: cycles of a walk on Falcon's hardware, and the row made of what it kept."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.document import BenchOptions, Origin, build
from bench.figures.targets import FIGURES
from bench.simulation import falcon_published as published
from bench.simulation.delayed_traversal import Evaluation, Traversal
from bench.simulation.falcon_cycles import FalconHardware, cycles, steady
from bench.suites import v3
from bench.suites.v3_tables import (
    PAIRS,
    UNITS,
    QueryTimes,
    SimulatedPair,
    SubGraphs,
    WalksKept,
    describe,
    hardware,
    named,
)  # fmt: skip


def test_one_candidate_takes_what_can_be_counted_by_hand() -> None:
    """A read of links, a filter's cycle, a vector, its insertion, a sorting; more vectors come a read's width apart."""
    deep = FalconHardware(1, 384, 100)
    one = Traversal(launched=[[[Evaluation(16, 1)]], []])
    assert cycles(one, deep) == 101 + 1 + 100 + 6 + 2 + 63
    ten = Traversal(launched=[[[Evaluation(16, 10)]], []])
    assert cycles(ten, deep) == cycles(one, deep) + 9 * 6
    late = FalconHardware(1, 384, 100, streamed=False)
    assert cycles(ten, late) == cycles(ten, deep) + 9 * 2
    none = Traversal(launched=[[[Evaluation(16, 0)]], []])
    assert cycles(none, deep) <= 100 + 63 + 2


@given(st.integers(10, 60), st.integers(1, 7), st.integers(1, 4), st.integers(0, 40))
def test_more_units_and_quicker_reads_never_take_longer(
    hops: int, groups: int, candidates: int, fresh: int
) -> None:
    """The same walk takes at most as long on more units, with a lower latency, or with distances that stream."""
    walk = steady(hops, groups, candidates, Evaluation(48, fresh))
    took = [cycles(walk, FalconHardware(units, 384, 100)) for units in (1, 2, 4)]
    assert took == sorted(took, reverse=True)
    assert cycles(walk, FalconHardware(1, 384, 60)) <= took[0]
    assert took[0] <= cycles(walk, FalconHardware(1, 384, 100, streamed=False))
    assert walk.hops >= hops - candidates


@pytest.mark.parametrize("streamed", [True, False])
def test_walks_of_the_published_lengths_take_the_published_times(*, streamed: bool) -> None:
    """With the thesis' own hops, and 29 new neighbours a hop, speeds are near its surfaces and its count of units."""

    def took(units: int, groups: int, candidates: int) -> int:
        hops = round(70 * published.HOPS[candidates - 1][groups - 1])
        walk = steady(hops, groups, candidates, Evaluation(40, 29))
        return cycles(walk, FalconHardware(units, 384, v3.LATENCY[streamed], streamed))

    for units, surface, mean in ((1, published.ACROSS, 0.12), (4, published.WITHIN, 0.22)):
        gaps = [
            abs(
                took(units, 1, 1)
                / took(units, groups, candidates)
                / surface[candidates - 1][groups - 1]
                - 1
            )
            for groups in range(1, 8)
            for candidates in range(1, 5)
        ]
        assert fmean(gaps) <= mean
    assert took(1, 1, 1) / took(4, 1, 1) == pytest.approx(published.UNITS_BEST_FIRST, rel=0.1)


def _kept() -> WalksKept:
    pairs = {}
    for groups, candidates in PAIRS:
        inside = 1000 + 100 * abs(groups - 3) + 50 * abs(candidates - 2)
        took = {
            hardware(units, streamed=streamed): [inside if (groups, candidates) != (1, 1) else 3000]
            for units in UNITS
            for streamed in (True, False)
        }
        pairs[named((groups, candidates))] = SimulatedPair([70], [2000], [60], took, 0.94)
    sides = [side for side in v3._sides(64) if side in {"best-first", "alone 2/2", "helped 2/2"}]
    times = QueryTimes(
        {side: [1e-4] * 40 if side == sides[0] else [8e-5] * 40 for side in sides},
        {side: [2e-4] * 4 for side in sides},
        {sides[0]: [1e-4] * 4, "2/2, 2 together": [9e-5] * 4},
        dict.fromkeys(sides, 0.94),
        {side: [70.0, 2000.0, 35.0] for side in sides},
    )
    return WalksKept(
        1_000_000, ["cpu/64"], pairs, {64: times}, {"1/1": [0.94, 0.9395, 2000.0, 1999.0]},
        {f"{bits}/{hashes}": [int(1e5 * rate), 100_000] for (bits, hashes), rate in published.FILTERS.items()},
        {1: SubGraphs(40, 0.9, 1000.0), 8: SubGraphs(20, 0.9, 3000.0)},
    )  # fmt: skip


def test_a_row_is_judged_by_the_worse_reading() -> None:
    """Verdicts of what is there, a note of what is not, and a line of the summary for each figure."""
    kept = _kept()
    body = describe(kept)
    assert body.met["simulated, within a query"] == "goal"
    assert body.met["simulated, within a query: over the best row of one group"] == "goal"
    assert body.met["simulated, across queries: optimum in the interior"] == "goal"
    assert body.met["CPU, ef 64: two threads one query after another"] == "goal"
    assert body.met["filter: recall within 0.1 point"] == "goal"
    assert body.met["filter: false positives within twice the formula"] == "goal"
    assert "Time on this CPU with 256 candidates kept: not measured." in body.notes
    assert not any("ef 256" in what for what in body.met)
    document = build("V3", "", body, BenchOptions(), Origin("c0ffee", dirty=False))
    lines = [
        figure.cells(document)
        for figure in FIGURES
        if figure.row == "V3" and "256" not in figure.what
    ]
    assert [line[-1] for line in lines] == ["goal"] * len(lines)
    kept.times.clear()
    slow = hardware(4, streamed=False)
    kept.simulated["3/2"].cycles[slow] = [2000]
    for pair in PAIRS[1:]:
        kept.simulated[named(pair)].cycles[slow] = [2000]
    assert describe(kept).met["simulated, within a query"] == "missed"
    assert "Simulation: not measured in full." in describe(WalksKept()).notes
