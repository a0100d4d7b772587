"""The jobs of one stage of a workflow: submitted as lanes have room, awaited, and their results kept in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from common.bus import NewJob
from common.bus.events import Subscription
from common.errors import DeadlineExceeded, Unavailable
from common.ids import family_of
from common.wire.results import Event, Result
from services.router.admission.job_spec import Prompt, RequestContext
from services.router.admission.queue import Ticket
from services.router.admission.refusals import refusal
from services.router.responses.outcomes import error_of, result_of
from services.router.workflows.context import WorkflowContext

_AT_ONCE = 64  # jobs of one stage that are in lanes at the same time


class JobGroup:
    """One stage's jobs, run once.

    `own` is awaited with each job's id before the job is submitted; `report` is called with the count of results.
    """

    def __init__(
        self,
        context: WorkflowContext,
        caller: RequestContext,
        jobs: Sequence[NewJob],
        classes: Sequence[str],
        *,
        prompt: Prompt,
        own: Callable[[str], Awaitable[None]],
        report: Callable[[int], None],
    ) -> None:
        self._context, self._caller = context, caller
        self._jobs, self._classes = jobs, classes
        self._prompt, self._own, self._report = prompt, own, report
        self._submitted = 0
        self._waiting: dict[asyncio.Task[Event], int] = {}
        self._subscriptions: list[Subscription] = []
        self._results: dict[int, Result] = {}
        self._ticket: Ticket | None = None

    async def submit_whole(self) -> None:
        """Submit all jobs in one step, each to the first lane with room for it; raise the refusal of them all.

        `run` then finds that the jobs exist.
        """
        admission = await self._context.admission.submit(
            self._caller, self._jobs, self._classes, prompt=self._prompt, spread=True
        )
        if admission.outcome == "refused":
            raise refusal(admission.reason, admission.retry_after_s)

    async def run(self) -> list[Result]:
        """Submit the jobs as lanes have room, and return their results in order; raise the first error."""
        try:
            while self._submitted < len(self._jobs) or self._waiting:
                more = self._submitted < len(self._jobs) and len(self._waiting) < _AT_ONCE
                if more and await self._submit_next():
                    continue
                await self._collect()
                self._report(len(self._results))
        finally:
            for task in self._waiting:
                task.cancel()
            for subscription in self._subscriptions:
                subscription.close()
            self._leave_queue()
        return [self._results[i] for i in range(len(self._jobs))]

    async def _submit_next(self) -> bool:
        """Submit the next job; return False, with a ticket in the queue, if lanes have no room."""
        context, job = self._context, self._jobs[self._submitted]
        if context.bus.clock.now_ms() >= self._caller.deadline_ms:
            raise DeadlineExceeded("the deadline passed before the request's last job was admitted")
        family = family_of(job.id)
        subscription = context.notifications.bell(job.id, family)
        self._subscriptions.append(subscription)
        self._ticket = self._ticket or Ticket(context.admission.queue, family, self._caller.share)
        self._ticket.begin()
        outcome = await self._outcome(job)
        if outcome != "admitted":  # then the log is read at once: the job may have ended already
            self._subscriptions.pop().close()
        if outcome == "refused":
            return False
        known = subscription if outcome == "admitted" else None
        ending = context.notifications.end(job.id, self._caller.deadline_ms, known)
        self._waiting[asyncio.create_task(ending)] = self._submitted
        self._submitted += 1
        self._leave_queue()
        return True

    async def _outcome(self, job: NewJob) -> str:
        """Submit a job; return "admitted", "exists" or "refused"; "refused" also while Redis is away."""
        try:
            await self._own(job.id)
            admission = await self._context.admission.submit(
                self._caller, [job], self._classes, prompt=self._prompt, waits=True
            )
        except Unavailable:
            return "refused"
        return admission.outcome

    async def _collect(self) -> None:
        """Wait until a job has ended, or until there may be room for a refused job; keep the results."""
        awaited: set[asyncio.Task[Any]] = set(self._waiting)
        turn = None
        if self._ticket is not None:
            left_s = (self._caller.deadline_ms - self._context.bus.clock.now_ms()) / 1000
            turn = asyncio.create_task(self._ticket.wait(left_s))
            awaited.add(turn)
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if turn is not None:
                turn.cancel()
        for task in [task for task in self._waiting if task.done()]:
            event = task.result()
            if event.kind == "cancelled":
                raise error_of(event)
            self._results[self._waiting.pop(task)] = result_of(event)

    def _leave_queue(self) -> None:
        if self._ticket is not None:
            self._ticket.leave()
            self._ticket = None
