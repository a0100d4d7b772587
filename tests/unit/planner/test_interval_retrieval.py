"""Answers that retrieve at intervals: the model of two lines, efforts and margins, and batches of later retrievals."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation import virtual_loop
from bench.simulation.piperag_published import (
    FIGURE_3_8B,
    GENERATION,
    INTERVALS,
    SEARCHES,
    TABLE_5_1,
    TOKENS,
)
from bench.suites.g1s import CHOICES, PIPELINED, retro_s, thesis_s
from planner.iterative_batches import IterativeLoad, RetrievalBatches, gaps, simulate
from planner.pipelined_retrieval import (
    LatenessMargin,
    SearchLine,
    SearchTimes,
    TokenTimes,
    beside_chunks,
    choose_interval,
    pipelined_s,
    sequential_s,
)

TIMES = st.floats(1e-3, 10.0)
ANSWERS = st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=30)


# -- the model of two lines ------------------------------------------------------------------------


async def _answer(chunks_s: Sequence[float], searches_s: Sequence[float], *, ahead: bool) -> float:
    """Write chunks from searches on the loop's clock, each search begun as soon as it may be; return the seconds."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    coming = asyncio.create_task(asyncio.sleep(searches_s[0]))
    for number, chunk_s in enumerate(chunks_s):
        await coming
        if number + 1 < len(chunks_s):
            following = asyncio.sleep(searches_s[number + 1])
            if ahead:
                coming = asyncio.create_task(following)
                await asyncio.sleep(chunk_s)
                continue
            await asyncio.sleep(chunk_s)
            coming = asyncio.create_task(following)
        else:
            await asyncio.sleep(chunk_s)
    return loop.time() - began


@given(ANSWERS)
def test_the_model_is_what_happens_on_a_clock(answer: list[tuple[float, float]]) -> None:
    """A program that searches and writes, beside each other or in turn, takes what the two sums say."""
    chunks_s, searches_s = map(list, zip(*answer, strict=True))
    ours = virtual_loop.run(_answer(chunks_s, searches_s, ahead=True))
    theirs = virtual_loop.run(_answer(chunks_s, searches_s, ahead=False))

    beside = beside_chunks(searches_s)
    assert ours == pytest.approx(pipelined_s(chunks_s, beside, searches_s[0]))
    assert theirs == pytest.approx(sequential_s(chunks_s, searches_s))
    assert ours <= theirs * (1 + 1e-9)
    assert theirs <= 2 * ours * (1 + 1e-9)


@given(st.lists(TIMES, min_size=1, max_size=8), st.integers(1, 50), st.integers(1, 64))
def test_chunks_are_the_whole_answer(seconds: list[float], segment: int, interval: int) -> None:
    """However an answer is cut, its chunks take together what its tokens take; a fast device divides that."""
    times, tokens = TokenTimes(tuple(seconds), segment), 3 * segment + 7
    whole = times.between(0, tokens)

    chunks = times.chunks(tokens, interval)
    assert len(chunks) == math.ceil(tokens / interval)
    assert sum(chunks) == pytest.approx(whole)
    assert times.faster(4).between(0, tokens) == pytest.approx(whole / 4)


# -- efforts ---------------------------------------------------------------------------------------


@given(TIMES, TIMES, st.floats(0, 1000), st.integers(1, 500))
def test_an_effort_is_the_largest_that_fits(
    base_s: float, each_s: float, budget_s: float, most: int
) -> None:
    """The chosen effort fits unless none does, and one more does not, unless there is no more."""
    line = SearchLine(base_s, each_s)
    found = line.largest(budget_s, most)

    assert 1 <= found <= most
    assert found == 1 or line.seconds(found) <= budget_s * (1 + 1e-9)
    assert found == most or line.seconds(found + 1) > budget_s * (1 - 1e-9)


@given(
    st.lists(
        st.tuples(st.integers(1, 500), TIMES), min_size=2, max_size=9, unique_by=lambda p: p[0]
    )
)
def test_a_search_between_two_measured_ones_takes_a_time_between(
    points: list[tuple[int, float]],
) -> None:
    """Measured efforts keep their times; between two of them the time lies between; the line has the points' mean."""
    times = SearchTimes(tuple(sorted(points)))

    for effort, seconds in times.points:
        assert times.seconds(effort) == pytest.approx(seconds)
    for (low, low_s), (high, high_s) in pairwise(times.points):
        middle = times.seconds((low + high) / 2)
        assert min(low_s, high_s) * (1 - 1e-9) <= middle <= max(low_s, high_s) * (1 + 1e-9)
    line, count = times.line(), len(points)
    mean_effort, mean_s = sum(e for e, _ in points) / count, sum(s for _, s in points) / count
    assert line.seconds(mean_effort) == pytest.approx(mean_s)
    assert times.faster(16).seconds(3) == pytest.approx(times.seconds(3) / 16)


@given(
    st.lists(st.floats(0.1, 3.0), min_size=1, max_size=400),
    st.floats(0.005, 0.2),
    st.floats(0.02, 0.3),
)
def test_late_searches_are_bounded_whatever_the_times(
    noise: list[float], share: float, step: float
) -> None:
    """At most share x n + (most - first) / step searches are late, and the margin is never below 1."""
    margin = LatenessMargin(share=share, step=step, most=4.0, factor=1.0)
    line, budget_s, late = SearchLine(0.001, 0.001), 1.0, 0
    for each in noise:
        effort = margin.effort(line, budget_s, 10_000)
        missed = line.seconds(effort) * each > budget_s
        late += missed
        margin.learn(missed)
        assert 1.0 <= margin.factor <= margin.most

    assert late <= share * len(noise) + (margin.most - 1.0) / step + 1e-9


@given(st.lists(TIMES, min_size=1, max_size=8), TIMES)
def test_the_interval_is_the_smallest_that_hides_a_search(
    seconds: list[float], least_s: float
) -> None:
    """Each chunk of the chosen interval takes as long as the search, and some chunk of each smaller one does not."""
    times = TokenTimes(tuple(seconds), 32)
    found = choose_interval(INTERVALS, times, 256, least_s)

    for interval in INTERVALS:
        hides = min(times.chunks(256, interval)) >= least_s
        assert not hides or interval >= found
        assert interval != found or hides or interval == max(INTERVALS)


def test_figures_of_the_thesis() -> None:
    """Tables 5.1, 5.3 and 5.4: seconds of RETRO and PipeRAG, and the nprobe of rule S3, which rises along an answer."""
    chunks_s, line = GENERATION.chunks(TOKENS, 64), SEARCHES.line()

    assert sum(chunks_s) == pytest.approx(9.650, abs=5e-4)
    found = [retro_s(chunks_s, SEARCHES.seconds(each.nprobe)) for each in TABLE_5_1]
    assert found == pytest.approx([14.82, 12.33, 11.04], abs=5e-3)
    for each, seconds in zip(TABLE_5_1, found, strict=True):
        assert seconds == pytest.approx(each.retro_s, rel=0.02)
    for nprobe, seconds in PIPELINED.items():
        assert thesis_s(chunks_s, SEARCHES.seconds(nprobe)) == pytest.approx(seconds, abs=0.06)
    assert (line.base_s, line.each_s) == pytest.approx((0.01821, 0.019817), abs=1e-5)
    for interval, nprobes in CHOICES.items():
        budgets = [GENERATION.between(start, start + interval) for start in range(0, TOKENS, 128)]
        assert tuple(line.largest(budget, 16_384) for budget in budgets) == nprobes


# -- batches of later retrievals -------------------------------------------------------------------


@given(
    st.integers(1, 6),
    st.one_of(st.just(math.inf), st.integers(0, 9)),
    st.lists(st.tuples(st.sampled_from(("add", "add", "add", "drop", "wait")), st.integers(0, 3))),
)
def test_batches_go_in_order_when_they_are_full_or_due(
    size: int, longest: float, happens: list[tuple[str, int]]
) -> None:
    """Against a plain list: first come, first served; a batch is full, or its first has waited; nobody is lost."""
    batches, waiting = RetrievalBatches[int](size, longest), list[tuple[int, float]]()
    now, number, gone = 0.0, 0, set[int]()
    for what, value in happens:
        if what == "add":
            batches.add(number, now)
            waiting.append((number, now))
            number += 1
        elif what == "drop" and waiting:
            each = waiting.pop(value % len(waiting))
            batches.drop(each[0])
            gone.add(each[0])
        else:
            now += value
        assert batches.due() == (waiting[0][1] + longest if waiting else math.inf)
        while batch := batches.take(now):
            assert batch == [each for each, _ in waiting[:size]]
            assert len(batch) == size or now >= waiting[0][1] + longest
            gone.update(batch)
            del waiting[:size]
        assert len(batches) == len(waiting) < size
        assert all(now < since + longest for _, since in waiting)
    assert gone | {each for each, _ in waiting} == set(range(number))


def test_what_cannot_wait_is_refused() -> None:
    """No batch of nothing, nobody waits twice, and not all for one that never comes."""
    with pytest.raises(ValueError, match="expected at least 1"):
        RetrievalBatches(0)
    batches = RetrievalBatches[str](2)
    batches.add("a", 0.0)
    with pytest.raises(ValueError, match="'a' waits already"):
        batches.add("a", 1.0)
    with pytest.raises(ValueError, match="expected at most 4, or a limit"):
        simulate(IterativeLoad(4, 5), 1, lambda: [256])


def _stepped(load: IterativeLoad, finished: int, seed: int) -> float:
    """Count steps one by one, slot by slot; no limit of the wait."""
    draw = load.drawn(str(seed))
    points = [draw() for _ in range(load.sequences)]
    written, began = [0] * load.sequences, [0] * load.sequences
    waiting, ended, now = list[int](), list[int](), 0
    while len(ended) < finished:
        now += 1
        for slot in range(load.sequences):
            if slot in waiting:
                continue
            written[slot] += 1
            if written[slot] == points[slot][0]:
                points[slot].pop(0)
                if points[slot]:
                    waiting.append(slot)
                    continue
                ended.append(now - began[slot])
                written[slot], began[slot], points[slot] = 0, now, draw()
        while len(waiting) >= load.batch:
            del waiting[: load.batch]
    return sum(ended[:finished]) / finished / load.tokens


@given(st.integers(1, 9), st.data(), st.integers(0, 5), st.integers(8, 40), st.integers(0, 1000))
def test_events_are_what_steps_are(
    sequences: int, data: st.DataObject, retrievals: int, tokens: int, seed: int
) -> None:
    """The simulation by events counts what one does that takes every step of every sequence."""
    load = IterativeLoad(sequences, data.draw(st.integers(1, sequences)), retrievals, tokens)

    found = simulate(load, 20, load.drawn(str(seed)))
    assert found.steps_a_token == pytest.approx(_stepped(load, 20, seed))
    assert found.mean_batch == (load.batch if retrievals and found.mean_batch else 0.0)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 20), st.integers(0, 5))
def test_a_limit_bounds_what_waiting_costs(
    sequences: int, batch: int, limit: int, latency: int
) -> None:
    """No sequence takes longer than its tokens and its retrievals, each as long as the limit and the latency."""
    load = IterativeLoad(sequences, batch, 3, 32, longest=limit, latency=latency)

    found = simulate(load, 30, load.drawn("limited"))
    assert 1 + 3 * latency / 32 <= found.steps_a_token <= 1 + 3 * (limit + latency) / 32
    assert 0 < found.mean_batch <= batch


@pytest.mark.parametrize(
    ("cell", "steps"), [each for each in FIGURE_3_8B.items() if each[0][1] < 128]
)
def test_cells_of_figure_3_8b(cell: tuple[int, int], steps: float) -> None:
    """Three stops while it is written make the figure's cells, the median of three seeds within 0.07."""
    load = IterativeLoad(cell[1], cell[0])
    count = 40 * load.sequences
    runs = [simulate(load, count, load.drawn(str(seed)), count // 4) for seed in range(3)]

    assert median(run.steps_a_token for run in runs) == pytest.approx(steps, abs=0.07)


def test_gaps_add_up_to_the_points() -> None:
    """The tokens between stops are those up to the last one."""
    assert gaps([3, 10, 32]) == [3, 7, 22]
