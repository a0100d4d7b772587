"""POST /v1/completions in OpenAI's shape."""

from __future__ import annotations

import itertools
from functools import partial

from aiohttp import web

from common.wire.workflows import ResponseOptions
from services.router.cards import Cards
from services.router.http.generations import Generations
from services.router.http.receiver import Receiver
from services.router.text import completions
from services.router.text.chats import peek
from services.router.text.pool import INLINE_TEXT_BYTES, TextPool


class CompletionsApi:
    """Continues prompts by one generate job; a known idempotency key attaches to its request."""

    def __init__(
        self,
        receiver: Receiver,
        cards: Cards,
        pool: TextPool,
        generations: Generations,
        most_tokens: int,
    ) -> None:
        self._receiver, self._cards, self._pool = receiver, cards, pool
        self._generations, self._most_tokens = generations, most_tokens
        self._turns = itertools.count(1)  # each request takes the next partition

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.post("/v1/completions", self.create)]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Continue the prompts of a request."""
        raw = await self._receiver.body(request)
        caller = self._receiver.generation_context(request, raw)
        known = await self._generations.attached(request, caller)
        if known is not None:
            return known
        specs, default = await self._cards.specs(), await self._cards.generate_default()
        call = partial(
            completions.completion,
            raw,
            specs,
            default,
            caller.tenant,
            self._most_tokens,
            low=caller.low,
        )
        light = len(raw) < INLINE_TEXT_BYTES and peek(raw).response_format is None
        ask, made = await self._pool.run(call, inline=light)
        options = ResponseOptions(
            kind="completion",
            model=ask.model,
            tokens=made.prompt_tokens,
            fingerprint=specs[ask.model].fingerprint,
            choices=made.choices,
            stream=ask.stream,
            include_usage=ask.include_usage,
            logprobs=ask.options.logprobs,
            echo=ask.echo,
        )
        family = await self._cards.family(ask.model, request.remote or "", next(self._turns))
        spec = self._generations.spec(family, made, options)
        accepted = await self._generations.accept(request, caller, spec)
        return await self._generations.deliver(request, caller, spec, accepted)
