"""The stages of a grounded answer: embed the question, search, generate; and what whoever waits for one follows.

Every stage's job id is a function of the request, so a router that takes over finds the jobs that exist and goes on.
The generate job's id and the passages are told as the request's progress once the job is admitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from functools import partial
from typing import Any, NamedTuple

import msgspec

from common.bus import Admission, Bus, BusFull, NewJob, Notifications
from common.bus.events import Subscription
from common.bus.metrics import lane_label
from common.errors import DeadlineExceeded
from common.ids import Family, child_id, family_of
from common.registry.sessions import Sessions
from common.wire.results import Event, decode_result
from common.wire.sessions import Turn
from common.wire.workflows import GroundPlan, RequestResult, ResponseOptions
from services.router import metrics
from services.router.admission.affinity import preferred
from services.router.admission.controller import GENERATE_CLASSES
from services.router.admission.refusals import refusal
from services.router.responses.outcomes import result_of
from services.router.text.chats import SessionHistory
from services.router.text.generations import GenerationSpec
from services.router.text.grounded import GroundedSpec, grounded
from services.router.workflows.search import find
from services.router.workflows.session_history import past
from services.router.workflows.workflow import Workflow

STAGE = "generate"
_FIRST_S, _MOST_S = 0.05, 1.0


class GroundedProgress(NamedTuple):
    """What a grounded request says of its answer: the job that generates it, and what it rests on."""

    job: str
    retrieval: dict[str, Any]


async def ground(run: Workflow, plan: GroundPlan) -> RequestResult:
    """Answer a chat from what a collection says; the result names the generate job."""
    job = child_id(run.request, await _family(run, plan), STAGE, 0)
    run.owns(job)
    if plan.chat.session:
        await _note(run, plan.chat.session)
        run.session = plan.chat.session
    told = None
    if run.index:  # another router had it before
        told = told_of(await run.tools.bus.jobs.log(run.request))
    if told is None:
        found, _, _ = await find(run, plan.collection, plan.search, plan.parcel, plan.queries)
        told = GroundedProgress(job, await _generate(run, plan, job, found))
        run.tell(STAGE, job=told.job, retrieval=told.retrieval)
    run.owns(told.job)
    result_of(await run.tools.journal.end(told.job, run.deadline_ms))
    info = {"view": msgspec.to_builtins(plan.options), "retrieval": told.retrieval}
    return RequestResult(jobs=[told.job], info=info)


async def _note(run: Workflow, session: str) -> None:
    """Remember the request with its session before anything is made of it: it is deleted with it."""
    record = await Sessions(run.tools.bus).get(session)
    if record is None or record.tenant != run.tenant:
        raise refusal("session_not_found", 0.0)
    with contextlib.suppress(BusFull):  # then its turn will be remembered, and names it
        await Sessions(run.tools.bus).note_job(session, run.request)


async def await_told(
    journal: Notifications, request: str, deadline_ms: int, bell: Subscription | None = None
) -> GroundedProgress | Event:
    """Return what a request says of its answer, as soon as it does, or the outcome it ends with before that."""
    async with contextlib.aclosing(journal.events(request, 0, deadline_ms, bell)) as events:
        async for event in events:
            if (told := told_by(event)) is not None:
                return told
            if event.ends:
                return event
    return Event(
        index=-1,
        kind="expired",
        code="deadline_exceeded",
        message="the deadline passed before the answer began",
    )


def told_of(events: list[Event]) -> GroundedProgress | None:
    """Return what a request's events say of its answer, None before its generate job was admitted."""
    for event in reversed(events):
        if (told := told_by(event)) is not None:
            return told
    return None


def told_by(event: Event) -> GroundedProgress | None:
    """Return what one event of a grounded request says of its answer, if it is the one that does."""
    if event.kind == "progress" and event.data[:1] == b"{":
        news = msgspec.json.decode(event.data, type=dict[str, Any])
        if news.get("stage") == STAGE and "job" in news:
            return GroundedProgress(news["job"], news["retrieval"])
    if event.kind == "result":
        result = decode_result(event.data)
        if isinstance(result, RequestResult) and result.jobs and "retrieval" in result.info:
            return GroundedProgress(result.jobs[0], result.info["retrieval"])
    return None


async def view_of(bus: Bus, request: str) -> ResponseOptions | None:
    """Return how the answer of a grounded request that is over is shown; None for any other request."""
    for event in (await bus.jobs.log(request))[-1:]:
        if event.kind == "result" and told_by(event) is not None:
            result = decode_result(event.data)
            assert isinstance(result, RequestResult)
            return msgspec.convert(result.info["view"], ResponseOptions)
    return None


async def _history(run: Workflow, session: str, fingerprint: str, job: str) -> SessionHistory:
    """Return the session as it stood before the turn of `job`; NotFound if it is not the tenant's."""
    record = await Sessions(run.tools.bus).get(session)
    if record is None or record.tenant != run.tenant:
        raise refusal("session_not_found", 0.0)

    def before(turn: Turn) -> bool:
        return turn.job != job

    every = await Sessions(run.tools.bus).turns(session)
    turns = list(itertools.takewhile(before, every))
    if len(turns) < len(every):  # the turn is over: it was made of what stood before it
        tokens = 0
        for turn in turns:
            tokens = (tokens if turn.history else 0) + len(turn.prompt) + len(turn.output)
        record = msgspec.structs.replace(record, tokens=tokens)
    return past(record, turns, fingerprint)


async def _family(run: Workflow, plan: GroundPlan) -> Family:
    """Return where the answer is generated: where its session is, else in a partition drawn from the request."""
    if plan.chat.session:
        return family_of(plan.chat.session)
    return await run.tools.cards.family(plan.chat.model, run.request)


async def _prepare(
    run: Workflow, plan: GroundPlan, job: str, found: list[list[Any]]
) -> GroundedSpec:
    await run.tools.cards.card(plan.chat.model)
    spec = (await run.tools.cards.specs())[plan.chat.model]
    history = None
    if plan.chat.session:
        history = await _history(run, plan.chat.session, spec.fingerprint, job)
    return await run.tools.pool.run(partial(grounded, plan.chat, spec, history, found))


async def _generate(
    run: Workflow, plan: GroundPlan, job: str, found: list[list[Any]]
) -> dict[str, Any]:
    """Admit the generate job unless it exists, and return the passages in its prompt.

    A busy session and full lanes are refused; where no worker is up, or the bus is full, the job waits for them.
    """
    bus = run.tools.bus
    place, pause_s = run.tools.room.place(family_of(job), 1.0), _FIRST_S
    try:
        while True:
            made = await _prepare(run, plan, job, found)
            if (
                await bus.jobs.get(job) is not None
            ):  # taken over: its own turn may have gone on meanwhile
                return made.retrieval
            left_s = (run.deadline_ms - bus.clock.now_ms()) / 1000
            if left_s <= 0:
                raise DeadlineExceeded("the deadline passed before the answer could be generated")
            place.look()
            admission = await _admit(run, job, made.generation)
            if admission.outcome != "refused":
                return made.retrieval
            if (
                admission.reason == "session_changed"
            ):  # it may change again: ask less and less often
                await asyncio.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
                pause_s = min(2 * pause_s, _MOST_S)
            elif admission.reason in {"no_worker", "bus_full"}:
                await place.wait(left_s)
            else:
                raise refusal(admission.reason, admission.retry_after_s)
    finally:
        place.leave()


async def _admit(run: Workflow, job: str, generation: GenerationSpec) -> Admission:
    bus, parcel, family = run.tools.bus, generation.parcel, family_of(job)
    prefer = await preferred(
        bus, family, generation.session, generation.marks, generation.prompt_tokens
    )
    admission = await bus.admission.admit(
        [NewJob(job, parcel.payload, parcel.items, parcel.tokens)],
        classes=GENERATE_CLASSES,
        router=run.tools.journal.router,
        tenant=run.tenant,
        deadline_ms=run.deadline_ms,
        prefer=prefer.worker,
        value_s=prefer.value_s,
        session=generation.session,
        version=generation.version,
        origin=run.request,
        waits=True,
    )
    if admission.outcome == "admitted":
        metrics.ADMITTED.labels(lane_label(family, admission.lane)).inc()
    return admission
