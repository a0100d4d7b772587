"""The intake of generation jobs: reads leases and their logs, checks their work, builds generations or refuses jobs."""

from __future__ import annotations

import asyncio
import contextlib

from common import log, tracing
from common.bus import BusDown
from common.errors import InternalError, SpillwayError, Unprocessable
from common.wire.message import BadMessage
from common.wire.results import Event
from common.worker.leases import Lease
from common.worker.worker import Worker
from engine.decoder.engine import DecoderEngine
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.sampling.grammar import GrammarCompiler
from services.adapters.generate.job import GenerationJob, build, read_work

_log = log.get("engine")


class Intake:
    """Reads one family's leases for one worker; sequences are numbered in the order of arrival."""

    def __init__(self, worker: Worker, engine: DecoderEngine) -> None:
        self._worker, self._executor = worker, engine.executor
        self._fits = engine.scheduler.fits
        self._vocabulary = Vocabulary(self._executor.tokenizer_json())
        size, stop_ids = self._executor.shape.vocabulary, self._executor.stop_ids
        self._grammars = GrammarCompiler(self._vocabulary, size, stop_ids)
        self._order = 0

    async def read(self, room: int) -> list[Lease]:
        """Return at most `room` new leases; waits up to a second."""
        return await self._worker.reader.read(room, room)

    async def accept(self, leases: list[Lease]) -> list[GenerationJob]:
        """Return the jobs of these leases, each restored to the end of its log; refuse jobs that cannot be executed."""
        incarnation = self._worker.generation
        logs = await asyncio.gather(*(self._log_of(lease, incarnation) for lease in leases))
        jobs = []
        for lease, events in zip(leases, logs, strict=True):
            if events is None or incarnation != self._worker.generation:
                continue  # the lease was lost with the worker's former name
            try:
                job = await self._build(lease, events, incarnation)
            except (SpillwayError, BadMessage) as error:
                await self._refuse(lease, error)
                continue
            if job.taken_over:
                with tracing.use(self._worker.leases.spans.of(lease)):
                    _log.info("job_taken_over", job=job.id, index=job.next_index)
            span = self._worker.leases.spans.of(lease)
            span.update_name(f"generate_content {self._executor.name}")
            span.set_attributes(
                {
                    "gen_ai.operation.name": "generate_content",
                    "gen_ai.provider.name": "spillway",
                    "gen_ai.request.model": self._executor.name,
                    "gen_ai.usage.input_tokens": sum(map(len, job.work.prompts)),
                }
            )
            jobs.append(job)
        return jobs

    async def _log_of(self, lease: Lease, incarnation: int) -> list[Event] | None:
        """Return the log of a leased job; None once the lease is lost. A fresh job's log is not read."""
        if lease.fresh:
            return []
        while incarnation == self._worker.generation and lease.job in self._worker.leases.held:
            try:
                return await self._worker.bus.jobs.log(lease.job)
            except BusDown:
                continue  # retried until the bus is back or the lease is lost
        return None

    async def _build(self, lease: Lease, events: list[Event], incarnation: int) -> GenerationJob:
        work = read_work(lease, self._executor)
        grammar = None
        if work.grammar is not None:  # on a thread, so that steps continue meanwhile
            compile_grammar = self._grammars.compile
            grammar = await asyncio.to_thread(compile_grammar, work.grammar, work.stop_ids)
        job = build(
            lease, work, events, self._vocabulary,
            order=self._order, incarnation=incarnation, grammar=grammar,
        )  # fmt: skip
        self._order += len(job.choices)
        for sequence in job.generation.sequences:
            if not self._fits(sequence):
                raise Unprocessable(
                    f"job {job.id}: {sequence.most} tokens (prompt and max_new) need more pages than this worker "
                    f"has for model {self._executor.name}: {self._executor.shape.pages}; expected a shorter one, or "
                    "more memory for pages (SPILLWAY_KV_BYTES)"
                )
        return job

    async def _refuse(self, lease: Lease, error: SpillwayError | BadMessage) -> None:
        with tracing.use(self._worker.leases.spans.of(lease)):
            _log.warning("job_refused", job=lease.job, why=str(error))
        with contextlib.suppress(BusDown):  # the lease is lost: another worker gets the job
            if isinstance(error, BadMessage | InternalError):  # the job's log cannot be decoded
                await self._worker.outbox.fail(lease, "log_damaged", str(error))
            else:
                await self._worker.outbox.refuse(lease, error)
