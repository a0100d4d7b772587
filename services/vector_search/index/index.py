"""The index of one shard: rows, a graph over the older ones, and exact search over the rest.

New rows are searched exactly at once and enter the graph in the background, in short turns; deleted rows are masked
at once and marked in the graph later. A rebuild (first graph, too many deleted) runs beside the searches and is
swapped in. So a write never waits for the graph and a search always sees it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Literal, NamedTuple

import numpy as np

from services.vector_search import metrics, planner
from services.vector_search.index import exact
from services.vector_search.index.graph import Graph
from services.vector_search.index.rows import Flags, Floats, Ints, Metric, Rows, View

# What searches wait for while rows are put into the graph, and how many rows that may be at most.
_TURN_S = 0.003
_SLICE = 32
_BUILD_SLICE = 2000
_COMPACT_RATIO = 0.3
_COMPACT_ROWS = 256
_AUDITED = 64
Path = Literal["exact", "graph", "filtered-exact", "filtered-graph", "scan"]


class Found(NamedTuple):
    """Labels and scores of each query (rows of a matrix, or a list), best first, and the way they were found."""

    labels: list[Ints] | Ints
    scores: list[Floats] | Floats
    path: Path


class State(NamedTuple):
    """What a search reads in one go: rows, the graph over the first `indexed` of them."""

    rows: Rows
    graph: Graph | None
    indexed: int


class Index:
    """Vectors by label. One thread calls `publish`, one calls `maintain`; any number search.

    Scores: cosine, dot product or negative Euclidean distance; higher is nearer.
    """

    def __init__(self, dimension: int, metric: Metric, *, exact_below: int, threads: int) -> None:
        self.dimension = dimension
        self.metric: Metric = metric
        self.recall = 1.0
        self._exact_below = exact_below
        self._threads = threads
        self._state = State(Rows(dimension), None, 0)
        self._lock = threading.Lock()
        self._unmarked: list[int] = []
        self._recent: deque[Floats] = deque(maxlen=_AUDITED)
        self._closing = threading.Event()
        self._tuned_at = 0
        self._audited = False
        self._slice = 4

    # -- what it holds

    @property
    def live(self) -> int:
        """Vectors that are not deleted."""
        return self._state.rows.live_count

    @property
    def deleted_ratio(self) -> float:
        """Deleted rows / all rows."""
        return self._state.rows.deleted_ratio

    @property
    def ef(self) -> int:
        """Candidates the graph search keeps; 0 without a graph."""
        graph = self._state.graph
        return graph.ef if graph else 0

    @property
    def path(self) -> str:
        """The way an unfiltered search goes now."""
        state = self._state
        return "graph" if state.graph and state.rows.live_count >= self._exact_below else "exact"

    # -- writing

    def publish(self, vectors: Floats, labels: Ints, numbers: Ints, removed: Ints) -> None:
        """Add prepared rows (labels rising), then delete labels; visible to searches that begin afterwards."""
        with self._lock:
            state = self._state
            if len(labels):
                state.rows.append(vectors, labels, numbers)
            if len(removed):
                gone = state.rows.kill(removed)
                self._unmarked += gone[gone < state.indexed].tolist()

    def restore(self, rows: Rows, graph: Graph | None, indexed: int) -> None:
        """Take over what was loaded at start."""
        if graph is not None:
            dead = np.flatnonzero(~rows.view.live[:indexed])
            graph.mark_deleted(dead)
            self._tuned_at = indexed
        self._state = State(rows, graph, indexed)

    def saved(self) -> tuple[Graph, Ints] | None:
        """Return the graph and the labels of its rows, for a snapshot; call between calls of `maintain`."""
        with self._lock:
            state = self._state
        if state.graph is None:
            return None
        return state.graph, state.rows.view.labels[: state.indexed].copy()

    # -- searching

    def search(
        self,
        queries: Floats,
        k: int,
        *,
        wanted: Flags | None = None,
        ef: int | None = None,
        exactly: bool = False,
        remember: bool = True,
    ) -> Found:
        """Find the k nearest of each prepared query; `wanted` marks document numbers a filter allows.

        Returns fewer than k only if fewer match. Numbers past the end of `wanted` are not allowed. `remember`
        lets `audit` use the query.
        """
        state = self._state
        rows, graph, indexed = state
        view = rows.view
        if wanted is None and ef is None and not exactly and graph is not None:
            found = self._whole(queries, k, state, remember=remember)
            if found is not None:
                return found
        allowed: Flags | None = None
        if wanted is not None:
            numbers = view.numbers[: view.size]
            allowed = wanted[np.minimum(numbers, len(wanted) - 1)] & (numbers < len(wanted))
            allowed &= view.live[: view.size]
        plan = planner.choose(
            live=rows.live_count,
            indexed=indexed,
            matching=None if allowed is None else int(np.count_nonzero(allowed)),
            k=k,
            ef=max(ef or 0, graph.ef if graph else 0),
            exact=exactly,
            exact_below=self._exact_below,
        )
        metrics.BY_PATH[plan.way].inc(len(queries))
        if graph is None or plan.way in ("exact", "filtered-exact"):
            return self._exactly(queries, view, k, dead=rows.dead, allowed=allowed, way=plan.way)
        if wanted is None and remember:
            self._recent.append(queries[:1])
        return self._by_graph(queries, k, state, view, allowed=allowed, plan=plan, ef=ef)

    def _whole(self, queries: Floats, k: int, state: State, *, remember: bool) -> Found | None:
        """Search the graph alone, the short way when it holds every row and none is deleted; None if not."""
        rows, graph, indexed = state
        view = rows.view
        if graph is None or view.size != indexed or rows.dead or indexed < self._exact_below:
            return None
        found, scores = graph.query(queries, k)
        if rows.view is not view or rows.dead or found.shape[1] < min(k, indexed):
            return None
        if remember:
            self._recent.append(queries[:1])
        metrics.BY_PATH["graph"].inc(len(queries))
        return Found(view.labels[found], scores, "graph")

    def _exactly(
        self, queries: Floats, view: View, k: int, *, dead: int, allowed: Flags | None, way: Path
    ) -> Found:
        if allowed is None and dead:
            allowed = view.live[: view.size].copy()
        found, scores = exact.top_k(queries, view.matrix[: view.size], k, self.metric, allowed)
        return Found(view.labels[found], scores, way)

    def _by_graph(
        self,
        queries: Floats,
        k: int,
        state: State,
        view: View,
        *,
        allowed: Flags | None,
        plan: planner.Plan,
        ef: int | None,
    ) -> Found:
        graph, indexed = state.graph, state.indexed
        assert graph is not None
        fetch, way = max(plan.fetch, k), plan.way
        keep = view.live if allowed is None else allowed
        reach = int(np.count_nonzero(keep[:indexed])) if allowed is not None else len(graph)
        while True:
            found, scores = graph.query(queries, fetch, ef)
            # Rows that entered the graph since `state` was read are found in the tail.
            inside = found.max(initial=0) < indexed
            good = keep[found] if inside else (found < indexed) & keep[found.clip(max=indexed - 1)]
            if good.all():
                enough = found.shape[1] >= min(k, reach)
            else:
                enough = bool((good.sum(axis=1) >= min(k, reach)).all())
                scores = np.where(good, scores, -np.inf).astype(np.float32)
            if enough:
                break
            if fetch >= plan.limit or found.shape[1] < fetch:
                metrics.SLOW_PATHS.inc(len(queries))
                metrics.BY_PATH["scan"].inc(len(queries))
                mask = keep[: view.size].copy()
                return self._exactly(queries, view, k, dead=1, allowed=mask, way="scan")
            fetch = min(fetch * planner.GROWTH, max(plan.limit, 1))
        if view.size > indexed:
            mask = keep[indexed : view.size].copy()
            tail, near = exact.top_k(
                queries, view.matrix[indexed : view.size], k, self.metric, mask
            )
            found, scores = np.hstack([found, tail + indexed]), np.hstack([scores, near])
        elif good.all():
            return Found(view.labels[found[:, :k]], scores[:, :k], way)
        found, scores = exact.rank(found, scores, k)
        sound = np.isfinite(scores)
        return Found(
            [view.labels[row[ok]] for row, ok in zip(found, sound, strict=True)],
            [row[ok] for row, ok in zip(scores, sound, strict=True)],
            way,
        )

    # -- maintenance, one thread

    def maintain(self) -> bool:
        """Do one bounded piece of background work, if there is any; True if there may be more."""
        rows, graph, indexed = self._state
        live, count = rows.live_count, rows.view.size
        wasteful = rows.dead >= _COMPACT_ROWS and rows.deleted_ratio > _COMPACT_RATIO
        wants_graph = live >= self._exact_below
        behind = count - indexed
        if wasteful or (wants_graph and (graph is None or behind > max(indexed, 4096))):
            return self._rebuild(wants_graph)
        if graph is None or not (self._unmarked or behind):
            return False
        if count > planner.RETUNE_GROWTH * self._tuned_at:
            if behind < _AUDITED:
                return False  # searched exactly until there are enough to choose ef by
            view = rows.view
            fresh = view.matrix[indexed : indexed + _AUDITED]
            self._tune(graph, view, fresh, view.live[:indexed].copy(), graph.ef)
            self._tuned_at = count
        self._extend(graph, rows, indexed)
        return True

    def _extend(self, graph: Graph, rows: Rows, indexed: int) -> None:
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
            self._state = State(rows, graph, end)
        if len(fresh):
            fitting = int(len(fresh) * _TURN_S / (time.perf_counter() - began))
            self._slice = min(max(fitting, 1), 2 * self._slice, _SLICE)

    def _rebuild(self, with_graph: bool) -> bool:
        old = self._state.rows
        before = old.view
        kept = np.flatnonzero(before.live[: before.size])
        rows = Rows(self.dimension, max(1024, len(kept)))
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

    def _build(self, rows: Rows) -> Graph | None:
        """Build a graph over all rows; some go in last, as the queries that ef is chosen by."""
        view = rows.view
        graph = Graph(self.dimension, self.metric, int(view.size * 1.25), self._threads)
        order = np.random.default_rng(view.size).permutation(view.size)
        few = min(_AUDITED, view.size // 4)
        order, held_out = np.sort(order[few:]), order[:few]
        for part in np.array_split(order, len(order) // _BUILD_SLICE + 1):
            if self._closing.is_set():
                return None
            if len(part):
                graph.add(view.matrix[part], part)
        mask = view.live[: view.size].copy()
        mask[held_out] = False
        self._tune(graph, view, view.matrix[held_out], mask)
        if few:
            graph.add(view.matrix[held_out], held_out)
        return graph

    def _tune(self, graph: Graph, view: View, queries: Floats, mask: Flags, least: int = 0) -> None:
        """Take the least ef of the ladder, from `least` on, that finds what exact search finds in `mask`.

        The queries must not be in the graph: it finds the neighbours of its own rows too easily.
        """
        truth, _ = exact.top_k(queries, view.matrix[: len(mask)], 10, self.metric, mask)
        for ef in planner.EF_LADDER:
            if ef < least:
                continue
            if ef != graph.ef:
                graph.set_ef(ef)
            found, _ = graph.query(queries, 10)
            self.recall = _recall(found, truth)
            if self.recall >= planner.RECALL_GOAL:
                return

    def audit(self) -> float:
        """Compare recent queries with exact search; raise ef where recall fell short. Returns the recall."""
        rows, graph, indexed = self._state
        recent = list(self._recent)
        if graph is None or not indexed:
            self.recall = 1.0
        elif recent:
            view = rows.view
            mask = view.live[:indexed].copy()
            self._tune(graph, view, np.vstack(recent), mask, graph.ef)
            self._audited = self._audited or len(recent) == _AUDITED
        return self.recall

    @property
    def audit_due(self) -> bool:
        """True once enough queries have come for the first audit of this graph."""
        return not self._audited and len(self._recent) == _AUDITED and self._state.graph is not None

    def close(self) -> None:
        """Stop a rebuild in progress at its next slice."""
        self._closing.set()


def _recall(found: Ints, truth: Ints) -> float:
    pairs = zip(found.tolist(), truth.tolist(), strict=True)
    hits = sum(len(set(mine) & set(right)) for mine, right in pairs)
    return hits / truth.size if truth.size else 1.0
