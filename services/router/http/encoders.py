"""The routes of encoders: embeddings in OpenAI's shape or TEI's (/embed); scores in Cohere's, Jina's or TEI's.

A request is one job if its texts fit one parcel, else a request of several jobs. A cross-encoder's score is the sigmoid
of its output; an encoder's is the cosine similarity, in -1..1.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from aiohttp import web

from common.wire.workflows import ResponseOptions
from services.router.admission.job_spec import RequestContext
from services.router.cards import Cards
from services.router.http.job_replies import ParcelReplies
from services.router.http.parcel_limits import ParcelLimits
from services.router.http.receiver import MODEL, Receiver
from services.router.text import requests
from services.router.text.bodies import RequestLimits
from services.router.text.pool import INLINE_TEXT_BYTES, TextPool
from services.router.text.requests import EmbedRequest, RerankRequest
from services.router.text.tokens import Spec

Asked = TypeVar("Asked", EmbedRequest, RerankRequest)
Parse = Callable[[bytes, dict[str, Spec], str, RequestLimits], Asked]


class EncodersApi:
    """Embeds texts or token lists, and scores documents against a query, best first."""

    def __init__(
        self,
        receiver: Receiver,
        limits: ParcelLimits,
        cards: Cards,
        pool: TextPool,
        replies: ParcelReplies,
    ) -> None:
        self._receiver, self._limits = receiver, limits
        self._cards, self._pool, self._replies = cards, pool, replies

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post("/v1/embeddings", self.embed),
            web.post("/embed", self.embed_tei),
            web.post("/v1/rerank", self.rerank),
            web.post("/v2/rerank", self.rerank_v2),
            web.post("/rerank", self.rerank),
        ]

    async def embed(self, request: web.Request) -> web.Response:
        """Embed the input of a request."""
        return await self._embedded(request, requests.embeddings)

    async def embed_tei(self, request: web.Request) -> web.Response:
        """Embed the inputs of a request in TEI's shape."""
        return await self._embedded(request, requests.tei_embeddings)

    async def _embedded(self, request: web.Request, parse: Parse[EmbedRequest]) -> web.Response:
        caller, ask = await self._read(request, parse, self._cards.embed_default)
        options = ResponseOptions(
            kind="embed",
            model=ask.spec.name,
            base64=ask.base64,
            tei=ask.tei,
            dimensions=ask.dimensions,
            tokens=ask.tokens,
        )
        return await self._replies.reply(
            request, caller, "embeddings", ask.parcels, options, whole=ask.whole
        )

    async def rerank(self, request: web.Request) -> web.Response:
        """Score the documents of a request."""
        return await self._scored(request, requests.rerank)

    async def rerank_v2(self, request: web.Request) -> web.Response:
        """Score the documents of a request in the shape of Cohere's second version."""
        return await self._scored(request, requests.rerank_v2)

    async def _scored(self, request: web.Request, parse: Parse[RerankRequest]) -> web.Response:
        caller, ask = await self._read(request, parse, self._cards.rerank_default)
        options = ResponseOptions(
            kind="rerank",
            model=ask.spec.name,
            tokens=ask.tokens,
            tei=ask.tei,
            v2=ask.v2,
            raw=ask.raw,
            top_n=ask.top_n,
            texts=ask.texts,
        )
        return await self._replies.reply(request, caller, "rerank", ask.parcels, options)

    async def _read(
        self, request: web.Request, parse: Parse[Asked], default: Callable[[], Awaitable[str]]
    ) -> tuple[RequestContext, Asked]:
        """Return a request's caller and its parsed body; `default` names the model of a body that names none."""
        raw = await self._receiver.body(request)
        caller = self._receiver.context(request, raw)
        specs, limits = await self._cards.specs(), await self._limits.encoders()
        call = partial(parse, raw, specs, await default(), limits)
        ask = await self._pool.run(call, inline=len(raw) < INLINE_TEXT_BYTES)
        request[MODEL] = ask.spec.name
        return caller, ask
