"""The stages of a grounded answer: find passages (see `retrieve`), generate.

Every stage's job id is a function of the request, so a router that takes over finds the jobs that exist and goes on.
The generate job's id and the passages are reported as the request's progress once the job is admitted. If the chat sets
an interval, passages are retrieved again while the generate job runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from common.bus import Admission, BusFull, NewJob
from common.errors import DeadlineExceeded
from common.ids import Family, child_id, family_of
from common.registry.sessions import Sessions
from common.wire.results import Event
from common.wire.search import Hit
from common.wire.sessions import Turn
from common.wire.workflows import GroundPlan, RequestResult
from services.router.admission.job_spec import Prompt
from services.router.admission.policy import GENERATE_CLASSES
from services.router.admission.queue import Ticket
from services.router.admission.refusals import refusal
from services.router.responses.outcomes import result_of
from services.router.text.chats import SessionHistory
from services.router.text.generations import GenerationSpec
from services.router.text.grounded import GroundedSpec, Unread, grounded, quoted, unread
from services.router.text.tokens import Spec
from services.router.workflows.embed import embed, encoder_of
from services.router.workflows.interval_retrieval import IntervalRetrieval
from services.router.workflows.progress import (
    GENERATE_STAGE,
    GroundedProgress,
    latest_grounded_progress,
)
from services.router.workflows.retrieve import Retrieved, retrieve
from services.router.workflows.session_history import session_history
from services.router.workflows.workflow import Workflow

_FIRST_S, _MOST_S = 0.05, 1.0  # first and longest pause while the session changes


async def ground(workflow: Workflow, plan: GroundPlan) -> RequestResult:
    """Answer a chat from the passages that a collection holds for it; the result names the generate job."""
    job = child_id(workflow.request, await _family(workflow, plan), GENERATE_STAGE, 0)
    workflow.claim(job)
    if plan.chat.session:
        await _note(workflow, plan.chat.session)
        workflow.session = plan.chat.session
    progress, prepared = None, None
    if workflow.index:  # another router ran the request before
        events = await workflow.context.bus.jobs.log(workflow.request)
        progress = latest_grounded_progress(events)
    repeated = plan.chat.retrieval is not None and plan.chat.retrieval.interval
    if progress is None or repeated:
        found = await retrieve(workflow, plan)
        quotable = await _quotable(workflow, plan, found)
        prepare = partial(_prepare, workflow, plan, job, found.hits, quotable)
        with workflow.timeline.stage("prompt"):
            prepared = await (_generate(workflow, job, prepare) if progress is None else prepare())
        if progress is None:
            retrieval = prepared.made.retrieval | found.told
            progress = GroundedProgress(job, await _timed(workflow, retrieval))
            workflow.report(progress, at_once=True)
    workflow.claim(progress.job)
    with workflow.timeline.stage(GENERATE_STAGE):
        result_of(await _outcome(workflow, plan, progress.job, prepared))
    retrieval = await _timed(workflow, progress.retrieval)
    info = {"view": msgspec.to_builtins(plan.options), "retrieval": retrieval}
    return RequestResult(jobs=[progress.job], info=info)


async def _timed(workflow: Workflow, retrieval: dict[str, Any]) -> dict[str, Any]:
    """Return a `retrieval` object with the times of the stages so far; times that it already has stay as they are."""
    state = await workflow.context.bus.jobs.get(workflow.request)
    accepted_ms = 0 if state is None else state.created_ms
    known = retrieval.get("stages", [])
    told = {(stage["name"], stage.get("nth", 0)) for stage in known}
    times = [
        time for time in workflow.timeline.times(accepted_ms) if (time.name, time.nth) not in told
    ]
    return {**retrieval, "stages": [*known, *(msgspec.to_builtins(time) for time in times)]}


class _Prepared(NamedTuple):
    """A grounded chat's generate job, and the model and the history that its prompt was made with."""

    made: GroundedSpec
    spec: Spec
    history: SessionHistory | None


async def _outcome(
    workflow: Workflow, plan: GroundPlan, job: str, prepared: _Prepared | None
) -> Event:
    """Return the outcome of the generate job; if its passages have a slot, retrieve again while the job runs."""
    if prepared is None or prepared.made.slot is None:
        return await workflow.context.notifications.end(job, workflow.deadline_ms)
    made, spec, history = prepared
    return await IntervalRetrieval(workflow, plan, job, made, spec, history).run()


async def _note(workflow: Workflow, session: str) -> None:
    """Record the request in its session, so that a deletion of the session finds the request."""
    record = await Sessions(workflow.context.bus).get(session)
    if record is None or record.tenant != workflow.tenant:
        raise refusal("session_not_found", 0.0)
    with contextlib.suppress(BusFull):  # then the turn's own record will name the request
        await Sessions(workflow.context.bus).note_job(session, workflow.request)


async def _history(workflow: Workflow, session: str, fingerprint: str, job: str) -> SessionHistory:
    """Return the session as it stood before the turn of `job`; NotFound if it is not the tenant's."""
    record = await Sessions(workflow.context.bus).get(session)
    if record is None or record.tenant != workflow.tenant:
        raise refusal("session_not_found", 0.0)

    def before(turn: Turn) -> bool:
        return turn.job != job

    every = await Sessions(workflow.context.bus).turns(session)
    turns = list(itertools.takewhile(before, every))
    if len(turns) < len(every):  # the turn is over: its prompt was made of the turns before it
        tokens = 0
        for turn in turns:
            tokens = (tokens if turn.history else 0) + len(turn.prompt) + len(turn.output)
        record = msgspec.structs.replace(record, tokens=tokens)
    return session_history(record, turns, fingerprint)


async def _family(workflow: Workflow, plan: GroundPlan) -> Family:
    """Return the family that generates the answer: its session's, else a partition drawn from the request."""
    if plan.chat.session:
        return family_of(plan.chat.session)
    return await workflow.context.cards.family(plan.chat.model, workflow.request)


async def _quotable(
    workflow: Workflow, plan: GroundPlan, found: Retrieved
) -> tuple[Unread, bytes] | None:
    """Return the sentences for an extractive answer, with their vectors; None where the model can read the passages."""
    context, record = workflow.context, plan.collection
    await context.cards.card(plan.chat.model)
    spec = (await context.cards.specs())[plan.chat.model]
    if not spec.reads:
        return None
    encoder = await encoder_of(workflow, record)
    prompts = (record.query_prompt, record.document_prompt)
    asked = found.search.tokens[-1] if found.search.tokens else []
    call = partial(unread, plan.chat, spec, encoder, asked, prompts, found.hits)
    given = await context.pool.run(call)
    if given is None:
        return None
    with workflow.timeline.stage("quotes"):
        return given, await embed(workflow, "quotes", encoder, given.tokens, plan.parcel)


async def _prepare(
    workflow: Workflow,
    plan: GroundPlan,
    job: str,
    found: list[list[Hit]],
    quotable: tuple[Unread, bytes] | None,
) -> _Prepared:
    await workflow.context.cards.card(plan.chat.model)
    spec = (await workflow.context.cards.specs())[plan.chat.model]
    history = None
    if plan.chat.session:
        history = await _history(workflow, plan.chat.session, spec.fingerprint, job)
    call = partial(grounded, plan.chat, spec, history, found)
    if quotable is not None:
        call = partial(quoted, plan.chat, spec, history, *quotable)
    return _Prepared(await workflow.context.pool.run(call), spec, history)


async def _generate(
    workflow: Workflow, job: str, prepare: Callable[[], Awaitable[_Prepared]]
) -> _Prepared:
    """Submit the generate job unless it exists, and return the job with the model and the history of its prompt.

    A busy session or full lanes raise the refusal; while no worker lives, or the bus is full, the job waits.
    """
    context, pause_s = workflow.context, _FIRST_S
    ticket = Ticket(context.admission.queue, family_of(job), 1.0)
    try:
        while True:
            prepared = await prepare()
            if await context.bus.jobs.get(job) is not None:
                return prepared  # taken over: the job exists, and its turn may have ended
            left_s = (workflow.deadline_ms - context.bus.clock.now_ms()) / 1000
            if left_s <= 0:
                raise DeadlineExceeded("the deadline passed before the answer could be generated")
            ticket.begin()
            admission = await _submit(workflow, job, prepared.made.generation)
            if admission.outcome != "refused":
                return prepared
            if admission.reason == "session_changed":  # and may change again: try less often
                await asyncio.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
                pause_s = min(2 * pause_s, _MOST_S)
            elif admission.reason in {"no_worker", "bus_full"}:
                await ticket.wait(left_s)
            else:
                raise refusal(admission.reason, admission.retry_after_s)
    finally:
        ticket.leave()


async def _submit(workflow: Workflow, job: str, made: GenerationSpec) -> Admission:
    return await workflow.context.admission.submit(
        workflow.caller(),
        [NewJob(job, *made.parcel)],
        GENERATE_CLASSES,
        prompt=Prompt(made.session, made.version, made.marks, made.prompt_tokens),
        origin=workflow.request,
        waits=True,
    )
