"""POST /tokenize, /detokenize and /decode, in vLLM's shapes or TEI's: no job, since the router has the tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from aiohttp import web

from common.errors import Unavailable
from services.router.cards import Cards
from services.router.http.parcel_limits import ParcelLimits
from services.router.http.receiver import Receiver
from services.router.http.replies import reply
from services.router.text import tokenizing
from services.router.text.bodies import RequestLimits
from services.router.text.pool import INLINE_TEXT_BYTES, TextPool
from services.router.text.tokens import Spec

Translate = Callable[[bytes, dict[str, Spec], str, str, RequestLimits], bytes]


class TokenizingApi:
    """Turns texts into token ids and back, by any model's tokenizer."""

    def __init__(
        self, receiver: Receiver, limits: ParcelLimits, cards: Cards, pool: TextPool
    ) -> None:
        self._receiver, self._limits, self._cards, self._pool = receiver, limits, cards, pool

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.post("/decode", self.detokenize),
        ]

    async def tokenize(self, request: web.Request) -> web.Response:
        """Return the token ids of texts, or of a conversation as its model sees it."""
        return await self._translated(request, tokenizing.tokenize)

    async def detokenize(self, request: web.Request) -> web.Response:
        """Return the texts of token ids."""
        return await self._translated(request, tokenizing.detokenize)

    async def _translated(self, request: web.Request, translate: Translate) -> web.Response:
        raw = await self._receiver.body(request)
        self._receiver.context(request, raw)  # refuses invalid headers
        specs, limits = await self._cards.specs(), self._limits.of()
        generator, encoder = await self._defaults()
        call = partial(translate, raw, specs, generator, encoder, limits)
        light = len(raw) < INLINE_TEXT_BYTES and not tokenizing.renders(raw)
        return reply(await self._pool.run(call, inline=light))

    async def _defaults(self) -> tuple[str, str]:
        """Return the names of the default generator and encoder, "" if none is served yet.

        Unavailable `no_worker` if neither is served.
        """
        try:
            generator = await self._cards.generate_default()
        except Unavailable:
            return "", await self._cards.embed_default()
        try:
            return generator, await self._cards.embed_default()
        except Unavailable:
            return generator, ""
