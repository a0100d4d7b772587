"""Micro-benchmarks of searches on this machine, with the kernels that the index uses, over codes that mean nothing.

Lists of codes are made, not trained: what a search in them takes depends on their sizes alone.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np

from common.clock import Clock
from services.vector_search.index.exact_index import ExactIndex
from services.vector_search.index.inverted_lists import Coded, InvertedLists
from services.vector_search.index.quantizer import CodeBits, Quantizer, subspaces_of, words_of
from services.vector_search.index.rows import Metric, VectorRows
from services.vector_search.tuning.cost_lines import BLOCK, CostLines, ListsSearch
from services.vector_search.tuning.trials import K, Sample, lists_index, single_searches, speedup

_QUERIES = 48
# Numbers of lists, of which a share is read, and rows compared for each of K.
_LISTS, _SHARES, _DEPTHS = (64, 512, 4096), (0.0, 0.05, 0.4), (1, 8, 48)
_BITS: tuple[CodeBits, ...] = (4, 8)
# Shares of the rows that are compared one by one.
_PARTS = (0.05, 0.3, 1.0)


class StageCalibration(msgspec.Struct, frozen=True):
    """What was measured: the lines of lists, and of exact search in seconds per call and row; tails and speed-ups.

    A tail is how many times the mean one search in a hundred takes. `fit_error` is the median relative error of the
    lines of lists at the points that they were fitted to.
    """

    lists: CostLines
    lists_tail: float
    fit_error: float
    exact: tuple[float, float]
    exact_tail: float
    threads: int
    lists_speedup: float


def calibrate(sample: Sample, threads: int, clock: Clock) -> StageCalibration:
    """Measure searches in lists of many shapes over the rows of a sample, and exact search of parts of them."""
    points: list[tuple[tuple[float, ...], float]] = []
    tails: list[float] = []
    factor = 1.0
    most = max(sample.rows.view.size // BLOCK, 1)
    dimension = sample.rows.dimension
    for own in (dimension, max(dimension // 2, 8)):
        made = sample if own == dimension else _narrow(sample, own)
        for count, bits in itertools.product(sorted({min(each, most) for each in _LISTS}), _BITS):
            lists = _made(made, count, bits)
            for share, depth in itertools.product(_SHARES, _DEPTHS):
                probes = max(1, round(share * count))
                point, tail = _timed(made, lists.tuned(probes, depth), clock)
                points.append(point)
                tails.append(tail)
        if own == dimension:
            some = lists.tuned(max(1, lists.quantizer.lists // 20), 8)
            factor = _lists_speedup(made, some, threads, clock)
    lines = CostLines.fit(points)
    errors = [abs(lines.seconds(work) / seconds - 1.0) for work, seconds in points]
    call_s, row_s, tail = _exact(sample, clock)
    return StageCalibration(
        lines, float(np.median(tails)), float(np.median(errors)), (call_s, row_s), tail, threads, factor
    )  # fmt: skip


def _narrow(sample: Sample, dimension: int) -> Sample:
    view = sample.rows.view
    rows = VectorRows(dimension, view.size)
    rows.append(view.matrix[: view.size, :dimension], view.labels[: view.size], view.numbers[: view.size])  # fmt: skip
    return Sample(sample.metric, rows, np.ascontiguousarray(sample.queries[:, :dimension]), sample.truth)  # fmt: skip


def _made(sample: Sample, count: int, bits: CodeBits) -> InvertedLists:
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


def _timed(
    sample: Sample, lists: InvertedLists, clock: Clock
) -> tuple[tuple[tuple[float, ...], float], float]:
    """Return the work of a search and its seconds, and its tail."""
    queries, quantizer = sample.queries[:_QUERIES], lists.quantizer
    order = lists.nearest_lists(queries)[:, : lists.probes]
    slots = (np.ceil(lists.sizes / BLOCK) * BLOCK)[order].sum(axis=1).mean()
    work = ListsSearch(
        quantizer.dimension,
        quantizer.width,
        quantizer.subspaces,
        quantizer.lists,
        lists.probes,
        float(slots),
        float(lists.sizes[order].sum(axis=1).mean()),
        lists.depth * K,
        *quantizer.coding,
    ).work()
    times = single_searches(lists_index(sample, lists, clock), queries, clock)
    return (work, times.mean_s), times.p99_s / times.mean_s


def _lists_speedup(sample: Sample, lists: InvertedLists, threads: int, clock: Clock) -> float:
    indexes = {count: lists_index(sample, lists, clock, count) for count in {1, threads}}
    return speedup(
        lambda count: indexes[count].search(sample.queries, K, remember=False), threads, clock
    )


def _exact(sample: Sample, clock: Clock) -> tuple[float, float, float]:
    """Return the seconds of a call and of a row, and the tail."""
    sizes, means, tails = [], [], []
    for share in _PARTS:
        part = Sample(
            sample.metric, _first(sample.rows, int(share * sample.rows.view.size)), sample.queries, sample.truth
        )  # fmt: skip
        index = ExactIndex(part.state(None, None), sample.metric, threads=1, clock=clock)
        times = single_searches(index, sample.queries[: _QUERIES // 3], clock)
        sizes.append(part.rows.view.size)
        means.append(times.mean_s)
        tails.append(times.p99_s / times.mean_s)
    line = np.stack([np.ones(len(sizes)), np.array(sizes)], axis=1) / np.array(means)[:, None]
    call_s, row_s = np.linalg.lstsq(line, np.ones(len(sizes)), rcond=None)[0]
    return float(max(call_s, 0.0)), float(row_s), float(np.median(tails))


def _first(rows: VectorRows, count: int) -> VectorRows:
    """Return the first of the rows, where these lie."""
    made = VectorRows(rows.dimension, 1)
    made.view = rows.view._replace(size=max(count, 1))
    return made
