"""Grounded chats at the door: what is asked becomes one request of three jobs; what is refused is refused here."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from aiohttp import web

from common.bus.events import Subscription
from common.errors import InvalidRequest, NotFound
from common.ids import Family, family_of
from common.registry.collections import Collections
from common.registry.sessions import Sessions
from common.wire.registry import CollectionRecord
from common.wire.results import Event
from common.wire.workflows import (
    ChatRequest,
    GroundPlan,
    ResponseOptions,
    RetrievalOptions,
    SearchRequest,
)
from services.router.admission.job_spec import JobSpec, RequestContext
from services.router.admission.policy import SEARCH_CLASSES
from services.router.admission.refusals import refusal
from services.router.http.context import ROUTER, Router
from services.router.http.generations import admitted, door
from services.router.http.session_history import history
from services.router.responses.answers import ReaderAnswer, deliver
from services.router.responses.outcomes import error_of
from services.router.responses.sources import AnswerSource, told_source
from services.router.text.grounded import GroundedQuestion, question_of
from services.router.workflows.embed import checked_encoder
from services.router.workflows.progress import await_grounded_progress
from services.router.workflows.search import QUERIES_AT_ONCE

# How long a stream's head waits for its generate job, so that what is refused until then gets a status of its own.
HOLD_S = 2.0
# Turns of a session that a question may lean on.
_TURNS = 4


async def answer(
    request: web.Request, caller: RequestContext, chat: ChatRequest, began: float
) -> web.StreamResponse:
    """Answer a chat from a collection: one request of three jobs; raises what its stages refuse within HOLD_S."""
    router = request.app[ROUTER]
    ask = await ask_of(router, caller, chat)
    name, bell = await admitted(request, caller, ask)
    telling = asyncio.create_task(_tell(router, caller, name, bell))
    try:
        await asyncio.wait({telling}, timeout=HOLD_S if chat.stream else None)
    except asyncio.CancelledError:
        telling.cancel()
        router.runner.left(caller, name)
        raise
    try:
        if telling.done():
            telling.result()
        answered = ReaderAnswer(caller, name, ask.view, lambda: _source(telling))
        response = await deliver(request, answered, began)
        if telling.done() and not telling.exception():
            router.runner.delivered(caller, telling.result().job)
        return response
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(
    router: Router, caller: RequestContext, request: str, bell: Subscription | None
) -> AnswerSource:
    """Return where the answer comes from; if the request ends before it tells, note that and raise its error."""
    with router.runner.reading(request):
        told = await await_grounded_progress(
            router.notifications, request, caller.deadline_ms, bell
        )
    if isinstance(told, Event):
        await router.runner.ended(caller, request, told)
        raise error_of(told)
    return await told_source(router, told)


async def _source(telling: asyncio.Task[AnswerSource]) -> AnswerSource:
    return await asyncio.shield(telling)


async def ask_of(router: Router, caller: RequestContext, chat: ChatRequest) -> JobSpec:
    """Return the request that answers a chat from a collection.

    Refused at once: no such collection, one without an encoder, another encoder than the one served, a conversation
    too long for the model, and kinds of work nobody is there for.
    """
    retrieval = chat.retrieval
    assert retrieval is not None, "a chat without retrieval is one job"
    record = await _collection(router, caller.tenant, retrieval.collection)
    specs = await router.cards.specs()
    encoder = checked_encoder(record, specs)
    if chat.session:
        family = family_of(chat.session)
    else:
        family = await router.cards.family(chat.model, caller.tenant)
    for needed in (family, await router.cards.family(encoder.name, caller.tenant)):
        if not await _served(router, needed):
            raise refusal("no_worker", 2.0)
    past = await history(router, chat.session, caller.tenant) if chat.session else None
    earlier = await _earlier(router, chat.session) if chat.session else []
    question: GroundedQuestion = await router.pool.run(
        partial(question_of, chat, specs[chat.model], past, encoder, record.query_prompt, earlier)
    )
    card, family = await router.cards.card(chat.model), router.bus.writes.search_family(record.id)
    view = ResponseOptions(
        kind="chat",
        model=chat.model,
        tokens=question.generation.prompt_tokens,
        fingerprint=card.fingerprint,
        stream=chat.stream,
        include_usage=chat.include_usage,
        logprobs=chat.options.logprobs,
        session=chat.session,
    )
    # What even an empty lane could not hold without a passage is refused here, and what no shard could find in time.
    charged = door(router, family, question.generation, view).charge_tokens
    count = len(question.tokens)
    await router.admission.foresee(family, SEARCH_CLASSES, count, 0, caller.deadline_ms)
    bounds = await router.encoder_limits()
    plan = GroundPlan(
        collection=record,
        search=_search(retrieval, question.tokens),
        parcel=(bounds.parcel_items, bounds.parcel_tokens),
        queries=router.depths.get(family.name, (QUERIES_AT_ONCE, 0))[0],
        chat=chat,
        options=view,
    )
    charged += sum(map(len, question.tokens))
    return router.several(caller.tenant, "chat", plan, view, charged)


async def _served(router: Router, family: Family) -> bool:
    """Return whether a worker of a family lives; one that has just started counts."""
    if await router.bus.workers.living(family):
        return True
    router.bus.workers.forget(family)
    return bool(await router.bus.workers.living(family))


async def _collection(router: Router, tenant: str, name: str) -> CollectionRecord:
    record = await Collections(router.bus).get(tenant, name)
    if record is None:
        raise NotFound(
            f"no collection {name!r}", code="collection_not_found", param="retrieval.collection"
        )
    if record.model is None:
        raise InvalidRequest(
            f"collection {name!r} has no encoder (model is null), so a question cannot be searched for in it; "
            "name a collection that embeds texts",
            code="vectors_only",
            param="retrieval.collection",
        )
    return record


async def _earlier(router: Router, session: str) -> list[dict[str, str]]:
    """Return the last turns of a session as its client sent them; who owns it is looked at when the turn is made."""
    found: list[dict[str, str]] = []
    for turn in await Sessions(router.bus).turns(session, -_TURNS):
        found += msgspec.json.decode(turn.shown or turn.messages, type=list[dict[str, str]])
        found.append({"role": "assistant", "content": turn.answer})
    return found


def _search(retrieval: RetrievalOptions, tokens: list[list[int]]) -> SearchRequest:
    return SearchRequest(
        many=True,
        count=len(tokens),
        tokens=tokens,
        vectors=b"",
        k=retrieval.k,
        filter=retrieval.filter,
        min_score=retrieval.min_score,
        include_text=True,
        include_metadata=False,
        ef=None,
        exact=False,
        after=None,
    )
