"""The job server: runs each leased job in a task of its own, for stores, searches and workflows (no batches)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from common import log
from common.bus import BusDown
from common.tasks import Supervisor, cancel
from common.wire.results import Event
from common.worker.leases import Lease
from common.worker.worker import Worker

STEP_S = 0.25
# The predicted seconds of a step, which usually takes far less; a loop that hangs five times longer loses its leases.
PREDICTED_S = 3.0
_RETRY_S = 0.2
_TOKENS = 1 << 40  # no limit in tokens, since room is counted in jobs

Serve = Callable[[Worker, Lease], Coroutine[Any, Any, None]]


class ServedJob(Protocol):
    """One leased job while its task runs."""

    async def run(self) -> None:
        """Execute the job and end it through the worker's outbox; after an exception the job is tried again."""

    def event(self) -> Event | None:
        """Return the next event to emit to the job's log; None if there is none."""

    async def stopped(self) -> None:
        """Clean up after the task was cancelled because the job was cancelled or fenced off."""


class LogNames(NamedTuple):
    """The names in a server's logs: its logger, the event of a job that raised, the event of a step that raised."""

    logger: str
    job_failed: str
    step_failed: str


class _Running(NamedTuple):
    worker: Worker
    lease: Lease
    served: ServedJob
    task: asyncio.Task[None]


class JobServer:
    """Runs one task for every job of its workers, at most `concurrency` tasks at once over all workers.

    `begin` builds the job of a lease. Four times a second, and after every `step_now`, the server emits the events of
    the running jobs and cancels the tasks of jobs that were cancelled or fenced off. `renamed` is called when a worker
    gets a new name, before the tasks of its old leases are cancelled.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        begin: Callable[[Worker, Lease], ServedJob],
        names: LogNames,
        *,
        concurrency: int,
        renamed: Callable[[Worker], None] | None = None,
    ) -> None:
        self._supervisor, self._begin, self._concurrency = supervisor, begin, concurrency
        self._names, self._log = names, log.get(names.logger)
        self._renamed = renamed
        self._workers: list[Worker] = []
        self._running: dict[str, _Running] = {}
        self._unsent: dict[str, Event] = {}  # events by job that the bus has not acknowledged yet
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._poked = asyncio.Event()
        self._step_all = False

    def add(self, worker: Worker) -> None:
        """Serve the jobs of a started worker."""
        if not self._workers:
            self._tasks.append(self._supervisor.process(self._step(), f"step {worker.family}"))
        self._workers.append(worker)
        self._tasks.append(self._supervisor.process(self._read(worker), f"read {worker.family}"))

    def step_now(self, *, every: bool = False) -> None:
        """Emit pending events without waiting for the next step; with `every` also check all jobs for cancellation."""
        self._step_all = self._step_all or every
        self._poked.set()

    async def drain(self, seconds: float) -> None:
        """Take no more jobs, let running jobs end within `seconds`, hand over the rest, and deregister."""
        self._stopping = True
        for worker in self._workers:
            with contextlib.suppress(BusDown):
                record = msgspec.structs.replace(worker.record, draining=True)
                await worker.incarnation.publish(record)
        if self._running:
            await asyncio.wait([run.task for run in self._running.values()], timeout=seconds)
        await self._supervisor.end(*self._tasks)
        await cancel(*(run.task for run in self._running.values()))
        for worker in self._workers:
            with contextlib.suppress(BusDown):
                await worker.drain()
                await worker.stop()

    async def _read(self, worker: Worker) -> None:
        generation = worker.generation
        while not self._stopping:
            try:
                free = max(self._concurrency - len(self._running), 0)
                leases = await worker.reader.read(free, _TOKENS)
            except BusDown:
                await asyncio.sleep(_RETRY_S)
                continue
            if worker.generation != generation:
                generation = worker.generation
                if self._renamed is not None:
                    self._renamed(worker)
                await self._drop(worker)
            for lease in leases:
                served = self._begin(worker, lease)
                task = asyncio.create_task(served.run())
                self._running[lease.job] = _Running(worker, lease, served, task)
                task.add_done_callback(partial(self._ended, lease))

    async def _drop(self, worker: Worker) -> None:
        """Cancel the tasks of leases that were lost with the worker's old name."""
        await cancel(*(run.task for run in self._running.values() if run.worker is worker))

    def _ended(self, lease: Lease, task: asyncio.Task[None]) -> None:
        run = self._running.get(lease.job)
        if run is not None and run.task is task:
            del self._running[lease.job]
            self._unsent.pop(lease.job, None)
            for worker in self._workers:  # all workers share the freed room
                worker.leases.wake()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error(self._names.job_failed, job=lease.job, exc_info=error)
            if run is not None and run.task is task:
                run.worker.leases.let_go(lease)

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time() + STEP_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_at):
                    await self._poked.wait()
            due = self._step_all or loop.time() >= next_at
            if due:
                next_at = loop.time() + STEP_S
            self._poked.clear()
            self._step_all = False
            for worker in self._workers:
                worker.incarnation.heartbeat.working(PREDICTED_S)
                try:
                    await self._step_worker(worker, every=due)
                except BusDown:
                    continue
                except Exception:  # noqa: BLE001 - stepping must outlive a bad reply
                    self._log.exception(self._names.step_failed, family=str(worker.family))

    async def _step_worker(self, worker: Worker, *, every: bool) -> None:
        """Emit the events of one worker's jobs, and stop jobs; with `every` also check jobs without an event."""
        held = {
            job: lease
            for job, lease in worker.leases.held.items()
            if job in self._running and self._running[job].worker is worker
        }
        for job in held:
            # An event that the bus may not have received is sent again first, since a log must not have gaps.
            if job not in self._unsent and (event := self._running[job].served.event()):
                self._unsent[job] = event
        events = {job: self._unsent[job] for job in held if job in self._unsent}
        leases = [lease for job, lease in held.items() if every or job in events]
        stopped = await worker.outbox.emit(leases, events)
        for job in events:
            self._unsent.pop(job, None)
        for job in stopped:
            if (run := self._running.get(job)) is not None:
                await cancel(run.task)
                await run.served.stopped()


class _PlainJob:
    """A job without events and without clean-up."""

    def __init__(self, serve: Serve, worker: Worker, lease: Lease) -> None:
        self._serve, self._worker, self._lease = serve, worker, lease

    async def run(self) -> None:
        await self._serve(self._worker, self._lease)

    def event(self) -> Event | None:
        return None

    async def stopped(self) -> None:
        return


async def serve_each(
    worker: Worker,
    serve: Serve,
    concurrency: int,
    *,
    names: LogNames,
    stopping: asyncio.Event,
    drain_s: float,
) -> None:
    """Serve the jobs of a started worker until `stopping`, at most `concurrency` at once.

    Then let running jobs end within `drain_s` seconds, and hand over the rest.
    """
    begin = partial(_PlainJob, serve)
    server = JobServer(worker.bus.supervisor, begin, names, concurrency=concurrency)
    server.add(worker)
    await stopping.wait()
    await server.drain(drain_s)
