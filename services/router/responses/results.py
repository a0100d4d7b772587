"""Turns a request's result into the JSON its client asked for, at once or when it comes back for it."""

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


async def present(
    bus: Bus, pool: TextPool, request: str, result: Result, view: ResponseOptions | None
) -> bytes:
    """Return a result as JSON; large ones are written by the pool. NotFound if its parts have expired."""
    results: Sequence[Result] = [result]
    if isinstance(result, RequestResult):
        if result.body:
            return result.body
        results = await _parts(bus, result.jobs)
        view = msgspec.convert(result.info["view"], ResponseOptions)
    if isinstance(result, SessionResult):
        return result.body
    first = results[0]
    view = view or _default_view(request, first)
    if isinstance(first, EmbedResult):
        blocks = [cast("EmbedResult", part).vectors for part in results]
        call = partial(json_bodies.embeddings, view, first.dimension, blocks)
        return await pool.run(call, inline=sum(map(len, blocks)) <= INLINE_BYTES)
    if isinstance(first, ScoreResult):
        return json_bodies.rerank(view, request, [cast("ScoreResult", part) for part in results])
    if isinstance(first, SearchResult):
        found = partial(json_bodies.search, view, request, first.hits, first.path, first.applied)
        return await pool.run(found, inline=sum(map(len, first.hits)) <= json_bodies.INLINE_HITS)
    if isinstance(first, DocumentsResult):
        shown = partial(json_bodies.documents, view, first)
        many = sum(len(doc.vectors or b"") + len(doc.text or "") for doc in first.documents)
        return await pool.run(shown, inline=many <= INLINE_BYTES)
    raise InternalError(f"no view of a {type(first).__name__}")


async def _parts(bus: Bus, jobs: Sequence[str]) -> list[Result]:
    parts: list[Result] = []
    for job in jobs:
        events = await bus.jobs.log(job)
        if not events or not events[-1].ends:
            raise NotFound("the request's result has expired", code="request_not_found")
        parts.append(result_of(events[-1]))
    return parts


def _default_view(request: str, result: Result) -> ResponseOptions:
    """Return how a result is shown when its client did not say, or said it to a router that is gone."""
    name = family_of(request).name
    model = name.split(".", 1)[1] if "." in name else name
    tokens: Any = getattr(result, "tokens", 0)
    many = isinstance(result, SearchResult) and len(result.hits) != 1
    return ResponseOptions(
        kind=name.split(".", maxsplit=1)[0], model=model, tokens=tokens, many=many
    )
