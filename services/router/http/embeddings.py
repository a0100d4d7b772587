"""POST /v1/embeddings, as OpenAI's clients send it."""

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
    """Embed texts or token lists: one job if they fit one parcel, else a request of several jobs."""
    router = request.app[ROUTER]
    raw = await router.body(request)
    caller = router.caller(request, raw)
    specs, default = await router.cards.specs(), await router.cards.embed_default()
    call = partial(requests.embeddings, raw, specs, default, await router.encoder_limits())
    ask = await router.pool.run(call, inline=len(raw) < INLINE_TEXT_BYTES)
    model = request[MODEL] = ask.spec.name
    view = ResponseOptions(
        kind="embed",
        model=model,
        base64=ask.base64,
        dimensions=ask.dimensions,
        tokens=ask.tokens,
    )
    family = await router.cards.family(model, request.remote or "", router.next_turn())
    if len(ask.parcels) == 1:
        single = JobSpec(family, EMBED_CLASSES, ask.parcels[0], view, ask.tokens)
        return await router.answer(request, caller, single)
    items = sum(parcel.items for parcel in ask.parcels)
    await router.admission.foresee(family, EMBED_CLASSES, items, ask.tokens, caller.deadline_ms)
    plan = ParcelsPlan(
        model, view, [(p.payload, p.items, p.tokens) for p in ask.parcels], whole=ask.whole
    )
    several = router.several(caller.tenant, "embeddings", plan, view, ask.tokens)
    return await router.answer(request, caller, several)
