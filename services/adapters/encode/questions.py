"""The loop of searches' questions: computes them as soon as they arrive, beside the batches of the embedding loop.

A search waits for its question, which has few tokens; a batch takes as long as a hundred questions. So on a CPU
questions have a thread of their own, and the system divides the cores; on an accelerator they are the device's next
task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from common.bus import BusDown
from common.clock import Clock
from common.tasks import wait
from common.worker.worker import Worker
from engine.device import DeviceQueue
from engine.encoder.batching import BatchLimits, next_batch
from engine.encoder.capacity import EncoderCapacity
from engine.encoder.model import EncoderModel
from services.adapters.encode.batch import record_batch, take_batch
from services.adapters.encode.ends import end_jobs, expire
from services.adapters.encode.job import EncodeJob, run_jobs
from services.adapters.encode.running_steps import RunningSteps
from services.adapters.metrics import LaneMetrics

_SHARE = 8  # questions that run together have at most 1/_SHARE of the largest batch's tokens
_WAIT_S = 1.0


class QuestionDevice(NamedTuple):
    """The model as questions use it, and the queue of the thread that computes them."""

    model: EncoderModel
    queue: DeviceQueue


class QuestionLoop:
    """Computes the questions that it is given, all that wait at once, in the order of their arrival."""

    def __init__(
        self,
        worker: Worker,
        device: QuestionDevice,
        capacity: EncoderCapacity,
        *,
        clock: Clock,
        metrics: LaneMetrics,
        steps: RunningSteps,
    ) -> None:
        self._worker, self._device, self._capacity = worker, device, capacity
        self._clock, self._metrics, self._steps = clock, metrics, steps
        self._waiting: deque[EncodeJob] = deque()
        self._arrived = asyncio.Event()
        self._stopping = False

    def takes(self, job: EncodeJob) -> bool:
        """Return whether a job is a question, and small enough to hold up nobody."""
        return job.question and job.tokens <= self._limits.tokens

    def add(self, job: EncodeJob) -> None:
        """Take a question over."""
        self._waiting.append(job)
        self._arrived.set()

    def stop(self) -> None:
        """Begin nothing more; `run` returns once the running questions have ended."""
        self._stopping = True
        self._arrived.set()

    async def run(self) -> None:
        """Compute questions until told to stop."""
        while not self._stopping:
            self._arrived.clear()
            if jobs := await self._next():
                await self._compute(jobs)
            elif not self._waiting:
                await wait(self._arrived, _WAIT_S)

    @property
    def _limits(self) -> BatchLimits:
        largest = self._capacity.limits
        return BatchLimits(largest.items, largest.tokens // _SHARE)

    async def _next(self) -> list[EncodeJob]:
        """Take the next questions; drop those of lost leases, and end those whose deadline has passed."""
        taken = take_batch(
            self._waiting,
            lambda jobs: next_batch(jobs, self._limits),
            generation=self._worker.generation,
            now_ms=self._clock.now_ms(),
        )
        self._waiting = taken.waiting
        await expire(self._worker, taken.expired)
        return taken.batch

    async def _compute(self, jobs: Sequence[EncodeJob]) -> None:
        """Compute questions and end them; their times teach the cost model nothing, since they share the cores."""
        metrics, began_s = self._metrics, self._clock.monotonic()
        items, tokens = sum(job.items for job in jobs), sum(job.tokens for job in jobs)
        predicted_s = self._capacity.expected(items, tokens)
        span = self._worker.leases.spans.batch(job.lease for job in jobs)
        asking = asyncio.create_task(self._ask(jobs), name="ask")
        self._steps.begin("questions", predicted_s)
        device = self._device
        ran = await device.queue.run(run_jobs, device.model, jobs, kind="question")
        self._steps.end("questions")
        span.end()
        for job in jobs:
            metrics.batch_wait.observe(began_s - job.read_s)
        record_batch(metrics, items, tokens, ran)
        self._worker.incarnation.ran(items, tokens, self._clock.monotonic() - began_s)
        await end_jobs(self._worker, jobs, ran, await asking)
        now_ms = self._clock.now_ms()
        metrics.missed.inc(sum(job.due_ms < now_ms for job in jobs))

    async def _ask(self, jobs: Sequence[EncodeJob]) -> set[str]:
        """Return the jobs that were cancelled or fenced off."""
        try:
            return await self._worker.outbox.emit([job.lease for job in jobs])
        except BusDown:
            return set()  # the results are fenced when written
