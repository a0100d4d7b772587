"""POST /v1/chat/completions in OpenAI's shape, with our own fields for sessions and retrieval."""

from __future__ import annotations

import itertools
from functools import partial

from aiohttp import web

from common.errors import Conflict
from common.ids import family_of
from common.wire.workflows import ChatRequest, ResponseOptions
from services.router.admission.job_spec import JobSpec, RequestContext
from services.router.cards import Cards
from services.router.http.generations import Generations
from services.router.http.grounded import GroundedChats
from services.router.http.receiver import Receiver
from services.router.http.session_turns import SessionTurns
from services.router.text import chats
from services.router.text.generations import GenerationSpec
from services.router.text.pool import INLINE_BYTES, TextPool


class ChatApi:
    """Answers a conversation by one generate job, or by a workflow if the chat asks for retrieval."""

    def __init__(
        self,
        receiver: Receiver,
        cards: Cards,
        pool: TextPool,
        turns: SessionTurns,
        generations: Generations,
        grounded: GroundedChats,
    ) -> None:
        self._receiver, self._cards, self._pool = receiver, cards, pool
        self._turns, self._generations, self._grounded = turns, generations, grounded
        self._nth = itertools.count(1)  # each request takes the next partition

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.post("/v1/chat/completions", self.create)]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation; a known idempotency key attaches to its request."""
        raw = await self._receiver.body(request)
        caller = self._receiver.generation_context(request, raw)
        known = await self._generations.attached(request, caller)
        if known is not None:
            return known
        peek = await self._pool.run(partial(chats.peek, raw), inline=len(raw) < INLINE_BYTES)
        session, tries = peek.session or "", 0
        while True:
            chat, made = await self._parsed(caller, raw, session)
            try:
                if made is None:
                    return await self._grounded.answer(request, caller, chat)
                spec = await self._spec(request, chat, made)
                accepted = await self._generations.accept(request, caller, spec)
            except Conflict as error:
                tries += 1
                await self._turns.retry(caller, session, error, wait=peek.wait, tries=tries)
                continue
            return await self._generations.deliver(request, caller, spec, accepted)

    async def _parsed(
        self, caller: RequestContext, raw: bytes, session: str
    ) -> tuple[ChatRequest, GenerationSpec | None]:
        """Parse a chat's body and, unless it asks for retrieval, render and tokenize its prompt.

        The pool of text processes does this, since a template's time and memory are bounded there.
        """
        past = await self._turns.history(session, caller.tenant) if session else None
        specs, default = await self._cards.specs(), await self._cards.generate_default()
        return await self._pool.run(
            partial(chats.chat, raw, specs, default, caller.tenant, past, low=caller.low)
        )

    async def _spec(self, request: web.Request, chat: ChatRequest, made: GenerationSpec) -> JobSpec:
        """Return a chat's job, in its session's family or in the next partition."""
        card = await self._cards.card(chat.model)
        options = chat_options(chat, made, card.fingerprint)
        if made.session:
            family = family_of(made.session)
        else:
            seed = request.remote or ""
            family = await self._cards.family(chat.model, seed, next(self._nth))
        return self._generations.spec(family, made, options)


def chat_options(chat: ChatRequest, made: GenerationSpec, fingerprint: str) -> ResponseOptions:
    """Return the response options of a chat."""
    return ResponseOptions(
        kind="chat",
        model=chat.model,
        tokens=made.prompt_tokens,
        fingerprint=fingerprint,
        choices=made.choices,
        stream=chat.stream,
        include_usage=chat.include_usage,
        logprobs=chat.options.logprobs,
        session=made.session,
        marks=chats.marks_of(chat, made),
    )
