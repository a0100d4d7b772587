"""Collections: create, list, describe, delete, re-embed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import msgspec
from aiohttp import web

from common.errors import Conflict, InvalidRequest, Unprocessable
from common.ids import ulid
from common.registry.collections import Collections
from common.wire.message import encode
from common.wire.registry import Chunking, CollectionRecord
from common.wire.search import DocumentsResult, DocumentsWork, Write
from common.wire.workflows import ReembedPlan, ResponseOptions
from services.router.admission.job_spec import JobSpec, RequestContext
from services.router.admission.policy import SEARCH_CLASSES
from services.router.http.context import ROUTER, TENANT, Router, reply
from services.router.text.bodies import CollectionBody, ReembedBody, decode
from services.router.text.requests import Parcel, choose
from services.router.workflows.write import await_served


def shown(record: CollectionRecord) -> dict[str, Any]:
    """Return a collection as clients see it."""
    return {
        "object": "collection",
        "id": record.id,
        "name": record.name,
        "dimension": record.dimension,
        "metric": record.metric,
        "model": record.model,
        "fingerprint": record.fingerprint,
        "chunking": msgspec.to_builtins(record.chunking),
        "query_prompt": record.query_prompt,
        "document_prompt": record.document_prompt,
        "created": record.created_ms // 1000,
    }


async def create(request: web.Request) -> web.Response:
    """Create a collection; with an encoder its dimension is the encoder's."""
    router = request.app[ROUTER]
    body = decode(await router.body(request), CollectionBody)
    record = await _record(router, request[TENANT], body)
    if not await Collections(router.bus).create(record):
        raise Conflict(
            f"collection {record.name!r} exists; delete it first, or choose another name",
            code="collection_exists",
            param="name",
        )
    await await_served(router.bus, router.admission, record)
    return reply(msgspec.json.encode(shown(record)), status=201)


async def _record(router: Router, tenant: str, body: CollectionBody) -> CollectionRecord:
    chunking = body.chunking
    if chunking is not None and chunking.overlap_tokens >= chunking.max_tokens:
        raise InvalidRequest(
            "chunking.overlap_tokens: expected less than chunking.max_tokens",
            code="invalid_chunking",
            param="chunking.overlap_tokens",
        )
    base = CollectionRecord(
        id=ulid(router.clock.now_ms()),
        tenant=tenant,
        name=body.name,
        dimension=body.dimension or 0,
        metric=body.metric,
        chunking=Chunking(chunking.max_tokens, chunking.overlap_tokens) if chunking else Chunking(),
        query_prompt=body.query_prompt or "",
        document_prompt=body.document_prompt or "",
        created_ms=router.clock.now_ms(),
    )
    if body.model is None:
        if body.dimension is None:
            raise InvalidRequest(
                "dimension: expected for a collection of vectors only (model is null)",
                code="invalid_value",
                param="dimension",
            )
        return base
    name = body.model if isinstance(body.model, str) else None
    return await _with_encoder(router, base, name, body)


async def _with_encoder(
    router: Router, base: CollectionRecord, name: str | None, body: CollectionBody
) -> CollectionRecord:
    specs, default = await router.cards.specs(), await router.cards.embed_default()
    spec = choose(specs, name, default, ("embed",))
    if body.dimension is not None and body.dimension != spec.dimension:
        raise InvalidRequest(
            f"dimension is {body.dimension}: {spec.name} has {spec.dimension}; leave dimension out, or set "
            "model to null for a collection of vectors only",
            code="dimension_mismatch",
            param="dimension",
        )
    most = base.chunking.max_tokens
    if body.chunking is not None and most > spec.max_tokens:
        raise InvalidRequest(
            f"chunking.max_tokens is {most}: {spec.name} takes at most {spec.max_tokens}",
            code="invalid_chunking",
            param="chunking.max_tokens",
        )
    return msgspec.structs.replace(
        base,
        dimension=spec.dimension,
        model=spec.name,
        fingerprint=spec.fingerprint,
        query_prompt=spec.query_prompt if body.query_prompt is None else body.query_prompt,
        document_prompt=spec.document_prompt
        if body.document_prompt is None
        else body.document_prompt,
    )


async def list_all(request: web.Request) -> web.Response:
    """List the tenant's collections."""
    records = await Collections(request.app[ROUTER].bus).all(request[TENANT])
    data = [shown(record) for record in records if not record.name.startswith(".")]
    return reply(msgspec.json.encode({"object": "list", "data": data}))


async def get(request: web.Request) -> web.Response:
    """Return a collection with its statistics."""
    router = request.app[ROUTER]
    record = await router.collection(request)
    caller = router.caller(request)
    parts = await asyncio.gather(*(_stats(router, caller, record, s) for s in range(record.shards)))
    stats = dict(parts[0].stats or {})
    for part in parts[1:]:
        for name, value in (part.stats or {}).items():
            if name in {"documents", "chunks", "bytes", "vectors", "deleted"}:
                stats[name] = stats.get(name, 0) + value
    stats["applied"] = ",".join(part.applied for part in parts)
    return reply(msgspec.json.encode({**shown(record), "stats": stats}))


async def _stats(
    router: Router, caller: RequestContext, record: CollectionRecord, shard: int
) -> DocumentsResult:
    work = DocumentsWork(collection=record.id, op="stats", limit=1, with_text=False, shard=shard)
    ask = JobSpec(
        router.bus.writes.search_family(record.id),
        SEARCH_CLASSES,
        Parcel(encode(work), 1, 0),
        ResponseOptions(kind="stats"),
    )
    name, result = await router.runner.run(caller, ask)
    router.runner.delivered(caller, name)
    return cast("DocumentsResult", result)


async def delete(request: web.Request) -> web.Response:
    """Delete a collection with everything in it."""
    router = request.app[ROUTER]
    record = await router.collection(request)
    await Collections(router.bus).remove(record)
    for shard in range(record.shards):
        write = Write(
            request=f"drop-{record.id}", index=1 << 20, router=router.admission.router, drop=True
        )
        await router.bus.writes.append(record.id, shard, write)
    body = {"object": "collection", "name": record.name, "deleted": True}
    return reply(msgspec.json.encode(body))


async def reembed(request: web.Request) -> web.Response:
    """Embed all texts of a collection with the encoder served now, then let its name mean the result."""
    router = request.app[ROUTER]
    record = await router.collection(request)
    raw = await router.body(request)
    body = decode(raw, ReembedBody) if raw.strip() else ReembedBody()
    caller = router.caller(request, raw, default_timeout_s=router.config.max_timeout_s)
    if record.model is None and body.model is None:
        raise Unprocessable(
            f"collection {record.name!r} has no encoder: it holds vectors only; name a model to give it one",
            code="not_embeddable",
            param="model",
        )
    specs, default = await router.cards.specs(), await router.cards.embed_default()
    wanted = body.model or (record.model if record.model in specs else None)
    spec = choose(specs, wanted, default, ("embed",))
    target = msgspec.structs.replace(
        record,
        id=ulid(router.clock.now_ms()),
        model=spec.name,
        fingerprint=spec.fingerprint,
        dimension=spec.dimension,
        created_ms=router.clock.now_ms(),
    )
    bounds = await router.encoder_limits()
    plan = ReembedPlan(record, target, (bounds.parcel_items, bounds.parcel_tokens))
    make = partial(router.several, caller.tenant, "reembed", plan)
    return await router.answer(
        request, caller, make(ResponseOptions(kind="reembed", model=spec.name))
    )
