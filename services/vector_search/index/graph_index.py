"""The graph kind of index: HNSW over the older rows, exact search over the rest.

New rows are searched exactly at once and enter the graph in the background; deleted rows are masked at once and marked
in the graph later. So a write never waits for the graph, and a search always sees the write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from common.clock import Clock
from services.vector_search import metrics
from services.vector_search.index import exact, recall_ladder, search_path
from services.vector_search.index.allowed_rows import AllowedRows, AllowedRowsCache
from services.vector_search.index.exact_index import (
    compare,
    exact_plan,
    filtered_plan,
    rows_bytes,
)
from services.vector_search.index.graph import Graph
from services.vector_search.index.maintenance import IndexMaintenance
from services.vector_search.index.native_graph import SearchGraph, graph_bytes
from services.vector_search.index.port import (
    Effort,
    EffortPlan,
    IndexSnapshot,
    IndexStats,
    Kind,
    Neighbours,
    Pick,
    Rung,
)
from services.vector_search.index.recall import RecallAudit
from services.vector_search.index.rows import Flags, Floats, Ints, Metric, RowsView
from services.vector_search.index.state import IndexState

# Queries of a batch that one thread takes at a time.
_TOGETHER = 4


class _Moment(NamedTuple):
    """What one search sees: the rows, the graph it walks and how many rows that covers, and what a filter allows."""

    view: RowsView
    dead: int
    graph: SearchGraph | None
    covered: int
    allowed: AllowedRows | None

    @property
    def matching(self) -> int | None:
        """How many rows the filter allows, None without a filter."""
        return None if self.allowed is None else self.allowed.count


class GraphIndex:
    """A graph over rows in memory; until it is built, and where a filter leaves few, rows are compared one by one."""

    kind: Kind = "graph"

    def __init__(self, state: IndexState, metric: Metric, *, threads: int, clock: Clock) -> None:
        self._state, self._metric, self._threads = state, metric, threads
        self._allowed = AllowedRowsCache()
        self._recall = RecallAudit(state.followed)
        self._ladder = recall_ladder.RecallLadder()
        self._maintenance = IndexMaintenance(
            state, self._recall, metric, with_graph=True, threads=threads, clock=clock
        )

    # -- writing and maintenance

    def publish(self, vectors: Floats, labels: Ints, numbers: Ints, removed: Ints) -> None:
        """Add prepared rows (labels rising), then delete labels; visible to searches that begin afterwards."""
        self._state.publish(vectors, labels, numbers, removed)

    def restored(self, indexed: int, recall: float) -> None:
        """Take over a saved graph over the first `indexed` rows, whose recall was measured before it was saved."""
        view = self._state.view
        if view.graph is not None:
            view.graph.mark_deleted(np.flatnonzero(~view.rows.view.live[:indexed]))
            self._maintenance.restored(indexed)
            self._recall.recall = recall

    def maintain(self) -> bool:
        """Do one bounded piece of building, growing or tidying, if there is any; True if there may be more."""
        return self._maintenance.step()

    def take_in(self) -> bool:
        """Put some of the newer rows into the graph there is, and build nothing anew; True if there may be more."""
        return self._maintenance.take_in()

    def audit(self) -> float:
        """Compare recent queries with exact search; raise ef where recall fell short. Returns the recall."""
        view = self._state.view
        recall = self._recall.audit(view)
        recent = self._recall.recent
        if len(recent):
            self._ladder.measure(view, recent, self._metric)
        return recall

    @property
    def audit_due(self) -> bool:
        """True once enough queries have come for the first audit of this graph."""
        return self._recall.due(self._state.view)

    def snapshot(self) -> IndexSnapshot | None:
        """Return the graph and the labels of its rows; call between calls of `maintain`."""
        with self._state.lock:
            view = self._state.view
        graph = view.graph
        if graph is None:
            return None
        labels = view.rows.view.labels[: view.indexed].copy()
        return IndexSnapshot(
            "graph", labels, graph.ef, self._recall.recall, graph.save, str(graph.links)
        )

    def close(self) -> None:
        """Stop background work in progress at its next step."""
        self._maintenance.close()

    # -- what is told of it

    def stats(self) -> IndexStats:
        """Return how the index stands."""
        state = self._state.view
        rows = state.rows
        held = {"rows": rows_bytes(rows.view)}
        if state.graph is None:
            return IndexStats(rows.live_count, rows.deleted_ratio, 0, "exact", "exact", 1.0, held)
        held["graph"] = graph_bytes(state.indexed, rows.dimension)
        newer = rows.view.size - state.indexed
        measured = self._recall.recall
        return IndexStats(
            rows.live_count, rows.deleted_ratio, newer, "graph", state.graph.ef, measured, held
        )

    def ladder(self) -> list[Rung]:
        """Return the values of ef, and the recall of each as far as it was measured."""
        graph = self._state.view.graph
        known = self._ladder.of(graph)
        if graph is not None:
            known[graph.ef] = self._recall.recall
        return [Rung(ef, known.get(ef)) for ef in search_path.EF_LADDER]

    def matching(self, wanted: Flags) -> int:
        """Return how many live rows a filter allows."""
        rows = self._state.view.rows
        return self._allowed.of(rows, rows.view, wanted).count

    def plans(self, queries: int, k: int, wanted: Flags | None = None) -> list[EffortPlan]:
        """Return the plan of each ef of the ladder for a batch of so many queries."""
        return self._plans(self._moment(wanted), queries, k)

    # -- searching

    def search(
        self,
        queries: Floats,
        k: int,
        *,
        effort: Effort | None = None,
        wanted: Flags | None = None,
        pick: Pick | None = None,
        remember: bool = True,
    ) -> Neighbours:
        """Find the k nearest of each prepared query, by the graph or exactly, whichever takes less."""
        count = len(queries)
        moment = None
        if pick is not None:
            moment = self._moment(wanted)
            effort = pick(self._plans(moment, count, k)).effort
        if wanted is None:
            found = self._whole(queries, k, effort, remember=remember)
            if found is not None:
                return found
        moment = moment or self._moment(wanted)
        graph, threads = moment.graph, self._searching
        plan, way = _planned(moment, count, k, effort, threads)
        if graph is None or plan.effort == "exact":
            view, dead, allowed = moment.view, moment.dead, moment.allowed
            return compare(
                queries,
                view,
                k,
                self._metric,
                dead=dead,
                allowed=allowed,
                plan=plan,
                path=plan.path,
            )
        if wanted is None and remember:
            self._recall.remember(queries)
        return self._walk(queries, k, moment, graph, plan, way, threads)

    def _moment(self, wanted: Flags | None) -> _Moment:
        state = self._state.view
        view = state.rows.view
        allowed = None if wanted is None else self._allowed.of(state.rows, view, wanted)
        covered = state.indexed if state.graph is not None else 0
        return _Moment(view, state.rows.dead, state.graph, covered, allowed)

    def _plans(self, moment: _Moment, queries: int, k: int) -> list[EffortPlan]:
        efforts: Sequence[Effort] = search_path.EF_LADDER if moment.graph is not None else ["exact"]
        return [_planned(moment, queries, k, each, self._searching)[0] for each in efforts]

    @property
    def _searching(self) -> int:
        return self._state.followed.threads(self._threads)

    def _whole(
        self, queries: Floats, k: int, effort: Effort | None, *, remember: bool
    ) -> Neighbours | None:
        """Search the graph alone, the short way, if it holds every row and none is deleted; None if not."""
        state = self._state.view
        graph, view, count = state.graph, state.rows.view, len(queries)
        if graph is None or state.indexed != view.size or state.rows.dead or effort == "exact":
            return None
        ef, threads = effort or graph.ef, self._searching
        plan, _ = _plan_of(view.size, 0, view.size, None, count, k, ef, threads)
        if isinstance(graph, Graph):
            rows, scores = graph.query(queries, k, _asked(plan, graph), threads)
            found = view.labels[rows]
        else:
            found, scores = graph.query(queries, k, ef, threads, labelled=True)
        now = self._state.view.rows
        if now.view is not view or now.dead or found.shape[1] < min(k, view.size):
            return None
        if remember:
            self._recall.remember(queries)
        metrics.BY_PATH["graph"].inc(count)
        return Neighbours(found, scores, plan, "graph")

    def _walk(
        self,
        queries: Floats,
        k: int,
        moment: _Moment,
        graph: SearchGraph,
        plan: EffortPlan,
        way: search_path.SearchPath,
        threads: int,
    ) -> Neighbours:
        """Walk the graph, further and further until enough is found, and compare the rows that it lacks."""
        view, indexed, allowed = moment.view, moment.covered, moment.allowed
        metrics.BY_PATH[plan.path].inc(len(queries))
        fetch = max(way.fetch, k)
        keep = view.live if allowed is None else allowed.flags
        counted = allowed is not None or not isinstance(graph, Graph)
        reach = int(np.count_nonzero(keep[:indexed])) if counted else len(graph)
        beam = _asked(plan, graph) if allowed is None else way.beam
        while True:
            found, scores = graph.query(queries, fetch, beam, threads)
            # Rows that entered the graph since `indexed` was read are found in the tail.
            inside = found.max(initial=0) < indexed
            good = keep[found] if inside else (found < indexed) & keep[found.clip(max=indexed - 1)]
            if good.all():
                enough = found.shape[1] >= min(k, reach)
            else:
                enough = bool((good.sum(axis=1) >= min(k, reach)).all())
                scores = np.where(good, scores, -np.inf).astype(np.float32)
            if enough:
                break
            if fetch >= way.limit or found.shape[1] < fetch:
                metrics.SLOW_PATHS.inc(len(queries))
                rest = AllowedRows(keep[: view.size].copy()) if allowed is None else allowed
                return compare(
                    queries, view, k, self._metric, dead=1, allowed=rest, plan=plan, path="scan"
                )
            fetch = min(fetch * search_path.GROWTH, max(way.limit, 1))
        if view.size > indexed:
            newer = AllowedRows(keep[indexed : view.size].copy())
            tail, near = exact.top_k(
                queries, view.matrix[indexed : view.size], k, self._metric, newer
            )
            found, scores = np.hstack([found, tail + indexed]), np.hstack([scores, near])
        elif good.all():
            return Neighbours(view.labels[found[:, :k]], scores[:, :k], plan, plan.path)
        found, scores = exact.rank(found, scores, k)
        sound = np.isfinite(scores)
        return Neighbours(
            [view.labels[row[ok]] for row, ok in zip(found, sound, strict=True)],
            [row[ok] for row, ok in zip(scores, sound, strict=True)],
            plan,
            plan.path,
        )


def _asked(plan: EffortPlan, graph: SearchGraph) -> int | None:
    """Return the ef to ask a graph for, None for its own: hnswlib honours another one at a price."""
    return plan.effort if isinstance(plan.effort, int) and plan.effort != graph.ef else None


def _planned(
    moment: _Moment, queries: int, k: int, effort: Effort | None, threads: int
) -> tuple[EffortPlan, search_path.SearchPath]:
    """Return the plan of a search, and how the graph is asked if it goes that way."""
    graph = moment.graph
    ef = graph.ef if graph is not None and effort is None else effort
    size, dead, covered = moment.view.size, moment.dead, moment.covered
    return _plan_of(size, dead, covered, moment.matching, queries, k, ef, threads)


@lru_cache(maxsize=1024)
def _plan_of(
    size: int, dead: int, covered: int, matching: int | None, queries: int, k: int, ef: Effort | None, threads: int
) -> tuple[EffortPlan, search_path.SearchPath]:  # fmt: skip
    """Plan a search of a graph over `covered` of `size` rows (0: no graph); between two writes searches share plans."""
    way = search_path.choose(
        live=size - dead,
        indexed=covered,
        matching=matching,
        queries=queries,
        k=k,
        ef=ef if isinstance(ef, int) else 0,
        exact=ef == "exact",
    )
    if not isinstance(ef, int) or way.way in ("exact", "filtered-exact"):
        if matching is None:
            return exact_plan(queries, k, size, None), way
        return filtered_plan(queries, k, size, matching), way
    walked = one_after_another(queries, threads)
    kept, tail = walked * way.beam, size - covered
    factors: tuple[float, ...] = (walked, kept, tail * queries, k * queries)
    if matching is not None:
        factors = (*factors, size)
    return EffortPlan(way.way, ef, factors), way


def one_after_another(queries: int, threads: int) -> int:
    """Return how many queries of a batch the busiest of the threads walks."""
    shares = math.ceil(queries / _TOGETHER)
    return min(queries, _TOGETHER * math.ceil(shares / max(1, min(threads, shares))))
