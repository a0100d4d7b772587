"""How leases become generations: their logs are read, their work checked, and what cannot be done is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from common import log, tracing
from common.bus import BusDown
from common.errors import InternalError, SpillwayError, Unprocessable
from common.wire.message import BadMessage
from common.wire.results import Event
from common.worker.leases import Lease
from common.worker.worker import Worker
from engine.decoder.executor.interface import Executor
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.sequence import TokenSequence
from services.adapters.generate.job import GenerationJob, build, read_work
from services.adapters.generate.metrics import EngineMetrics

_log = log.get("engine")


class Intake:
    """Reads one family's leases for one worker; sequences are numbered in the order of arrival."""

    def __init__(
        self,
        worker: Worker,
        runner: Executor,
        fits: Callable[[TokenSequence], bool],
        metrics: EngineMetrics,
    ) -> None:
        self._worker, self._runner, self._fits, self._metrics = worker, runner, fits, metrics
        self._vocabulary = Vocabulary(runner.tokenizer_json())
        self._order = 0

    async def read(self, room: int) -> list[Lease]:
        """Return at most `room` new leases; waits up to a second."""
        return await self._worker.reader.read(room, room)

    async def accept(self, leases: list[Lease]) -> list[GenerationJob]:
        """Return the generations of these leases, each where its log ends; those that cannot be done are ended."""
        generation = self._worker.generation
        logs = await asyncio.gather(*(self._log_of(lease, generation) for lease in leases))
        jobs = []
        for lease, events in zip(leases, logs, strict=True):
            if events is None or generation != self._worker.generation:
                continue  # lost with its incarnation
            try:
                job = self._build(lease, events, generation)
            except (SpillwayError, BadMessage) as error:
                await self._refuse(lease, error)
                continue
            if job.taken_over:
                with tracing.use(self._worker.leases.spans.of(lease)):
                    _log.info("job_taken_over", job=job.id, index=job.next_index)
            span = self._worker.leases.spans.of(lease)
            span.update_name(f"generate_content {self._runner.name}")
            span.set_attributes(
                {
                    "gen_ai.operation.name": "generate_content",
                    "gen_ai.provider.name": "spillway",
                    "gen_ai.request.model": self._runner.name,
                    "gen_ai.usage.input_tokens": sum(map(len, job.work.prompts)),
                }
            )
            jobs.append(job)
        return jobs

    async def _log_of(self, lease: Lease, generation: int) -> list[Event] | None:
        while generation == self._worker.generation and lease.job in self._worker.leases.held:
            try:
                return await self._worker.bus.jobs.log(lease.job)
            except BusDown:
                continue  # until it is back, or the lease is lost
        return None

    def _build(self, lease: Lease, events: list[Event], generation: int) -> GenerationJob:
        work = read_work(lease, self._runner)
        job = build(lease, work, events, self._vocabulary, order=self._order, generation=generation)
        self._order += len(job.choices)
        for sequence in job.sequences:
            if not self._fits(sequence):
                raise Unprocessable(
                    f"job {job.id}: {sequence.most} tokens (prompt and max_new) need more pages than this worker "
                    f"has for model {self._runner.name}: {self._runner.shape.pages}; expected a shorter one, or "
                    "more memory for pages (SPILLWAY_KV_BYTES)"
                )
        return job

    async def _refuse(self, lease: Lease, error: SpillwayError | BadMessage) -> None:
        with tracing.use(self._worker.leases.spans.of(lease)):
            _log.warning("job_refused", job=lease.job, why=str(error))
        with contextlib.suppress(BusDown):  # its lease is lost by then: another worker will have it
            if isinstance(error, BadMessage | InternalError):  # its log cannot be understood
                await self._worker.outbox.fail(lease, "log_damaged", str(error))
            else:
                await self._worker.outbox.refuse(lease, error)
