"""The embedding loop of one worker and one model: reads jobs, forms batches, computes, finishes.

While a batch computes, the previous batch is finished, and the next batch is read, chosen and queued on the device, so
that the device never waits: on a CPU its first parts run beside the last ones of the batch before. The loop's state may
be lost: if a lease is lost, another worker gets the job.

Questions of searches go to a loop of their own, which computes them beside the batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from opentelemetry.trace import Span

from common import log, tracing
from common.bus import BusDown
from common.clock import Clock
from common.cost.linear import PARCEL_ITEMS, PARCEL_TOKENS
from common.errors import SpillwayError
from common.tasks import cancel, stop_or_end, wait
from common.wire.registry import WorkerRecord
from common.worker.leases import Lease
from common.worker.outbox import RunningBatch
from common.worker.worker import Worker
from engine.device import DeviceQueue
from engine.encoder.batching import next_batch
from engine.encoder.capacity import EncoderCapacity
from engine.encoder.executor import EncodeResult
from engine.encoder.model import EncoderModel
from services.adapters.encode.batch import record_batch, take_batch
from services.adapters.encode.ends import end_jobs, expire, refuse
from services.adapters.encode.job import EncodeJob, read_job, run_jobs
from services.adapters.encode.questions import QuestionDevice, QuestionLoop
from services.adapters.encode.running_steps import RunningSteps
from services.adapters.metrics import LaneMetrics

# A job that was read or checked for cancellation within this time is not checked again before its batch.
_ASK_FIRST_S = 0.02
# The next batch is chosen this long before the running batch should end (seconds, and share of the prediction), which
# leaves time to ask the bus, and for an early end.
_LEAD_S, _LEAD_SHARE = 0.005, 0.1
# Jobs that arrive within this time are read in one call; before the next batch is chosen, this delays no job.
_GATHER_S = 0.003
_MAX_JOBS = 256
_QUESTION_JOBS = 16  # the most questions of one read
_WAIT_S = 1.0
_DRIFT = 0.2  # a depth that changes by this share is logged
_log = log.get("work")


def with_capacity(record: WorkerRecord, capacity: EncoderCapacity) -> WorkerRecord:
    """Return a worker's record with the depths and costs from which admission predicts."""
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


@dataclass(slots=True, eq=False)
class SubmittedBatch:
    """A batch queued on the device at `queued_s`; `full` if waiting jobs did not fit.

    From `spare_s` on the batch leaves cores to the next one. `began_s`, `ahead_s`, `span` and `asking` are set when the
    previous batch has ended; `ahead_s` is the part of the batch's seconds that was computed before.
    """

    jobs: list[EncodeJob]
    predicted_s: float
    queued_s: float
    full: bool
    computing: asyncio.Future[EncodeResult] = field(init=False)
    spare_s: float = math.inf
    began_s: float = 0.0
    ahead_s: float = 0.0
    span: Span = tracing.NONE
    asking: asyncio.Task[set[str]] | None = None  # the jobs to stop
    items: int = field(init=False)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.items = sum(job.items for job in self.jobs)
        self.tokens = sum(job.tokens for job in self.jobs)

    @property
    def left_s(self) -> float:
        """The predicted seconds from the end of the previous batch to the end of this one."""
        return max(0.0, self.predicted_s - self.ahead_s)

    def shared_s(self, after: SubmittedBatch, now_s: float) -> float:
        """Return half the seconds during which this batch and the one `after` it were computed beside each other."""
        return max(0.0, now_s - max(after.queued_s, self.spare_s)) / 2


def is_stale(job: EncodeJob, now_s: float) -> bool:
    """True if the job must be checked for cancellation before its batch begins."""
    return now_s - job.asked_s >= _ASK_FIRST_S


class EmbeddingLoop:
    """The loop of one worker: runs until told to stop, finishes the running batch, and hands over the rest."""

    def __init__(
        self,
        worker: Worker,
        model: EncoderModel,
        capacity: EncoderCapacity,
        *,
        clock: Clock,
        device: DeviceQueue,
        metrics: LaneMetrics,
        questions: QuestionDevice | None = None,
    ) -> None:
        """Serve `worker`'s lanes; `questions` is what computes questions, by default the model on the device."""
        self._worker = worker
        self._model = model
        self._capacity = capacity
        self._clock = clock
        self._device = device
        self._metrics = metrics
        self._kind = "rerank" if model.reranks else "embed"
        self._steps = RunningSteps(worker.incarnation, clock)
        self._questions = QuestionLoop(
            worker,
            questions or QuestionDevice(model, device),
            capacity,
            clock=clock,
            metrics=metrics,
            steps=self._steps,
        )
        self._queue: deque[EncodeJob] = deque()
        self._next: SubmittedBatch | None = None  # queued on the device behind the running batch
        self._choose_s = -math.inf  # when to choose the next batch
        self._finishing: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._stopping = False
        self._logged_tokens = capacity.depth.tokens
        self._typical_tokens = 128.0
        self._ended_s = clock.monotonic()  # the end of the last batch

    async def run(self, stopping: asyncio.Event, drain_s: float) -> None:
        """Work until `stopping`; then finish the running batch within `drain_s` seconds, and hand over the rest."""
        reader = asyncio.create_task(self._read(), name="read")
        own_reader = asyncio.create_task(self._read_own(), name="read own")
        questions = asyncio.create_task(self._questions.run(), name="questions")
        worker = asyncio.create_task(self._work(), name="work")
        ended = await stop_or_end(stopping, reader, own_reader, questions, worker)
        self._stopping = True
        self._questions.stop()
        self._arrived.set()
        self._room.set()
        await asyncio.wait({worker, questions}, timeout=drain_s)
        if worker.done() and self._finishing is not None:
            await asyncio.wait({self._finishing}, timeout=drain_s)
        try:
            await self._worker.drain()
            await self._worker.stop()
        except BusDown as error:
            _log.warning("drained_without_bus", error=str(error), held=len(self._queue))
        await cancel(reader, own_reader, questions, worker)
        for task in ended:
            task.result()  # a loop that ended unasked has raised

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
                return  # the drain hands them over
            for lease in leases:
                await self._accept(lease)
            left_s = self._choose_s - self._clock.monotonic()
            if left_s > 0:
                await asyncio.sleep(min(_GATHER_S, left_s))

    async def _read_own(self) -> None:
        """Read the own lane regardless of the queue: it holds questions, which wait for no batch."""
        while not self._stopping:
            leases = await self._worker.reader.read_own(_QUESTION_JOBS)
            if self._stopping:
                return  # the drain hands them over
            for lease in leases:
                await self._accept(lease)

    def _free_jobs(self) -> int:
        """Return the number of jobs of typical size that are missing for one full batch behind the running one."""
        queued = sum(job.tokens for job in self._queue) + (self._next.tokens if self._next else 0)
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
            await refuse(self._worker, lease, error)
            return
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
        if self._questions.takes(job):
            self._questions.add(job)
            return
        self._typical_tokens += 0.1 * (max(1, job.tokens) - self._typical_tokens)
        self._queue.append(job)
        self._arrived.set()

    # -- computing -------------------------------------------------------------------------------------

    async def _work(self) -> None:
        running: SubmittedBatch | None = None
        while running is not None or not self._stopping:
            if running is None:
                self._arrived.clear()
                running = await self._submit()
                if running is not None:
                    self._begun(running)
                elif not self._queue:
                    with contextlib.suppress(BusDown):
                        await self._worker.recovery.relieve()
                    await wait(self._arrived, _WAIT_S)
                continue
            await self._follow(running)
            ran = await asyncio.shield(running.computing)
            ended, running, self._next = running, self._next, None
            self._ended_s = self._clock.monotonic()
            seconds = self._ended_s - ended.began_s + ended.ahead_s
            if running is None:
                self._steps.end("batch")
            else:
                if self._device.begun(running.computing):
                    running.ahead_s = ended.shared_s(running, self._ended_s)
                seconds -= running.ahead_s
                self._begun(running)
            await self._conclude(ended, ran, seconds)

    async def _follow(self, running: SubmittedBatch) -> None:
        """Wait for the end of a batch; meanwhile queue the next batch behind it, with all jobs that arrive in time.

        The next batch is chosen shortly before the predicted end, or once the running one leaves a core without work.
        While the batch takes longer than predicted, the next batch is chosen anew at growing intervals, so that no
        expired or cancelled job waits on the device for long.
        """
        ended = running.computing
        pause_s, anew = _ASK_FIRST_S, True
        while not self._stopping:
            self._arrived.clear()
            left_s = self._choose_s - self._clock.monotonic()
            if left_s > 0 and running.spare_s == math.inf:
                await self._wait_for(ended, left_s)
                if ended.done():
                    self._choose_s = -math.inf
                continue
            if self._next is None or (anew and self._take_back(self._next)):
                self._next = await self._submit(running)
            if ended.done():
                return
            await self._wait_for(ended, pause_s)
            if ended.done() and self._next is not None:
                return
            late = not self._arrived.is_set()
            anew = late or (self._next is not None and not self._next.full)
            pause_s *= 1 + late
        if self._next is not None and self._take_back(self._next):
            self._next = None

    async def _wait_for(self, ended: asyncio.Future[Any], seconds: float) -> None:
        """Wait up to `seconds` until a batch has ended or a job has arrived."""
        arrival = asyncio.create_task(self._arrived.wait())
        events: set[asyncio.Future[Any]] = {ended, arrival}
        await asyncio.wait(events, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        arrival.cancel()

    def _ends(self, wait_s: float) -> Callable[[int, int], float]:
        """Return a function from texts and tokens to when (ms) such a batch surely ends, if it begins in `wait_s`."""
        begin_ms = self._clock.now_ms() + 1000 * wait_s
        return lambda items, tokens: begin_ms + 1000 * self._capacity.surely(items, tokens)

    def _take_back(self, batch: SubmittedBatch) -> bool:
        """Put the jobs of a batch into the queue again; False if the batch has begun."""
        if not self._device.revoke(batch.computing):
            return False
        self._queue = deque(sorted([*batch.jobs, *self._queue], key=lambda job: job.read_s))
        return True

    async def _submit(self, running: SubmittedBatch | None = None) -> SubmittedBatch | None:
        """Choose the next batch and queue it on the device, behind the `running` batch; None if no job waits."""
        begin_s = now_s = self._clock.monotonic()
        if running is not None:
            begin_s = max(now_s, running.began_s + running.left_s)
        jobs = await self._form(begin_s - now_s)
        if any(is_stale(job, now_s) for job in jobs):
            stopped = await self._ask(jobs)
            jobs = [job._replace(asked_s=now_s) for job in jobs if job.lease.job not in stopped]
        if not jobs:
            return None
        items, tokens = sum(job.items for job in jobs), sum(job.tokens for job in jobs)
        predicted_s = self._capacity.expected(items, tokens)
        # A batch is due with its earliest job, but not later than it would end if it ran next: admission counts on
        # that, and later jobs wait for this batch.
        left_s = (min(job.due_ms for job in jobs) - self._clock.now_ms()) / 1000
        alone_s = self._capacity.cost.seconds(items, tokens)
        batch = SubmittedBatch(jobs, predicted_s, self._clock.monotonic(), bool(self._queue))
        batch.computing = self._device.submit(
            run_jobs,
            self._model,
            jobs,
            kind=self._kind,
            predicted_s=predicted_s,
            deadline_s=min(batch.queued_s + left_s, begin_s + alone_s),
            on_spare=partial(self._spared, batch),
        )
        return batch

    def _spared(self, batch: SubmittedBatch) -> None:
        """Choose the next batch now, since this one leaves cores without work."""
        batch.spare_s = self._clock.monotonic()
        self._arrived.set()  # ends a wait

    async def _form(self, wait_s: float) -> list[EncodeJob]:
        """Take the next batch, which begins in `wait_s`, off the queue; drop expired jobs and jobs of lost leases."""
        limits, end_ms = self._capacity.limits, self._ends(wait_s)
        taken = take_batch(
            self._queue,
            lambda jobs: next_batch(jobs, limits, end_ms),
            generation=self._worker.generation,
            now_ms=self._clock.now_ms(),
        )
        self._queue = taken.waiting
        await expire(self._worker, taken.expired)
        self._room.set()
        return taken.batch

    def _begun(self, batch: SubmittedBatch) -> None:
        """Record that the device begins a batch, and report this to the bus."""
        batch.began_s = self._clock.monotonic()
        self._choose_s = batch.began_s + (1 - _LEAD_SHARE) * batch.left_s - _LEAD_S
        self._capacity.rested(batch.began_s - self._ended_s)
        self._steps.begin("batch", batch.predicted_s)
        for job in batch.jobs:
            self._metrics.batch_wait.observe(batch.began_s - job.read_s)
        batch.span = self._worker.leases.spans.batch(job.lease for job in batch.jobs)
        number = max(job.batch for job in batch.jobs)
        until_ms = self._clock.now_ms() + int(1000 * batch.left_s)
        slowness = self._capacity.slowness
        doing = RunningBatch(until_ms, number, batch.items, batch.tokens, slowness)
        batch.asking = asyncio.create_task(self._ask(batch.jobs, doing), name="ask")

    async def _ask(self, batch: Sequence[EncodeJob], doing: RunningBatch | None = None) -> set[str]:
        """Return the jobs that were cancelled or fenced off, and drop them from the queue; report the batch `doing`."""
        now_s = self._clock.monotonic()
        asked = [job for job in (*batch, *self._queue) if job.unasked or is_stale(job, now_s)]
        leases = [job.lease for job in asked or batch[:1]]
        try:
            stopped = await self._worker.outbox.emit(leases, doing=doing)
        except BusDown:
            return set()  # the batch continues: its results are fenced when written
        names = {lease.job for lease in leases}
        self._queue = deque(
            job._replace(asked_s=now_s) if job.lease.job in names else job
            for job in self._queue
            if job.lease.job not in stopped
        )
        return stopped

    # -- ending ----------------------------------------------------------------------------------------

    async def _conclude(self, batch: SubmittedBatch, ran: EncodeResult, seconds: float) -> None:
        """Learn the cost of a batch, and start ending its jobs, except for jobs stopped while it ran."""
        assert batch.asking is not None
        batch.span.end()
        self._observe(batch, ran, seconds)
        stopped = await batch.asking
        if self._finishing is not None:
            await self._finishing
        self._finishing = asyncio.create_task(self._finish(batch, ran, stopped), name="finish")

    async def _finish(self, batch: SubmittedBatch, ran: EncodeResult, stopped: set[str]) -> None:
        await end_jobs(self._worker, batch.jobs, ran, stopped)
        self._judge(batch.jobs)

    # -- cost ------------------------------------------------------------------------------------------

    def _observe(self, batch: SubmittedBatch, ran: EncodeResult, seconds: float) -> None:
        items, tokens = batch.items, batch.tokens
        record_batch(self._metrics, items, tokens, ran)
        self._worker.incarnation.ran(items, tokens, seconds)
        if ran.isolated:
            return
        self._metrics.step_ratio.observe(self._capacity.ran(items, tokens, seconds))
        record = self._worker.incarnation.record = with_capacity(
            self._worker.record, self._capacity
        )
        self._metrics.publish(record)  # the next heartbeat publishes the record
        if abs(record.depth_tokens / self._logged_tokens - 1) > _DRIFT:
            self._logged_tokens = record.depth_tokens
            _log.info("depth_changed", items=record.depth_items, tokens=record.depth_tokens)

    def _judge(self, batch: Sequence[EncodeJob]) -> None:
        """Compare the end of a batch with admission's prediction, and with the due times of its jobs."""
        now_ms = self._clock.now_ms()
        self._metrics.missed.inc(sum(job.due_ms < now_ms for job in batch))
        predicted = [job.lease for job in batch if job.lease.finish_ms and job.lease.attempts == 1]
        if predicted:
            # The prediction for the job admitted last into a planned batch covers the whole batch.
            last = max(predicted, key=lambda lease: lease.finish_ms)
            admitted_ms = int(last.entry.partition("-")[0])
            ahead_s = (last.finish_ms - admitted_ms) / 1000
            self._capacity.ended((now_ms - last.finish_ms) / 1000, ahead_s)
