"""POST /v1/chat/completions, as OpenAI's clients send it, with sessions and retrieval beside it."""

from __future__ import annotations

import time
from functools import partial

from aiohttp import web

from common.bus.events import Subscription
from common.errors import Conflict
from common.ids import family_of
from common.wire.workflows import ChatRequest, ResponseOptions
from services.router.admission.job_spec import RequestContext
from services.router.http import grounded
from services.router.http.context import ROUTER, Router
from services.router.http.generations import admitted, attached, door, generation_caller
from services.router.http.session_history import history, try_again
from services.router.responses.answers import ReaderAnswer, deliver
from services.router.responses.sources import kept
from services.router.text import chats
from services.router.text.generations import GenerationSpec
from services.router.text.pool import INLINE_BYTES, INLINE_TEXT_BYTES


async def create(request: web.Request) -> web.StreamResponse:
    """Answer a conversation: one generate job, attached to if its idempotency key knows it."""
    router, began = request.app[ROUTER], time.perf_counter()
    raw = await router.body(request)
    caller = generation_caller(request, raw)
    again = await attached(request, caller, began)
    if again is not None:
        return again
    peek = await router.pool.run(partial(chats.peek, raw), inline=len(raw) < INLINE_BYTES)
    session, tries = peek.session or "", 0
    while True:
        ask, made = await understood(router, caller, raw, session)
        try:
            if made is None:
                return await grounded.answer(request, caller, ask, began)
            name, bell, view = await submit(request, caller, ask, made)
        except Conflict as error:
            tries += 1
            await try_again(router, caller, session, error, wait=peek.wait, tries=tries)
            continue
        return await deliver(request, ReaderAnswer(caller, name, view, kept(name, bell)), began)


async def understood(
    router: Router, caller: RequestContext, raw: bytes, session: str
) -> tuple[ChatRequest, GenerationSpec | None]:
    """Parse a chat's body and, unless it is to be grounded first, render and tokenize it.

    Templates run in the pool, where their time is bounded; one that has proved itself there renders short chats here.
    """
    past = await history(router, session, caller.tenant) if session else None
    specs, default = await router.cards.specs(), await router.cards.generate_default()
    generators = {spec.fingerprint for spec in specs.values() if spec.kind == "generate"}
    short = past is None and len(raw) < INLINE_TEXT_BYTES and generators <= router.proved
    call = partial(chats.chat, raw, specs, default, caller.tenant, past, low=caller.low)
    ask, made = await router.pool.run(call, inline=short)
    if made is not None:
        router.proved.add(specs[ask.model].fingerprint)
    return ask, made


async def submit(
    request: web.Request, caller: RequestContext, ask: ChatRequest, made: GenerationSpec
) -> tuple[str, Subscription | None, ResponseOptions]:
    """Admit a chat's job; return its id, its bell and how its answer looks."""
    router = request.app[ROUTER]
    card = await router.cards.card(ask.model)
    view = view_of(ask, made, card.fingerprint)
    if made.session:
        family = family_of(made.session)
    else:
        family = await router.cards.family(ask.model, request.remote or "", router.next_turn())
    name, bell = await admitted(request, caller, door(router, family, made, view))
    return name, bell, view


def view_of(ask: ChatRequest, made: GenerationSpec, fingerprint: str) -> ResponseOptions:
    """Return how a chat's answer looks."""
    return ResponseOptions(
        kind="chat",
        model=ask.model,
        tokens=made.prompt_tokens,
        fingerprint=fingerprint,
        choices=made.choices,
        stream=ask.stream,
        include_usage=ask.include_usage,
        logprobs=ask.options.logprobs,
        session=made.session,
    )
