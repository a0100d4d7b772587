"""The query loop of one family: leases jobs from its lanes, has them computed in batches, and finishes them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any

from common import log
from common.bus import BusDown
from common.clock import Clock
from common.errors import DeadlineExceeded, SpillwayError, TooLarge, Unavailable
from common.tasks import cancel, in_pool, stop_or_end, wait
from common.wire.results import Result
from common.wire.search import DocumentsWork, SearchWork
from common.worker.leases import Lease
from common.worker.worker import Worker
from services.vector_search.peers import Peers
from services.vector_search.query_batch import (
    QueryQueue,
    SearchJob,
    alike,
    decoded,
    opened,
    run,
)
from services.vector_search.shard_handle import ShardHandle
from services.vector_search.shard_manager import ShardManager

MAX_JOBS = 128
MOST_HELD = 1024  # jobs, also those that wait until their shard is open or has applied a write
_RUNNERS = 2
_PREDICTED_S = 1.0
_WAIT_S = 1.0
_ASK_FIRST_S = 0.05
_log = log.get("vector_search")


class QueryLoop:
    """Serves one family's queries until `stopping`; computing runs on `pool`'s `threads`, never on the event loop.

    A job of a shard that another process holds is sent there as a call. A job of a collection that `shards` does not
    have is refused with the reason, and touches no other job.
    """

    def __init__(
        self,
        shards: ShardManager,
        worker: Worker,
        pool: Executor,
        clock: Clock,
        *,
        threads: int,
        peers: Peers,
    ) -> None:
        self.worker = worker
        self._peers = peers
        self._shards = shards
        self._pool = pool
        self._clock = clock
        self._runners = max(_RUNNERS, threads + 1)
        self._queue = QueryQueue[SearchJob]()
        self._parked = 0  # jobs that wait for their shard
        self._waiting: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._stopping = False

    async def run(self, stopping: asyncio.Event, drain_s: float) -> None:
        """Work until `stopping`; then finish running batches and hand over the other jobs. The worker has started.

        An unexpected error of a part ends the loop and is raised, after the drain.
        """
        reader = asyncio.create_task(self._read())
        runners = [asyncio.create_task(self._work()) for _ in range(self._runners)]
        parts = (reader, *runners)
        await stop_or_end(stopping, *parts)
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
            await cancel(*parts, *self._waiting)
        for part in parts:
            if not part.cancelled():
                part.result()

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
            reader = self.worker.reader
            leases = await reader.read(room * reader.largest_items, room * reader.largest_tokens)
            if self._stopping:
                return  # drain hands these over
            for lease in leases:
                self._accept(lease)

    def _accept(self, lease: Lease) -> None:
        try:
            if lease.deadline_ms <= self._clock.now_ms():
                raise DeadlineExceeded("the deadline passed in the queue")
            work = decoded(lease.payload)
        except SpillwayError as error:
            self._spawn(lease, self._refuse(lease, error))
            return
        generation = self.worker.generation
        handle = self._shards.handles.get((work.collection, work.shard))
        mapped = isinstance(work, DocumentsWork) and work.op == "map"
        if handle is None or work.after is not None or mapped:
            self._spawn(lease, self._prepare(lease, work, generation))
        else:
            self._add(lease, work, generation, handle)

    async def _prepare(
        self, lease: Lease, work: SearchWork | DocumentsWork, generation: int
    ) -> None:
        """Queue a job once its shard is open, has applied the write that the job names, and has drawn the map."""
        self._parked += 1
        left_s = (lease.deadline_ms - self._clock.now_ms()) / 1000
        try:
            handle = await opened(self._shards, work, left_s)
        except SpillwayError as error:
            await self._settle(lease, work, generation, error)
            return
        except Exception as error:  # noqa: BLE001 - the job hears of it, and no other is touched
            _log.exception("shard_not_found", collection=work.collection, shard=work.shard)
            why = f"the collection could not be looked up: {type(error).__name__}"
            await self._refuse(lease, Unavailable(why, code="search_failed"))
            return
        finally:
            self._parked -= 1
            self._room.set()
        self._add(lease, work, generation, handle)

    async def _settle(
        self,
        lease: Lease,
        work: SearchWork | DocumentsWork,
        generation: int,
        error: SpillwayError,
    ) -> None:
        """End a job whose shard is not here: with the answer of a process that holds the shard, else with the error."""
        if error.code != "shard_missing":
            await self._refuse(lease, error)
            return
        try:
            outcome = await self._peers.ask(work, lease.deadline_ms)
        except SpillwayError as failed:
            await self._refuse(lease, failed)
            return
        if generation == self.worker.generation:
            await self._finish(lease, outcome)

    def _add(
        self,
        lease: Lease,
        work: SearchWork | DocumentsWork,
        generation: int,
        handle: ShardHandle,
    ) -> None:
        arrived_s = self._clock.perf_s()
        self._queue.add(SearchJob(lease, work, generation, handle, alike(work), arrived_s))
        self._arrived.set()

    def _spawn(self, lease: Lease, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` for one job in a task; after an unexpected error the job is delivered again."""
        task = asyncio.create_task(work)
        self._waiting.add(task)
        task.add_done_callback(partial(self._spawned, lease))

    def _spawned(self, lease: Lease, task: asyncio.Task[None]) -> None:
        self._waiting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("query_job_failed", job=lease.job, exc_info=error)
            self.worker.leases.let_go(lease)
            self._room.set()

    # -- computing

    async def _work(self) -> None:
        while not self._stopping:
            self._queue.keep(self._is_held)
            batch = self._queue.take()
            if not batch:
                self._arrived.clear()
                await wait(self._arrived, _WAIT_S)
                continue
            self.worker.incarnation.heartbeat.working(_PREDICTED_S)
            try:
                await self._run(batch)
            finally:
                self._queue.done(batch)
                self._arrived.set()
                if not self._queue.running:
                    self.worker.incarnation.heartbeat.idle()
                self._room.set()

    def _is_held(self, job: SearchJob) -> bool:
        return job.generation == self.worker.generation

    async def _run(self, batch: list[SearchJob]) -> None:
        now_ms = self._clock.now_ms()
        late = [job for job in batch if job.lease.deadline_ms <= now_ms]
        batch = [job for job in batch if job.lease.deadline_ms > now_ms]
        error = DeadlineExceeded("the deadline passed in the queue")
        await asyncio.gather(*(self._refuse(job.lease, error) for job in late))
        if not batch:
            return
        began_s = self._clock.perf_s()
        span = self.worker.leases.spans.batch(job.lease for job in batch)
        outcomes = await in_pool(self._pool, run, batch, self._clock)
        span.end()
        took_s = self._clock.perf_s() - began_s
        self.worker.incarnation.heartbeat.idle()
        self.worker.incarnation.ran(sum(job.lease.items for job in batch), 0, took_s)
        if took_s > _ASK_FIRST_S:
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

    async def _end(self, job: SearchJob, outcome: Result | SpillwayError) -> None:
        if not isinstance(outcome, SpillwayError):
            await self._finish(job.lease, outcome)
        elif (
            outcome.code == "shard_missing"
        ):  # it moved while the job waited: no batch waits for its holder
            self._spawn(job.lease, self._settle(job.lease, job.work, job.generation, outcome))
        else:
            await self._refuse(job.lease, outcome)

    async def _finish(self, lease: Lease, outcome: Result) -> None:
        try:
            await self.worker.outbox.finish(lease, outcome)
        except ValueError as error:
            too_large = TooLarge(f"{error}; ask for less at once (smaller k or limit, or no text)")
            await self._refuse(lease, too_large)
        except BusDown as error:
            _log.warning("result_lost", job=lease.job, error=str(error))

    async def _refuse(self, lease: Lease, error: SpillwayError) -> None:
        try:
            await self.worker.outbox.refuse(lease, error)
        except BusDown as down:
            _log.warning("result_lost", job=lease.job, error=str(down))
