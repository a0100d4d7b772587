"""One request of several jobs while this router leases it: admits its jobs as lanes have room, and gathers them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from common.bus import Bus, NewJob, Notifications
from common.bus.events import Subscription
from common.bus.metrics import lane_label
from common.errors import DeadlineExceeded, SpillwayError, Unavailable
from common.ids import Family, child_id, family_of
from common.registry.sessions import Sessions
from common.wire.results import Event, Result
from common.worker.leases import Lease
from services.router import metrics
from services.router.admission.policy import LanePolicy
from services.router.admission.refusals import refusal
from services.router.cards import Cards
from services.router.queue.room import Place, Room
from services.router.responses.outcomes import error_of, result_of
from services.router.text.pool import TextPool
from services.router.text.requests import Parcel

_AT_ONCE = 64
BULK_SHARE = 0.5


class WorkflowContext(msgspec.Struct, frozen=True):
    """What stages work with; `used` notes when a family was last asked for, by the clock's monotonic()."""

    policy: LanePolicy

    bus: Bus
    journal: Notifications
    cards: Cards
    pool: TextPool
    search_ack: int
    used: dict[Family, float]
    room: Room


class Workflow:
    """A leased request; stages call `gather` for their jobs and `report` their progress."""

    def __init__(self, tools: WorkflowContext, lease: Lease, tenant: str, logged: int) -> None:
        self.tools, self.lease, self.tenant = tools, lease, tenant
        self.request = lease.job
        self.session = ""  # whose request it is: its jobs are deleted with the session
        self.index = logged
        self.news: bytes | None = None
        self.on_cancel: Callable[[], Awaitable[None]] | None = None
        self.poke: Callable[[], None] = lambda: None
        self._open: set[str] = set()

    @property
    def deadline_ms(self) -> int:
        """When the request's client stops waiting."""
        return self.lease.deadline_ms

    def report(self, stage: str, done: int, total: int) -> None:
        """Say how far the request is; the next step logs it."""
        self.news = msgspec.json.encode({"stage": stage, "done": done, "total": total})

    def tell(self, stage: str, **news: Any) -> None:
        """Say at once what others wait for; the step that logs it comes now."""
        self.news = msgspec.json.encode({"stage": stage, **news})
        self.poke()

    def owns(self, job: str) -> None:
        """Count a job as this request's before it is admitted: a cancellation meets it, whoever admitted it."""
        self._open.add(job)

    def event(self) -> Event | None:
        """Return the progress not yet logged, if any."""
        if self.news is None:
            return None
        event = Event(index=self.index, kind="progress", data=self.news)
        self.news = None
        return event

    async def gather(
        self,
        stage: str,
        families: Sequence[Family],
        classes: Sequence[str],
        parcels: Sequence[Parcel],
        *,
        most: int = _AT_ONCE,
        bulk: bool | None = None,
        whole: bool = False,
    ) -> tuple[list[str], list[Result]]:
        """Run one job per parcel (in families[i % n]) and return their ids and results, in order.

        Jobs enter as lanes have room, woken when it appears, until the deadline; a repeated stage finds the jobs that
        exist. The first error cancels the rest. `bulk` (by default: more than one parcel) leaves half of each lane to
        single requests. With `whole` all enter at once, each where it fits, or the request is refused.
        """
        share = BULK_SHARE if (len(parcels) > 1 if bulk is None else bulk) else 1.0
        ids = [
            child_id(self.request, families[i % len(families)], stage, i)
            for i in range(len(parcels))
        ]
        results: dict[int, Result] = {}
        waiting: dict[asyncio.Task[Event], int] = {}
        bells: dict[str, Subscription] = {}
        following = 0
        place: Place | None = None
        if whole:
            await self._admit_whole(ids, classes, parcels)
        try:
            while following < len(ids) or waiting:
                refused = False
                if following < len(ids) and len(waiting) < most:
                    job = ids[following]
                    bells[job] = self.tools.journal.bell(job, family_of(job))
                    place = place or self.tools.room.place(family_of(job), share)
                    place.look()
                    outcome = await self._admit(job, classes, parcels[following], share)
                    if outcome != "admitted":
                        bells.pop(job).close()
                    if outcome != "refused":
                        ending = self.tools.journal.end(job, self.deadline_ms, bells.get(job))
                        waiting[asyncio.create_task(ending)] = following
                        following += 1
                        place.leave()
                        place = None
                        continue
                    refused = True
                await self._collect(waiting, results, place if refused else None)
                if len(ids) > 1:
                    self.report(stage, len(results), len(ids))
        finally:
            for task in waiting:
                task.cancel()
            for bell in bells.values():
                bell.close()
            if place is not None:
                place.leave()
        self._open -= set(ids)
        return ids, [results[i] for i in range(len(ids))]

    async def _admit(self, job: str, classes: Sequence[str], parcel: Parcel, share: float) -> str:
        if self.tools.bus.clock.now_ms() >= self.deadline_ms:
            raise DeadlineExceeded("the deadline passed before the request's last job was admitted")
        self._open.add(job)
        self.tools.used[family_of(job)] = self.tools.bus.clock.monotonic()
        try:
            if self.session:
                await Sessions(self.tools.bus).note_job(self.session, job, self.request)
            admission = await self.tools.bus.admission.admit(
                [NewJob(job, parcel.payload, parcel.items, parcel.tokens)],
                classes=self.tools.policy.classes(classes),
                terms=self.tools.policy.terms(classes),
                router=self.tools.journal.router,
                tenant=self.tenant,
                deadline_ms=self.deadline_ms,
                share=share,
                waits=True,
            )
        except Unavailable:
            return "refused"
        if admission.outcome == "exists":
            await self.tools.bus.jobs.adopt(job, self.tools.journal.router)
        elif admission.outcome == "admitted":
            metrics.ADMITTED.labels(lane_label(family_of(job), admission.lane)).inc()
        return admission.outcome

    async def _admit_whole(
        self, ids: Sequence[str], classes: Sequence[str], parcels: Sequence[Parcel]
    ) -> None:
        """Admit all jobs in one step; what is refused then raises. Each is found as existing afterwards."""
        self._open.update(ids)
        tools = self.tools
        admission = await tools.bus.admission.admit(
            [
                NewJob(job, p.payload, p.items, p.tokens)
                for job, p in zip(ids, parcels, strict=True)
            ],
            classes=tools.policy.classes(classes),
            terms=tools.policy.terms(classes),
            router=tools.journal.router,
            tenant=self.tenant,
            deadline_ms=self.deadline_ms,
            spread=True,
        )
        if admission.outcome == "refused":
            raise refusal(admission.reason, admission.retry_after_s)
        for job in ids if admission.outcome == "admitted" else ():
            if (state := await tools.bus.jobs.get(job)) is not None:
                metrics.ADMITTED.labels(lane_label(family_of(job), state.lane)).inc()

    async def _collect(
        self,
        waiting: dict[asyncio.Task[Event], int],
        results: dict[int, Result],
        place: Place | None,
    ) -> None:
        """Wait for a job's end, or at `place` for room; keep the results there are."""
        awaited: set[asyncio.Task[Any]] = set(waiting)
        turn = None
        if place is not None:
            left_s = (self.deadline_ms - self.tools.bus.clock.now_ms()) / 1000
            turn = asyncio.create_task(place.wait(left_s))
            awaited.add(turn)
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if turn is not None:
                turn.cancel()
        for task in [task for task in waiting if task.done()]:
            event = task.result()
            if event.kind == "cancelled":
                raise error_of(event)
            results[waiting.pop(task)] = result_of(event)

    async def cancel_jobs(self) -> None:
        """Cancel every job of this request that may still run."""
        for job in list(self._open):
            try:
                await self.tools.bus.control.cancel(job)
            except SpillwayError:
                return
        self._open.clear()
