"""The runner of workflows: leases requests of several jobs from `{request/<n>}:lane:router`, like any other job.

When this router dies, another router reclaims its requests and continues at the first stage without a result.
"""

from __future__ import annotations

import asyncio
import traceback

from common import log, tracing
from common.bus import BusDown
from common.errors import SpillwayError
from common.wire.jobs import decode_work
from common.wire.message import BadMessage
from common.wire.registry import WorkerRecord
from common.wire.results import Event
from common.wire.workflows import (
    DeletePlan,
    GroundPlan,
    ParcelsPlan,
    Plan,
    RequestResult,
    RequestWork,
    SearchPlan,
    WritePlan,
    decode_plan,
)
from common.worker.incarnation import incarnation_name
from common.worker.leases import Lease
from common.worker.serve_each import JobServer, LogNames
from common.worker.worker import Worker
from services.router.admission.policy import REQUEST_CLASSES, request_families
from services.router.admission.request_store import RequestStore
from services.router.workflows.context import WorkflowContext
from services.router.workflows.embed import parcels
from services.router.workflows.grounded import ground
from services.router.workflows.reembed import reembed
from services.router.workflows.search import search
from services.router.workflows.workflow import Workflow
from services.router.workflows.write import delete, write

AT_ONCE = 256
_TOKENS = 1 << 40
_LOG_NAMES = LogNames("router", "request_run_failed", "request_step_failed")
_log = log.get("router")


async def perform(workflow: Workflow, plan: Plan) -> RequestResult:
    """Run the workflow of a plan; raises the error that its client gets."""
    if isinstance(plan, ParcelsPlan):
        return await parcels(workflow, plan)
    if isinstance(plan, SearchPlan):
        return await search(workflow, plan)
    if isinstance(plan, WritePlan):
        return await write(workflow, plan)
    if isinstance(plan, DeletePlan):
        return await delete(workflow, plan)
    if isinstance(plan, GroundPlan):
        return await ground(workflow, plan)
    return await reembed(workflow, plan)


class WorkflowRunner:
    """Leases and runs this router's share of the families `request/<n>`, with one worker per partition."""

    def __init__(self, context: WorkflowContext, store: RequestStore, partitions: int) -> None:
        self._context, self._admission = context, context.admission
        self._store = store
        self._families = request_families(partitions)
        self.server = JobServer(
            context.bus.supervisor,
            self._begin,
            _LOG_NAMES,
            concurrency=AT_ONCE,
            renamed=self._prefer,
        )

    async def start(self) -> None:
        """Register in every partition and begin to read."""
        for family in self._families:
            record = WorkerRecord(
                worker=incarnation_name("router"),
                classes=list(REQUEST_CLASSES),
                device="cpu",
                depth_items=AT_ONCE,
                depth_tokens=_TOKENS,
                started_ms=self._context.bus.clock.now_ms(),
                service="router",
            )
            worker = Worker(self._context.bus, family, record, largest_items=1, largest_tokens=1)
            await worker.start()
            self.server.add(worker)
            self._prefer(worker)

    def _begin(self, worker: Worker, lease: Lease) -> _ServedWorkflow:
        served = _ServedWorkflow(self._context, self._store, worker, lease)
        served.workflow.on_progress = self.server.step_now
        return served

    def _prefer(self, worker: Worker) -> None:
        self._admission.prefer(worker.family, worker.name)


class _ServedWorkflow:
    """One leased request, run to its end by this router."""

    def __init__(
        self, context: WorkflowContext, store: RequestStore, worker: Worker, lease: Lease
    ) -> None:
        self.workflow = Workflow(context, lease, "", 0)
        self._bus, self._store, self._worker = context.bus, store, worker

    def event(self) -> Event | None:
        """Return the progress that is not logged yet."""
        return self.workflow.event()

    async def run(self) -> None:
        """Perform the plan's steps and end the request; while the bus is away the request is handed over."""
        workflow, worker = self.workflow, self._worker
        lease = workflow.lease
        try:
            work = decode_work(lease.payload)
            if not isinstance(work, RequestWork):
                raise BadMessage(f"{type(work).__name__} on the lane of requests")
            workflow.tenant, workflow.attached = work.tenant, work.attached
            span = worker.leases.spans.of(lease)
            span.update_name(f"request {work.kind}")
            with tracing.use(span):
                if lease.attempts > 1:
                    workflow.index = len(await self._bus.jobs.log(lease.job))
                result = await perform(workflow, decode_plan(work.body))
            verdict = await worker.outbox.finish(lease, result, index=workflow.index)
            if verdict == "ok":  # else another router runs the request, and needs its jobs
                self._store.passed(set(workflow.ran).difference(result.jobs))
        except SpillwayError as error:
            if isinstance(error, BusDown):
                _log.warning("request_interrupted", request_id=lease.job, error=error.message)
                await worker.outbox.give_back([lease])
                return
            if await worker.outbox.refuse(lease, error, index=workflow.index) != "fenced":
                await workflow.cancel_jobs()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - a bug in one request must not end the router
            _log.exception("request_failed", request_id=lease.job)
            await workflow.cancel_jobs()
            await worker.outbox.fail(lease, "internal_error", str(error), traceback.format_exc())

    async def stopped(self) -> None:
        """Cancel the jobs of a cancelled request; a request that another router took over keeps its jobs."""
        workflow = self.workflow
        state = await self._bus.jobs.get(workflow.request)
        if state is None or state.state != "cancelled":
            return
        await workflow.cancel_jobs()
        if workflow.on_cancel is not None:
            await workflow.on_cancel()
