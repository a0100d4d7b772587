"""The background work of an index: grow its graph, build it anew.

New rows enter the graph in short turns; a rebuild (first graph, too many deleted) runs beside the searches and is
swapped in.
"""

from __future__ import annotations

import threading

import numpy as np

from common.clock import Clock
from common.wire.tuning import IndexPlan, MeasuredPlan
from services.vector_search import metrics
from services.vector_search.index import search_path
from services.vector_search.index.followed_plan import divided, falls_short, proof
from services.vector_search.index.native_graph import SearchGraph, new_graph
from services.vector_search.index.recall import RecallAudit, recall_of
from services.vector_search.index.rows import Floats, Ints, Metric, VectorRows
from services.vector_search.index.state import IndexState, IndexView

# How many rows are put into the graph at once, at most.
_SLICE = 256
_BUILD_SLICE = 2000
_COMPACT_RATIO = 0.3
_COMPACT_ROWS = 256
_HELD_OUT = 512
_MARKED_AT_ONCE = 1000


class IndexMaintenance:
    """Does the background work of one index; one thread calls `step`."""

    def __init__(
        self,
        state: IndexState,
        recall: RecallAudit,
        metric: Metric,
        *,
        with_graph: bool,
        threads: int,
        clock: Clock,
    ) -> None:
        self._state, self._recall, self._metric = state, recall, metric
        self._with_graph, self._threads, self._clock = with_graph, threads, clock
        self._closing = threading.Event()
        self._tuned_at = 0  # how many rows the graph held when ef was chosen
        self._slice = 4
        self._measured: MeasuredPlan | None = None  # of the last graph that was built by a plan

    def restored(self, indexed: int) -> None:
        """Note that a saved graph over `indexed` rows was taken over, whose ef fits them."""
        self._tuned_at = indexed

    def close(self) -> None:
        """Stop a rebuild in progress at its next slice."""
        self._closing.set()

    def step(self) -> bool:
        """Do one bounded piece of work, if there is any; True if there may be more."""
        view = self._state.view
        rows, graph, indexed = view.rows, view.graph, view.indexed
        live, count = rows.live_count, rows.view.size
        wasteful = rows.dead >= _COMPACT_ROWS and rows.deleted_ratio > _COMPACT_RATIO
        wants_graph = self._with_graph and live > 0
        behind = count - indexed
        outgrown = graph is None or behind > max(indexed, 4096) or self._other_links(graph, live)
        if wasteful or (wants_graph and outgrown):
            return self._rebuild(with_graph=wants_graph, copied=wasteful)
        return self.take_in()

    def take_in(self) -> bool:
        """Put some of the newer rows into the graph there is, if there is one; True if there may be more."""
        view = self._state.view
        rows, graph, indexed = view.rows, view.graph, view.indexed
        behind = rows.view.size - indexed
        if graph is None or not (self._state.unmarked or behind):
            return False
        room = search_path.room(indexed=indexed, behind=behind, tuned_at=self._tuned_at)
        if behind and not room and not self._retune(view):
            return bool(self._state.unmarked) and self._mark(graph)
        self._mark(graph)
        if room:
            self._extend(graph, rows, indexed, min(room, self._slice))
        return True

    def _other_links(self, graph: SearchGraph, live: int) -> bool:
        """Return whether the nodes of the next graph are to have another number of links, or a plan wants a new one."""
        plan = self._state.followed.held("graph", live)
        if plan is None:
            return graph.links < _links(graph)
        planned = self._state.followed.due("graph", live) is not None
        return planned or graph.links != plan.setting.links

    def _retune(self, view: IndexView) -> bool:
        """Choose ef anew by rows that wait and by queries of users; False if these are too few yet."""
        assert view.graph is not None
        matrix = view.rows.view.matrix[: view.rows.view.size]
        queries: list[Floats] = [matrix[view.indexed : view.indexed + search_path.AUDITED]]
        recent = self._recall.recent
        if len(recent) and len(queries[0]) < search_path.AUDITED:
            queries.append(recent)
        tried = np.vstack(queries)
        if len(tried) < search_path.LEAST_AUDITED:
            return False  # those rows are searched exactly until there are enough to choose ef by
        self._recall.tune(view.graph, view, tried, least=view.graph.ef)
        self._tuned_at = view.indexed
        return True

    def _mark(self, graph: SearchGraph) -> bool:
        """Mark some of the rows deleted since in the graph."""
        unmarked = self._state.take_unmarked(_MARKED_AT_ONCE)
        if len(unmarked):
            graph.mark_deleted(unmarked)
        return True

    def _extend(self, graph: SearchGraph, rows: VectorRows, indexed: int, most: int) -> None:
        """Put up to so many new rows into the graph; so few at once as searches may wait for."""
        view = rows.view
        end = min(indexed + most, view.size)
        began_s = self._clock.perf_s()
        fresh = np.arange(indexed, end)[view.live[indexed:end].copy()]
        if len(fresh):
            graph.add(view, fresh, threads=1)
        with self._state.lock:
            self._state.unmarked += fresh[~rows.view.live[fresh]].tolist()
            self._state.view = self._state.view._replace(indexed=end)
        if len(fresh):
            took_s = max(self._clock.perf_s() - began_s, 1e-9)
            fitting = int(len(fresh) * graph.turn_s / took_s)
            self._slice = min(max(fitting, 1), 2 * self._slice, _SLICE)

    def _rebuild(self, *, with_graph: bool, copied: bool) -> bool:
        """Build a graph over the live rows, or over a copy of them that leaves out the deleted, and swap both in."""
        rows = self._state.view.rows
        plan = self._state.followed.held("graph", rows.live_count) if with_graph else None
        before = rows.view
        # Of a copy: numpy counts before it fills, and rows may be deleted in between.
        kept = np.flatnonzero(before.live[: before.size].copy())
        if copied:
            rows = self._copy(rows, kept)
        graph = (
            self._fitting(rows, np.arange(len(kept)) if copied else kept, plan)
            if with_graph
            else None
        )
        if self._closing.is_set() or (with_graph and graph is None):
            return False
        if copied:
            self._tuned_at = self._state.swap(rows, graph, before, kept)
            metrics.COMPACTIONS.inc()
        else:
            self._tuned_at = self._state.take_graph(graph, before, kept)
        self._recall.renew()
        if plan is not None and self._measured is not None:
            self._state.followed.built(plan, self._measured)
        return True

    @staticmethod
    def _copy(rows: VectorRows, kept: Ints) -> VectorRows:
        before, made = rows.view, rows.empty(max(1024, len(kept)))
        for part in np.array_split(kept, max(1, len(kept) // _BUILD_SLICE)):
            made.append(before.matrix[part], before.labels[part], before.numbers[part])
        return made

    def _fitting(self, rows: VectorRows, kept: Ints, plan: IndexPlan | None) -> SearchGraph | None:
        """Build a graph with as many links as a plan says, or these rows are found to need; None if it is not to be."""
        if plan is not None:
            return self._build(rows, kept, plan.setting.links, plan)
        links = _links(self._state.view.graph)
        graph = self._build(rows, kept, links)
        if graph is not None and links < (links := _links(graph)):
            graph = None  # its memory is free for the next one
            graph = self._build(rows, kept, links)
        return graph

    def _build(
        self, rows: VectorRows, kept: Ints, links: int, plan: IndexPlan | None = None
    ) -> SearchGraph | None:
        """Build a graph over rows; some go in last, as the queries that ef is chosen by, and a plan is proved by.

        None when closing, or if the graph falls short of its plan.
        """
        view = rows.view
        graph = new_graph(rows, self._metric, int(view.size * 1.25), self._threads, links)
        order = np.random.default_rng(len(kept)).permutation(kept)
        count = min(_HELD_OUT * (1 if plan is None else 2), len(kept) // 4)
        order, held_out = np.sort(order[count:]), order[:count]
        for part in np.array_split(order, len(order) // _BUILD_SLICE + 1):
            if self._closing.is_set():
                return None
            if len(part):
                graph.add(view, part)
        made = IndexView(rows, graph, view.size)
        asked = held_out if plan is None else divided(view.labels, held_out).tuning
        self._recall.tune(graph, made, view.matrix[asked], held_out=held_out)
        if plan is not None and not self._proved(plan, graph, made, held_out):
            return None
        if self._state.followed.dropped(plan):
            return None
        if count:
            graph.add(view, held_out)
        return graph

    def _proved(self, plan: IndexPlan, graph: SearchGraph, made: IndexView, held_out: Ints) -> bool:
        """Return whether a graph keeps to its plan, by queries that chose no ef; refuse the plan if not."""
        view = made.rows.view
        asked = divided(view.labels, held_out).proof
        recall = recall_of(graph, made, view.matrix[asked], held_out)
        self._measured = proof(recall, len(asked))
        why = falls_short(plan, self._measured)
        if why:
            self._state.followed.refuse(plan, why)
        return not why


def _links(graph: SearchGraph | None) -> int:
    """Return how many links the nodes of the next graph are to have."""
    return search_path.links(graph.links, graph.ef) if graph else search_path.FEW_LINKS
