"""The query loop of one shard: jobs in from its family's lanes, batched by what they ask, results out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

from common import log
from common.bus import BusDown, Consumer, Lease
from common.clock import Clock
from common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    SpillwayError,
    TooLarge,
)
from common.messages import (
    BadMessage,
    DocumentsWork,
    Result,
    SearchWork,
    decode_work,
)
from common.waiting import wait
from services.vector_search.execute import alike, execute
from services.vector_search.unit import Unit

MAX_JOBS = 128
MAX_QUERIES = 256
_RUNNERS = 2
_AFTER_S = 10.0
_PREDICTED_S = 1.0
_WAIT_S = 1.0
_ASK_FIRST_S = 0.05
_log = log.get("vector_search")
T = TypeVar("T")


class Job(NamedTuple):
    """A leased job, read and understood."""

    lease: Lease
    work: SearchWork | DocumentsWork
    generation: int


class QueryLoop:
    """Serves one unit's queries until `stopping`; compute runs on `pool`, never on the event loop."""

    def __init__(self, unit: Unit, consumer: Consumer, pool: Executor, clock: Clock) -> None:
        self.unit = unit
        self.consumer = consumer
        self._pool = pool
        self._clock = clock
        self._pending: list[Job] = []
        self._running = 0
        self._waiting: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._stopping = False

    async def run(self, stopping: asyncio.Event, drain_s: float) -> None:
        """Work until `stopping`; then end what runs and hand over the rest. The consumer has started."""
        reader = asyncio.create_task(self._read())
        runners = [asyncio.create_task(self._work()) for _ in range(_RUNNERS)]
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({reader, *runners, stop}, return_when=asyncio.FIRST_COMPLETED)
        self._stopping = True
        self._arrived.set()
        self._room.set()
        try:
            await asyncio.wait(runners, timeout=drain_s)
            await self.consumer.drain()
            await self.consumer.stop()
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
            room = MAX_JOBS - len(self.consumer.held)
            if room <= 0:
                self._room.clear()
                await wait(self._room, _WAIT_S)
                continue
            # The bus halves the room for handed-over work and shares it between lanes.
            room *= 4
            consumer = self.consumer
            leases = await consumer.read(
                room * consumer.largest_items, room * consumer.largest_tokens
            )
            if self._stopping:
                return  # drain hands these over
            for lease in leases:
                self._accept(lease)

    def _accept(self, lease: Lease) -> None:
        try:
            if lease.deadline_ms <= self._clock.now_ms():
                raise DeadlineExceeded("the deadline passed in the queue")
            job = Job(lease, self._understand(lease), self.consumer.generation)
        except SpillwayError as error:
            self._spawn(self._refuse(lease, error))
            return
        if job.work.after is not None:
            self._spawn(self._when_reached(job, job.work.after))
        else:
            self._queue(job)

    def _understand(self, lease: Lease) -> SearchWork | DocumentsWork:
        try:
            work = decode_work(lease.payload)
        except BadMessage as error:
            raise InvalidRequest(str(error)) from error
        if not isinstance(work, SearchWork | DocumentsWork):
            raise InvalidRequest(f"{type(work).__name__} on a search lane; expected a search")
        if work.collection != self.unit.collection:
            raise NotFound(
                f"collection {work.collection} is not served here", code="collection_not_found"
            )
        return work

    async def _when_reached(self, job: Job, after: str) -> None:
        left_s = (job.lease.deadline_ms - self._clock.now_ms()) / 1000
        try:
            await self.unit.reach(after, min(left_s, _AFTER_S))
        except SpillwayError as error:
            await self._refuse(job.lease, error)
            return
        self._queue(job)

    def _queue(self, job: Job) -> None:
        self._pending.append(job)
        self._arrived.set()

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
            self.consumer.working(_PREDICTED_S)
            try:
                await self._run(batch)
            finally:
                self._running -= 1
                if not self._running:
                    self.consumer.idle()
                self._room.set()

    def _form(self) -> list[Job]:
        """Take the oldest jobs that can run as one: searches that ask alike, or one read of documents."""
        held = [job for job in self._pending if job.generation == self.consumer.generation]
        if not held:
            self._pending = []
            return []
        key, queries = alike(held[0].work), 0
        batch: list[Job] = []
        rest: list[Job] = []
        for job in held:
            fits = job is held[0] or (
                key is not None
                and alike(job.work) == key
                and queries + job.lease.items <= MAX_QUERIES
            )
            (batch if fits else rest).append(job)
            queries += job.lease.items if fits else 0
        self._pending = rest
        return batch

    async def _run(self, batch: list[Job]) -> None:
        now_ms = self._clock.now_ms()
        late = [job for job in batch if job.lease.deadline_ms <= now_ms]
        batch = [job for job in batch if job.lease.deadline_ms > now_ms]
        error = DeadlineExceeded("the deadline passed in the queue")
        await asyncio.gather(*(self._refuse(job.lease, error) for job in late))
        if not batch:
            return
        began, span = time.monotonic(), self.consumer.spans.batch(job.lease for job in batch)
        outcomes = await self._compute(execute, self.unit, [job.work for job in batch])
        span.end()
        self.consumer.progressed()
        self.consumer.ran(sum(job.lease.items for job in batch), 0, time.monotonic() - began)
        if time.monotonic() - began > _ASK_FIRST_S:
            batch, outcomes = await self._without_stopped(batch, outcomes)
        await asyncio.gather(
            *(self._end(job, outcome) for job, outcome in zip(batch, outcomes, strict=True))
        )

    async def _without_stopped(
        self, batch: list[Job], outcomes: list[Result | SpillwayError]
    ) -> tuple[list[Job], list[Result | SpillwayError]]:
        """Leave out jobs that were cancelled or lost while a long batch ran."""
        try:
            stopped = await self.consumer.step([job.lease for job in batch])
        except BusDown:
            return batch, outcomes
        pairs = zip(batch, outcomes, strict=True)
        kept = [(job, outcome) for job, outcome in pairs if job.lease.job not in stopped]
        return [job for job, _ in kept], [outcome for _, outcome in kept]

    async def _compute(self, function: Callable[..., T], *args: object) -> T:
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._pool, function, *args))

    async def _end(self, job: Job, outcome: Result | SpillwayError) -> None:
        if isinstance(outcome, SpillwayError):
            await self._refuse(job.lease, outcome)
            return
        try:
            await self.consumer.finish(job.lease, outcome)
        except ValueError as error:
            too_large = TooLarge(f"{error}; ask for less at once (smaller k or limit, or no text)")
            await self._refuse(job.lease, too_large)
        except BusDown as error:
            _log.warning("result_lost", job=job.lease.job, error=str(error))

    async def _refuse(self, lease: Lease, error: SpillwayError) -> None:
        try:
            await self.consumer.refuse(lease, error)
        except BusDown as down:
            _log.warning("result_lost", job=lease.job, error=str(down))
