"""Documents of a collection: store, list, get, delete."""

from __future__ import annotations

from functools import partial
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import msgspec
from aiohttp import web

from common.errors import InvalidRequest, NotFound
from common.wire.message import encode
from common.wire.registry import CollectionRecord
from common.wire.search import DocumentsResult, DocumentsWork
from common.wire.workflows import DeletePlan, ResponseOptions, WritePlan
from services.router.admission.job_spec import JobSpec
from services.router.admission.policy import EMBED_CLASSES, SEARCH_CLASSES
from services.router.http.context import MODEL, ROUTER, Router, reply
from services.router.responses import json_bodies
from services.router.text import collections
from services.router.text.bodies import DeleteBody, check_id, check_json, decode
from services.router.text.pool import INLINE_BYTES
from services.router.text.requests import Parcel
from services.router.workflows.embed import checked_encoder
from services.router.workflows.write import shard_of

PARTS = ("text", "metadata", "vectors")
_MOST = 1000
_BYTES_PER_TOKEN = 4


async def store(request: web.Request) -> web.Response:
    """Store documents; texts are split, embedded and synced before the answer."""
    router = request.app[ROUTER]
    record = await router.collection(request)
    raw = await router.body(request)
    caller = router.caller(request, raw)
    call = partial(
        collections.documents,
        raw,
        record.dimension,
        record.metric,
        router.text_limits(),
        embeds=record.model is not None,
    )
    items, texts, size = await router.pool.run(call, inline=len(raw) < INLINE_BYTES)
    bounds, tokens = router.text_limits(), size // _BYTES_PER_TOKEN
    request[MODEL] = record.model or ""
    if texts and record.model is not None:
        checked_encoder(record, await router.cards.specs())
        bounds = router.text_limits((await router.cards.card(record.model)).family)
        family = await router.cards.family(record.model, record.id)
        await router.admission.foresee(family, EMBED_CLASSES, texts, tokens, caller.deadline_ms)
    await router.admission.foresee(
        router.bus.writes.search_family(record.id), SEARCH_CLASSES, 1, 0, caller.deadline_ms
    )
    plan = WritePlan(record, items, (bounds.parcel_items, bounds.parcel_tokens))
    view = ResponseOptions(kind="write", model=record.model or "")
    ask = router.several(caller.tenant, "write", plan, view, tokens)
    return await router.answer(request, caller, ask)


def _include(request: web.Request, default: str) -> list[str]:
    parts = [part for part in request.query.get("include", default).split(",") if part]
    wrong = [part for part in parts if part not in PARTS]
    if wrong:
        raise InvalidRequest(
            f"include names {wrong[0][:40]!r}: expected text, metadata or vectors",
            code="invalid_value",
            param="include",
        )
    return parts


def _query_filter(request: web.Request) -> dict[str, Any] | None:
    text = request.query.get("filter")
    if text is None:
        return None
    try:
        value = decode(text.encode(), dict[str, Any])
    except (InvalidRequest, UnicodeEncodeError) as error:
        raise InvalidRequest(
            f"filter is no JSON object: {error}", code="invalid_filter", param="filter"
        ) from None
    check_json(value, "filter")
    return value


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", "100")
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= _MOST):
        raise InvalidRequest(
            f"limit is {text[:40]!r}: expected 1 to {_MOST}", code="invalid_value", param="limit"
        )
    return int(text)


async def list_page(request: web.Request) -> web.Response:
    """List documents, a page after the cursor; a cursor is `<shard>:<the shard's cursor>`."""
    router = request.app[ROUTER]
    record = await router.collection(request)
    caller = router.caller(request)
    include = _include(request, "metadata")
    shard, cursor = _cursor(request.query.get("after", ""), record)
    work = DocumentsWork(
        collection=record.id,
        op="list",
        cursor=cursor,
        limit=_limit(request),
        filter=_query_filter(request),
        with_text="text" in include,
        with_vectors="vectors" in include,
    )
    view = ResponseOptions(kind="documents", include=include, count=record.dimension)
    name, result = await _read(router, request, record, shard, work)
    following = _next(result.cursor, shard, record)
    found = msgspec.structs.replace(result, cursor=following)
    router.runner.delivered(caller, name)
    size = sum(len(doc.vectors or b"") + len(doc.text or "") for doc in found.documents)
    body = await router.pool.run(
        partial(json_bodies.documents, view, found), inline=size <= INLINE_BYTES
    )
    return reply(body)


def _cursor(text: str, record: CollectionRecord) -> tuple[int, str | None]:
    if not text:
        return 0, None
    shard, _, rest = text.partition(":")
    if not (shard.isascii() and shard.isdigit() and len(shard) < 5 and int(shard) < record.shards):
        raise InvalidRequest(
            f"after is {text[:80]!r}: expected `next` of the page before",
            code="invalid_cursor",
            param="after",
        )
    return int(shard), rest or None


def _next(cursor: str | None, shard: int, record: CollectionRecord) -> str | None:
    if cursor is not None:
        return f"{shard}:{cursor}"
    return f"{shard + 1}:" if shard + 1 < record.shards else None


async def _read(
    router: Router, request: web.Request, record: CollectionRecord, shard: int, work: DocumentsWork
) -> tuple[str, DocumentsResult]:
    ask = JobSpec(
        router.bus.writes.search_family(record.id),
        SEARCH_CLASSES,
        Parcel(encode(msgspec.structs.replace(work, shard=shard)), 1, 0),
        ResponseOptions(kind="documents"),
    )
    name, result = await router.run(request, router.caller(request), ask)
    return name, cast("DocumentsResult", result)


def document_id(request: web.Request) -> str:
    """Return the document a path names; its id may hold slashes, encoded or not."""
    raw = request.rel_url.raw_path.split("/documents/", 1)[-1]
    try:
        name = unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("the document's id is not UTF-8", code="invalid_utf8") from None
    return check_id(name, "id")


async def get(request: web.Request) -> web.Response:
    """Return one document, or 404."""
    router = request.app[ROUTER]
    record = await router.collection(request)
    name, include = document_id(request), _include(request, "text,metadata")
    work = DocumentsWork(
        collection=record.id,
        op="get",
        ids=[name],
        limit=1,
        with_text="text" in include,
        with_vectors="vectors" in include,
        after=request.query.get("applied") or None,
    )
    job, found = await _read(router, request, record, shard_of(name, record.shards), work)
    router.runner.delivered(router.caller(request), job)
    if not found.documents:
        raise NotFound(
            f"collection {record.name!r} holds no document {name!r}", code="document_not_found"
        )
    view = ResponseOptions(kind="documents", doc=name, include=include, count=record.dimension)
    return reply(json_bodies.documents(view, found))


async def delete(request: web.Request) -> web.Response:
    """Delete one document, or 404."""
    return await _delete(request, b"", [document_id(request)], single=True)


async def delete_many(request: web.Request) -> web.Response:
    """Delete documents by id; ids that are not there are not counted."""
    raw = await request.app[ROUTER].body(request)
    ids = [check_id(item, "ids") for item in decode(raw, DeleteBody).ids]
    return await _delete(request, raw, ids, single=False)


async def _delete(
    request: web.Request, raw: bytes, ids: list[str], *, single: bool
) -> web.Response:
    router = request.app[ROUTER]
    record = await router.collection(request)
    caller = router.caller(request, raw)
    plan = DeletePlan(record, ids, single)
    ask = router.several(caller.tenant, "delete", plan, ResponseOptions(kind="delete"))
    return await router.answer(request, caller, ask)
