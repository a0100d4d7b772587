"""Execution of a schedule, batch by batch, micro-batches of a burst, and the picture of a front."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation import rago_cases
from planner.execution import (
    PipelineStage,
    best_micro_batch,
    burst_ttft,
    completions,
    pipeline_of,
)
from planner.front_plot import FrontPoint, page, svg
from planner.schedule_search import best_schedules

POWERS = st.sampled_from([1, 2, 4, 8])


def linear(seconds: float) -> Callable[[int], float]:
    """Return the time of a batch that takes so long a request."""
    return lambda batch: seconds * batch


@given(st.lists(st.tuples(POWERS, st.integers(1, 9)), min_size=1, max_size=4), st.integers(1, 5))
def test_deepest_first(stages: list[tuple[int, int]], rounds: int) -> None:
    """The same end for collocated stages whose later batches divide earlier ones, and never a later mean."""
    ordered = sorted(stages, reverse=True)  # large batches first
    pipeline = [PipelineStage(0, batch, linear(seconds)) for batch, seconds in ordered]
    arrivals = [0.0] * (rounds * ordered[0][0])
    deep, shallow = (
        completions(pipeline, arrivals, order=order) for order in ("deepest", "shallowest")
    )

    assert max(deep) == max(shallow) == sum(seconds for _, seconds in ordered) * len(arrivals)
    assert sum(deep) <= sum(shallow)


def test_the_order_of_figure_3_12() -> None:
    """Batches of 4, 2 and 1 on the same chips: the mean completion is a quarter earlier, the throughput equal."""
    pipeline = [PipelineStage(0, batch, linear(1.0)) for batch in (4, 2, 1)]
    deep = completions(pipeline, [0.0] * 8)
    shallow = completions(pipeline, [0.0] * 8, order="shallowest")

    assert deep == [7, 8, 11, 12, 19, 20, 23, 24]
    assert sum(deep) / sum(shallow) == pytest.approx(0.756, abs=0.001)
    assert max(deep) == max(shallow)


@given(
    st.lists(st.tuples(st.integers(0, 3), POWERS, st.integers(1, 9)), min_size=1, max_size=4),
    st.lists(st.integers(0, 50), min_size=1, max_size=20),
    st.booleans(),
)
def test_every_request_passes(
    stages: list[tuple[int, int, int]], arrivals: list[int], fills: bool
) -> None:
    """No request is lost or overtakes another, in any placement, and none is faster than its stages alone."""
    pipeline = [PipelineStage(group, batch, linear(float(each))) for group, batch, each in stages]
    came = sorted(map(float, arrivals))
    done = completions(pipeline, came, fills=fills)

    assert done == sorted(done)
    alone = sum(each for _, _, each in stages)
    for began, ended in zip(came, done, strict=True):
        assert ended >= began + alone


def test_what_waits_is_taken() -> None:
    """Without filling a request alone passes at once; with it, it waits for the others of its batch."""
    pipeline = [PipelineStage(0, 2, linear(1.0))]

    assert completions(pipeline, [0.0, 10.0], fills=False) == [1.0, 11.0]
    assert completions(pipeline, [0.0, 10.0]) == [12.0, 12.0]
    assert completions(pipeline, [0.0, 0.0, 0.0]) == [2.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("groups", "units", "published"), [((0, 1, 2), (64, 16), 2.47), ((0, 1, 0), (64, 64), 1.54)]
)
def test_first_tokens_of_table_3_4(
    groups: tuple[int, ...], units: tuple[int, int], published: float
) -> None:
    """The table's 2.47 and 1.54 s are those of batches that fill: 64 of two documents before one of 128 prompts."""
    profile = rago_cases.space(rago_cases.long_context(70e9)).profile

    def timed(name: str, on: int) -> Callable[[int], float]:
        return lambda batch: profile(name, on, batch).latency_s

    times = (timed("db_encode", units[0]), timed("retrieval", 1), timed("prefix", units[1]))
    pipeline = [
        PipelineStage(group, batch, time)
        for group, batch, time in zip(groups, (2, 2, 128), times, strict=True)
    ]

    assert max(completions(pipeline, [0.0] * 128)) == pytest.approx(published, abs=0.03)


@pytest.mark.parametrize(
    ("burst", "percent"), [(2, 25.0), (4, 37.5), (8, 43.8), (16, 46.9), (32, 48.4)]
)
def test_one_dominating_stage(burst: int, percent: float) -> None:
    """A burst one by one saves this much of the time to first token where one stage takes all of it."""
    found = best_micro_batch([linear(1.0)], burst)

    assert found.batch == 1
    assert 100 * found.reduction == pytest.approx(percent, abs=0.05)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8, 16]))
def test_micro_batches(seconds: list[int], burst: int) -> None:
    """The best is the least of all; a stage that gains nothing from smaller batches keeps the burst whole."""
    times = [linear(float(each)) for each in seconds]
    found = best_micro_batch(times, burst)

    assert found.ttft_s <= found.whole_s
    assert found.ttft_s == burst_ttft(times, burst, found.batch)
    flat = [lambda _batch, each=each: float(each) for each in seconds]
    assert best_micro_batch(flat, burst).batch == burst
    with pytest.raises(ValueError, match="do not divide"):
        burst_ttft(times, 12, 8)


def test_a_schedule_as_a_pipeline() -> None:
    """Groups keep their chips, the search has its hosts, and a batch is timed as the next power of two."""
    space = rago_cases.space(rago_cases.hyperscale(8e9), chips=16)
    schedule = best_schedules(space)[-1]
    search, prefix = pipeline_of(space, schedule)

    assert search.group != prefix.group
    assert search.batch == schedule.search_batch
    expected = space.profile("prefix", schedule.groups[0].units, 1).latency_s
    assert prefix.time(1) == expected
    done = completions([search, prefix], [0.0])
    assert done == pytest.approx([search.time(1) + expected])


# -- the picture ----------------------------------------------------------------------------------


def test_the_picture() -> None:
    """Well-formed SVG with a circle a point, the chosen and the running by name, whatever the names hold."""
    points = [FrontPoint(10.0, 0.2, "a <b>"), FrontPoint(900.0, 1.1)]
    drawn = svg(points, "C & D", chosen=points[1], running=FrontPoint(5000.0, 0.01))
    root = ET.fromstring(drawn)
    circles = [each for each in root.iter() if each.tag.endswith("circle")]

    assert len(circles) == 4
    for circle in circles:
        assert 0 < float(circle.attrib["cx"]) < 720
        assert 0 < float(circle.attrib["cy"]) < 420
    words = [each.text for each in root.iter() if each.text and each.text.strip()]
    assert {"C & D", "chosen", "running", "a <b>"} <= set(words)
    assert "<pre>1 &lt; 2</pre>" in page(drawn, "C & D", ["1 < 2"])
    ET.fromstring(svg(points[:1], "one point"))
