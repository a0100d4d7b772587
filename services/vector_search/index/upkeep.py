"""What keeps an index quick and right in the background: growing the graph, building it anew, choosing ef.

New rows enter the graph in short turns; a rebuild (first graph, too many deleted) runs beside the searches and is
swapped in; ef is the least that finds what exact search finds, for queries the graph does not hold.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple

import numpy as np

from services.vector_search import metrics, planner
from services.vector_search.index import exact
from services.vector_search.index.compact import Compact
from services.vector_search.index.graph import Graph
from services.vector_search.index.rows import Floats, Ints, Metric, RowsView, VectorRows

# What searches wait for while rows are put into the graph, and how many rows that may be at most.
_TURN_S = 0.003
_SLICE = 32
_BUILD_SLICE = 2000
_COMPACT_RATIO = 0.3
_COMPACT_ROWS = 256
_AUDITED = 256
_HELD_OUT = 512
# Rows newer than the frozen copy are compared one by one. It is made anew after so many or this share of its own rows,
# or, for fewer, when that costs no more than this share of the time; it serves until they are four times as many.
_NEWER_LEAST = 64
_NEWER_SHARE = 1 / 1024
_FREEZING_SHARE = 0.05


class State(NamedTuple):
    """What a search reads in one go: rows, the graph over the first `indexed` of them, its frozen copy."""

    rows: VectorRows
    graph: Graph | None
    indexed: int
    compact: Compact | None = None


def serving(state: State, view: RowsView) -> tuple[Graph | Compact | None, int]:
    """Return what a search walks, and how many rows that covers: the copy if it is fresh, else the graph."""
    _, graph, indexed, compact = state
    if compact is not None and compact.live is view.live:
        covered = compact.covered
        if view.size - covered <= 4 * _few(covered):
            return compact, covered
    return graph, indexed


def _few(covered: int) -> int:
    return max(_NEWER_LEAST, int(covered * _NEWER_SHARE))


class Upkeep:
    """The background half of an index; one thread calls `maintain` and `audit`."""

    def __init__(self, dimension: int, metric: Metric, *, exact_below: int, threads: int) -> None:
        self.dimension = dimension
        self.metric: Metric = metric
        self.recall = 1.0
        self._exact_below = exact_below
        self._threads = threads
        self._state = State(VectorRows(dimension), None, 0)
        self._lock = threading.Lock()
        self._unmarked: list[int] = []
        self._recent: deque[Floats] = deque(maxlen=_AUDITED)
        self._closing = threading.Event()
        self._tuned_at = 0
        self._audited = False
        self._slice = 4
        self._freeze_at = 0.0
        self._remembered = 0

    def maintain(self) -> bool:
        """Do one bounded piece of background work, if there is any; True if there may be more."""
        rows, graph, indexed, _ = self._state
        live, count = rows.live_count, rows.view.size
        wasteful = rows.dead >= _COMPACT_ROWS and rows.deleted_ratio > _COMPACT_RATIO
        wants_graph = live >= self._exact_below
        behind = count - indexed
        if wasteful or (wants_graph and (graph is None or behind > max(indexed, 4096))):
            return self._rebuild(wants_graph)
        if graph is None:
            return False
        if not (self._unmarked or behind):
            return self._freeze(graph)
        if count > planner.RETUNE_GROWTH * self._tuned_at:
            if behind < _AUDITED:
                return False  # searched exactly until there are enough to choose ef by
            view = rows.view
            fresh = view.matrix[indexed : indexed + _AUDITED]
            self._tune(graph, self._state, fresh, least=graph.ef)
            self._tuned_at = count
        self._extend(graph, rows, indexed)
        return True

    def _extend(self, graph: Graph, rows: VectorRows, indexed: int) -> None:
        with self._lock:
            unmarked, self._unmarked = self._unmarked[:1000], self._unmarked[1000:]
        if unmarked:
            graph.mark_deleted(np.array(unmarked, np.int64))
        view = rows.view
        end = min(indexed + self._slice, view.size)
        began = time.perf_counter()
        fresh = np.arange(indexed, end)[view.live[indexed:end]]
        if len(fresh):
            graph.add(view.matrix[fresh], fresh, threads=1)
        with self._lock:
            self._unmarked += fresh[~rows.view.live[fresh]].tolist()
            self._state = self._state._replace(indexed=end)
        if len(fresh):
            fitting = int(len(fresh) * _TURN_S / (time.perf_counter() - began))
            self._slice = min(max(fitting, 1), 2 * self._slice, _SLICE)

    def _freeze(self, graph: Graph) -> bool:
        """Make a copy of the graph to search if the one there is no longer fits; True if so."""
        rows, _, indexed, compact = self._state
        view = rows.view
        began = time.perf_counter()
        if compact is not None and compact.live is view.live:
            newer = indexed - compact.covered
            if newer == 0 or (newer <= _few(compact.covered) and began < self._freeze_at):
                return False
        made = Compact.of(graph, self.metric, view, indexed)
        if made is None:
            return False
        ended = time.perf_counter()
        self._freeze_at = ended + (ended - began) / _FREEZING_SHARE
        with self._lock:
            self._state = self._state._replace(compact=made)
        return True

    def _rebuild(self, with_graph: bool) -> bool:
        old = self._state.rows
        before = old.view
        kept = np.flatnonzero(before.live[: before.size])
        rows = VectorRows(self.dimension, max(1024, len(kept)))
        for part in np.array_split(kept, max(1, len(kept) // _BUILD_SLICE)):
            rows.append(before.matrix[part], before.labels[part], before.numbers[part])
        graph = self._build(rows) if with_graph else None
        if self._closing.is_set():
            return False
        indexed = len(kept) if graph else 0
        with self._lock:
            now = old.view
            late = np.arange(before.size, now.size)
            late = late[now.live[late]]
            rows.append(now.matrix[late], now.labels[late], now.numbers[late])
            gone = rows.kill(now.labels[kept[~now.live[kept]]])
            self._unmarked = gone[gone < indexed].tolist()
            self._state = State(rows, graph, indexed)
            self._tuned_at, self._audited = indexed, False
        metrics.COMPACTIONS.inc()
        return True

    def _build(self, rows: VectorRows) -> Graph | None:
        """Build a graph over all rows; some go in last, as the queries that ef is chosen by."""
        view = rows.view
        graph = Graph(self.dimension, self.metric, int(view.size * 1.25), self._threads)
        order = np.random.default_rng(view.size).permutation(view.size)
        few = min(_HELD_OUT, view.size // 4)
        order, held_out = np.sort(order[few:]), order[:few]
        for part in np.array_split(order, len(order) // _BUILD_SLICE + 1):
            if self._closing.is_set():
                return None
            if len(part):
                graph.add(view.matrix[part], part)
        compact = Compact.of(graph, self.metric, view, view.size)
        state = State(rows, graph, view.size, compact)
        self._tune(graph, state, view.matrix[held_out], but=held_out)
        if few:
            graph.add(view.matrix[held_out], held_out)
        return graph

    def _tune(
        self,
        graph: Graph,
        state: State,
        queries: Floats,
        *,
        least: int = 0,
        but: Ints | None = None,
        margin: float = planner.SURE,
    ) -> None:
        """Take the least ef of the ladder, from `least` on, that surely finds what exact search finds.

        The queries, and the rows `but`, must not be in the graph: it finds the neighbours of its own rows too easily.
        Surely: `margin` standard errors above the goal.
        """
        view = state.rows.view
        searched, covered = serving(state, view)
        assert searched is not None
        mask = view.live[:covered].copy()
        if but is not None:
            mask[but] = False
        truth, _ = exact.top_k(queries, view.matrix[:covered], 10, self.metric, mask)
        for ef in planner.EF_LADDER:
            if ef < least:
                continue
            if ef != graph.ef:
                graph.set_ef(ef)
            found, _ = searched.query(queries, 10)
            shares = _recall(found, truth)
            self.recall = float(shares.mean()) if len(shares) else 1.0
            error = float(shares.std()) / max(len(shares), 1) ** 0.5
            if self.recall - margin * error >= planner.RECALL_GOAL:
                return

    def audit(self) -> float:
        """Compare recent queries with exact search; raise ef where recall fell short. Returns the recall."""
        state = self._state
        recent = list(self._recent)
        if state.graph is None or not state.indexed:
            self.recall = 1.0
        elif recent:
            # Without a margin: one that is asked for again and again would raise ef by chance.
            self._tune(state.graph, state, np.vstack(recent), least=state.graph.ef, margin=0.0)
            self._audited = self._audited or len(recent) == _AUDITED
        return self.recall

    @property
    def audit_due(self) -> bool:
        """True once enough queries have come for the first audit of this graph."""
        return not self._audited and len(self._recent) == _AUDITED and self._state.graph is not None

    def close(self) -> None:
        """Stop a rebuild in progress at its next slice."""
        self._closing.set()


def _recall(found: Ints, truth: Ints) -> Floats:
    """Return which share of its true nearest each query found."""
    shares: Floats = (truth[:, :, None] == found[:, None, :]).any(axis=2).mean(axis=1)
    return shares
