"""Drives requests of several jobs: they are entries of `{request/<n>}:lane:router`, leased like any other job.

When this router dies another reclaims its requests and goes on from the first stage without a result.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback

import msgspec

from common import log, tracing
from common.bus import BusDown
from common.errors import SpillwayError
from common.ids import Family
from common.wire.jobs import decode_work
from common.wire.message import BadMessage
from common.wire.registry import WorkerRecord
from common.wire.results import Event
from common.wire.workflows import RequestWork, decode_plan
from common.worker.incarnation import incarnation_name
from common.worker.leases import Lease
from common.worker.worker import Worker
from services.router.admission.policy import REQUEST_CLASSES
from services.router.workflows.context import WorkflowContext
from services.router.workflows.steps import perform
from services.router.workflows.workflow import Workflow

AT_ONCE = 256
STEP_S = 0.25
STEP_PREDICTED_S = 3.0
TOKENS = 1 << 40
_log = log.get("router")


class WorkflowRunner:
    """This router's part in `request/<n>`, one worker per partition."""

    def __init__(self, context: WorkflowContext, partitions: int) -> None:
        self._context, self._admission = context, context.admission
        self._supervisor = context.bus.supervisor
        self._families = [Family("request", n) for n in range(partitions)]
        self._workers: list[Worker] = []
        self._runs: dict[str, tuple[Worker, Workflow, asyncio.Task[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._poked = asyncio.Event()
        self._flagged = False

    async def start(self) -> None:
        """Register in every partition and begin to read."""
        for family in self._families:
            record = WorkerRecord(
                worker=incarnation_name("router"),
                classes=list(REQUEST_CLASSES),
                device="cpu",
                depth_items=AT_ONCE,
                depth_tokens=TOKENS,
                started_ms=self._context.bus.clock.now_ms(),
                service="router",
            )
            worker = Worker(self._context.bus, family, record, largest_items=1, largest_tokens=1)
            await worker.start()
            self._workers.append(worker)
            self._admission.prefer(family, worker.name)
            self._tasks.append(self._supervisor.process(self._read(worker), f"read {family}"))
        self._tasks.append(self._supervisor.process(self._step(), "step requests"))

    def family(self, seed: int) -> Family:
        """Return the partition a new request goes to."""
        return self._families[seed % len(self._families)]

    async def drain(self, seconds: float) -> None:
        """Take no more requests, finish what runs within `seconds`, hand over the rest, deregister."""
        self._stopping = True
        for worker in self._workers:
            with contextlib.suppress(BusDown):
                await worker.incarnation.publish(
                    msgspec.structs.replace(worker.record, draining=True)
                )
        running = [task for _, _, task in self._runs.values()]
        if running:
            await asyncio.wait(running, timeout=seconds)
        await self._supervisor.end(*self._tasks)
        left = [task for _, _, task in self._runs.values()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for worker in self._workers:
            with contextlib.suppress(BusDown):
                await worker.drain()
                await worker.stop()

    # -- reading ---------------------------------------------------------------------------------------

    async def _read(self, worker: Worker) -> None:
        generation = worker.generation
        while not self._stopping:
            try:
                free = max(AT_ONCE - len(self._runs), 0)
                leases = await worker.reader.read(free, TOKENS)
            except BusDown:
                await asyncio.sleep(0.2)
                continue
            if worker.generation != generation:
                generation = worker.generation
                self._admission.prefer(worker.family, worker.name)
                await self._forget(worker)
            for lease in leases:
                self._begin(worker, lease)

    async def _forget(self, worker: Worker) -> None:
        """Drop the runs of an incarnation that was given up: another router, or this one anew, goes on with them."""
        lost = [task for owner, _, task in self._runs.values() if owner is worker]
        for task in lost:
            task.cancel()
        await asyncio.gather(*lost, return_exceptions=True)

    def _begin(self, worker: Worker, lease: Lease) -> None:
        run = Workflow(self._context, lease, "", 0)
        run.on_progress = self._poked.set
        task = asyncio.create_task(self._drive(worker, run))
        self._runs[lease.job] = (worker, run, task)
        task.add_done_callback(lambda done: self._ended(lease.job, done))

    def _ended(self, job: str, task: asyncio.Task[None]) -> None:
        run = self._runs.get(job)
        if run is None or run[2] is not task:
            run = None
        else:
            del self._runs[job]
            for worker in self._workers:  # they share the room
                worker.leases.wake()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("request_run_failed", request_id=job, exc_info=error)
            if run is not None:
                run[0].leases.let_go(run[1].lease)

    async def _drive(self, worker: Worker, run: Workflow) -> None:
        lease = run.lease
        try:
            work = decode_work(lease.payload)
            if not isinstance(work, RequestWork):
                raise BadMessage(f"{type(work).__name__} on the lane of requests")
            run.tenant = work.tenant
            span = worker.leases.spans.of(lease)
            span.update_name(f"request {work.kind}")
            with tracing.use(span):
                if lease.attempts > 1:
                    run.index = len(await self._context.bus.jobs.log(lease.job))
                result = await perform(run, decode_plan(work.body))
            await worker.outbox.finish(lease, result, index=run.index)
        except SpillwayError as error:
            if isinstance(error, BusDown):
                _log.warning("request_interrupted", request_id=lease.job, error=error.message)
                await worker.outbox.give_back([lease])
                return
            if await worker.outbox.refuse(lease, error, index=run.index) != "fenced":
                await run.cancel_jobs()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - a bug in one request must not end the router
            _log.exception("request_failed", request_id=lease.job)
            await run.cancel_jobs()
            await worker.outbox.fail(lease, "internal_error", str(error), traceback.format_exc())

    # -- stepping --------------------------------------------------------------------------------------

    def step_now(self) -> None:
        """Step every request at once: one of them may be cancelled."""
        self._flagged = True
        self._poked.set()

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time() + STEP_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_at):
                    await self._poked.wait()
            # Poked by a flag everything steps; poked by news only what has them, the rest when it is due.
            due = self._flagged or loop.time() >= next_at
            if due:
                next_at = loop.time() + STEP_S
            self._poked.clear()
            self._flagged = False
            for worker in self._workers:
                worker.incarnation.working(STEP_PREDICTED_S)
                try:
                    await self._step_one(worker, every=due)
                except BusDown:
                    continue
                except Exception:  # noqa: BLE001 - stepping must outlive a bad reply
                    _log.exception("request_step_failed")

    async def _step_one(self, worker: Worker, *, every: bool) -> None:
        mine = {
            job: run
            for job, (owner, run, _) in self._runs.items()
            if owner is worker and (every or run.has_progress)
        }
        held = [lease for job, lease in worker.leases.held.items() if job in mine]
        if not held:
            return
        events: dict[str, Event] = {}
        for lease in held:
            event = mine[lease.job].event()
            if event is not None:
                events[lease.job] = event
        for job in await worker.outbox.emit(held, events):
            entry = self._runs.get(job)
            if entry is not None:
                entry[2].cancel()
                await asyncio.gather(entry[2], return_exceptions=True)
                state = await self._context.bus.jobs.get(job)
                if state is None or state.state != "cancelled":
                    continue  # fenced off: whoever leases the request now goes on with its jobs
                await entry[1].cancel_jobs()
                if entry[1].on_cancel is not None:
                    await entry[1].on_cancel()
