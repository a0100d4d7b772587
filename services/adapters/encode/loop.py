"""The embedding loop of one worker and one model: read jobs, form batches, compute, finish.

While a batch computes, the next one is read and the last one is finished, so that the device never waits. The loop
holds no truth: a lease can be lost at any moment, and then another worker has the job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

import msgspec

from common import log, tracing
from common.bus import BusDown
from common.clock import Clock
from common.cost.linear import PARCEL_ITEMS, PARCEL_TOKENS
from common.errors import DeadlineExceeded, SpillwayError
from common.tasks import cancel, stop_or_end, wait
from common.wire.registry import WorkerRecord
from common.wire.results import Result
from common.worker.leases import Lease
from common.worker.outbox import RunningBatch
from common.worker.worker import Worker
from engine.device import DeviceQueue
from engine.encoder.batching import next_batch
from engine.encoder.capacity import EncoderCapacity
from engine.encoder.executor import EncodeFailure
from engine.encoder.model import EncoderModel
from services.adapters.encode.job import EncodeJob, FinishedBatch, read_job, run_jobs
from services.adapters.metrics import LaneMetrics

# Jobs read less than this before have hardly been cancelled: the bus is asked while their batch computes already.
_ASK_FIRST_S = 0.02
_MAX_JOBS = 256
_WAIT_S = 1.0
_DRIFT = 0.2  # a change of the depth by this share is logged
_log = log.get("work")


def with_capacity(record: WorkerRecord, capacity: EncoderCapacity) -> WorkerRecord:
    """Return a worker's record with the depths and costs by which admission predicts."""
    cost, depth, (late_s, late_share) = capacity.cost, capacity.depth, capacity.late
    queries = capacity.queries
    return msgspec.structs.replace(
        record,
        depth_items=depth.items,
        depth_tokens=depth.tokens,
        depth_queries=cost.queries(capacity.slo_s) if queries is None else queries,
        alpha_items_s=cost.alpha_items_s,
        alpha_tokens_s=cost.alpha_tokens_s,
        beta_s=cost.beta_s,
        r2=capacity.online.r2,
        limit_items=capacity.limits.items,
        limit_tokens=capacity.limits.tokens,
        late_s=late_s,
        late_share=late_share,
        slo_s=capacity.slo_s,
    )


class EmbeddingLoop:
    """The loop of one worker: it runs until told to stop, ends the running batch and hands over the rest."""

    def __init__(
        self,
        worker: Worker,
        model: EncoderModel,
        capacity: EncoderCapacity,
        *,
        clock: Clock,
        device: DeviceQueue,
        metrics: LaneMetrics,
    ) -> None:
        self._worker = worker
        self._model = model
        self._capacity = capacity
        self._clock = clock
        self._device = device
        self._metrics = metrics
        self._kind = "rerank" if model.reranks else "embed"
        self._queue: deque[EncodeJob] = deque()
        self._finishing: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._stopping = False
        self._logged_tokens = capacity.depth.tokens
        self._typical_tokens = 128.0

    async def run(self, stopping: asyncio.Event, drain_s: float) -> None:
        """Work until `stopping`; then end the running batch within `drain_s` and hand over what is left."""
        reader = asyncio.create_task(self._read(), name="read")
        worker = asyncio.create_task(self._work(), name="work")
        ended = await stop_or_end(stopping, reader, worker)
        self._stopping = True
        self._arrived.set()
        self._room.set()
        await asyncio.wait({worker}, timeout=drain_s)
        if worker.done() and self._finishing is not None:
            await asyncio.wait({self._finishing}, timeout=drain_s)
        try:
            await self._worker.drain()
            await self._worker.stop()
        except BusDown as error:
            _log.warning("drained_without_bus", error=str(error), held=len(self._queue))
        await cancel(reader, worker)
        for task in ended:
            task.result()  # a loop that ended by itself has raised

    # -- reading ---------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while not self._stopping:
            jobs = self._free_jobs()
            if jobs <= 0:
                self._room.clear()
                await wait(self._room, _WAIT_S)
                continue
            # The bus halves its count for handed-over work and shares it between lanes.
            room = 4 * jobs
            leases = await self._worker.reader.read(room * PARCEL_ITEMS, room * PARCEL_TOKENS)
            if self._stopping:
                return  # drain hands these over
            for lease in leases:
                await self._accept(lease)

    def _free_jobs(self) -> int:
        """Return how many jobs of the usual size one full batch beyond the running one still lacks."""
        queued = sum(job.tokens for job in self._queue)
        missing = self._capacity.limits.tokens - queued
        if missing <= 0 or len(self._queue) >= _MAX_JOBS:
            return 0
        return max(1, min(_MAX_JOBS - len(self._queue), int(missing / self._typical_tokens)))

    async def _accept(self, lease: Lease) -> None:
        generation = self._worker.generation
        try:
            job = read_job(lease, self._model, generation, self._clock.monotonic())
        except SpillwayError as error:
            with tracing.use(self._worker.leases.spans.of(lease)):
                _log.warning("job_refused", job=lease.job, code=error.code, why=error.message)
            await self._refuse(lease, error)
            return
        self._typical_tokens += 0.1 * (max(1, job.tokens) - self._typical_tokens)
        operation = "rerank" if job.input.scores else "embeddings"
        span = self._worker.leases.spans.of(lease)
        span.update_name(f"{operation} {self._model.name}")
        span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "spillway",
                "gen_ai.request.model": self._model.name,
                "gen_ai.usage.input_tokens": job.tokens,
            }
        )
        self._queue.append(job)
        self._arrived.set()

    async def _refuse(self, lease: Lease, error: SpillwayError) -> None:
        # Without the bus the lease is lost, and another worker will have the job.
        with contextlib.suppress(BusDown):
            await self._worker.outbox.refuse(lease, error)

    # -- computing -------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while not self._stopping:
            batch = await self._form()
            if not batch:
                self._arrived.clear()
                if not self._queue:
                    with contextlib.suppress(BusDown):
                        await self._worker.recovery.relieve()
                    await wait(self._arrived, _WAIT_S)
                continue
            await self._run(batch)

    async def _form(self) -> list[EncodeJob]:
        """Take the next batch off the queue; drop expired jobs, and jobs lost with an incarnation."""
        now_ms = self._clock.now_ms()
        held = [job for job in self._queue if job.generation == self._worker.generation]
        expired = [job for job in held if job.lease.deadline_ms <= now_ms]
        fresh = [job for job in held if job.lease.deadline_ms > now_ms]
        chosen = set(
            next_batch(
                fresh,
                self._capacity.limits,
                lambda i, t: now_ms + 1000 * self._capacity.surely(i, t),
            )
        )
        batch = [job for index, job in enumerate(fresh) if index in chosen]
        self._queue = deque(job for index, job in enumerate(fresh) if index not in chosen)
        for job in expired:
            await self._refuse(job.lease, DeadlineExceeded("the deadline passed in the queue"))
        self._room.set()
        return batch

    async def _run(self, batch: list[EncodeJob]) -> None:
        items, tokens = sum(job.items for job in batch), sum(job.tokens for job in batch)
        predicted_s = self._capacity.cost.seconds(items, tokens)
        waited_s = self._clock.monotonic() - min(job.read_s for job in batch)
        ask_first = waited_s >= _ASK_FIRST_S
        number = max(job.batch for job in batch)
        until_ms = self._clock.now_ms() + int(1000 * predicted_s)
        doing = RunningBatch(until_ms, number, items, tokens)
        if ask_first:
            batch = await self._drop_stopped(batch, doing)
            if not batch:
                return
        self._worker.incarnation.heartbeat.working(predicted_s)
        started_s = self._clock.monotonic()
        for job in batch:
            self._metrics.batch_wait.observe(started_s - job.read_s)
        span = self._worker.leases.spans.batch(job.lease for job in batch)
        computing = asyncio.create_task(self._compute(batch, predicted_s))
        wanted = batch if ask_first else await self._drop_stopped(batch, doing)
        ran = await computing
        span.end()
        self._worker.incarnation.heartbeat.idle()
        self._observe(batch, ran, self._clock.monotonic() - started_s)
        if self._finishing is not None:
            await self._finishing
        self._finishing = asyncio.create_task(self._finish(batch, ran, wanted), name="finish")

    async def _compute(self, batch: list[EncodeJob], predicted_s: float) -> FinishedBatch:
        """Queue the batch at the device.

        The batch is due with the first of its jobs, but no later than its predicted end: admission counts on batches
        that begin at once, and the jobs behind this batch wait for it.
        """
        left_s = (min(job.due_ms for job in batch) - self._clock.now_ms()) / 1000
        return await self._device.run(
            run_jobs,
            self._model,
            batch,
            kind=self._kind,
            predicted_s=predicted_s,
            deadline_s=self._clock.monotonic() + min(left_s, predicted_s),
        )

    async def _drop_stopped(self, batch: list[EncodeJob], doing: RunningBatch) -> list[EncodeJob]:
        """Tell the bus what runs, and drop the cancelled and fenced-off jobs from the queue and from `batch`."""
        held = [*batch, *self._queue]
        try:
            stopped = await self._worker.outbox.emit([job.lease for job in held], doing=doing)
        except BusDown:
            return batch  # the batch goes on: its results are fenced when they are written
        if stopped:
            self._queue = deque(job for job in self._queue if job.lease.job not in stopped)
        return [job for job in batch if job.lease.job not in stopped]

    # -- ending ----------------------------------------------------------------------------------------

    async def _finish(
        self, batch: Sequence[EncodeJob], ran: FinishedBatch, wanted: Sequence[EncodeJob]
    ) -> None:
        """End the jobs of a batch that were not stopped while it ran."""
        kept = {job.lease.job for job in wanted}
        pairs = zip(batch, ran.outcomes, strict=True)
        await asyncio.gather(*(self._end(job, out) for job, out in pairs if job.lease.job in kept))
        self._judge(batch)

    async def _end(self, job: EncodeJob, outcome: Result | EncodeFailure) -> None:
        try:
            if isinstance(outcome, EncodeFailure):
                with tracing.use(self._worker.leases.spans.of(job.lease)):
                    _log.error(
                        "job_failed", job=job.lease.job, code=outcome.code, why=outcome.message
                    )
                await self._worker.outbox.fail(job.lease, *outcome)
            else:
                await self._worker.outbox.finish(job.lease, outcome)
        except BusDown:
            _log.error("result_lost", job=job.lease.job, why="the bus stayed away")
        except Exception:  # noqa: BLE001 - the error is this job's: the others of the batch go on
            _log.exception("job_not_ended", job=job.lease.job)
            self._worker.leases.let_go(job.lease)

    # -- cost ------------------------------------------------------------------------------------------

    def _observe(self, batch: Sequence[EncodeJob], ran: FinishedBatch, seconds: float) -> None:
        metrics = self._metrics
        items, tokens = sum(job.items for job in batch), sum(job.tokens for job in batch)
        metrics.batch_size.observe(items)
        metrics.batch_tokens.observe(tokens)
        metrics.input.inc(tokens)
        metrics.step.observe(ran.seconds)
        self._worker.incarnation.ran(items, tokens, seconds)
        if ran.isolated:
            metrics.isolated.inc()
            return
        metrics.step_ratio.observe(self._capacity.online.observe(items, tokens, seconds))
        record = self._worker.incarnation.record = with_capacity(
            self._worker.record, self._capacity
        )
        self._metrics.publish(record)  # the bus learns of the record with the next heartbeat
        if abs(record.depth_tokens / self._logged_tokens - 1) > _DRIFT:
            self._logged_tokens = record.depth_tokens
            _log.info("depth_changed", items=record.depth_items, tokens=record.depth_tokens)

    def _judge(self, batch: Sequence[EncodeJob]) -> None:
        """Compare the end of a batch with the end that admission predicted, and with when its jobs were due."""
        now_ms = self._clock.now_ms()
        self._metrics.missed.inc(sum(job.due_ms < now_ms for job in batch))
        predicted = [job.lease for job in batch if job.lease.finish_ms and job.lease.attempts == 1]
        if predicted:
            # The job admitted last into a planned batch was predicted with all of it.
            last = max(predicted, key=lambda lease: lease.finish_ms)
            admitted_ms = int(last.entry.partition("-")[0])
            ahead_s = (last.finish_ms - admitted_ms) / 1000
            self._capacity.ended((now_ms - last.finish_ms) / 1000, ahead_s)
