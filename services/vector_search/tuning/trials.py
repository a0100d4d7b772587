"""Trials of tuning: indexes of real kinds over a sample, what they find, and what a search in them takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from common.clock import Clock
from services.vector_search.index import exact, search_path
from services.vector_search.index.graph_index import GraphIndex
from services.vector_search.index.inverted_lists import InvertedLists, code
from services.vector_search.index.ivfpq_index import IvfpqIndex
from services.vector_search.index.lists_tuning import DEPTHS, Places, Truth
from services.vector_search.index.memory import room_bytes
from services.vector_search.index.native_graph import NativeGraph, SearchGraph, new_graph
from services.vector_search.index.port import VectorIndex
from services.vector_search.index.quantizer import USUAL, Coding
from services.vector_search.index.quantizer_source import OwnQuantizer
from services.vector_search.index.quantizer_training import (
    ENOUGH_ROWS,
    LEAST_PER_LIST,
    TrainingWork,
    train,
    train_apart,
)
from services.vector_search.index.quantizer_training import SAMPLE_BYTES as TRAINED_BYTES
from services.vector_search.index.rows import Floats, Ints, Metric, VectorRows
from services.vector_search.index.state import IndexState, IndexView
from services.vector_search.tuning.cost_lines import BLOCK, expected_codes, expected_slots
from services.vector_search.tuning.search_timer import SearchTimes, Side
from services.vector_search.tuning.space import least

K = 10
_CODED_AT_ONCE = 32_768
_BUILD_SLICE = 2000
# Values of ef that a graph's line goes through, and how many ways to read them the lines of lists do.
_TIMED_EFS = (10, 16, 32, 64, 128, 256)
_TIMED_WAYS = 12
_MOST_EF = 2048
_ROUNDS = 5


class StructureKey(NamedTuple):
    """A structure of a kind, with its number of lists or links, over so many rows, which lists code so."""

    kind: str
    number: int
    rows: int
    coding: Coding = USUAL


class ListsOption(msgspec.Struct, frozen=True):
    """A way to read lists, what it found, and the codes and places for codes that it read of each query."""

    probes: int
    depth: int
    recall: float
    sure: float
    codes: float
    slots_p99: float


class TimedWay(msgspec.Struct, frozen=True):
    """What single searches took with an effort (lists read, or ef) and a depth (0 for graphs)."""

    effort: int
    depth: int
    mean_s: float
    p99_s: float


class ListsTrial(msgspec.Struct, frozen=True):
    """Lists over `rows` rows: what a query that reads one of them is expected to read, ways to read them, and times."""

    asked: int
    lists: int
    rows: int
    dimension: int
    width: int
    subspaces: int
    codes_each: float
    slots_each: float
    bytes: int
    options: list[ListsOption]
    timed: list[TimedWay] = []
    coding: Coding = USUAL

    @property
    def key(self) -> StructureKey:
        """What tells the lists from others."""
        return StructureKey("ivfpq", self.asked, self.rows, self.coding)


class GraphOption(msgspec.Struct, frozen=True):
    """An ef, and what a graph finds with it."""

    ef: int
    recall: float
    sure: float


class GraphTrial(msgspec.Struct, frozen=True):
    """A graph over `rows` rows; `speedup` is how many times the searches of one thread `threads` of them do."""

    links: int
    rows: int
    bytes: int
    threads: int
    speedup: float
    options: list[GraphOption]
    timed: list[TimedWay] = []

    @property
    def key(self) -> StructureKey:
        """What tells the graph from others."""
        return StructureKey("graph", self.links, self.rows)


class Sample(NamedTuple):
    """Rows to build over and queries that are none of them, prepared; and the true neighbours (queries, K)."""

    metric: Metric
    rows: VectorRows
    queries: Floats
    truth: Ints

    @classmethod
    def of(cls, metric: Metric, rows: VectorRows, queries: Floats) -> Sample:
        """Find the neighbours by comparing every row."""
        view = rows.view
        return cls(
            metric, rows, queries, exact.top_k(queries, view.matrix[: view.size], K, metric)[0]
        )

    def part(self, count: int) -> Sample:
        """Return the sample with only the first rows."""
        made, view = VectorRows(self.rows.dimension, count), self.rows.view
        made.append(view.matrix[:count], view.labels[:count], view.numbers[:count])
        return Sample.of(self.metric, made, self.queries)

    def state(self, graph: SearchGraph | None, lists: InvertedLists | None) -> IndexState:
        """Return the state of an index over these rows."""
        made = IndexState(self.rows.dimension)
        made.view = IndexView(self.rows, graph, self.rows.view.size if graph else 0, lists)
        return made


def batch_s(search: Callable[[], object], clock: Clock) -> float:
    """Return the seconds of a batch, the best of a few times."""
    times = []
    for _ in range(_ROUNDS):
        began_s = clock.perf_s()
        search()
        times.append(clock.perf_s() - began_s)
    return min(times)


def speedup(search: Callable[[int], object], threads: int, clock: Clock) -> float:
    """Return how many times the searches of one thread so many do; `search` runs a batch with a number of threads."""
    if threads == 1:
        return 1.0
    alone_s = batch_s(partial(search, 1), clock)
    return alone_s / batch_s(partial(search, threads), clock)


# -- lists


def made_lists(
    sample: Sample,
    asked: int,
    threads: int,
    rotation: Floats | None = None,
    coding: Coding = USUAL,
) -> InvertedLists:
    """Train a quantizer for the rows of a sample, and put them into lists; a `rotation` is taken over."""
    view, rows = sample.rows.view, sample.rows.view.size
    most = min(rows, TRAINED_BYTES // (4 * sample.rows.dimension))
    some = np.ascontiguousarray(view.matrix[: min(most, max(ENOUGH_ROWS, LEAST_PER_LIST * asked))])
    work = TrainingWork(
        metric=sample.metric,
        lists=asked,
        rows=rows,
        sample=len(some),
        dimension=some.shape[1],
        threads=threads,
        coding=coding,
    )
    lists = InvertedLists.empty(train(work, some, rotation=rotation))
    for at in range(0, rows, _CODED_AT_ONCE):
        part = np.arange(at, min(at + _CODED_AT_ONCE, rows))
        lists = lists.with_more(code(lists.quantizer, view, part), int(part[-1]) + 1)
    return lists


def try_lists(
    sample: Sample,
    lists: InvertedLists,
    asked: int,
    levels: list[float],
    threads: int,
) -> ListsTrial:
    """Return, for each depth and each recall level, the least number of lists to read, and what that reads."""
    view, quantizer = sample.rows.view, lists.quantizer
    truth = Truth.of(lists, view, view.live, sample.queries)
    places = Places.of(truth, lists, view.live, threads)
    order = lists.nearest_lists(sample.queries)
    codes = np.cumsum(lists.sizes[order], axis=1)
    slots = np.cumsum((np.ceil(lists.sizes / BLOCK) * BLOCK)[order], axis=1)
    options = []
    for probes, depth in sorted(_ways(places, quantizer.lists, levels)):
        shares = places.shares(probes, depth)
        read, slow = codes[:, probes - 1].mean(), np.quantile(slots[:, probes - 1], 0.99)
        options.append(
            ListsOption(
                probes, depth, float(shares.mean()), _sure(shares), float(read), float(slow)
            )
        )
    return ListsTrial(
        asked,
        quantizer.lists,
        view.size,
        quantizer.dimension,
        quantizer.width,
        quantizer.subspaces,
        expected_codes(lists.sizes.tolist(), 1),
        expected_slots(lists.sizes.tolist(), 1),
        lists.codes_bytes + lists.quantizer_bytes,
        options,
        coding=quantizer.coding,
    )


def lists_sides(
    sample: Sample, lists: InvertedLists, trial: ListsTrial, clock: Clock
) -> dict[tuple[int, int], Side]:
    """Return searches in lists in some of the ways of a trial, by lists read and depth."""
    ways = [(each.probes, each.depth) for each in trial.options]
    drawn = np.random.default_rng(len(ways)).permutation(len(ways))[:_TIMED_WAYS]
    found = {}
    for probes, depth in sorted(ways[at] for at in drawn):
        index = lists_index(sample, lists.tuned(probes, depth), clock)
        found[probes, depth] = Side(partial(_asked, index, None), sample.queries)
    return found


def _asked(index: VectorIndex, effort: int | None, query: Floats) -> object:
    return index.search(query, K, effort=effort, remember=False)


def lists_index(sample: Sample, lists: InvertedLists, clock: Clock, threads: int = 1) -> IvfpqIndex:
    """Return an index of lists over the rows of a sample."""
    state = sample.state(None, lists)
    return IvfpqIndex(
        state,
        sample.metric,
        threads=threads,
        clock=clock,
        trainer=train_apart,
        quantizers=OwnQuantizer(),
        training_room=room_bytes,
    )


def _ways(places: Places, lists: int, levels: list[float]) -> set[tuple[int, int]]:
    """Return, for each depth and each recall level, the least number of lists that reaches it."""
    found = set()
    for depth in DEPTHS:
        shares = partial(_shares_at, places, depth)
        for level in levels:
            if (probes := _least_sure(shares, level, lists)) is not None:
                found.add((probes, depth))
    return found


def _shares_at(places: Places, depth: int, probes: int) -> Floats:
    return places.shares(probes, depth)


# -- graphs


def made_graph(sample: Sample, links: int, threads: int) -> SearchGraph:
    """Build a graph over the rows of a sample."""
    view = sample.rows.view
    graph = new_graph(sample.rows, sample.metric, view.size, threads, links)
    for at in range(0, view.size, _BUILD_SLICE):
        graph.add(view, np.arange(at, min(at + _BUILD_SLICE, view.size)), threads=threads)
    return graph


def try_graph(
    sample: Sample, graph: SearchGraph, levels: list[float], threads: int, clock: Clock
) -> GraphTrial:
    """Return the least ef for each recall level."""
    options = _graph_options(sample, graph, levels)
    return GraphTrial(
        graph.links,
        sample.rows.view.size,
        graph.bytes if isinstance(graph, NativeGraph) else int(graph.copied_bytes),
        threads,
        _graph_speedup(graph, sample.queries, threads, clock),
        options,
    )


def graph_sides(sample: Sample, graph: SearchGraph, clock: Clock) -> dict[tuple[int, int], Side]:
    """Return searches of a graph by ef, and 0."""
    index = GraphIndex(sample.state(graph, None), sample.metric, threads=1, clock=clock)
    return {(ef, 0): Side(partial(_asked, index, ef), sample.queries) for ef in _TIMED_EFS}


def timed_ways(
    sides: Mapping[tuple[int, int], Side], times: Sequence[SearchTimes]
) -> list[TimedWay]:
    """Return what was measured of sides, in their order."""
    return [TimedWay(*way, *taken) for way, taken in zip(sides, times, strict=True)]


def _graph_options(sample: Sample, graph: SearchGraph, levels: list[float]) -> list[GraphOption]:
    found: dict[int, Floats] = {}

    def shares(ef: int) -> Floats:
        if ef not in found:
            graph.set_ef(max(ef, K))
            near, _ = graph.query(sample.queries, K)
            same = (sample.truth[:, :, None] == near[:, None, :]).any(axis=2)
            found[ef] = same.mean(axis=1)
        return found[ef]

    needed = [_least_sure(shares, level, _MOST_EF) for level in levels]
    efs = sorted({max(ef, K) for ef in needed if ef is not None})
    return [GraphOption(ef, float(shares(ef).mean()), _sure(shares(ef))) for ef in efs]


def _graph_speedup(graph: SearchGraph, queries: Floats, threads: int, clock: Clock) -> float:
    return speedup(lambda count: graph.query(queries, K, threads=count), threads, clock)


def _least_sure(shares: Callable[[int], Floats], level: float, most: int) -> int | None:
    """Return the least effort whose recall is for sure a level, None if `most` is too little."""
    return least(lambda effort: _sure(shares(effort)) >= level, most)


def _sure(shares: Floats) -> float:
    """Return the recall that queries show for sure: their mean, less a margin for how few they are."""
    error = float(shares.std()) / math.sqrt(len(shares))
    return float(shares.mean()) - search_path.SURE * error
