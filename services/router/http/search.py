"""POST /v1/collections/{name}/search: by text or by vector, one question or many."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from common.wire.registry import CollectionRecord
from common.wire.workflows import ResponseOptions, SearchPlan
from services.router.admission.job_spec import JobSpec
from services.router.admission.policy import SEARCH_CLASSES
from services.router.http.context import MODEL, ROUTER, Router
from services.router.text import collections
from services.router.text.pool import INLINE_TEXT_BYTES
from services.router.text.tokens import Spec
from services.router.workflows.embed import checked_encoder
from services.router.workflows.search import QUERIES_AT_ONCE, search_parcels

_INLINE_NUMBERS = 2048
_INLINE_BYTES = 1 << 20


async def create(request: web.Request) -> web.Response:
    """Search: one job for vectors on one shard, else embed and search as a request of several jobs."""
    router = request.app[ROUTER]
    record = await router.collection(request)
    raw = await router.body(request)
    caller = router.caller(request, raw)
    request[MODEL] = record.model or ""
    spec = await _spec(router, record)
    call = partial(
        collections.search,
        raw,
        record.dimension,
        record.metric,
        router.text_limits(),
        spec=spec,
        prompt=record.query_prompt,
    )
    ask = await router.pool.run(call, inline=_quick(raw))
    if ask.tokens:
        checked_encoder(record, await router.cards.specs())
    view = ResponseOptions(kind="search", model=record.model or "", many=ask.many)
    tokens = sum(map(len, ask.tokens))
    family = router.bus.writes.search_family(record.id)
    most = router.depths.get(family.name, (QUERIES_AT_ONCE, 0))[0]
    if not ask.tokens and record.shards == 1 and ask.count <= min(most, QUERIES_AT_ONCE):
        parcels = search_parcels(record, ask, ask.vectors, 0, most)
        only = JobSpec(family, SEARCH_CLASSES, parcels[0], view)
        return await router.answer(request, caller, only)
    await router.admission.foresee(family, SEARCH_CLASSES, ask.count, 0, caller.deadline_ms)
    bounds = await router.encoder_limits()
    plan = SearchPlan(record, ask, (bounds.parcel_items, bounds.parcel_tokens), most)
    several = router.several(caller.tenant, "search", plan, view, tokens)
    return await router.answer(request, caller, several)


def _quick(raw: bytes) -> bool:
    """Return whether reading a body here holds the loop no longer than handing it to another process would."""
    if len(raw) < 8 * INLINE_TEXT_BYTES:
        return True
    # Texts are tokenized, and numbers cost by their count; of vectors in base64 there are few commas. Whoever escapes
    # a name is read elsewhere.
    numbers = raw.count(b",") > _INLINE_NUMBERS
    return not (numbers or len(raw) > _INLINE_BYTES or b'"text' in raw or b"\\" in raw)


async def _spec(router: Router, record: CollectionRecord) -> Spec | None:
    """Return the encoder's spec for tokenizing; one that does not match is refused once the body is known."""
    if record.model is None:
        return None
    specs = await router.cards.specs()
    return specs.get(record.model) or next(iter(specs.values()), None)
