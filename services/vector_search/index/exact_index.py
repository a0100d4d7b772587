"""The exact kind of index: every row that a filter allows is compared."""

from __future__ import annotations

from common.clock import Clock
from services.vector_search import metrics
from services.vector_search.index import exact
from services.vector_search.index.allowed_rows import AllowedRows, AllowedRowsCache
from services.vector_search.index.maintenance import IndexMaintenance
from services.vector_search.index.port import (
    Effort,
    EffortPlan,
    IndexSnapshot,
    IndexStats,
    Kind,
    Neighbours,
    Path,
    Pick,
    Rung,
)
from services.vector_search.index.recall import RecallAudit
from services.vector_search.index.rows import Flags, Floats, Ints, Metric, RowsView
from services.vector_search.index.state import IndexState


class ExactIndex:
    """Rows in memory, compared one by one; it has no structure to build, and only drops deleted rows now and then."""

    kind: Kind = "exact"

    def __init__(self, state: IndexState, metric: Metric, *, threads: int, clock: Clock) -> None:
        self._state, self._metric = state, metric
        self._allowed = AllowedRowsCache()
        self._maintenance = IndexMaintenance(
            state,
            RecallAudit(state.followed),
            metric,
            with_graph=False,
            threads=threads,
            clock=clock,
        )

    def publish(self, vectors: Floats, labels: Ints, numbers: Ints, removed: Ints) -> None:
        """Add prepared rows (labels rising), then delete labels."""
        self._state.publish(vectors, labels, numbers, removed)

    def maintain(self) -> bool:
        """Drop deleted rows once they are many."""
        return self._maintenance.step()

    def take_in(self) -> bool:
        """Return False: every row is compared as soon as it is there."""
        return False

    def search(
        self,
        queries: Floats,
        k: int,
        *,
        effort: Effort | None = None,  # noqa: ARG002 - there is only one
        wanted: Flags | None = None,
        pick: Pick | None = None,
        remember: bool = True,  # noqa: ARG002 - there is nothing to audit
    ) -> Neighbours:
        """Compare the queries with every row that is allowed."""
        rows = self._state.view.rows
        view = rows.view
        allowed = None if wanted is None else self._allowed.of(rows, view, wanted)
        plan = exact_plan(len(queries), k, view.size, allowed)
        if pick is not None:
            plan = pick([plan])
        return compare(
            queries,
            view,
            k,
            self._metric,
            dead=rows.dead,
            allowed=allowed,
            plan=plan,
            path=plan.path,
        )

    def plans(self, queries: int, k: int, wanted: Flags | None = None) -> list[EffortPlan]:
        """Return the one plan there is."""
        rows = self._state.view.rows
        view = rows.view
        allowed = None if wanted is None else self._allowed.of(rows, view, wanted)
        return [exact_plan(queries, k, view.size, allowed)]

    def ladder(self) -> list[Rung]:
        """Return the one effort there is."""
        return [Rung("exact", 1.0)]

    def matching(self, wanted: Flags) -> int:
        """Return how many live rows a filter allows."""
        rows = self._state.view.rows
        return self._allowed.of(rows, rows.view, wanted).count

    def stats(self) -> IndexStats:
        """Return how the index stands."""
        rows = self._state.view.rows
        held = {"rows": rows_bytes(rows.view)}
        return IndexStats(rows.live_count, rows.deleted_ratio, 0, "exact", "exact", 1.0, held)

    def audit(self) -> float:
        """Return the recall, which is 1."""
        return 1.0

    @property
    def audit_due(self) -> bool:
        """Never: there is nothing to measure."""
        return False

    def snapshot(self) -> IndexSnapshot | None:
        """Return None: the rows are all there is."""
        return None

    def close(self) -> None:
        """Stop background work in progress at its next step."""
        self._maintenance.close()


def exact_plan(queries: int, k: int, size: int, allowed: AllowedRows | None) -> EffortPlan:
    """Return the plan of comparing a batch with the allowed ones of `size` rows; None allows all."""
    if allowed is None:
        return EffortPlan("exact", "exact", (size, size * queries, k * queries))
    return filtered_plan(queries, k, size, allowed.count)


def filtered_plan(queries: int, k: int, size: int, matching: int) -> EffortPlan:
    """Return the plan of comparing a batch with the `matching` of `size` rows."""
    read = exact.rows_read(size, matching)
    return EffortPlan("filtered-exact", "exact", (size, read, read * queries, k * queries))


def compare(
    queries: Floats,
    view: RowsView,
    k: int,
    metric: Metric,
    *,
    dead: int,
    allowed: AllowedRows | None,
    plan: EffortPlan,
    path: Path,
) -> Neighbours:
    """Compare queries with the allowed rows of a view, and count them under a path."""
    metrics.BY_PATH[path].inc(len(queries))
    if allowed is None and dead:
        allowed = AllowedRows(view.live[: view.size].copy())
    found, scores = exact.top_k(queries, view.matrix[: view.size], k, metric, allowed)
    return Neighbours(view.labels[found], scores, plan, path)


def rows_bytes(view: RowsView) -> int:
    """Return the bytes of memory that the rows take."""
    return sum(each.nbytes for each in (view.matrix, view.labels, view.numbers, view.live))
