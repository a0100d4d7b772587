"""Batches of queries: the jobs that wait, those that may run as one, and their execution on a thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from common import log
from common.errors import InvalidRequest, SpillwayError, Unavailable
from common.wire.results import Result
from common.wire.search import DocumentsWork, SearchWork
from common.worker.leases import Lease
from services.vector_search import metrics
from services.vector_search.shard import Shard
from services.vector_search.shard_handle import ShardHandle

MAX_QUERIES = 256
_AT_ONCE = 2  # batches of one shard: one computes while the next is made
_log = log.get("vector_search")


class Query(Protocol):
    """Work that waits for a thread, and its shard; those of one `key` may run as one, one of None runs alone."""

    @property
    def work(self) -> SearchWork | DocumentsWork:
        """The work."""

    @property
    def handle(self) -> ShardHandle:
        """The shard that is asked."""

    @property
    def key(self) -> bytes | None:
        """What queries that may run as one have in common."""

    @property
    def items(self) -> int:
        """How many queries the work holds."""

    @property
    def generation(self) -> int:
        """Of the worker that took it."""


class SearchJob(NamedTuple):
    """A leased job with its decoded work and its shard."""

    lease: Lease
    work: SearchWork | DocumentsWork
    generation: int
    handle: ShardHandle
    key: bytes | None

    @property
    def items(self) -> int:
        """How many queries the job holds."""
        return self.lease.items


Q = TypeVar("Q", bound=Query)


class QueryQueue(Generic[Q]):
    """The queries that wait for a thread, and how many batches of each shard run."""

    def __init__(self) -> None:
        self._pending: list[Q] = []
        self._running: Counter[ShardHandle] = Counter()

    def __len__(self) -> int:
        """Queries' works that wait."""
        return len(self._pending)

    def add(self, job: Q) -> None:
        """Queue a job behind all others."""
        self._pending.append(job)

    def take(self, generation: int) -> list[Q]:
        """Return the oldest jobs that can run as one: searches that ask alike, or one read of documents.

        Jobs of a shard that has as many batches running as it may wait, and others go before them. Jobs of another
        generation are dropped: their leases are lost. `done` ends the batch.
        """
        held = [job for job in self._pending if job.generation == generation]
        first = next((job for job in held if self._running[job.handle] < _AT_ONCE), None)
        self._pending = held
        if first is None:
            return []
        queries = 0
        batch: list[Q] = []
        rest: list[Q] = []
        for job in held:
            fits = job is first or (
                first.key is not None
                and job.key == first.key
                and job.handle is first.handle
                and queries + job.items <= MAX_QUERIES
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
        """Batches that run."""
        return self._running.total()


def alike(work: SearchWork | DocumentsWork) -> bytes | None:
    """Return the key of searches that may run as one batch; None for work that runs alone."""
    if isinstance(work, DocumentsWork):
        return None
    return msgspec.msgpack.encode(msgspec.structs.replace(work, vectors=b"", after=None))


def execute(
    handle: ShardHandle, works: Sequence[SearchWork | DocumentsWork]
) -> list[Result | SpillwayError]:
    """Run one batch; an error of one job is its own outcome and no other's."""
    first = works[0]
    if len(works) > 1 and isinstance(first, SearchWork):
        try:
            return _together(
                handle.open(), [work for work in works if isinstance(work, SearchWork)]
            )
        except SpillwayError:
            pass  # one of them is bad: each alone
        except Exception:  # noqa: BLE001 - whose fault it is shows when each runs alone
            _log.exception("queries_failed", collection=handle.collection, shard=handle.number)
    outcomes: list[Result | SpillwayError] = []
    for work in works:
        try:
            shard = handle.open()
            outcomes.append(
                shard.search(work) if isinstance(work, SearchWork) else shard.documents(work)
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


def _together(shard: Shard, works: list[SearchWork]) -> list[Result | SpillwayError]:
    size = shard.record.dimension * 4
    if any(not work.vectors or len(work.vectors) % size for work in works):
        raise InvalidRequest("a query has another dimension", code="dimension_mismatch")
    joined = msgspec.structs.replace(works[0], vectors=b"".join(work.vectors for work in works))
    found = shard.search(joined)
    outcomes: list[Result | SpillwayError] = []
    at = 0
    for work in works:
        end = at + len(work.vectors) // size
        outcomes.append(
            msgspec.structs.replace(found, shown=found.shown[at:end], scores=found.scores[at:end])
        )
        at = end
    return outcomes
