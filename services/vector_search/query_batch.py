"""Batches of queries: the jobs that wait, those that may run as one, and their execution on a thread."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from common import log
from common.clock import Clock
from common.errors import DeadlineExceeded, InvalidRequest, SpillwayError, Unavailable
from common.wire.jobs import decode_work
from common.wire.message import BadMessage
from common.wire.results import Result
from common.wire.search import DocumentsWork, SearchReport, SearchResult, SearchWork
from common.worker.leases import Lease
from services.vector_search import metrics
from services.vector_search.shard import Shard
from services.vector_search.shard_handle import ShardHandle
from services.vector_search.shard_manager import ShardManager

MAX_QUERIES = 256
AFTER_S = 10.0
DRAWN_S = 5.0  # a longer wait for a map ends with the answer "not drawn yet"
_AT_ONCE = 2  # batches of one shard: one computes while the next is made
_log = log.get("vector_search")


class Query(Protocol):
    """Work that waits for a thread, and its shard. Works with an equal `key` may run as one batch; None runs alone."""

    @property
    def work(self) -> SearchWork | DocumentsWork:
        """The work."""

    @property
    def handle(self) -> ShardHandle:
        """The handle of the work's shard."""

    @property
    def key(self) -> bytes | None:
        """The key that works of one batch share; None for work that runs alone."""

    @property
    def items(self) -> int:
        """The number of queries of the work."""

    @property
    def arrived_s(self) -> float:
        """The time at which this process took the work, by `Clock.perf_s`."""


class SearchJob(NamedTuple):
    """A leased job with its decoded work and its shard."""

    lease: Lease
    work: SearchWork | DocumentsWork
    generation: int
    handle: ShardHandle
    key: bytes | None
    arrived_s: float

    @property
    def items(self) -> int:
        """The number of queries of the job."""
        return self.lease.items


Q = TypeVar("Q", bound=Query)


class QueryQueue(Generic[Q]):
    """The queries that wait for a thread, and how many batches of each shard run."""

    def __init__(self) -> None:
        self._pending: list[Q] = []
        self._running: Counter[ShardHandle] = Counter()

    def add(self, job: Q) -> None:
        """Queue a job behind all others."""
        self._pending.append(job)

    def keep(self, wanted: Callable[[Q], bool]) -> None:
        """Keep only the jobs that are `wanted`; the leases of the others are lost."""
        self._pending = [job for job in self._pending if wanted(job)]

    def take(self) -> list[Q]:
        """Return the oldest job, with all jobs that can run in one batch with it; [] if none can run now.

        While _AT_ONCE batches of a shard run, its jobs wait, and jobs of other shards pass them. `done` ends a batch.
        """
        held = self._pending
        first = next((job for job in held if self._running[job.handle] < _AT_ONCE), None)
        if first is None:
            return []
        key = first.key if len(held) > 1 else None
        queries = 0
        batch: list[Q] = []
        rest: list[Q] = []
        for job in held:
            fits = job is first or (
                key is not None
                and job.handle is first.handle
                and queries + job.items <= MAX_QUERIES
                and job.key == key
            )
            (batch if fits else rest).append(job)
            queries += job.items if fits else 0
        self._pending = rest
        self._running[first.handle] += 1
        return batch

    def done(self, batch: Sequence[Q]) -> None:
        """End a batch: jobs that waited for its shard may run."""
        handle = batch[0].handle
        self._running[handle] -= 1
        if not self._running[handle]:
            del self._running[handle]

    @property
    def running(self) -> int:
        """The number of batches that run."""
        return self._running.total()


def decoded(payload: bytes) -> SearchWork | DocumentsWork:
    """Return the work of a job or of a call; InvalidRequest if the payload is no work of a search lane."""
    try:
        work = decode_work(payload)
    except BadMessage as error:
        raise InvalidRequest(str(error)) from error
    if not isinstance(work, SearchWork | DocumentsWork):
        raise InvalidRequest(f"{type(work).__name__} on a search lane; expected a search")
    return work


async def opened(
    shards: ShardManager, work: SearchWork | DocumentsWork, left_s: float
) -> ShardHandle:
    """Return the shard of a work once the shard is open and has applied the write that the work names in `after`.

    A work that reads a map waits up to DRAWN_S, at most half of `left_s`, until the map is drawn. Raises NotFound,
    Unavailable (`not_applied` after AFTER_S), or DeadlineExceeded after `left_s`.
    """
    try:
        async with asyncio.timeout(left_s):
            handle = await shards.find(work.collection, work.shard)
            if work.after is not None:
                await handle.reach(work.after, AFTER_S)
            if isinstance(work, DocumentsWork) and work.op == "map":
                await handle.drawn(work, min(DRAWN_S, left_s / 2))
    except TimeoutError as error:
        raise DeadlineExceeded("the deadline passed before the shard was ready") from error
    return handle


def alike(work: SearchWork | DocumentsWork) -> bytes | None:
    """Return the key that searches of one batch share; None for work that runs alone: documents, and searches of texts.

    The strictest time budget counts for a whole batch, so budgets within one batch differ by less than a factor of 2.
    """
    if isinstance(work, DocumentsWork) or work.mode != "vector":
        return None
    budget_ms = work.budget_ms and math.ldexp(1.0, math.frexp(work.budget_ms)[1])
    return msgspec.msgpack.encode(
        msgspec.structs.replace(
            work, vectors=b"", after=None, trace="", budget_ms=budget_ms, spent_ms=0.0
        )
    )


def run(batch: Sequence[Query], clock: Clock) -> list[Result | SpillwayError]:
    """Run one batch on this thread; the time that has passed since the works came counts against their time budgets."""
    now_s = clock.perf_s()
    spent_s = max((_spent_s(query, now_s) for query in batch), default=0.0)
    outcomes = execute(batch[0].handle, [query.work for query in batch], spent_s)
    return [
        _timed(outcome, spent_s - _spent_s(query, now_s))
        for query, outcome in zip(batch, outcomes, strict=True)
    ]


def _spent_s(query: Query, now_s: float) -> float:
    """Return the seconds of a search's time budget that have passed; 0 without a budget."""
    work = query.work
    if not isinstance(work, SearchWork) or work.budget_ms is None:
        return 0.0
    return now_s - query.arrived_s + work.spent_ms / 1000


def _timed(outcome: Result | SpillwayError, later_s: float) -> Result | SpillwayError:
    """Return an outcome with the time of its own search, which came `later_s` after the first of its batch."""
    if not isinstance(outcome, SearchResult) or outcome.report is None:
        return outcome
    report, budget_ms = outcome.report, outcome.report.budget_ms
    if not budget_ms:
        return outcome
    took_ms = round(report.took_ms - 1000 * later_s, 3)
    metrics.BUDGET_RATIO.observe(took_ms / budget_ms)
    report = msgspec.structs.replace(report, took_ms=took_ms)
    return msgspec.structs.replace(outcome, report=report)


def reported(report: SearchReport | None, work: SearchWork) -> SearchReport | None:
    """Return the report of a batch for one of its searches, with the time budget of that search."""
    if report is None or work.budget_ms is None or report.budget_ms == work.budget_ms:
        return report
    predicted_ms = report.predicted_ms
    fits = predicted_ms is not None and predicted_ms <= work.budget_ms
    return msgspec.structs.replace(report, budget_ms=work.budget_ms, fits=fits)


def execute(
    handle: ShardHandle, works: Sequence[SearchWork | DocumentsWork], spent_s: float = 0.0
) -> list[Result | SpillwayError]:
    """Run one batch; `spent_s` of its time budgets have passed. An error is the outcome of its own work only."""
    first = works[0]
    if len(works) > 1 and isinstance(first, SearchWork):
        try:
            return _together(
                handle.open(), [work for work in works if isinstance(work, SearchWork)], spent_s
            )
        except SpillwayError:
            pass  # one work is bad: run each alone
        except Exception:  # noqa: BLE001 - running each alone finds the failing work
            _log.exception("queries_failed", collection=handle.collection, shard=handle.number)
    outcomes: list[Result | SpillwayError] = []
    for work in works:
        try:
            shard = handle.open()
            outcomes.append(
                shard.search(work, spent_s)
                if isinstance(work, SearchWork)
                else shard.documents(work)
            )
        except SpillwayError as error:
            outcomes.append(error)
        except Exception as error:  # noqa: BLE001 - one query's failure is its own
            _log.exception("query_failed", collection=handle.collection)
            metrics.FAILURES.inc()
            outcomes.append(
                handle.error
                or Unavailable(f"the search failed: {type(error).__name__}", code="search_failed")
            )
    return outcomes


def _together(
    shard: Shard, works: list[SearchWork], spent_s: float
) -> list[Result | SpillwayError]:
    size = shard.record.dimension * 4
    if any(not work.vectors or len(work.vectors) % size for work in works):
        raise InvalidRequest("a query has another dimension", code="dimension_mismatch")
    strictest = works[0]
    if strictest.budget_ms is not None:
        strictest = min(works, key=lambda work: work.budget_ms or 0.0)
    joined = msgspec.structs.replace(strictest, vectors=b"".join(work.vectors for work in works))
    found = shard.search(joined, spent_s)
    outcomes: list[Result | SpillwayError] = []
    at = 0
    for work in works:
        end = at + len(work.vectors) // size
        report = reported(found.report, work)
        outcomes.append(msgspec.structs.replace(found.part(at, end), report=report))
        at = end
    return outcomes
