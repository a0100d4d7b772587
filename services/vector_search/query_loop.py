"""The query loop of one family: jobs in from its lanes, batched by shard and by what they ask, results out."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

from common import log
from common.bus import BusDown
from common.clock import Clock
from common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    SpillwayError,
    TooLarge,
    Unavailable,
)
from common.tasks import wait
from common.wire.jobs import decode_work
from common.wire.message import BadMessage
from common.wire.results import Result
from common.wire.search import DocumentsWork, SearchWork
from common.worker.leases import Lease
from common.worker.worker import Worker
from services.vector_search.execute import alike, execute
from services.vector_search.shard_handle import ShardHandle
from services.vector_search.shard_manager import ShardManager

MAX_JOBS = 128
MOST_HELD = 1024  # with those that wait for a shard to be opened or to get as far as they ask
MAX_QUERIES = 256
_RUNNERS = 2  # batches of one shard at a time: one computes while the next is made
_AFTER_S = 10.0
_PREDICTED_S = 1.0
_WAIT_S = 1.0
_ASK_FIRST_S = 0.05
_log = log.get("vector_search")
T = TypeVar("T")


class SearchJob(NamedTuple):
    """A leased job, read and understood, with its shard; jobs of one `key` may run as one, of None alone."""

    lease: Lease
    work: SearchWork | DocumentsWork
    generation: int
    unit: ShardHandle
    key: bytes | None


class QueryLoop:
    """Serves one family's queries until `stopping`; compute runs on `pool`'s `threads`, never on the event loop.

    A job of a collection that `holdings` does not have is answered why, and no other's is.
    """

    def __init__(
        self,
        holdings: ShardManager,
        worker: Worker,
        pool: Executor,
        clock: Clock,
        *,
        threads: int,
    ) -> None:
        self.worker = worker
        self._holdings = holdings
        self._pool = pool
        self._clock = clock
        self._runners = max(_RUNNERS, threads + 1)
        self._pending: list[SearchJob] = []
        self._running = 0
        self._busy: Counter[ShardHandle] = Counter()  # batches that run, of each shard
        self._parked = 0  # jobs that wait for their shard
        self._waiting: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._stopping = False

    async def run(self, stopping: asyncio.Event, drain_s: float) -> None:
        """Work until `stopping`; then end what runs and hand over the rest. The worker has started."""
        reader = asyncio.create_task(self._read())
        runners = [asyncio.create_task(self._work()) for _ in range(self._runners)]
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({reader, *runners, stop}, return_when=asyncio.FIRST_COMPLETED)
        self._stopping = True
        self._arrived.set()
        self._room.set()
        try:
            await asyncio.wait(runners, timeout=drain_s)
            await self.worker.drain()
            await self.worker.stop()
        except BusDown as error:
            _log.warning("drained_without_bus", error=str(error))
        finally:
            tasks = [reader, *runners, stop, *self._waiting]
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):
                    _log.error("query_loop_failed", exc_info=ended)

    # -- reading

    async def _read(self) -> None:
        while not self._stopping:
            held = len(self.worker.leases.held)
            room = min(MAX_JOBS - (held - self._parked), MOST_HELD - held)
            if room <= 0:
                self._room.clear()
                await wait(self._room, _WAIT_S)
                continue
            # The bus halves the room for handed-over work and shares it between lanes.
            room *= 4
            worker = self.worker
            leases = await worker.reader.read(
                room * worker.reader.largest_items, room * worker.reader.largest_tokens
            )
            if self._stopping:
                return  # drain hands these over
            for lease in leases:
                self._accept(lease)

    def _accept(self, lease: Lease) -> None:
        try:
            if lease.deadline_ms <= self._clock.now_ms():
                raise DeadlineExceeded("the deadline passed in the queue")
            work = self._understand(lease)
        except SpillwayError as error:
            self._spawn(self._refuse(lease, error))
            return
        generation = self.worker.generation
        unit = self._holdings.units.get((work.collection, work.shard))
        if unit is None or work.after is not None:
            self._spawn(self._prepare(lease, work, generation))
        else:
            self._queue(SearchJob(lease, work, generation, unit, alike(work)))

    def _understand(self, lease: Lease) -> SearchWork | DocumentsWork:
        try:
            work = decode_work(lease.payload)
        except BadMessage as error:
            raise InvalidRequest(str(error)) from error
        if not isinstance(work, SearchWork | DocumentsWork):
            raise InvalidRequest(f"{type(work).__name__} on a search lane; expected a search")
        return work

    async def _prepare(
        self, lease: Lease, work: SearchWork | DocumentsWork, generation: int
    ) -> None:
        """Queue a job once its shard is open and has applied as much as it asks for."""
        self._parked += 1
        try:
            unit = await self._shard_of(lease, work)
        except SpillwayError as error:
            await self._refuse(lease, error)
            return
        except Exception as error:  # noqa: BLE001 - else the job would be held for ever
            _log.exception("shard_not_found", collection=work.collection, shard=work.shard)
            why = f"the collection could not be looked up: {type(error).__name__}"
            await self._refuse(lease, Unavailable(why, code="search_failed"))
            return
        finally:
            self._parked -= 1
            self._room.set()
        self._queue(SearchJob(lease, work, generation, unit, alike(work)))

    def _queue(self, job: SearchJob) -> None:
        self._pending.append(job)
        self._arrived.set()

    async def _shard_of(self, lease: Lease, work: SearchWork | DocumentsWork) -> ShardHandle:
        left_s = (lease.deadline_ms - self._clock.now_ms()) / 1000
        try:
            async with asyncio.timeout(left_s):
                unit = await self._holdings.find(work.collection, work.shard)
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the deadline passed while the collection was being opened"
            ) from error
        if work.after is not None:
            left_s = (lease.deadline_ms - self._clock.now_ms()) / 1000
            await unit.reach(work.after, min(left_s, _AFTER_S))
        return unit

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    # -- computing

    async def _work(self) -> None:
        while not self._stopping:
            batch = self._form()
            if not batch:
                self._arrived.clear()
                await wait(self._arrived, _WAIT_S)
                continue
            self._running += 1
            self._busy[batch[0].unit] += 1
            self.worker.incarnation.working(_PREDICTED_S)
            try:
                await self._run(batch)
            finally:
                self._running -= 1
                self._rest(batch[0].unit)
                if not self._running:
                    self.worker.incarnation.idle()
                self._room.set()

    def _rest(self, unit: ShardHandle) -> None:
        """A batch of a shard is over: jobs that waited for its turn may run."""
        self._busy[unit] -= 1
        if not self._busy[unit]:
            del self._busy[unit]
        self._arrived.set()

    def _form(self) -> list[SearchJob]:
        """Take the oldest jobs that can run as one: searches that ask alike, or one read of documents.

        Jobs of a shard that has as many batches running as it may wait, and others go before them.
        """
        held = [job for job in self._pending if job.generation == self.worker.generation]
        first = next((job for job in held if self._busy[job.unit] < _RUNNERS), None)
        if first is None:
            self._pending = held
            return []
        queries = 0
        batch: list[SearchJob] = []
        rest: list[SearchJob] = []
        for job in held:
            fits = job is first or (
                first.key is not None
                and job.key == first.key
                and job.unit is first.unit
                and queries + job.lease.items <= MAX_QUERIES
            )
            (batch if fits else rest).append(job)
            queries += job.lease.items if fits else 0
        self._pending = rest
        return batch

    async def _run(self, batch: list[SearchJob]) -> None:
        now_ms = self._clock.now_ms()
        late = [job for job in batch if job.lease.deadline_ms <= now_ms]
        batch = [job for job in batch if job.lease.deadline_ms > now_ms]
        error = DeadlineExceeded("the deadline passed in the queue")
        await asyncio.gather(*(self._refuse(job.lease, error) for job in late))
        if not batch:
            return
        began, span = time.monotonic(), self.worker.leases.spans.batch(job.lease for job in batch)
        outcomes = await self._compute(execute, batch[0].unit, [job.work for job in batch])
        span.end()
        self.worker.incarnation.idle()
        self.worker.incarnation.ran(
            sum(job.lease.items for job in batch), 0, time.monotonic() - began
        )
        if time.monotonic() - began > _ASK_FIRST_S:
            batch, outcomes = await self._without_stopped(batch, outcomes)
        await asyncio.gather(
            *(self._end(job, outcome) for job, outcome in zip(batch, outcomes, strict=True))
        )

    async def _without_stopped(
        self, batch: list[SearchJob], outcomes: list[Result | SpillwayError]
    ) -> tuple[list[SearchJob], list[Result | SpillwayError]]:
        """Leave out jobs that were cancelled or lost while a long batch ran."""
        try:
            stopped = await self.worker.outbox.emit([job.lease for job in batch])
        except BusDown:
            return batch, outcomes
        pairs = zip(batch, outcomes, strict=True)
        kept = [(job, outcome) for job, outcome in pairs if job.lease.job not in stopped]
        return [job for job, _ in kept], [outcome for _, outcome in kept]

    async def _compute(self, function: Callable[..., T], *args: object) -> T:
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._pool, function, *args))

    async def _end(self, job: SearchJob, outcome: Result | SpillwayError) -> None:
        if isinstance(outcome, SpillwayError):
            await self._refuse(job.lease, outcome)
            return
        try:
            await self.worker.outbox.finish(job.lease, outcome)
        except ValueError as error:
            too_large = TooLarge(f"{error}; ask for less at once (smaller k or limit, or no text)")
            await self._refuse(job.lease, too_large)
        except BusDown as error:
            _log.warning("result_lost", job=job.lease.job, error=str(error))

    async def _refuse(self, lease: Lease, error: SpillwayError) -> None:
        try:
            await self.worker.outbox.refuse(lease, error)
        except BusDown as down:
            _log.warning("result_lost", job=lease.job, error=str(down))
