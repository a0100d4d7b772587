"""The kind of index for rows that memory cannot hold: inverted lists of codes over the older rows, exact over the rest.

New rows are searched exactly at once and enter lists in the background; deleted rows are masked by their live mark. So
a write never waits for the lists, and a search always sees the write.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from common.clock import Clock
from services.vector_search import metrics
from services.vector_search.index import exact
from services.vector_search.index.allowed_rows import AllowedRows, AllowedRowsCache
from services.vector_search.index.exact_index import (
    compare,
    exact_plan,
    filtered_plan,
    rows_bytes,
)
from services.vector_search.index.graph_index import one_after_another
from services.vector_search.index.inverted_lists import FoundRows, InvertedLists
from services.vector_search.index.lists_maintenance import ListsMaintenance
from services.vector_search.index.lists_recall import ListsRecall
from services.vector_search.index.lists_tuning import codes_s, probes_ladder
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
from services.vector_search.index.quantizer_source import QuantizerSource
from services.vector_search.index.quantizer_training import Trainer
from services.vector_search.index.rows import Flags, Floats, Ints, Metric, RowsView
from services.vector_search.index.search_path import GATHERED_ROW_S, GROWTH
from services.vector_search.index.state import IndexState

# Rows that one query compares exactly, unless it returns more.
_MOST_COMPARED = 8192


class _Way(NamedTuple):
    """How lists are read: so many of them, and so many of their rows compared."""

    probes: int
    compared: int


class _Instant(NamedTuple):
    """What one search sees: the rows, the lists over the older ones, and what a filter allows."""

    view: RowsView
    dead: int
    lists: InvertedLists | None
    allowed: AllowedRows | None

    @property
    def matching(self) -> int | None:
        """How many rows the filter allows, None without a filter."""
        return None if self.allowed is None else self.allowed.count


class IvfpqIndex:
    """Lists over rows, wherever these lie; until they are made, and where a filter leaves few, rows are compared."""

    kind: Kind = "ivfpq"

    def __init__(
        self,
        state: IndexState,
        metric: Metric,
        *,
        threads: int,
        clock: Clock,
        trainer: Trainer,
        quantizers: QuantizerSource,
        training_room: Callable[[], int | None],
    ) -> None:
        self._state, self._metric, self._threads = state, metric, threads
        self._allowed = AllowedRowsCache()
        self._recall = ListsRecall(threads, state.followed)
        self._maintenance = ListsMaintenance(
            state,
            self._recall,
            metric,
            threads=threads,
            clock=clock,
            trainer=trainer,
            quantizers=quantizers,
            room=training_room,
        )

    # -- writing and maintenance

    def publish(self, vectors: Floats, labels: Ints, numbers: Ints, removed: Ints) -> None:
        """Add prepared rows (labels rising), then delete labels; visible to searches that begin afterwards."""
        self._state.publish(vectors, labels, numbers, removed)

    def restored(self, covered: int, recall: float) -> None:
        """Take over saved lists over the first `covered` rows, whose recall was measured before they were saved."""
        self._maintenance.restored(covered)
        self._recall.recall = recall

    def maintain(self) -> bool:
        """Do one bounded piece of training, filling or tidying, if there is any; True if there may be more."""
        return self._maintenance.step()

    def take_in(self) -> bool:
        """Put some of the newer rows into the lists there are, and build nothing anew; True if there may be more."""
        return self._maintenance.take_in()

    def audit(self) -> float:
        """Compare recent queries with exact search; read more lists where recall fell short. Returns the recall."""
        state = self._state.view
        if state.lists is not None:
            self._state.take_lists(self._recall.audit(state.lists, state.rows.view))
        return self._recall.recall

    @property
    def audit_due(self) -> bool:
        """True once enough queries have come for the first audit of these lists."""
        return self._state.view.lists is not None and self._recall.due

    @property
    def problem(self) -> str:
        """Why the last training failed, "" if it did not."""
        return self._maintenance.problem

    def snapshot(self) -> IndexSnapshot | None:
        """Return the lists with their quantizer and the labels of their rows; call between calls of `maintain`."""
        state = self._state.view
        lists = state.lists
        if lists is None:
            return None
        labels = state.rows.view.labels[: lists.covered].copy()
        version = lists.quantizer.version
        return IndexSnapshot(
            "ivfpq", labels, lists.probes, self._recall.recall, lists.save, version
        )

    def close(self) -> None:
        """Stop background work in progress at its next step."""
        self._maintenance.close()

    # -- what is told of it

    def stats(self) -> IndexStats:
        """Return how the index stands."""
        state = self._state.view
        rows, lists = state.rows, state.lists
        held = {"rows": rows_bytes(rows.view)}
        if lists is None:
            return IndexStats(rows.live_count, rows.deleted_ratio, 0, "exact", "exact", 1.0, held)
        held |= {"codes": lists.codes_bytes, "quantizer": lists.quantizer_bytes}
        newer = rows.view.size - lists.covered
        return IndexStats(
            rows.live_count, rows.deleted_ratio, newer, "ivfpq", lists.probes, self._recall.recall, held,
            lists.quantizer.version, lists.quantizer.coding,
        )  # fmt: skip

    def ladder(self) -> list[Rung]:
        """Return the numbers of lists, and the recall of each as far as it was measured."""
        lists = self._state.view.lists
        if lists is None:
            return [Rung("exact", 1.0)]
        known = {**self._recall.by_probes, lists.probes: self._recall.recall}
        return [Rung(probes, known.get(probes)) for probes in probes_ladder(lists.quantizer.lists)]

    def matching(self, wanted: Flags) -> int:
        """Return how many live rows a filter allows."""
        rows = self._state.view.rows
        return self._allowed.of(rows, rows.view, wanted).count

    def plans(self, queries: int, k: int, wanted: Flags | None = None) -> list[EffortPlan]:
        """Return the plan of each number of lists for a batch of so many queries."""
        return self._plans(self._instant(wanted), queries, k)

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
        """Find the k nearest of each prepared query, by the lists or exactly, whichever takes less."""
        instant = self._instant(wanted)
        if pick is not None:
            effort = pick(self._plans(instant, len(queries), k)).effort
        plan, way = self._plan(instant, len(queries), k, effort)
        lists = instant.lists
        if lists is None or way is None:
            return compare(
                queries,
                instant.view,
                k,
                self._metric,
                dead=instant.dead,
                allowed=instant.allowed,
                plan=plan,
                path=plan.path,
            )
        if wanted is None and remember:
            self._recall.recent.remember(queries)
        metrics.BY_PATH[plan.path].inc(len(queries))
        return self._read(queries, k, instant, lists, plan, way)

    @property
    def _searching(self) -> int:
        return self._state.followed.threads(self._threads)

    def _instant(self, wanted: Flags | None) -> _Instant:
        state = self._state.view
        view = state.rows.view
        allowed = None if wanted is None else self._allowed.of(state.rows, view, wanted)
        return _Instant(view, state.rows.dead, state.lists, allowed)

    def _plans(self, instant: _Instant, queries: int, k: int) -> list[EffortPlan]:
        if instant.lists is None:
            return [self._plan(instant, queries, k, "exact")[0]]
        ladder = probes_ladder(instant.lists.quantizer.lists)
        return [self._plan(instant, queries, k, probes)[0] for probes in ladder]

    def _plan(
        self, instant: _Instant, queries: int, k: int, effort: Effort | None
    ) -> tuple[EffortPlan, _Way | None]:
        """Return the plan of a search, and how the lists are read, None if every row that is allowed is compared."""
        lists, matching, size = instant.lists, instant.matching, instant.view.size
        if lists is None or effort == "exact":
            if matching is None:
                return exact_plan(queries, k, size, None), None
            return filtered_plan(queries, k, size, matching), None
        asked = lists.probes if effort is None else min(effort, lists.quantizer.lists)
        probes = asked
        if matching is not None:
            # The fewer rows of a list a filter leaves, the more lists hold the nearest of them.
            live = size - instant.dead
            probes = min(math.ceil(asked * live / max(matching, 1)), lists.quantizer.lists)
        compared = max(k, min(lists.depth_of(asked) * k, _MOST_COMPARED))
        codes = lists.codes_read(probes)
        if matching is not None:
            lists_s = codes_s(lists, codes) + compared * GATHERED_ROW_S
            if matching <= compared or matching * GATHERED_ROW_S <= lists_s:
                return filtered_plan(queries, k, size, matching), None
        one_by_one, tail = one_after_another(queries, self._searching), size - lists.covered
        factors: tuple[float, ...] = (
            one_by_one,
            one_by_one * codes,
            one_by_one * compared,
            tail * queries,
            k * queries,
        )
        if matching is None:
            return EffortPlan("ivfpq", asked, factors), _Way(probes, compared)
        return EffortPlan("filtered-ivfpq", asked, (*factors, size)), _Way(probes, compared)

    def _read(
        self,
        queries: Floats,
        k: int,
        instant: _Instant,
        lists: InvertedLists,
        plan: EffortPlan,
        way: _Way,
    ) -> Neighbours:
        """Read the nearest lists, more and more until enough is found, and compare the rows that are in none."""
        view, covered = instant.view, lists.covered
        keep = view.live if instant.allowed is None else instant.allowed.flags
        found, probes = self._enough(queries, k, view, keep, lists, way)
        scanned = partial(lists.scanned, queries, probes)
        read = plan, plan.path, probes, lists.quantizer.version, scanned
        rows, scores = found.rows, found.scores
        if view.size > covered:
            newer = AllowedRows(keep[covered : view.size].copy())
            tail, near = exact.top_k(
                queries, view.matrix[covered : view.size], k, self._metric, newer
            )
            rows, scores = np.hstack([rows, tail + covered]), np.hstack([scores, near])
            rows, scores = exact.rank(rows, scores, k)
        sound = np.isfinite(scores)
        if sound.all():
            return Neighbours(view.labels[rows], scores, *read)
        return Neighbours(
            [view.labels[row[ok]] for row, ok in zip(rows, sound, strict=True)],
            [row[ok] for row, ok in zip(scores, sound, strict=True)],
            *read,
        )

    def _enough(
        self,
        queries: Floats,
        k: int,
        view: RowsView,
        keep: Flags,
        lists: InvertedLists,
        way: _Way,
    ) -> tuple[FoundRows, int]:
        """Return k rows of each query, or all that the lists hold, and how many lists were read for that."""
        probes = way.probes
        while True:
            found = lists.query(
                view,
                keep,
                queries,
                k,
                probes=probes,
                compared=way.compared,
                threads=self._searching,
            )
            if probes >= lists.quantizer.lists or int(found.found.min(initial=k)) >= k:
                return found, probes
            reach = int(np.count_nonzero(keep[: lists.covered]))
            if int(found.found.min(initial=k)) >= min(k, reach):
                return found, probes
            metrics.SLOW_PATHS.inc(len(queries))
            probes = min(probes * GROWTH, lists.quantizer.lists)
