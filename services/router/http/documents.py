"""Documents of a collection: store, list, get, delete."""

from __future__ import annotations

from functools import partial
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import msgspec
from aiohttp import web

from common.bus.writes import Writes
from common.errors import Conflict, InvalidRequest, NotFound, SpillwayError
from common.registry.layout import ShardLayout
from common.wire.message import encode
from common.wire.registry import CollectionRecord
from common.wire.search import DocumentsResult, DocumentsWork
from common.wire.workflows import DeletePlan, ResponseOptions, WritePlan
from services.router.admission.controller import AdmissionController
from services.router.admission.job_spec import JobSpec
from services.router.admission.policy import EMBED_CLASSES, SEARCH_CLASSES
from services.router.cards import Cards
from services.router.http.job_replies import JobReplies
from services.router.http.parcel_limits import ParcelLimits
from services.router.http.receiver import MODEL, Receiver, page_limit
from services.router.http.records import TenantRecords
from services.router.http.replies import reply
from services.router.layouts import Layouts
from services.router.responses import json_bodies
from services.router.text import collections
from services.router.text.bodies import DeleteBody, check_id, check_json, decode
from services.router.text.pool import INLINE_BYTES, TextPool
from services.router.text.requests import Parcel
from services.router.workflows.embed import checked_encoder
from services.router.workflows.planned_jobs import PlannedJobs

DOCUMENTS = "/v1/collections/{name}/documents"
PARTS = ("text", "metadata", "vectors")
_CHARACTERS_PER_TOKEN = 4


class DocumentsApi:
    """Lists and gets documents, each by one job on one shard; a job on a shard that was split is sent again."""

    def __init__(
        self,
        receiver: Receiver,
        records: TenantRecords,
        pool: TextPool,
        replies: JobReplies,
        searches: Writes,
        layouts: Layouts,
    ) -> None:
        self._receiver, self._records, self._layouts = receiver, records, layouts
        self._pool, self._replies, self._searches = pool, replies, searches

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that read."""
        return [
            web.get(DOCUMENTS, self.list_page),
            web.get(DOCUMENTS + "/{id:.+}", self.get),
        ]

    async def list_page(self, request: web.Request) -> web.Response:
        """List documents, a page after the cursor; a cursor is `<shard>:<the shard's cursor>`."""
        record = await self._records.collection(request)
        include = _include(request, "metadata")
        layout = await self._layouts.of(record)
        for again in (True, False):
            try:
                shard, cursor = _cursor(request.query.get("after", ""), layout)
                work = DocumentsWork(
                    collection=record.id,
                    op="list",
                    cursor=cursor,
                    limit=page_limit(request),
                    filter=query_filter(request),
                    with_text="text" in include,
                    with_vectors="vectors" in include,
                    shard=shard,
                )
                result = await self._read(request, record, work)
                break
            except (
                SpillwayError
            ) as error:  # the cursor, or the shards, may be newer than the known layout
                if error.code not in {"layout_changed", "invalid_cursor"} or not again:
                    raise
                layout = await self._layouts.now(record)
        options = ResponseOptions(kind="documents", include=include, count=record.dimension)
        following = _next(result.cursor, shard, layout)
        found = msgspec.structs.replace(result, cursor=following)
        size = sum(len(doc.vectors or b"") + len(doc.text or "") for doc in found.documents)
        write = partial(json_bodies.documents, options, found)
        return reply(await self._pool.run(write, inline=size <= INLINE_BYTES))

    async def get(self, request: web.Request) -> web.Response:
        """Return one document, or 404."""
        record = await self._records.collection(request)
        name, include = _document_id(request), _include(request, "text,metadata")
        layout = await self._layouts.of(record)
        for again in (True, False):
            try:
                after = layout.after(request.query.get("applied"))
                shard = layout.shard_of(name)
                work = DocumentsWork(
                    collection=record.id,
                    op="get",
                    ids=[name],
                    limit=1,
                    with_text="text" in include,
                    with_vectors="vectors" in include,
                    after=after.get(shard),
                    shard=shard,
                )
                found = await self._read(request, record, work)
                if layout.shards:
                    told = layout.token({shard: found.applied})
                    found = msgspec.structs.replace(found, applied=told)
                break
            except Conflict as error:
                if error.code != "layout_changed" or not again:
                    raise
                layout = await self._layouts.now(record)
        if not found.documents:
            raise NotFound(
                f"collection {record.name!r} holds no document {name!r}", code="document_not_found"
            )
        options = ResponseOptions(
            kind="documents", doc=name, include=include, count=record.dimension
        )
        return reply(json_bodies.documents(options, found))

    async def _read(
        self, request: web.Request, record: CollectionRecord, work: DocumentsWork
    ) -> DocumentsResult:
        caller = self._receiver.context(request)
        spec = JobSpec(
            self._searches.search_family(record.id),
            SEARCH_CLASSES,
            Parcel(encode(work), 1, 0),
            ResponseOptions(kind="documents"),
        )
        return cast("DocumentsResult", await self._replies.fetch(request, caller, spec))


class DocumentWritesApi:
    """Stores and deletes documents, each request by a workflow."""

    def __init__(
        self,
        receiver: Receiver,
        records: TenantRecords,
        limits: ParcelLimits,
        cards: Cards,
        pool: TextPool,
        admission: AdmissionController,
        planned: PlannedJobs,
        replies: JobReplies,
        searches: Writes,
    ) -> None:
        self._receiver, self._records, self._limits = receiver, records, limits
        self._cards, self._pool, self._admission = cards, pool, admission
        self._planned, self._replies, self._searches = planned, replies, searches

    def routes(self) -> list[web.RouteDef]:
        """Return the routes that write."""
        return [
            web.post(DOCUMENTS, self.store),
            web.post(DOCUMENTS + "/delete", self.delete_many),
            web.delete(DOCUMENTS + "/{id:.+}", self.delete),
        ]

    async def store(self, request: web.Request) -> web.Response:
        """Store documents; texts are split, embedded and synced before the response."""
        record = await self._records.collection(request)
        raw = await self._receiver.body(request)
        caller = self._receiver.context(request, raw)
        bounds = self._limits.of()
        call = partial(
            collections.documents,
            raw,
            record.dimension,
            record.metric,
            bounds,
            embeds=record.model is not None,
        )
        items, texts, size = await self._pool.run(call, inline=len(raw) < INLINE_BYTES)
        tokens, deadline_ms = size // _CHARACTERS_PER_TOKEN, caller.deadline_ms
        request[MODEL] = record.model or ""
        if texts and record.model is not None:
            checked_encoder(record, await self._cards.specs())
            bounds = self._limits.of((await self._cards.card(record.model)).family)
            family = await self._cards.family(record.model, record.id)
            await self._admission.foresee(family, EMBED_CLASSES, texts, tokens, deadline_ms)
        searched = self._searches.search_family(record.id)
        await self._admission.foresee(searched, SEARCH_CLASSES, 1, 0, deadline_ms)
        plan = WritePlan(record, items, (bounds.parcel_items, bounds.parcel_tokens))
        options = ResponseOptions(kind="write", model=record.model or "")
        spec = self._planned.spec(caller, "write", plan, options, tokens)
        return await self._replies.reply(request, caller, spec)

    async def delete(self, request: web.Request) -> web.Response:
        """Delete one document, or 404."""
        return await self._delete(request, b"", [_document_id(request)], single=True)

    async def delete_many(self, request: web.Request) -> web.Response:
        """Delete documents by id; unknown ids are not counted."""
        raw = await self._receiver.body(request)
        ids = [check_id(item, "ids") for item in decode(raw, DeleteBody).ids]
        return await self._delete(request, raw, ids, single=False)

    async def _delete(
        self, request: web.Request, raw: bytes, ids: list[str], *, single: bool
    ) -> web.Response:
        record = await self._records.collection(request)
        caller = self._receiver.context(request, raw)
        plan = DeletePlan(record, ids, single)
        options = ResponseOptions(kind="delete")
        spec = self._planned.spec(caller, "delete", plan, options)
        return await self._replies.reply(request, caller, spec)


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


def query_filter(request: web.Request) -> dict[str, Any] | None:
    """Return the filter that a URL's query gives as JSON; InvalidRequest if it is no JSON object."""
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


def _cursor(text: str, layout: ShardLayout) -> tuple[int, str | None]:
    """Return the shard and the shard's own cursor at which a listing continues."""
    if not text:
        return layout.numbers[0], None
    shard, _, rest = text.partition(":")
    if not (shard.isascii() and shard.isdigit() and len(shard) < 10):
        raise InvalidRequest(
            f"after is {text[:80]!r}: expected `next` of the page before",
            code="invalid_cursor",
            param="after",
        )
    if int(shard) not in layout.numbers:
        if layout.shards:
            raise Conflict(
                "after: the shard that the page before came from was split; begin the list again",
                code="layout_changed",
                param="after",
            )
        raise InvalidRequest(
            f"after is {text[:80]!r}: expected `next` of the page before",
            code="invalid_cursor",
            param="after",
        )
    return int(shard), rest or None


def _next(cursor: str | None, shard: int, layout: ShardLayout) -> str | None:
    if cursor is not None:
        return f"{shard}:{cursor}"
    at = layout.numbers.index(shard) + 1
    return f"{layout.numbers[at]}:" if at < len(layout.numbers) else None


def _document_id(request: web.Request) -> str:
    """Return the document's id in a path; the id may hold slashes, encoded or not."""
    raw = request.rel_url.raw_path.split("/documents/", 1)[-1]
    try:
        name = unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("the document's id is not UTF-8", code="invalid_utf8") from None
    return check_id(name, "id")
