"""Brings what was generated into the logs, one call at a time, and learns with each call which jobs to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.bus import BusDown
from common.wire.results import Event
from common.wire.sessions import SessionTurn, Turn
from common.worker.leases import Lease
from common.worker.worker import Worker
from services.adapters.generate.job import GenerationJob


class EventLog:
    """One family's events of one worker."""

    def __init__(self, worker: Worker, now_ms: Callable[[], int]) -> None:
        self._worker = worker
        self._now_ms = now_ms

    async def emit(self, jobs: Iterable[GenerationJob]) -> set[str]:
        """Log what is new of each job, in one event per job; return the jobs to stop: ended elsewhere or cancelled.

        Jobs with nothing new are asked for too, so that a cancelled prompt stops as soon as an answer. Raises
        BusDown; the events are then kept as they are for the next call, which may find them logged already.
        """
        listed, lost = [], set()
        for job in jobs:
            if self._lease(job) is not None:
                listed.append(job)
            else:
                lost.add(job.id)
        events: dict[str, Event] = {}
        folding = []
        for job in listed:
            if (found := job.event()) is not None:
                events[job.id], fold = found
                if fold:
                    folding.append(job)
        plain = [job for job in listed if job not in folding]
        by_id = {job.id: job for job in listed}
        stopped = set(lost)
        for group, fold in ((plain, False), (folding, True)):
            if group:
                stopped |= await self._step(group, events, by_id, fold=fold)
        return stopped

    async def _step(
        self,
        group: list[GenerationJob],
        events: dict[str, Event],
        by_id: dict[str, GenerationJob],
        *,
        fold: bool,
    ) -> set[str]:
        def partial(lease: Lease) -> tuple[Turn, SessionTurn] | None:
            job = by_id[lease.job]
            turn = job.turn(self._now_ms(), partial=True)
            return (turn, job.work.turn) if turn is not None and job.work.turn else None

        leases = [lease for job in group if (lease := self._lease(job)) is not None]
        mine = {lease.job: events[lease.job] for lease in leases if lease.job in events}
        stopped = await self._worker.outbox.emit(leases, mine, fold=fold, partial=partial)
        for lease in leases:
            if lease.job in mine and lease.job not in stopped:
                by_id[lease.job].acknowledged()
        return stopped

    async def end(self, job: GenerationJob) -> str:
        """End a job whose events are all logged; the verdict, "fenced" if the bus stayed away."""
        lease = self._lease(job)
        if lease is None:
            return "fenced"
        try:
            if job.failure is not None:
                return await self._worker.outbox.fail(lease, *job.failure)
            turn, session = job.turn(self._now_ms()), job.work.turn
            if job.refusal is not None:
                kept = job.turn(self._now_ms(), partial=True) if _keeps(session) else None
                index = job.next_index
                return await self._worker.outbox.refuse(
                    lease, job.refusal, index=index, turn=kept, session=session
                )
            return await self._worker.outbox.finish(
                lease, job.result(), index=job.next_index, turn=turn, session=session
            )
        except BusDown:
            return "fenced"  # the heartbeat is lost by now: another worker will have it

    async def give_back(self, jobs: Iterable[GenerationJob]) -> None:
        """Hand over jobs that have not begun, uncharged."""
        leases = [lease for job in jobs if (lease := self._lease(job)) is not None]
        if leases:
            await self._worker.outbox.give_back(leases)

    def _lease(self, job: GenerationJob) -> Lease | None:
        """Return the lease a job runs under; None if it was lost, even if the same job was leased again since."""
        current = job.generation == self._worker.generation
        return self._worker.leases.held.get(job.id) if current else None


def _keeps(session: SessionTurn | None) -> bool:
    return session is not None and session.keep_partial
