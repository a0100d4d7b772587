"""POST /v1/rerank and /rerank, in Cohere's and Jina's shape or in TEI's.

With a cross-encoder a score is its sigmoid; with an encoder it is the cosine similarity, in -1..1.
"""

from __future__ import annotations

from functools import partial

from aiohttp import web

from common.wire.workflows import ParcelsPlan, ResponseOptions
from services.router.admission.job_spec import JobSpec
from services.router.admission.policy import EMBED_CLASSES
from services.router.http.context import MODEL, ROUTER
from services.router.text import requests
from services.router.text.pool import INLINE_TEXT_BYTES


async def create(request: web.Request) -> web.Response:
    """Score documents against a query, best first."""
    router = request.app[ROUTER]
    raw = await router.body(request)
    caller = router.caller(request, raw)
    specs, default = await router.cards.specs(), await router.cards.rerank_default()
    call = partial(requests.rerank, raw, specs, default, await router.encoder_limits())
    ask = await router.pool.run(call, inline=len(raw) < INLINE_TEXT_BYTES)
    model = request[MODEL] = ask.spec.name
    view = ResponseOptions(
        kind="rerank",
        model=model,
        tokens=ask.tokens,
        tei=ask.tei,
        raw=ask.raw,
        top_n=ask.top_n,
        texts=ask.texts,
    )
    family = await router.cards.family(model, request.remote or "", router.next_turn())
    if len(ask.parcels) == 1:
        single = JobSpec(family, EMBED_CLASSES, ask.parcels[0], view, ask.tokens)
        return await router.answer(request, caller, single)
    items = sum(parcel.items for parcel in ask.parcels)
    await router.admission.foresee(family, EMBED_CLASSES, items, ask.tokens, caller.deadline_ms)
    plan = ParcelsPlan(model, view, [(p.payload, p.items, p.tokens) for p in ask.parcels])
    several = router.several(caller.tenant, "rerank", plan, view, ask.tokens)
    return await router.answer(request, caller, several)
