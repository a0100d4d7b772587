"""JSON of a request's result, for a client that waits and for one that comes back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import msgspec

from common.bus import Bus
from common.errors import InternalError, NotFound
from common.ids import family_of
from common.wire.results import EmbedResult, Result, ScoreResult
from common.wire.search import DocumentsResult, SearchResult
from common.wire.sessions import SessionResult
from common.wire.workflows import RequestResult, ResponseOptions
from services.router.responses import json_bodies
from services.router.responses.outcomes import result_of
from services.router.text.pool import INLINE_BYTES, TextPool


class ResultWriter:
    """Writes results as JSON; large results are written in the pool of text processes."""

    def __init__(self, bus: Bus, pool: TextPool) -> None:
        self._bus, self._pool = bus, pool

    async def json(self, request: str, result: Result, options: ResponseOptions | None) -> bytes:
        """Return a result as JSON. NotFound if the results of its jobs have expired."""
        results: Sequence[Result] = [result]
        if isinstance(result, RequestResult):
            if result.body:
                return result.body
            results = await self._parts(result.jobs)
            options = msgspec.convert(result.info["view"], ResponseOptions)
        first = results[0]
        if isinstance(first, SessionResult):
            return first.body
        return await self._written(request, results, options or _default_options(request, first))

    async def _written(
        self, request: str, results: Sequence[Result], options: ResponseOptions
    ) -> bytes:
        first, run = results[0], self._pool.run
        if isinstance(first, EmbedResult):
            blocks = [cast("EmbedResult", part).vectors for part in results]
            call = partial(json_bodies.embeddings, options, first.dimension, blocks)
            return await run(call, inline=sum(map(len, blocks)) <= INLINE_BYTES)
        if isinstance(first, ScoreResult):
            scores = [cast("ScoreResult", part) for part in results]
            return json_bodies.rerank(options, request, scores)
        if isinstance(first, SearchResult):
            return json_bodies.search(options, request, first)
        if isinstance(first, DocumentsResult):
            size = sum(len(doc.vectors or b"") + len(doc.text or "") for doc in first.documents)
            shown = partial(json_bodies.documents, options, first)
            return await run(shown, inline=size <= INLINE_BYTES)
        raise InternalError(f"no response shows a {type(first).__name__}")

    async def _parts(self, jobs: Sequence[str]) -> list[Result]:
        parts: list[Result] = []
        for job in jobs:
            events = await self._bus.jobs.log(job)
            if not events or not events[-1].ends:
                raise NotFound("the request's result has expired", code="request_not_found")
            parts.append(result_of(events[-1]))
        return parts


def _default_options(request: str, result: Result) -> ResponseOptions:
    """Return the response options of a request that stored none, from its id and its result."""
    name = family_of(request).name
    model = name.split(".", 1)[1] if "." in name else name
    tokens: Any = getattr(result, "tokens", 0)
    many = isinstance(result, SearchResult) and len(result.shown) != 1
    return ResponseOptions(
        kind=name.split(".", maxsplit=1)[0], model=model, tokens=tokens, many=many
    )
