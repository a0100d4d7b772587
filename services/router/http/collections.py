"""Collections: create, list, describe, delete, re-embed."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
from aiohttp import web

from common.bus import Bus
from common.clock import Clock
from common.errors import Conflict, InvalidRequest, Unprocessable
from common.ids import ulid
from common.registry import placement_plan
from common.registry.collections import Collections
from common.registry.placements import Placements
from common.registry.quantizers import Quantizers
from common.registry.tunings import Tunings
from common.wire.message import encode
from common.wire.registry import Chunking, CollectionRecord
from common.wire.search import DocumentsResult, DocumentsWork
from common.wire.workflows import ReembedPlan, ResponseOptions
from services.router.admission.controller import AdmissionController
from services.router.admission.job_spec import JobSpec, RequestContext
from services.router.admission.policy import SEARCH_CLASSES
from services.router.cards import Cards
from services.router.http.documents import query_filter
from services.router.http.job_replies import JobReplies
from services.router.http.parcel_limits import ParcelLimits
from services.router.http.receiver import TENANT, Receiver, query_count
from services.router.http.records import TenantRecords
from services.router.http.replies import reply_json
from services.router.http.shards import processes_of
from services.router.layouts import Layouts
from services.router.responses.collection_stats import collection_stats
from services.router.text.bodies import CollectionBody, ReembedBody, decode
from services.router.text.requests import Parcel, choose
from services.router.text.tokens import Spec
from services.router.workflows.planned_jobs import PlannedJobs
from services.router.workflows.write import await_served, drop_shards

_MOST_HITS = 10_000


class CollectionsApi:
    """Manages the collections of a tenant; vector_search makes and serves their shards."""

    def __init__(
        self,
        receiver: Receiver,
        records: TenantRecords,
        bus: Bus,
        cards: Cards,
        admission: AdmissionController,
        replies: JobReplies,
        layouts: Layouts,
    ) -> None:
        self._receiver, self._records, self._replies = receiver, records, replies
        self._layouts, self._placements = layouts, Placements(bus)
        self._bus, self._cards, self._admission = bus, cards, admission
        self._collections = Collections(bus)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of collections themselves."""
        name = "/v1/collections/{name}"
        return [
            web.get("/v1/collections", self.list_all),
            web.post("/v1/collections", self.create),
            web.get(name, self.get),
            web.get(f"{name}/explain", self.explain),
            web.delete(name, self.delete),
        ]

    async def create(self, request: web.Request) -> web.Response:
        """Create a collection; a collection with an encoder has the encoder's dimension."""
        body = decode(await self._receiver.body(request), CollectionBody)
        record = await self._record(request[TENANT], body)
        if body.shards is not None or body.replicas is not None:
            record = await self._placed(record, body.shards or 1, body.replicas or 1)
        if not await self._collections.create(record):
            if record.placed:
                await self._placements.remove(record.id)
            raise Conflict(
                f"collection {record.name!r} exists; delete it first, or choose another name",
                code="collection_exists",
                param="name",
            )
        layout = await self._layouts.now(record)
        await await_served(self._bus, self._admission, record, layout)
        return reply_json(_shown(record), status=201)

    async def _placed(
        self, record: CollectionRecord, shards: int, replicas: int
    ) -> CollectionRecord:
        """Place a collection's shards on living processes; Unprocessable if there are too few of them."""
        processes = await processes_of(self._bus, record)
        await self._placements.put(placement_plan.created(record.id, shards, replicas, processes))
        return msgspec.structs.replace(record, shards=shards, placed=True)

    async def _record(self, tenant: str, body: CollectionBody) -> CollectionRecord:
        chunking = body.chunking
        if chunking is not None and chunking.overlap_tokens >= chunking.max_tokens:
            raise InvalidRequest(
                "chunking.overlap_tokens: expected less than chunking.max_tokens",
                code="invalid_chunking",
                param="chunking.overlap_tokens",
            )
        now_ms = self._bus.clock.now_ms()
        base = CollectionRecord(
            id=ulid(now_ms),
            tenant=tenant,
            name=body.name,
            dimension=body.dimension or 0,
            metric=body.metric,
            chunking=Chunking(chunking.max_tokens, chunking.overlap_tokens)
            if chunking
            else Chunking(),
            query_prompt=body.query_prompt or "",
            document_prompt=body.document_prompt or "",
            created_ms=now_ms,
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
        specs, default = await self._cards.specs(), await self._cards.embed_default()
        return _with_encoder(base, choose(specs, name, default, ("embed",)), body)

    async def list_all(self, request: web.Request) -> web.Response:
        """List the tenant's collections."""
        records = await self._collections.all(request[TENANT])
        data = [_shown(record) for record in records if not record.name.startswith(".")]
        return reply_json({"object": "list", "data": data})

    async def get(self, request: web.Request) -> web.Response:
        """Return a collection with its statistics."""
        record = await self._records.collection(request)
        caller = self._receiver.context(request)
        layout = (
            await self._layouts.now(record) if record.placed else await self._layouts.of(record)
        )
        parts = await asyncio.gather(
            *(self._stats(request, caller, record, shard) for shard in layout.numbers)
        )
        stats = collection_stats([part.stats or {} for part in parts])
        applied = {n: part.applied for n, part in zip(layout.numbers, parts, strict=True)}
        stats["applied"] = layout.token(applied)
        return reply_json({**_shown(record), "stats": stats})

    async def explain(self, request: web.Request) -> web.Response:
        """Return how each shard searches, and how it applies a filter."""
        record = await self._records.collection(request)
        wanted, k = query_filter(request), query_count(request, "k", 10, _MOST_HITS)
        caller = self._receiver.context(request)
        layout = await self._layouts.of(record)
        works = [
            DocumentsWork(collection=record.id, op="explain", filter=wanted, k=k, shard=shard)
            for shard in layout.numbers
        ]
        parts = await asyncio.gather(*(self._told(request, caller, work) for work in works))
        shards = [
            {"shard": work.shard, **(part.stats or {}), "applied": part.applied}
            for work, part in zip(works, parts, strict=True)
        ]
        return reply_json(
            {"object": "explanation", "collection": record.name, "k": k, "shards": shards}
        )

    async def _stats(
        self, request: web.Request, caller: RequestContext, record: CollectionRecord, shard: int
    ) -> DocumentsResult:
        work = DocumentsWork(
            collection=record.id, op="stats", limit=1, with_text=False, shard=shard
        )
        return await self._told(request, caller, work)

    async def _told(
        self, request: web.Request, caller: RequestContext, work: DocumentsWork
    ) -> DocumentsResult:
        """Return the result of a job about one shard: its statistics, or its explanation of a search."""
        spec = JobSpec(
            self._bus.writes.search_family(work.collection),
            SEARCH_CLASSES,
            Parcel(encode(work), 1, 0),
            ResponseOptions(kind="stats"),
        )
        return cast("DocumentsResult", await self._replies.fetch(request, caller, spec))

    async def delete(self, request: web.Request) -> web.Response:
        """Delete a collection with everything in it."""
        record = await self._records.collection(request)
        layout = await self._layouts.now(record)
        await self._collections.remove(record)
        self._records.forget_collection(record)
        await drop_shards(self._bus, record, layout, f"drop-{record.id}", self._admission.router)
        if record.placed:
            await self._placements.remove(record.id)
        await Tunings(self._bus).remove(record.id)
        await Quantizers(self._bus).remove(record.id)
        return reply_json({"object": "collection", "name": record.name, "deleted": True})


class ReembedApi:
    """Embeds all texts of a collection with another encoder, then gives the collection's name to the new vectors."""

    def __init__(
        self,
        receiver: Receiver,
        records: TenantRecords,
        limits: ParcelLimits,
        cards: Cards,
        planned: PlannedJobs,
        replies: JobReplies,
        clock: Clock,
        timeout_s: float,
    ) -> None:
        self._receiver, self._records, self._limits = receiver, records, limits
        self._cards, self._planned, self._replies = cards, planned, replies
        self._clock, self._timeout_s = clock, timeout_s

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.post("/v1/collections/{name}/reembed", self.create)]

    async def create(self, request: web.Request) -> web.Response:
        """Re-embed a collection; searches find the old vectors until all new ones are stored."""
        record = await self._records.collection(request)
        raw = await self._receiver.body(request)
        body = decode(raw, ReembedBody) if raw.strip() else ReembedBody()
        caller = self._receiver.context(request, raw, default_timeout_s=self._timeout_s)
        if record.model is None and body.model is None:
            raise Unprocessable(
                f"collection {record.name!r} has no encoder: it holds vectors only; name a model to give it one",
                code="not_embeddable",
                param="model",
            )
        specs, default = await self._cards.specs(), await self._cards.embed_default()
        wanted = body.model or (record.model if record.model in specs else None)
        spec = choose(specs, wanted, default, ("embed",))
        now_ms = self._clock.now_ms()
        target = msgspec.structs.replace(
            record,
            id=ulid(now_ms),
            model=spec.name,
            fingerprint=spec.fingerprint,
            dimension=spec.dimension,
            created_ms=now_ms,
        )
        bounds = await self._limits.encoders()
        plan = ReembedPlan(record, target, (bounds.parcel_items, bounds.parcel_tokens))
        options = ResponseOptions(kind="reembed", model=spec.name)
        job = self._planned.spec(caller, "reembed", plan, options)
        return await self._replies.reply(request, caller, job)


def _shown(record: CollectionRecord) -> dict[str, Any]:
    """Return a collection in the form that clients see."""
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
        **({"placed": True} if record.placed else {}),
    }


def _with_encoder(base: CollectionRecord, spec: Spec, body: CollectionBody) -> CollectionRecord:
    """Return a collection's record with its encoder; InvalidRequest if the body does not fit the encoder."""
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
