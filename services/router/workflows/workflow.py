"""A workflow: one request of several jobs, while this router leases it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from common.bus import NewJob
from common.errors import SpillwayError
from common.ids import Family, child_id
from common.registry.sessions import Sessions
from common.wire.results import Event, Result
from common.worker.leases import Lease
from services.router.admission.job_spec import NO_PROMPT, Prompt, RequestContext
from services.router.text.requests import Parcel
from services.router.workflows.context import WorkflowContext
from services.router.workflows.job_group import JobGroup
from services.router.workflows.progress import Progress, StageProgress, encode_progress
from services.router.workflows.timeline import StageTimeline

BULK_SHARE = 0.5  # the part of a lane's depth that the many jobs of one request may fill


def letters(number: int) -> str:
    """Return a number with letters for its digits (a for 0), since names of stages consist of letters."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


class Workflow:
    """A leased request: its steps `gather` jobs and `report` progress; a cancellation reaches all its jobs.

    `session`, where set, is the session whose deletion deletes the jobs too. `on_cancel` undoes the changes of a
    cancelled request; `on_progress` is called when progress must be logged at once. `index` is the next event's.
    `timeline` records when the stages ran. `ran` names the jobs whose results an `attached` request has read.
    """

    def __init__(self, context: WorkflowContext, lease: Lease, tenant: str, index: int) -> None:
        self.context, self.lease, self.tenant, self.index = context, lease, tenant, index
        self.request = lease.job
        self.session = ""
        self.attached = False
        self.ran: list[str] = []
        self.timeline = StageTimeline(context.bus.clock)
        self.on_cancel: Callable[[], Awaitable[None]] | None = None
        self.on_progress: Callable[[], None] | None = None
        self._progress: bytes | None = None
        self._jobs: set[str] = set()

    @property
    def deadline_ms(self) -> int:
        """The time at which the request's client stops waiting."""
        return self.lease.deadline_ms

    def caller(self, share: float = 1.0) -> RequestContext:
        """Return the caller of the request's jobs; a `share` below 1 leaves the rest of a lane to others."""
        return RequestContext(
            tenant=self.tenant, key=None, deadline_ms=self.deadline_ms, share=share
        )

    def report(self, progress: Progress, *, at_once: bool = False) -> None:
        """Keep progress for the next step to log; with `at_once` a step is made now."""
        self._progress = encode_progress(progress)
        if at_once and self.on_progress is not None:
            self.on_progress()

    def event(self) -> Event | None:
        """Return the progress that is not logged yet, as the next event."""
        if self._progress is None:
            return None
        event = Event(index=self.index, kind="progress", data=self._progress)
        self._progress = None
        self.index += 1
        return event

    async def gather(
        self,
        stage: str,
        families: Sequence[Family],
        classes: Sequence[str],
        parcels: Sequence[Parcel],
        *,
        bulk: bool | None = None,
        whole: bool = False,
        prompt: Prompt = NO_PROMPT,
    ) -> tuple[list[str], list[Result]]:
        """Run one job per parcel (in families[i % n]) and return their ids and results, in order.

        Jobs enter as lanes have room, until the deadline; a repeated stage finds the jobs that exist. The first error
        ends the stage. `bulk` (by default: more than one parcel) leaves half of each lane to single requests. With
        `whole` all jobs enter at once, each where it fits, or the request is refused. `prompt` is as in
        `AdmissionController.submit`.
        """
        share = BULK_SHARE if (len(parcels) > 1 if bulk is None else bulk) else 1.0
        jobs = [
            NewJob(child_id(self.request, families[i % len(families)], stage, i), *parcel)
            for i, parcel in enumerate(parcels)
        ]
        names = [job.id for job in jobs]

        def report(done: int) -> None:
            if len(jobs) > 1:
                self.report(StageProgress(stage, done, len(jobs)))

        caller = self.caller(1.0 if whole else share)
        group = JobGroup(
            self.context, caller, jobs, classes, prompt=prompt, own=self.own, report=report
        )
        if whole:
            self.claim(*names)
            await group.submit_whole()
        results = await group.run()
        self._jobs -= set(names)
        if self.attached:
            self.ran += names
        return names, results

    async def own(self, job: str) -> None:
        """Claim a job before its admission, so that a cancellation and the session's deletion reach the job."""
        self.claim(job)
        if self.session:
            await Sessions(self.context.bus).note_job(self.session, job, self.request)

    def claim(self, *jobs: str) -> None:
        """Count jobs as this request's: a cancellation reaches them, whoever admitted them."""
        self._jobs.update(jobs)

    async def cancel_jobs(self) -> None:
        """Cancel every job of this request that may still run."""
        for job in list(self._jobs):
            try:
                await self.context.bus.control.cancel(job)
            except SpillwayError:
                return
        self._jobs.clear()
