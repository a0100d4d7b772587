"""Tells the bus what the jobs have come to, beside the steps: pieces of answers together, and each job's end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from common import log
from common.bus import BusDown, BusFull
from common.tasks import wait
from common.worker.worker import Worker
from services.adapters.generate.cache_directory import CacheAnnouncer
from services.adapters.generate.event_log import EventLog
from services.adapters.generate.job import GenerationJob
from services.adapters.generate.metrics import EngineMetrics

TOGETHER_S = 0.008  # for which pieces wait for each other, unless an answer begins or ends
_WAIT_S = 1.0
_RETRY_S = 0.2
_log = log.get("engine")


class OutputEmitter:
    """Tells of all `jobs`; those that are over, or ended elsewhere, `leave`.

    `steps` were computed, the tokens of `acked` of them are acknowledged: of the first so many.
    """

    def __init__(
        self,
        worker: Worker,
        emitter: EventLog,
        holding: CacheAnnouncer,
        metrics: EngineMetrics,
        jobs: Mapping[str, GenerationJob],
        leave: Callable[[GenerationJob], None],
    ) -> None:
        self._worker, self._emitter, self._holding = worker, emitter, holding
        self._metrics, self._jobs, self._leave = metrics, jobs, leave
        self.steps = self.acked = 0
        self._ending: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()  # something to tell or to ask the bus
        self._hurry = asyncio.Event()  # and somebody waits for it
        self._heard = asyncio.Event()  # the bus has acknowledged

    @property
    def behind(self) -> int:
        """Steps that are not acknowledged."""
        return self.steps - self.acked

    def stepped(self) -> None:
        """Note that a step has ended."""
        self.steps += 1
        self._news.set()

    def hurry(self) -> None:
        """Let nothing wait for more to come with it: an answer begins or ends."""
        self._hurry.set()

    def now(self) -> None:
        """Tell what there is to tell, now."""
        self._hurry.set()
        self._news.set()

    async def acknowledged(self, seconds: float) -> None:
        """Wait until the bus acknowledges something, at most so long."""
        self._hurry.set()
        self._heard.clear()
        await wait(self._heard, seconds)

    def halt(self) -> None:
        """Let nobody wait for the bus any more."""
        self._heard.set()

    async def run(self) -> None:
        """Tell until cancelled; while the bus is away, try again a little later."""
        told_at = 0.0
        while True:
            await wait(self._news, _WAIT_S)
            if not self._news.is_set():
                continue
            if (left := told_at + TOGETHER_S - time.monotonic()) > 0:
                await wait(self._hurry, left)
            told_at = time.monotonic()
            self._news.clear()
            self._hurry.clear()
            jobs = [job for job in self._jobs.values() if not job.ending]
            # Events made before this call lack what came since: then it acknowledges nothing new, and another follows.
            repeated = any(job.emitting is not None for job in jobs)
            steps = self.acked if repeated else self.steps
            try:
                stopped = await self._emitter.emit(jobs)
            except (BusDown, BusFull):
                self._news.set()
                await asyncio.sleep(_RETRY_S)
                continue
            self.acked = steps
            if repeated:
                self._news.set()
            for job in jobs:
                if job.id in stopped:
                    self._leave(job)
            self._end_those_over(jobs)
            self._heard.set()

    async def flush(self, seconds: float) -> None:
        """Tell what the last steps gave, if the bus can be reached, for at most so long."""
        self._news.set()
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up and self._worker.bus.connection.reachable:
            waiting = any(job.event() is not None for job in self._jobs.values() if not job.ending)
            if not waiting and not self._ending:
                return
            self._heard.clear()
            await wait(self._heard, 0.1)

    async def close(self) -> None:
        """Give up the ends that are under way."""
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _end_those_over(self, jobs: Iterable[GenerationJob]) -> None:
        for job in jobs:
            if self._jobs.get(job.id) is not job or not job.over:
                continue
            if job.event() is not None:
                self.now()  # its last pieces came while the call was under way
                continue
            job.ending = True
            task = asyncio.create_task(self._end(job), name="end")
            self._ending.add(task)
            task.add_done_callback(partial(self._ended, job))

    def _ended(self, job: GenerationJob, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("job_not_ended", job=job.id, exc_info=error)
        self._leave(job)
        lease = self._worker.leases.held.get(job.id)
        if lease is not None and job.generation == self._worker.generation:
            self._worker.leases.let_go(lease)

    async def _end(self, job: GenerationJob) -> None:
        self._worker.leases.span(job.id).set_attributes(job.usage())
        if job.session and job.failure is None and job.refusal is None:
            await self._holding.ended(job.session, job.choices[0].sequence.ids)
        await self._emitter.end(job)
        if job.failure is None and job.refusal is None:
            result = job.result()
            self._metrics.work.cached.inc(result.cached_tokens)
            self._metrics.work.input.inc(result.prompt_tokens - result.cached_tokens)
        self._leave(job)
        await self._holding.mark(job.choices[0].sequence.ids)
