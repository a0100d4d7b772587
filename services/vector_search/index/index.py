"""The index of one shard: rows, a graph over the older ones, and exact search over the rest.

New rows are searched exactly at once and enter the graph in the background; deleted rows are masked at once and marked
in the graph later. So a write never waits for the graph, and a search always sees the write.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from common.clock import SYSTEM, Clock
from services.vector_search import metrics
from services.vector_search.index import exact, search_path
from services.vector_search.index.graph import Graph
from services.vector_search.index.maintenance import IndexMaintenance
from services.vector_search.index.native_graph import SearchGraph
from services.vector_search.index.recall import RecallAudit
from services.vector_search.index.rows import Flags, Floats, Ints, Metric, RowsView, VectorRows
from services.vector_search.index.state import IndexState, IndexView

Path = Literal["exact", "graph", "filtered-exact", "filtered-graph", "scan"]


class Neighbours(NamedTuple):
    """Labels and scores of each query (rows of a matrix, or a list), best first, and the way they were found."""

    labels: list[Ints] | Ints
    scores: list[Floats] | Floats
    path: Path


class Index:
    """Vectors by label. One thread calls `publish`, one `maintain` and `audit`; any number search.

    Scores: cosine, dot product or negative Euclidean distance; higher is nearer.
    """

    def __init__(
        self,
        dimension: int,
        metric: Metric,
        *,
        exact_below: int,
        threads: int,
        clock: Clock = SYSTEM,
    ) -> None:
        self.metric: Metric = metric
        self._exact_below = exact_below
        self._state = IndexState(dimension)
        self._recall = RecallAudit()
        self._maintenance = IndexMaintenance(
            self._state,
            self._recall,
            metric,
            exact_below=exact_below,
            threads=threads,
            clock=clock,
        )

    # -- counts

    @property
    def live(self) -> int:
        """Vectors that are not deleted."""
        return self._state.view.rows.live_count

    @property
    def deleted_ratio(self) -> float:
        """Deleted rows / all rows."""
        return self._state.view.rows.deleted_ratio

    @property
    def recall(self) -> float:
        """The share of true neighbours that the graph was last measured to find."""
        return self._recall.recall

    @property
    def ef(self) -> int:
        """Candidates the graph search keeps; 0 without a graph."""
        graph = self._state.view.graph
        return graph.ef if graph else 0

    @property
    def path(self) -> str:
        """The way an unfiltered search goes now."""
        view = self._state.view
        return "graph" if view.graph and view.rows.live_count >= self._exact_below else "exact"

    @property
    def newer(self) -> int:
        """Rows that every search compares one by one, because the graph it walks does not hold them yet."""
        view = self._state.view
        rows = view.rows.view
        return rows.size - view.indexed if view.graph else 0

    # -- writing and maintenance

    def publish(self, vectors: Floats, labels: Ints, numbers: Ints, removed: Ints) -> None:
        """Add prepared rows (labels rising), then delete labels; visible to searches that begin afterwards."""
        self._state.publish(vectors, labels, numbers, removed)

    def restore(
        self, rows: VectorRows, graph: SearchGraph | None, indexed: int, recall: float = 1.0
    ) -> None:
        """Take over what was loaded at start: the rows, the graph over the first `indexed`, and its recall."""
        if graph is not None:
            dead = np.flatnonzero(~rows.view.live[:indexed])
            graph.mark_deleted(dead)
            self._maintenance.restored(indexed)
            self._recall.recall = recall
        self._state.view = IndexView(rows, graph, indexed)

    def saved(self) -> tuple[SearchGraph, Ints] | None:
        """Return the graph and the labels of its rows, for a snapshot; call between calls of `maintain`."""
        with self._state.lock:
            view = self._state.view
        if view.graph is None:
            return None
        return view.graph, view.rows.view.labels[: view.indexed].copy()

    def maintain(self) -> bool:
        """Do one bounded piece of background work, if there is any; True if there may be more."""
        return self._maintenance.step()

    def audit(self) -> float:
        """Compare recent queries with exact search; raise ef where recall fell short. Returns the recall."""
        return self._recall.audit(self._state.view)

    @property
    def audit_due(self) -> bool:
        """True once enough queries have come for the first audit of this graph."""
        return self._recall.due(self._state.view)

    def close(self) -> None:
        """Stop background work in progress at its next step."""
        self._maintenance.close()

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
    ) -> Neighbours:
        """Find the k nearest of each prepared query; `wanted` marks document numbers a filter allows.

        Returns fewer than k only if fewer match. Numbers past the end of `wanted` are not allowed. `remember`
        lets `audit` use the query.
        """
        state = self._state.view
        rows = state.rows
        view = rows.view
        searched, covered = state.graph, state.indexed
        if searched is not None and wanted is None and not exactly:
            if remember:
                self._recall.remember(queries)
            found = self._whole(queries, k, ef, rows, searched, covered)
            if found is not None:
                return found
        allowed: Flags | None = None
        if wanted is not None:
            numbers = view.numbers[: view.size]
            allowed = wanted[np.minimum(numbers, len(wanted) - 1)] & (numbers < len(wanted))
            allowed &= view.live[: view.size]
        plan = search_path.choose(
            live=rows.live_count,
            indexed=covered,
            matching=None if allowed is None else int(np.count_nonzero(allowed)),
            k=k,
            ef=max(ef or 0, searched.ef if searched else 0),
            exact=exactly,
            exact_below=self._exact_below,
        )
        metrics.BY_PATH[plan.way].inc(len(queries))
        if searched is None or plan.way in ("exact", "filtered-exact"):
            return self._exactly(queries, view, k, dead=rows.dead, allowed=allowed, way=plan.way)
        return self._by_graph(
            queries, k, searched, covered, view, allowed=allowed, plan=plan, ef=ef
        )

    def _whole(
        self,
        queries: Floats,
        k: int,
        ef: int | None,
        rows: VectorRows,
        searched: SearchGraph,
        covered: int,
    ) -> Neighbours | None:
        """Search the graph alone, the short way when it holds every row and none is deleted; None if not."""
        view = rows.view
        if view.size != covered or rows.dead or covered < self._exact_below:
            return None
        found, scores = searched.query(queries, k, ef)
        if rows.view is not view or rows.dead or found.shape[1] < min(k, covered):
            return None
        metrics.BY_PATH["graph"].inc(len(queries))
        return Neighbours(view.labels[found], scores, "graph")

    def _exactly(
        self,
        queries: Floats,
        view: RowsView,
        k: int,
        *,
        dead: int,
        allowed: Flags | None,
        way: Path,
    ) -> Neighbours:
        if allowed is None and dead:
            allowed = view.live[: view.size].copy()
        found, scores = exact.top_k(queries, view.matrix[: view.size], k, self.metric, allowed)
        return Neighbours(view.labels[found], scores, way)

    def _by_graph(
        self,
        queries: Floats,
        k: int,
        graph: SearchGraph,
        indexed: int,
        view: RowsView,
        *,
        allowed: Flags | None,
        plan: search_path.SearchPath,
        ef: int | None,
    ) -> Neighbours:
        fetch, way = max(plan.fetch, k), plan.way
        keep = view.live if allowed is None else allowed
        counted = allowed is not None or not isinstance(graph, Graph)
        reach = int(np.count_nonzero(keep[:indexed])) if counted else len(graph)
        while True:
            found, scores = graph.query(queries, fetch, ef)
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
            if fetch >= plan.limit or found.shape[1] < fetch:
                metrics.SLOW_PATHS.inc(len(queries))
                metrics.BY_PATH["scan"].inc(len(queries))
                mask = keep[: view.size].copy()
                return self._exactly(queries, view, k, dead=1, allowed=mask, way="scan")
            fetch = min(fetch * search_path.GROWTH, max(plan.limit, 1))
        if view.size > indexed:
            mask = keep[indexed : view.size].copy()
            tail, near = exact.top_k(
                queries, view.matrix[indexed : view.size], k, self.metric, mask
            )
            found, scores = np.hstack([found, tail + indexed]), np.hstack([scores, near])
        elif good.all():
            return Neighbours(view.labels[found[:, :k]], scores[:, :k], way)
        found, scores = exact.rank(found, scores, k)
        sound = np.isfinite(scores)
        return Neighbours(
            [view.labels[row[ok]] for row, ok in zip(found, sound, strict=True)],
            [row[ok] for row, ok in zip(scores, sound, strict=True)],
            way,
        )
