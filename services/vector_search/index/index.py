"""The index of one shard: rows, a graph over the older ones, and exact search over the rest.

New rows are searched exactly at once and enter the graph in the background, in short turns; deleted rows are masked
at once and marked in the graph later. A rebuild (first graph, too many deleted) runs beside the searches and is
swapped in. So a write never waits for the graph and a search always sees it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from services.vector_search import metrics, planner
from services.vector_search.index import exact
from services.vector_search.index.compact import Compact
from services.vector_search.index.graph import Graph
from services.vector_search.index.rows import Flags, Floats, Ints, RowsView, VectorRows
from services.vector_search.index.upkeep import State, Upkeep, serving

Path = Literal["exact", "graph", "filtered-exact", "filtered-graph", "scan"]


class Neighbours(NamedTuple):
    """Labels and scores of each query (rows of a matrix, or a list), best first, and the way they were found."""

    labels: list[Ints] | Ints
    scores: list[Floats] | Floats
    path: Path


class Index(Upkeep):
    """Vectors by label. One thread calls `publish`, one calls `maintain`; any number search.

    Scores: cosine, dot product or negative Euclidean distance; higher is nearer.
    """

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

    @property
    def newer(self) -> int:
        """Rows that every search compares one by one, because what it walks does not hold them yet."""
        state = self._state
        searched, covered = serving(state, state.rows.view)
        return state.rows.view.size - covered if searched else 0

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

    def restore(self, rows: VectorRows, graph: Graph | None, indexed: int) -> None:
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
    ) -> Neighbours:
        """Find the k nearest of each prepared query; `wanted` marks document numbers a filter allows.

        Returns fewer than k only if fewer match. Numbers past the end of `wanted` are not allowed. `remember`
        lets `audit` use the query.
        """
        state = self._state
        rows = state.rows
        view = rows.view
        searched, covered = serving(state, view)
        if searched is not None and wanted is None and not exactly:
            if remember:
                # Another place of every batch: a request that is repeated must not be all that is audited.
                place = self._remembered = (self._remembered + 1) % max(len(queries), 1)
                self._recent.append(queries[place : place + 1])
            found = self._whole(queries, k, ef, rows, searched, covered)
            if found is not None:
                return found
        allowed: Flags | None = None
        if wanted is not None:
            numbers = view.numbers[: view.size]
            allowed = wanted[np.minimum(numbers, len(wanted) - 1)] & (numbers < len(wanted))
            allowed &= view.live[: view.size]
        plan = planner.choose(
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
        searched: Graph | Compact,
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
        graph: Graph | Compact,
        indexed: int,
        view: RowsView,
        *,
        allowed: Flags | None,
        plan: planner.SearchPath,
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
            fetch = min(fetch * planner.GROWTH, max(plan.limit, 1))
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
