"""The engine's loop: schedule, plan, execute, commit; with the bus around it: leases in, events and results out.

The loop holds no truth: every lease can be lost at any moment, and then another worker goes on from the job's log. It
runs at most a few steps ahead of what the bus has acknowledged, so when Redis is away, generation pauses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import msgspec

from common import log, tracing
from common.bus import BusDown
from common.clock import Clock
from common.config import WorkerConfig
from common.cost.step import Step
from common.errors import DeadlineExceeded
from common.pages.store import PageStore
from common.registry.deletion import digest_of
from common.tasks import wait
from common.worker.leases import Lease
from common.worker.worker import Worker
from engine.decoder.capacity import DecoderCapacity, decoding_of, size_of
from engine.decoder.executor.interface import Executor, SampledToken, SequenceInput
from engine.decoder.executor.isolated_step import StepFailure, StepResult, failure_of, run_step
from engine.decoder.kv.offload import OffloadManager
from engine.decoder.kv.prefix_index import PrefixIndex
from engine.decoder.schedule import StepLimits
from engine.decoder.scheduler import ScheduledRows
from engine.device import DeviceQueue
from services.adapters.generate.cache_directory import CacheAnnouncer
from services.adapters.generate.cache_invalidation import CacheInvalidation
from services.adapters.generate.event_log import EventLog
from services.adapters.generate.intake import Intake
from services.adapters.generate.job import GenerationJob
from services.adapters.generate.metrics import EngineMetrics
from services.adapters.generate.output_emitter import OutputEmitter

AHEAD = 8  # steps that may run before the first of them is acknowledged
STATE_S = 0.1  # between two looks at what is held, while steps run
_WAIT_S = 1.0
_PLAIN = WorkerConfig()
_CLOSE_S = 5.0
_log = log.get("engine")


class GenerationLoop:
    """Runs until told to stop; `run` then lets what runs go on for the drain time and hands over the rest."""

    def __init__(
        self,
        worker: Worker,
        runner: Executor,
        pace: DecoderCapacity,
        bounds: StepLimits,
        *,
        clock: Clock,
        thread: DeviceQueue,
        metrics: EngineMetrics,
        config: WorkerConfig = _PLAIN,
        store: PageStore | None = None,
    ) -> None:
        """`config` says how pages are kept; `store` are the tiers of pages below the host, if there are any."""
        self._worker, self._runner, self._pace, self._bounds = worker, runner, pace, bounds
        self._clock, self._thread, self._metrics = clock, thread, metrics
        self._tiering = OffloadManager(runner, bounds, pace.recompute_s, config, store, self._wake)
        self._scheduler = self._tiering.scheduler
        self._residents = PrefixIndex()
        self._holding = CacheAnnouncer(worker, self._scheduler.table, self._residents)
        self._forgetting = CacheInvalidation(
            worker, self._tiering, self._residents, self._leave_session
        )
        self._intake = Intake(worker, runner, self._scheduler.fits, metrics)
        self._emitter = EventLog(worker, clock.now_ms)
        self._jobs: dict[str, GenerationJob] = {}
        self._teller = OutputEmitter(
            worker, self._emitter, self._holding, metrics, self._jobs, self._leave
        )
        self._observed_at = 0.0
        self._work = asyncio.Event()  # something to compute may have come
        self._room = asyncio.Event()  # room for another lease may have come
        self._stopping = self._halted = False

    async def run(self, stopping: asyncio.Event, drain_s: float) -> None:
        """Work until `stopping`; then finish what runs, for at most `drain_s`, and hand over what is left."""
        loops = [
            asyncio.create_task(self._reads(), name="read"),
            asyncio.create_task(self._computes(), name="compute"),
            asyncio.create_task(self._teller.run(), name="tell"),
            asyncio.create_task(self._tiering.run(), name="tiers"),
            asyncio.create_task(self._holding.run(), name="hold"),
            asyncio.create_task(self._forgetting.run(), name="forget"),
        ]
        stop = asyncio.create_task(stopping.wait(), name="stop")
        done, _ = await asyncio.wait([*loops, stop], return_when=asyncio.FIRST_COMPLETED)
        self._stopping = True
        if stop in done:
            await self._drain(drain_s)
        self._halted = True
        for event in (self._work, self._room):
            event.set()
        self._teller.halt()
        await asyncio.wait({loops[1]}, timeout=_CLOSE_S)  # the step that runs
        await self._teller.flush(_CLOSE_S)
        try:
            await self._worker.drain()
            await self._worker.stop()
        except BusDown as error:
            _log.warning("drained_without_bus", error=str(error), held=len(self._jobs))
        await self._tiering.drain(_CLOSE_S)
        for task in (*loops, stop):
            task.cancel()
        await asyncio.gather(*loops, stop, return_exceptions=True)
        await self._teller.close()
        for task in loops:
            if task in done:
                task.result()  # a loop that ended by itself has raised

    async def _drain(self, drain_s: float) -> None:
        """Say that no more is taken, give back what has not begun, and let the rest go on until it is done."""
        give_up = time.monotonic() + drain_s
        try:
            record = msgspec.structs.replace(self._worker.record, draining=True)
            await self._worker.incarnation.publish(record)
            fresh = [job for job in self._jobs.values() if not job.started and not job.over]
            for job in fresh:
                self._leave(job)
            await self._emitter.give_back(fresh)
        except BusDown as error:
            _log.warning("drains_without_bus", error=str(error))
        while self._jobs and (left := give_up - time.monotonic()) > 0:
            self._room.clear()
            await wait(self._room, min(left, _WAIT_S))

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
                return  # drain hands these over
            if leases:
                await self._accept(leases)

    def _free(self) -> int:
        """Return how many jobs may be read: slots, unless pages are short or a step's worth of work waits already."""
        scheduler = self._scheduler
        if (
            scheduler.short
            or sum(sequence.rows for sequence in scheduler.waiting) >= self._bounds.tokens
        ):
            return 0
        return self._bounds.running - len(scheduler.running) - len(scheduler.waiting)

    async def _accept(self, leases: list[Lease]) -> None:
        for job in await self._intake.accept(leases):
            if (old := self._jobs.get(job.id)) is not None:
                self._leave(old)
            self._jobs[job.id] = job
            for sequence in job.sequences:
                self._scheduler.add(sequence)
            self._tiering.begin(job.sequences)
        self._work.set()
        self._teller.now()  # for what needs no computing: forced answers, and those that had ended

    # -- computing -------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._work.set()

    async def _computes(self) -> None:
        while not self._halted:
            self._drop_lost()
            self._expire()
            if self._teller.behind >= AHEAD:
                await self._teller.acknowledged(_WAIT_S)
                continue
            self._work.clear()
            decoding = decoding_of(self._scheduler.running, self._runner.shape.windows)
            budget = self._pace.budget(decoding, self._bounds.tokens)
            parts = self._scheduler.step(budget, now_s=time.monotonic())
            if parts or self._scheduler.loads:
                await self._step(parts)
            elif self._scheduler.running:
                await asyncio.sleep(0)  # pages were taken from the only one planned
            elif self._scheduler.waiting:
                await wait(self._work, self._tiering.patience_s())
            else:
                self._observe_state()
                await wait(self._work, _WAIT_S)
            await self._follow_drift()

    async def _step(self, parts: list[ScheduledRows]) -> None:
        jobs = [self._jobs[part.sequence.job] for part in parts]
        rows = [self._rows(job, part) for job, part in zip(jobs, parts, strict=True)]
        size = size_of(rows, self._runner.shape.windows)
        predicted = self._pace.cost.seconds(size)
        self._worker.incarnation.working(predicted)
        self._note_waits(jobs)
        loading = self._tiering.load()
        ran = await self._thread.run(
            run_step, self._runner, rows, [job.id for job in jobs], loading
        )
        self._worker.incarnation.idle()
        self._observe(size, ran, predicted)
        self._tiering.loaded(loading)
        for job, part, outcome in zip(jobs, parts, ran.outcomes, strict=True):
            if self._jobs.get(job.id) is job and not job.over and part.sequence.pages:
                try:
                    self._commit(job, part, outcome)
                except Exception as error:  # noqa: BLE001 - it is this job's: the others go on
                    self._fail(job, failure_of(error, "internal_error"))
        self._tiering.save()
        self._teller.stepped()
        self._room.set()

    def _note_waits(self, jobs: Iterable[GenerationJob]) -> None:
        now = time.monotonic()
        for job in jobs:
            if job.waits:
                job.waits = False
                self._metrics.work.batch_wait.observe(now - job.read_at)

    def _rows(self, job: GenerationJob, part: ScheduledRows) -> SequenceInput:
        sequence = part.sequence
        sample = job.choices[sequence.choice].draw() if part.draws else None
        return SequenceInput(sequence.at(part.positions), part.positions, sequence.pages, sample)

    def _commit(
        self, job: GenerationJob, part: ScheduledRows, outcome: SampledToken | StepFailure | None
    ) -> None:
        choice = job.choices[part.sequence.choice]
        if isinstance(outcome, StepFailure):
            self._fail(job, outcome)
            return
        token = None if outcome is None else choice.push(outcome)
        self._scheduler.commit(part, token)
        if outcome is None:
            return
        self._metrics.work.output.inc()
        if len(choice.tokens) == 1:
            self._worker.leases.span(job.id).add_event("first token")
            self._teller.hurry()
        if choice.finish is not None:
            self._tiering.drop([part.sequence])
            self._teller.hurry()

    def _fail(self, job: GenerationJob, failure: StepFailure) -> None:
        with tracing.use(self._worker.leases.span(job.id)):
            _log.error("job_failed", job=job.id, code=failure.code, why=failure.message)
        job.failure = failure
        self._tiering.drop([choice.sequence for choice in job.choices])
        self._teller.hurry()

    def _drop_lost(self) -> None:
        """Forget jobs whose leases were lost with an incarnation: another delivery begins from their logs."""
        for job in list(self._jobs.values()):
            if job.generation != self._worker.generation:
                self._leave(job)

    def _expire(self) -> None:
        now = self._clock.now_ms()
        for job in self._jobs.values():
            if job.deadline_ms <= now and not job.over:
                job.refusal = DeadlineExceeded("the deadline passed before the generation ended")
                self._tiering.drop([choice.sequence for choice in job.choices])
                self._teller.now()

    def _leave(self, job: GenerationJob) -> None:
        """Let a job go, with its pages at once."""
        if self._jobs.get(job.id) is job:
            del self._jobs[job.id]
            for choice in job.choices:
                if choice.sequence.cached >= 0:
                    self._residents.left(job.session, choice.sequence.ids)
        self._tiering.drop([choice.sequence for choice in job.choices])
        self._room.set()

    def _leave_session(self, digest: bytes) -> None:
        for job in list(self._jobs.values()):
            if job.session and digest_of(job.session) == digest:
                self._leave(job)

    # -- cost ------------------------------------------------------------------------------------------

    def _observe(self, size: Step, ran: StepResult, predicted: float) -> None:
        self._metrics.observe_step(ran, predicted, sequences=size.sequences, rows=size.rows)
        self._worker.incarnation.ran(size.sequences, size.rows, ran.seconds)
        if time.monotonic() >= self._observed_at + STATE_S:
            self._observe_state()
        if not ran.isolated:
            self._pace.cost.observe(size, ran.seconds)

    def _observe_state(self) -> None:
        self._observed_at = time.monotonic()
        self._metrics.observe_state(self._scheduler, self._teller.behind)
        self._metrics.tiers.observe(self._tiering)

    async def _follow_drift(self) -> None:
        """Publish a new depth when the device has become faster or slower than it was when measured."""
        if not self._pace.moved() or self._stopping:
            return
        try:
            await self._worker.incarnation.publish(self._pace.record(self._worker.record))
        except BusDown:
            return
        depth = self._pace.depth
        self._metrics.work.depth_items.set(depth.items)
        self._metrics.work.depth_tokens.set(depth.tokens)
        _log.info("depth_changed", token_s=self._pace.token_s, **depth._asdict())
