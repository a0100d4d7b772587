"""The control of running generations: messages to them arrive beside the steps, and take effect between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from common import log
from common.bus import BusDown, BusFull
from common.wire.control import Extend, span_problem
from common.worker.worker import Worker
from engine.decoder.engine import DecoderEngine
from engine.decoder.sequence import TokenSequence
from services.adapters.generate.job import GenerationJob
from services.adapters.generate.metrics import EngineMetrics

_RETRY_S = 0.2
_log = log.get("engine")


class GenerationControl:
    """Pauses and extends the `jobs` of one engine; `emit` sends their output at once and asks for cancelled jobs.

    A family's inbox names jobs with new messages, and cancelled jobs, so that a generation without rows learns of both
    at once, too. The messages themselves are stored beside the job until its log records their outcome.
    """

    def __init__(
        self,
        worker: Worker,
        engine: DecoderEngine,
        jobs: Mapping[str, GenerationJob],
        metrics: EngineMetrics,
        emit: Callable[[], None],
    ) -> None:
        self._worker, self._engine, self._jobs = worker, engine, jobs
        self._metrics, self._emit = metrics, emit
        self._clock = worker.bus.clock
        self._asked: dict[str, GenerationJob] = {}  # jobs whose messages shall be fetched
        self._news = asyncio.Event()
        self._due: dict[str, GenerationJob] = {}  # jobs with changes to apply before the next step

    # -- receiving -------------------------------------------------------------------------------------

    def look(self, job: GenerationJob) -> None:
        """Request a fetch of the messages to a job."""
        self._asked[job.id] = job
        self._news.set()

    async def listen(self) -> None:
        """Read the inbox until cancelled; after an outage fetch the messages to all jobs."""
        bus, family, after = self._worker.bus, self._worker.family, ""
        while True:
            try:
                if not after:
                    after = await bus.control.last(family)
                    for job in self._jobs.values():
                        self.look(job)
                after, names = await bus.control.named(family, after)
            except (BusDown, BusFull):
                after = ""
                await asyncio.sleep(_RETRY_S)
                continue
            for name in names:
                if (named := self._jobs.get(name)) is not None:
                    self.look(named)
                    self._emit()

    async def fetch(self) -> None:
        """Fetch the messages to requested jobs until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            asked, self._asked = self._asked, {}
            heard = await asyncio.gather(
                *(self._hear(job) for job in asked.values()), return_exceptions=True
            )
            for job, error in zip(asked.values(), heard, strict=True):
                if isinstance(error, BusDown | BusFull):
                    self.look(job)
                elif error is not None:
                    raise error
            if self._asked:
                await asyncio.sleep(_RETRY_S)

    async def _hear(self, job: GenerationJob) -> None:
        found = await self._worker.bus.control.state(job.id)
        if job.extensions.hear(found, len(job.choices[0].tokens)):
            self._needs(job)

    # -- taking effect ---------------------------------------------------------------------------------

    def reached(self, job: GenerationJob) -> None:
        """Check whether a generation has reached its boundary, and if so act before the next step."""
        choice = job.choices[0]
        if choice.finish is None and choice.room <= 0:
            self._needs(job)

    def _needs(self, job: GenerationJob) -> None:
        if self._jobs.get(job.id) is job:
            self._due[job.id] = job
            self._engine.recall()
            self._engine.wake()

    @property
    def pending(self) -> bool:
        """True if changes must be applied before the next step is planned."""
        return bool(self._due)

    def waits(self, job: GenerationJob) -> bool:
        """Return whether a job gets no tokens, since it is paused or waits for an extension."""
        return job.extensions.paused or job.extensions.waits_since_s is not None

    def apply(self) -> None:
        """Apply messages; no step may be in flight."""
        due, self._due = self._due, {}
        for job in due.values():
            if self._jobs.get(job.id) is job and not job.over:
                self._apply(job)

    def _apply(self, job: GenerationJob) -> None:
        extensions, choice = job.extensions, job.choices[0]
        tokens = len(choice.tokens)
        extension = extensions.next(tokens)
        if extension is not None:
            self._extend(job, extension)
        if tokens == extensions.boundary and extensions.heard:
            self._at_boundary(job, waits=extension is None and extensions.waits(tokens))
        if extensions.paused:
            self._engine.pause(job.generation)
        else:
            self._engine.resume(job.generation)

    def _at_boundary(self, job: GenerationJob, *, waits: bool) -> None:
        extensions, now_s = job.extensions, self._clock.monotonic()
        if waits:
            if extensions.waits_since_s is None:
                extensions.waits_since_s = now_s
                self._emit()  # the next extension may depend on the present tokens
            return
        since_s = now_s if extensions.waits_since_s is None else extensions.waits_since_s
        self._metrics.extension_wait.observe(now_s - since_s)
        extensions.waits_since_s = None
        extensions.passes()
        job.choices[0].boundary = extensions.boundary

    def _extend(self, job: GenerationJob, extension: Extend) -> None:
        """Extend a prompt, or log the reason for leaving it unchanged."""
        choice, extensions = job.choices[0], job.extensions
        prompt = extension.prompt(extensions.admitted)
        problem = self._problem(job, extension, prompt) if extension.changes else ""
        if problem:
            _log.warning("extension_refused", job=job.id, number=extension.number, why=problem)
            extension = Extend(number=extension.number)
        elif extension.changes and _differs(choice.sequence, prompt, extension):
            computed = self._engine.rewrite(choice, prompt, extension.spans)
            self._metrics.extension_tokens.labels("computed").inc(computed)
            self._metrics.extension_tokens.labels("kept").inc(choice.sequence.length - computed)
        extensions.apply(len(choice.tokens), extension)
        outcome = "refused" if problem else "changed" if extension.changes else "unchanged"
        self._metrics.extensions.labels(outcome).inc()
        self._emit()

    def _problem(self, job: GenerationJob, extension: Extend, prompt: list[int]) -> str:
        """Return why an extension cannot be applied; empty if it can."""
        shape, work = self._engine.executor.shape, job.work
        admitted = len(job.extensions.admitted)
        history = 0 if work.turn is None else work.turn.history
        start, end = extension.start, extension.start + extension.removed
        if len(job.choices) != 1:
            return f"the job has {len(job.choices)} choices: only the prompt of a single one is extended"
        if not history <= start <= end <= admitted:
            return f"it replaces tokens {start} to {end}: expected {history} to {admitted} (a session's history stays)"
        if not prompt or not all(0 <= token < shape.vocabulary for token in extension.tokens):
            return f"expected a prompt of tokens from 0 to {shape.vocabulary - 1}"
        if extension.spans:
            if not self._engine.executor.precomputes:
                return f"model {self._engine.executor.name} cannot compute passages alone on this worker"
            if problem := span_problem(extension.spans, len(prompt)):
                return problem
        most = len(prompt) + work.max_new
        if most > shape.context:
            return (
                f"the prompt would have {len(prompt)} tokens and max_new is {work.max_new}: "
                f"the model takes {shape.context} in all"
            )
        sequence = TokenSequence(job.id, 0, 0, prompt, root=job.choices[0].sequence.root, most=most)
        if not self._engine.scheduler.fits(sequence):
            return f"{most} tokens (prompt and max_new) need more pages than there are"
        return ""


def _differs(sequence: TokenSequence, prompt: list[int], extension: Extend) -> bool:
    """Return whether an extension's prompt, or the passages computed alone in it, are not those in force."""
    return prompt != sequence.prompt or extension.spans != sequence.spans
