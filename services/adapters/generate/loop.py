"""The generation loop: connects a decoder engine to the bus; leases in, events and results out.

The loop's state may be lost: if a lease is lost, another worker continues from the job's log. The loop runs at most
`AHEAD` tokens ahead of the bus' acknowledgements, so generation pauses while Redis is away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from common import log, tracing
from common.bus import BusDown
from common.errors import DeadlineExceeded, Unprocessable
from common.registry.deletion import digest_of
from common.tasks import cancel, stop_or_end, wait
from common.wire.registry import WorkerRecord
from common.worker.worker import Worker
from engine.decoder.capacity import DecoderCapacity
from engine.decoder.engine import DecoderEngine, Progress, RunningStep
from engine.decoder.executor.step import StepResult
from engine.decoder.kv.prefix_index import PrefixIndex
from services.adapters.generate.cache_announcer import CacheAnnouncer
from services.adapters.generate.cache_invalidation import CacheInvalidation
from services.adapters.generate.control import GenerationControl
from services.adapters.generate.intake import Intake
from services.adapters.generate.job import GenerationJob
from services.adapters.generate.metrics import EngineMetrics
from services.adapters.generate.output_emitter import OutputEmitter
from services.adapters.generate.step_reporter import StepReporter

AHEAD = 32  # the most tokens of a sequence that are drawn but not acknowledged
STATE_S = 0.1  # seconds between two observations of the engine's state
_WAIT_S = 1.0
# A new job's messages are fetched so much later, since its first step needs the interpreter.
_LOOK_S = 0.001
_CLOSE_S = 5.0
_log = log.get("engine")


def with_capacity(record: WorkerRecord, capacity: DecoderCapacity) -> WorkerRecord:
    """Return a worker's record with its depth, and costs that predict a job's seconds by its tokens and one step."""
    depth = capacity.depth
    return msgspec.structs.replace(
        record,
        depth_items=depth.items,
        depth_tokens=depth.tokens,
        alpha_items_s=0.0,
        alpha_tokens_s=capacity.token_s,
        beta_s=capacity.step_s,
    )


class GenerationLoop:
    """The loop of one generator: reads jobs, computes steps, and sends output until stopped and drained."""

    def __init__(self, worker: Worker, engine: DecoderEngine, metrics: EngineMetrics) -> None:
        self.engine = engine
        self._worker, self._metrics, self._clock = worker, metrics, worker.bus.clock
        self._jobs: dict[str, GenerationJob] = {}
        self._prefixes = PrefixIndex()
        self.announcer = CacheAnnouncer(worker, engine.scheduler.table, self._prefixes)
        self._invalidation = CacheInvalidation(
            worker, engine.offload, self._prefixes, self._leave_session
        )
        self._intake = Intake(worker, engine)
        self.emitter = OutputEmitter(
            worker, self.announcer, metrics, self._jobs, self._leave, self._clock
        )
        self._control = GenerationControl(worker, engine, self._jobs, metrics, self.emitter.now)
        self._reporter = StepReporter(worker, engine.homes) if engine.homes is not None else None
        self._observed_s = 0.0
        self._room = asyncio.Event()  # set when there may be room for another lease
        self._stopping = self._halted = False

    async def run(self, stopping: asyncio.Event, drain_s: float) -> None:
        """Work until `stopping`; then finish running jobs within `drain_s` seconds, and hand over the rest."""
        computes = asyncio.create_task(self._computes(), name="compute")
        loops = [
            computes,
            asyncio.create_task(self._reads(), name="read"),
            asyncio.create_task(self.emitter.run(), name="emit"),
            asyncio.create_task(self.engine.offload.run(), name="tiers"),
            asyncio.create_task(self.announcer.run(), name="announce"),
            asyncio.create_task(self._invalidation.run(), name="invalidate"),
            asyncio.create_task(self._control.listen(), name="listen"),
            asyncio.create_task(self._control.fetch(), name="fetch"),
        ]
        if self._reporter is not None:
            loops.append(asyncio.create_task(self._reporter.run(), name="report"))
        ended = await stop_or_end(stopping, *loops)
        self._stopping = True
        if not ended:
            await self._drain(drain_s)
        self._halted = True
        self.engine.wake()
        self._room.set()
        self.emitter.halt()
        await asyncio.wait({computes}, timeout=_CLOSE_S)  # for the end of the running step
        await self.emitter.flush(_CLOSE_S)
        try:
            await self._worker.drain()
            await self._worker.stop()
        except BusDown as error:
            _log.warning("drained_without_bus", error=str(error), held=len(self._jobs))
        await self.engine.offload.drain(_CLOSE_S)
        await cancel(*loops)
        await self.emitter.close()
        for task in ended:
            task.result()  # a loop that ended unasked has raised

    async def _drain(self, drain_s: float) -> None:
        """Publish that no more jobs are taken, and wait for generating jobs; give back jobs that do not generate."""
        give_up = self._clock.monotonic() + drain_s
        try:
            record = msgspec.structs.replace(self._worker.record, draining=True)
            await self._worker.incarnation.publish(record)
        except BusDown as error:
            _log.warning("drains_without_bus", error=str(error))
        await self._give_back(lambda job: not job.started)
        while self._jobs and (left := give_up - self._clock.monotonic()) > 0:
            self._room.clear()
            await self._give_back(lambda job: self._control.waits(job) and job.event() is None)
            await wait(self._room, min(left, _WAIT_S))

    async def _give_back(self, which: Callable[[GenerationJob], bool]) -> None:
        """Return the selected jobs that are not over to the lane, uncharged."""
        jobs = [job for job in self._jobs.values() if not job.over and which(job)]
        for job in jobs:
            self._leave(job)
        try:
            await self.emitter.give_back(jobs)
        except BusDown as error:
            _log.warning("drains_without_bus", error=str(error))

    # -- reading ---------------------------------------------------------------------------------------

    async def _reads(self) -> None:
        while not self._stopping:
            room = self._free()
            if room <= 0:
                self._room.clear()
                await wait(self._room, _WAIT_S)
                continue
            leases = await self._intake.read(room)
            if self._stopping:
                return  # the drain hands them over
            for job in await self._intake.accept(leases) if leases else ():
                self._add(job)

    def _free(self) -> int:
        """Return the number of jobs to read: free slots, or 0 if pages are short or a full step's rows wait already."""
        scheduler, limits = self.engine.scheduler, self.engine.limits
        waiting = sum(sequence.rows for sequence in scheduler.waiting)
        if scheduler.short or waiting >= limits.tokens:
            return 0
        held = len(scheduler.running) + len(scheduler.waiting) + len(scheduler.paused)
        return limits.running - held

    def _add(self, job: GenerationJob) -> None:
        if (old := self._jobs.get(job.id)) is not None:
            self._leave(old)
        self._jobs[job.id] = job
        job.waits_since_s = self._clock.monotonic()
        self.engine.add(job.generation)
        asyncio.get_running_loop().call_later(_LOOK_S, self._control.look, job)
        self._control.reached(job)
        if job.over:
            self.emitter.hurry(job.id)  # forced, or complete when it was handed over

    # -- computing -------------------------------------------------------------------------------------

    async def _computes(self) -> None:
        while not self._halted:
            self._drop_lost()
            self._expire()
            step = self.engine.running
            if step is None:
                if self.emitter.behind >= AHEAD:
                    await self.emitter.acknowledged(_WAIT_S)
                    continue
                self._control.apply()
                parts = self.engine.plan()
                step = None if parts is None else self.engine.submit(parts)
            if step is not None:
                if self.emitter.behind + step.tokens < AHEAD and not self._control.pending:
                    self.engine.submit_ahead()
                await self._step(step)
            else:
                if self.engine.idle:
                    self._observe_state()
                await self.engine.wait(_WAIT_S)
            await self._follow_drift()
        self.engine.recall()
        while (step := self.engine.running) is not None:
            await self._step(step)

    async def _step(self, step: RunningStep) -> None:
        self._worker.incarnation.heartbeat.working(step.predicted_s)
        self._note_waits(generation.id for generation in step.generations)
        result = await step.handle.result()
        self._worker.incarnation.heartbeat.idle()
        self._observe(step, result)
        for progress in self.engine.commit(step, result):
            self._note_progress(progress)
        self.emitter.stepped(result.tokens)
        self._room.set()

    def _note_waits(self, jobs: Iterable[str]) -> None:
        now_s = self._clock.monotonic()
        for name in jobs:
            job = self._jobs.get(name)
            if job is not None and job.waits_since_s is not None:
                self._metrics.work.batch_wait.observe(now_s - job.waits_since_s)
                job.waits_since_s = None

    def _note_progress(self, progress: Progress) -> None:
        job, choice = progress.generation.id, progress.choice
        if choice is None:
            assert progress.generation.failure is not None
            code, why, _ = progress.generation.failure
            with tracing.use(self._worker.leases.span(job)):
                _log.error("job_failed", job=job, code=code, why=why)
            if code == "grammar_failed":  # it would fail again on every worker
                self._jobs[job].refusal = Unprocessable(why, code="grammar_failed")
            self.emitter.hurry(job)
            return
        self._metrics.work.output.inc(progress.tokens)
        if 0 < len(choice.tokens) <= progress.tokens:
            self._worker.leases.span(job).add_event("first token")
            self.emitter.hurry(job)
        if choice.finish is not None:
            self.emitter.hurry(job)
            if progress.generation.request.grammar is not None:
                self._metrics.structured.labels(choice.finish).inc()
        self._control.reached(self._jobs[job])

    def _drop_lost(self) -> None:
        """Drop jobs whose leases were lost with an incarnation; their next deliveries continue from their logs."""
        for job in list(self._jobs.values()):
            if job.incarnation != self._worker.generation:
                self._leave(job)

    def _expire(self) -> None:
        now_ms = self._clock.now_ms()
        for job in self._jobs.values():
            if job.deadline_ms <= now_ms and not job.over:
                job.refusal = DeadlineExceeded("the deadline passed before the generation ended")
                self.engine.abort(job.generation)
                self.emitter.now()

    def _leave(self, job: GenerationJob) -> None:
        """Drop a job and abort its generation."""
        if self._jobs.get(job.id) is job:
            del self._jobs[job.id]
            for choice in job.choices:
                if choice.sequence.cached >= 0:
                    self._prefixes.left(job.session, choice.sequence.ids)
        self.engine.abort(job.generation)
        self._room.set()

    def _leave_session(self, digest: bytes) -> None:
        for job in list(self._jobs.values()):
            if job.session and digest_of(job.session) == digest:
                self._leave(job)

    # -- cost ------------------------------------------------------------------------------------------

    def _observe(self, step: RunningStep, result: StepResult) -> None:
        sequences, rows = step.size.sequences, step.size.rows
        predicted_s = step.predicted_s / step.tokens
        self._metrics.observe_step(result, predicted_s, sequences=sequences, rows=rows)
        self._worker.incarnation.ran(sequences, rows * result.tokens, result.seconds)
        if self._clock.monotonic() >= self._observed_s + STATE_S:
            self._observe_state()

    def _observe_state(self) -> None:
        self._observed_s = self._clock.monotonic()
        self._metrics.observe_state(self.engine, self.emitter.behind)

    async def _follow_drift(self) -> None:
        """Publish a new depth when the device has become faster or slower."""
        capacity = self.engine.capacity
        if not capacity.moved() or self._stopping:
            return
        try:
            await self._worker.incarnation.publish(with_capacity(self._worker.record, capacity))
        except BusDown:
            return
        depth = capacity.depth
        self._metrics.work.depth_items.set(depth.items)
        self._metrics.work.depth_tokens.set(depth.tokens)
        _log.info("depth_changed", token_s=capacity.token_s, **depth._asdict())
