"""The output emitter: sends the output of generations to the bus beside the steps, and ends finished jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from common import log
from common.bus import BusDown, BusFull
from common.clock import Clock
from common.tasks import cancel, wait
from common.wire.results import Event
from common.worker.leases import Lease
from common.worker.outbox import SessionPart
from common.worker.worker import Worker
from services.adapters.generate.cache_announcer import CacheAnnouncer
from services.adapters.generate.job import GenerationJob
from services.adapters.generate.metrics import EngineMetrics

# Output is collected, since each event costs the bus, the router and the client a millisecond of a core that could
# compute. It waits for `TOGETHER` tokens and `LEAST_S`, at most `MOST_S`. An answer that begins or ends does not wait,
# and takes the output of the others with it if theirs was last sent `SOON_S` ago.
TOGETHER, LEAST_S, SOON_S, MOST_S = 4, 0.008, 0.03, 0.1
_WAIT_S = 1.0
_RETRY_S = 0.2
_log = log.get("engine")


class OutputEmitter:
    """Sends the events of all `jobs` in few calls; calls `leave` with jobs that are over or were ended elsewhere.

    `tokens` is the number of tokens that each sequence got; the bus has acknowledged the first `acked` of them.
    """

    def __init__(
        self,
        worker: Worker,
        announcer: CacheAnnouncer,
        metrics: EngineMetrics,
        jobs: Mapping[str, GenerationJob],
        leave: Callable[[GenerationJob], None],
        clock: Clock,
    ) -> None:
        self._worker, self._announcer, self._metrics = worker, announcer, metrics
        self._jobs, self._leave, self._clock = jobs, leave, clock
        self.tokens = self.acked = 0
        self._sent_s = 0.0  # when the output of all jobs was last sent
        self._urgent: set[str] = set()  # jobs whose answers begin or end
        self._all = False  # the next call sends the output of all jobs
        self._ending: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()  # set: output to send, or a question to the bus
        self._hurry = asyncio.Event()  # set: some output is to be sent without collecting more
        self._heard = asyncio.Event()  # set: the bus has acknowledged output

    @property
    def behind(self) -> int:
        """The number of each sequence's tokens that are not acknowledged."""
        return self.tokens - self.acked

    def stepped(self, tokens: int) -> None:
        """Record the end of a step that gave each sequence `tokens` tokens."""
        self.tokens += tokens
        self._news.set()
        if self.behind >= TOGETHER and self._clock.monotonic() >= self._sent_s + LEAST_S:
            self.now()

    def hurry(self, job: str) -> None:
        """Send a job's next output without collecting more, since its answer begins or ends."""
        self._urgent.add(job)
        self._hurry.set()
        self._news.set()

    def now(self) -> None:
        """Send the pending output of all jobs at once, and ask the bus for jobs to stop."""
        self._all = True
        self._hurry.set()
        self._news.set()

    async def acknowledged(self, seconds: float) -> None:
        """Wait up to `seconds` until the bus acknowledges output."""
        self.now()
        self._heard.clear()
        await wait(self._heard, seconds)

    def halt(self) -> None:
        """End all waits for acknowledgements."""
        self._heard.set()

    async def run(self) -> None:
        """Send output until cancelled; while the bus is away, pause between tries."""
        while True:
            await wait(self._news, _WAIT_S)
            if not self._news.is_set():
                continue
            if (left := self._sent_s + MOST_S - self._clock.monotonic()) > 0:
                await wait(self._hurry, left)
            jobs, whole = self._due()
            # Repeated events lack newer tokens: then this call acknowledges no token, and another call follows.
            repeated = any(job.emitting is not None for job in jobs)
            tokens = self.tokens if whole and not repeated else self.acked
            try:
                stopped = await self._emit(jobs)
            except (BusDown, BusFull):
                self._news.set()
                await asyncio.sleep(_RETRY_S)
                continue
            self.acked = tokens
            if repeated:
                self._news.set()
            for job in jobs:
                if job.id in stopped:
                    self._leave(job)
            self._end_those_over(jobs)
            self._heard.set()

    def _due(self) -> tuple[list[GenerationJob], bool]:
        """Return the jobs whose output is sent now, and whether these are all, not only those that begin or end."""
        now_s, urgent = self._clock.monotonic(), self._urgent
        self._hurry.clear()
        self._urgent = set()
        jobs = [job for job in self._jobs.values() if not job.ending]
        if not self._all and now_s < self._sent_s + SOON_S:
            return [job for job in jobs if job.id in urgent], False
        self._sent_s, self._all = now_s, False
        self._news.clear()
        return jobs, True

    async def flush(self, seconds: float) -> None:
        """Send the output of the last steps within `seconds`, while the bus can be reached."""
        self._news.set()
        give_up = self._clock.monotonic() + seconds
        while self._clock.monotonic() < give_up and self._worker.bus.connection.reachable:
            waiting = any(job.event() is not None for job in self._jobs.values() if not job.ending)
            if not waiting and not self._ending:
                return
            self._heard.clear()
            await wait(self._heard, 0.1)

    async def give_back(self, jobs: Iterable[GenerationJob]) -> None:
        """Return jobs to the lane, uncharged."""
        leases = [lease for job in jobs if (lease := self._lease(job)) is not None]
        if leases:
            await self._worker.outbox.give_back(leases)

    async def close(self) -> None:
        """Cancel the calls that end jobs."""
        await cancel(*self._ending)

    # -- events ----------------------------------------------------------------------------------------

    async def _emit(self, jobs: Iterable[GenerationJob]) -> set[str]:
        """Log the new output of each job in one event; return the jobs to stop: ended elsewhere or cancelled.

        Jobs without new output are included, so that a job cancelled during its prompt stops as early as during its
        answer. After BusDown the next call sends the same events again, and may find them logged already.
        """
        plain: list[GenerationJob] = []
        folding: list[GenerationJob] = []
        stopped: set[str] = set()
        for job in jobs:
            if self._lease(job) is None:
                stopped.add(job.id)
            else:
                found = job.event()
                (folding if found is not None and found[1] else plain).append(job)
        for group, fold in ((plain, False), (folding, True)):
            if group:
                stopped |= await self._emit_group({job.id: job for job in group}, fold=fold)
        return stopped

    async def _emit_group(self, jobs: Mapping[str, GenerationJob], *, fold: bool) -> set[str]:
        def partial_turn(lease: Lease) -> SessionPart | None:
            return jobs[lease.job].turn(self._clock.now_ms(), partial=True)

        leases = [lease for job in jobs.values() if (lease := self._lease(job)) is not None]
        events: dict[str, Event] = {}
        for lease in leases:
            if (found := jobs[lease.job].event()) is not None:
                events[lease.job] = found[0]
        stopped = await self._worker.outbox.emit(leases, events, fold=fold, partial=partial_turn)
        for job in events:
            if job not in stopped and (number := jobs[job].acknowledged()):
                with contextlib.suppress(
                    BusDown, BusFull
                ):  # a later extension removes the message, too
                    await self._worker.bus.control.taken(job, number)
        return stopped

    def _lease(self, job: GenerationJob) -> Lease | None:
        """Return the lease under which a job runs; None if it was lost, even if the same job was leased again."""
        current = job.incarnation == self._worker.generation
        return self._worker.leases.held.get(job.id) if current else None

    # -- ends ------------------------------------------------------------------------------------------

    def _end_those_over(self, jobs: Iterable[GenerationJob]) -> None:
        for job in jobs:
            if self._jobs.get(job.id) is not job or not job.over:
                continue
            if job.event() is not None:
                self.now()  # the last output came during the call
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
        if (lease := self._lease(job)) is not None:
            self._worker.leases.let_go(lease)

    async def _end(self, job: GenerationJob) -> None:
        self._worker.leases.span(job.id).set_attributes(job.usage())
        done = job.failure is None and job.refusal is None
        if job.session and done:
            await self._announcer.ended(job.session, job.choices[0].sequence.ids)
        await self._end_on_bus(job)
        if done:
            result = job.result()
            self._metrics.work.cached.inc(result.cached_tokens)
            self._metrics.work.input.inc(result.prompt_tokens - result.cached_tokens)
        self._leave(job)
        await self._announcer.mark(job.choices[0].sequence.ids)

    async def _end_on_bus(self, job: GenerationJob) -> None:
        """End a job whose events are all logged; without the bus the lease is lost, and another worker gets the job."""
        lease = self._lease(job)
        if lease is None:
            return
        try:
            if job.failure is not None and job.refusal is None:
                await self._worker.outbox.fail(lease, *job.failure)
                return
            index, now_ms = job.next_index, self._clock.now_ms()
            if job.refusal is not None:
                keeps = job.work.turn is not None and job.work.turn.keep_partial
                part = job.turn(now_ms, partial=True) if keeps else None
                await self._worker.outbox.refuse(lease, job.refusal, index=index, part=part)
                return
            part = job.turn(now_ms)
            await self._worker.outbox.finish(lease, job.result(), index=index, part=part)
        except BusDown:
            return
