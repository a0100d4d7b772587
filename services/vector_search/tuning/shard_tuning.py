"""The tuning of one shard: its plan, a sample of its rows, and the times of the index that was built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from common.clock import Clock
from common.wire.tuning import IndexPlan, MeasuredPlan, TuningGoal
from services.vector_search.index.followed_plan import PlanState, tunes
from services.vector_search.index.index import Index
from services.vector_search.index.memory import limit_bytes
from services.vector_search.index.rows import Floats, Ints, RowsView, in_memory_bytes
from services.vector_search.storage_errors import storage_error
from services.vector_search.tuning.exploration import (
    LISTS_ROWS,
    QUERIES,
    SAMPLE_BYTES,
    ExplorationFiles,
    ExplorationWork,
)
from services.vector_search.tuning.plan_file import PlanFile
from services.vector_search.tuning.search_timer import SearchTimes, Side, rounds_of
from services.vector_search.tuning.space import LEAST_ROWS
from services.vector_search.tuning.trials import K, batch_s

_AT_ONCE = 4096


class ShardTuning:
    """What tuning asks of one shard. `follow` and `keep` may come from different threads than the others.

    The plan that is followed is remembered in the shard's directory, and built by when the index is maintained.
    """

    def __init__(self, directory: Path, index: Index, threads: int, clock: Clock) -> None:
        self.directory = directory
        self._index, self._threads, self._clock = index, threads, clock
        self._plans = PlanFile(directory / "plan.json")
        index.followed.now = self._plans.read()

    @property
    def now(self) -> PlanState:
        """The plan that the index keeps to, and how its building went."""
        return self._index.followed.now

    def follow(self, plan: IndexPlan | None) -> bool:
        """Keep to a plan, or to none, and remember that; True if it is another one. Unavailable: `disk_full`."""
        if not self._index.followed.follow(plan):
            return False
        self.keep()
        return True

    def keep(self) -> None:
        """Remember what was built by the plan, after that was saved. Unavailable: `disk_full`."""
        try:
            self._plans.keep(self.now)
        except OSError as error:
            raise storage_error(error) from error

    def give_sample(self, files: ExplorationFiles, goal: TuningGoal) -> str:
        """Write a sample of the rows for an exploration; return why that cannot be, "" if it was done."""
        return give_sample(self._index, files, goal, self._threads)

    def measured(self) -> MeasuredPlan | None:
        """Return what the index built by its plan does, its searches timed now; None if it is not built."""
        known = self.now.measured
        return None if known is None else measure(self._index, known, self._clock)


def give_sample(index: Index, files: ExplorationFiles, goal: TuningGoal, threads: int) -> str:
    """Write rows to build over, and others as queries; return why that cannot be, "" if it was done."""
    view = index.rows.view
    live = np.flatnonzero(view.live[: view.size].copy())
    if len(live) < LEAST_ROWS:
        return f"{len(live):,} vectors are too few to tune by; expected at least {LEAST_ROWS:,}"
    order = np.random.default_rng(len(live)).permutation(live)
    queries = order[tunes(view.labels[order])][: min(QUERIES, len(live) // 8)]
    rest = order[~np.isin(order, queries)]
    dimension = index.rows.dimension
    rows = np.sort(rest[: min(LISTS_ROWS, SAMPLE_BYTES // (4 * dimension))])
    size = 4 * dimension * len(live)
    work = ExplorationWork(
        metric=index.metric,
        dimension=dimension,
        rows=len(rows) if len(rows) == len(rest) else len(live),
        rows_bytes=size if size <= in_memory_bytes(limit_bytes()) else 0,
        sample=len(rows),
        queries=len(queries),
        goal=goal,
        threads=threads,
    )
    files.write(work, _parts(view, rows), view.matrix[queries])
    return ""


def _parts(view: RowsView, rows: Ints) -> Iterator[Floats]:
    for at in range(0, len(rows), _AT_ONCE):
        yield view.matrix[rows[at : at + _AT_ONCE]]


def measure(index: Index, known: MeasuredPlan, clock: Clock) -> MeasuredPlan:
    """Return what was measured with the times of searches for rows that tuning did not ask for.

    They are searches of one query, and a batch of them where the plan divides it among threads.
    """
    view = index.rows.view
    live = np.flatnonzero(view.live[: view.size].copy())
    rows = live[~tunes(view.labels[live])]
    queries = view.matrix[np.random.default_rng(1).permutation(rows)[:QUERIES]]
    stats, plan = index.now.stats(), index.followed.now.plan

    def search(asked: Floats) -> object:
        return index.now.search(asked, K, remember=False)

    times = SearchTimes.of(rounds_of([Side(search, queries)], clock)[0])
    mean_s = times.mean_s
    if plan is not None and plan.setting.threads > 1:
        mean_s = batch_s(lambda: search(queries), clock) / len(queries)
    return msgspec.structs.replace(
        known,
        effort=stats.effort if isinstance(stats.effort, int) else 0,
        qps=1.0 / mean_s,
        p99_s=times.p99_s,
        bytes=sum(stats.bytes.values()),
    )
