"""Micro-benchmarks of searches on this machine, with the kernels that the index uses, over codes that mean nothing.

Lists of codes are made, not trained: what a search in them takes depends on their sizes alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from common.clock import Clock
from services.vector_search.index.exact_index import ExactIndex
from services.vector_search.index.inverted_lists import Coded, InvertedLists
from services.vector_search.index.quantizer import CodeBits, Quantizer, subspaces_of, words_of
from services.vector_search.index.rows import Metric, VectorRows
from services.vector_search.tuning.cost_lines import BLOCK, CostLines, ListsSearch
from services.vector_search.tuning.search_timer import SearchTimer, SearchTimes, Side
from services.vector_search.tuning.trials import K, Sample, lists_index, speedup

_QUERIES = 48
# Numbers of lists, of which a share is read, and rows compared for each of K.
_LISTS, _SHARES, _DEPTHS = (64, 512, 4096), (0.0, 0.05, 0.4), (1, 8, 48)
_BITS: tuple[CodeBits, ...] = (4, 8)
# Shares of the rows that are compared one by one.
_PARTS = (0.05, 0.3, 1.0)


# The search that all times are told by: in so many lists, of which some are read.
_REFERENCE_LISTS, _REFERENCE_PROBES, _REFERENCE_DEPTH = 64, 8, 8


class StageCalibration(msgspec.Struct, frozen=True):
    """What was measured: the lines of lists, and of exact search in seconds per call and row; tails and speed-ups.

    A tail is how many times the mean one search in a hundred takes. `fit_error` is the median relative error of the
    lines of lists at the points that they were fitted to; `reference_s` what the reference search took then.
    """

    lists: CostLines
    lists_tail: float
    fit_error: float
    exact: tuple[float, float]
    exact_tail: float
    threads: int
    lists_speedup: float
    reference_s: float


class _Point(NamedTuple):
    """A search in lists, and the work of its stages."""

    side: Side
    work: tuple[float, ...]


def reference(sample: Sample, clock: Clock) -> Side:
    """Return the search that others are timed beside: over the same rows always the same."""
    count = min(_REFERENCE_LISTS, max(sample.rows.view.size // BLOCK, 1))
    lists = _made(sample, count).tuned(min(_REFERENCE_PROBES, count), _REFERENCE_DEPTH)
    return _side(sample, lists, clock)


def calibrate(sample: Sample, threads: int, clock: Clock, timer: SearchTimer) -> StageCalibration:
    """Measure searches in lists of many shapes over the rows of a sample, and exact search of parts of them.

    All of one dimension are measured by turns.
    """
    points: list[tuple[tuple[float, ...], float]] = []
    every: list[SearchTimes] = []
    dimension = sample.rows.dimension
    for own in (dimension, max(dimension // 2, 8)):
        asked = list(_points(sample if own == dimension else _narrow(sample, own), clock))
        times = timer.time([each.side for each in asked])
        points += [(each.work, taken.mean_s) for each, taken in zip(asked, times, strict=True)]
        every += times
    lines = CostLines.fit(points)
    errors = [abs(lines.seconds(work) / seconds - 1.0) for work, seconds in points]
    call_s, row_s, tail = _exact(sample, clock, timer)
    return StageCalibration(
        lines, _tail(every), float(np.median(errors)), (call_s, row_s), tail, threads,
        _lists_speedup(sample, threads, clock), timer.base_s,
    )  # fmt: skip


def _points(sample: Sample, clock: Clock) -> Iterator[_Point]:
    """Yield searches in made-up lists of every shape."""
    most = max(sample.rows.view.size // BLOCK, 1)
    for count, bits in itertools.product(sorted({min(each, most) for each in _LISTS}), _BITS):
        lists = _made(sample, count, bits)
        for share, depth in itertools.product(_SHARES, _DEPTHS):
            yield _point(sample, lists.tuned(max(1, round(share * count)), depth), clock)


def _narrow(sample: Sample, dimension: int) -> Sample:
    view = sample.rows.view
    rows = VectorRows(dimension, view.size)
    rows.append(view.matrix[: view.size, :dimension], view.labels[: view.size], view.numbers[: view.size])  # fmt: skip
    return Sample(sample.metric, rows, np.ascontiguousarray(sample.queries[:, :dimension]), sample.truth)  # fmt: skip


def _made(sample: Sample, count: int, bits: CodeBits = 8) -> InvertedLists:
    """Return lists of random codes over the rows, with rows as centroids."""
    view = sample.rows.view
    rng = np.random.default_rng(count)
    subspaces, part = subspaces_of(sample.rows.dimension, bits)
    width = subspaces * part
    rotation = np.zeros((width, sample.rows.dimension), np.float32)
    np.fill_diagonal(rotation[:, ::-1], 1.0)  # rows that are left as they are take less time
    centroids = np.zeros((count, width), np.float32)
    centroids[:, : sample.rows.dimension] = view.matrix[rng.integers(0, view.size, count)]
    words = rng.standard_normal((subspaces, words_of(bits), part)).astype(np.float32)
    words *= 0.3 * float(np.abs(view.matrix[: min(view.size, 1000)]).mean())
    metric: Metric = sample.metric
    lists = InvertedLists.empty(Quantizer(metric, view.size, rotation, centroids, words))
    codes = rng.integers(0, words_of(bits), (view.size, subspaces), np.uint8)
    lists_of = rng.integers(0, count, view.size)
    return lists.with_more(Coded(np.arange(view.size), lists_of, codes), view.size)


def _side(sample: Sample, lists: InvertedLists, clock: Clock) -> Side:
    index = lists_index(sample, lists, clock)
    return Side(lambda query: index.search(query, K, remember=False), sample.queries[:_QUERIES])


def _point(sample: Sample, lists: InvertedLists, clock: Clock) -> _Point:
    quantizer = lists.quantizer
    order = lists.nearest_lists(sample.queries[:_QUERIES])[:, : lists.probes]
    slots = (np.ceil(lists.sizes / BLOCK) * BLOCK)[order].sum(axis=1).mean()
    search = ListsSearch(
        quantizer.dimension,
        quantizer.width,
        quantizer.subspaces,
        quantizer.lists,
        lists.probes,
        float(slots),
        float(lists.sizes[order].sum(axis=1).mean()),
        lists.depth * K,
        *quantizer.coding,
    )
    return _Point(_side(sample, lists, clock), search.work())


def _lists_speedup(sample: Sample, threads: int, clock: Clock) -> float:
    """Return how many times the searches of one thread so many do in lists of which a twentieth are read."""
    count = min(_LISTS[-1], max(sample.rows.view.size // BLOCK, 1))
    lists = _made(sample, count).tuned(max(1, count // 20), 8)
    indexes = {number: lists_index(sample, lists, clock, number) for number in {1, threads}}
    return speedup(
        lambda number: indexes[number].search(sample.queries, K, remember=False), threads, clock
    )


def _exact(sample: Sample, clock: Clock, timer: SearchTimer) -> tuple[float, float, float]:
    """Return the seconds of a call and of a row, and the tail."""
    sizes, sides = [], []
    for share in _PARTS:
        part = sample._replace(rows=_first(sample.rows, int(share * sample.rows.view.size)))
        index = ExactIndex(part.state(None, None), sample.metric, threads=1, clock=clock)
        sizes.append(part.rows.view.size)
        sides.append(Side(partial(index.search, k=K), sample.queries[: _QUERIES // 3]))
    times = timer.time(sides)
    means = np.array([each.mean_s for each in times])
    line = np.stack([np.ones(len(sizes)), np.array(sizes)], axis=1) / means[:, None]
    call_s, row_s = np.linalg.lstsq(line, np.ones(len(sizes)), rcond=None)[0]
    return float(max(call_s, 0.0)), float(row_s), _tail(times)


def _tail(times: Sequence[SearchTimes]) -> float:
    return float(np.median([each.p99_s / each.mean_s for each in times]))


def _first(rows: VectorRows, count: int) -> VectorRows:
    """Return the first of the rows, where these lie."""
    made = VectorRows(rows.dimension, 1)
    made.view = rows.view._replace(size=max(count, 1))
    return made
