"""POST /v1/collections/{name}/search: by text or by vector, one query or many."""

from __future__ import annotations

import itertools
from functools import partial
from typing import cast

import msgspec
from aiohttp import web

from common.bus.writes import Writes
from common.errors import Conflict, NotFound
from common.ids import job_id, ulid
from common.registry.layout import ShardLayout
from common.wire.registry import CollectionRecord
from common.wire.results import EmbedResult
from common.wire.search import MissingShard, SearchResult
from common.wire.workflows import ResponseOptions, SearchPlan, SearchRequest
from services.router.admission.controller import AdmissionController
from services.router.admission.job_spec import QUESTION, JobSpec, RequestContext
from services.router.admission.policy import EMBED_CLASSES, SEARCH_CLASSES
from services.router.cards import Cards
from services.router.http.job_replies import JobReplies, noted
from services.router.http.parcel_limits import ParcelLimits
from services.router.http.quick_search import PLAIN, ROUTE, is_plain, read_at_once
from services.router.http.receiver import MODEL, REQUEST_ID, Receiver
from services.router.http.records import TenantRecords
from services.router.http.whole_reply import WholeReply
from services.router.layouts import Layouts
from services.router.mesh.lane_depths import LaneDepths
from services.router.responses import json_bodies
from services.router.shard_reads import ShardReads
from services.router.text import collections
from services.router.text.pool import TextPool
from services.router.text.requests import Parcel, parcels_of
from services.router.text.tokens import Spec
from services.router.workflows.embed import checked_encoder
from services.router.workflows.planned_jobs import PlannedJobs
from services.router.workflows.search import (
    QUERIES_AT_ONCE,
    at_once,
    merge,
    search_parcels,
    search_work,
)


class SearchApi:
    """Searches a collection: by calls to its shards if only the caller waits for the result, else by jobs.

    A search by vectors in one shard is one job; any other is a workflow that embeds and searches.
    """

    def __init__(
        self,
        receiver: Receiver,
        records: TenantRecords,
        limits: ParcelLimits,
        depths: LaneDepths,
        cards: Cards,
        pool: TextPool,
        admission: AdmissionController,
        planned: PlannedJobs,
        replies: JobReplies,
        searches: Writes,
        reads: ShardReads,
        layouts: Layouts,
    ) -> None:
        self._receiver, self._records = receiver, records
        self._limits, self._depths = limits, depths
        self._cards, self._pool, self._admission = cards, pool, admission
        self._planned, self._replies, self._searches = planned, replies, searches
        self._reads, self._layouts = reads, layouts
        self._turns = itertools.count(1)  # each request takes the next partition

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.post(ROUTE, self.create)]

    async def create(self, request: web.Request) -> web.Response:
        """Search for the queries of a request."""
        record = await self._records.recent_collection(request)
        raw = await self._receiver.body(request)
        caller = self._receiver.context(request, raw)
        if (
            not caller.attached
        ):  # the outcome is kept, so it must not be the outcome of a former collection
            record = await self._records.collection(request)
        try:
            return await self._searched(request, caller, record, raw)
        except NotFound as error:
            if error.code != "collection_not_found":
                raise
            found = await self._records.collection(request)
            if found.id == record.id:
                raise
        self._records.forget_collection(record)
        return await self._searched(request, caller, found, raw)

    async def _searched(
        self, request: web.Request, caller: RequestContext, record: CollectionRecord, raw: bytes
    ) -> web.Response:
        """Search a collection for the queries of a body."""
        request[MODEL] = record.model or ""
        call = partial(
            collections.search,
            raw,
            record.dimension,
            record.metric,
            self._limits.of(),
            spec=await self._spec(record),
            prompt=record.query_prompt,
        )
        ask = await self._pool.run(call, inline=read_at_once(raw))
        request[PLAIN] = is_plain(ask)
        if ask.tokens:
            checked_encoder(record, await self._cards.specs())
        options = ResponseOptions(kind="search", model=record.model or "", many=ask.many)
        if caller.attached:
            ask, found = await self._read(request, caller, record, ask)
            if found is not None:
                return WholeReply(json_bodies.search(options, request[REQUEST_ID], found))
        family = self._searches.search_family(record.id)
        most, _ = self._depths.of(family.name) or (QUERIES_AT_ONCE, 0)
        ask = self._begun(request, ask)
        single = record.shards == 1 and not record.placed
        if not ask.tokens and single and ask.count <= min(most, QUERIES_AT_ONCE):
            parcels = search_parcels(
                record, ask, ask.vectors, ShardLayout.of(record, None), 0, most
            )
            only = JobSpec(family, SEARCH_CLASSES, parcels[0], options)
            return await self._replies.reply(request, caller, only)
        await self._admission.foresee(family, SEARCH_CLASSES, ask.count, 0, caller.deadline_ms)
        bounds = await self._limits.encoders()
        plan = SearchPlan(record, ask, (bounds.parcel_items, bounds.parcel_tokens), most)
        tokens = sum(map(len, ask.tokens))
        spec = self._planned.spec(caller, "search", plan, options, tokens)
        return await self._replies.reply(request, caller, spec)

    async def _read(
        self,
        request: web.Request,
        caller: RequestContext,
        record: CollectionRecord,
        ask: SearchRequest,
    ) -> tuple[SearchRequest, SearchResult | None]:
        """Return the search with its vectors, and its result by calls to shards, None if it needs jobs.

        The search ends if its client leaves, since nobody can ask for its outcome later.
        """
        family = self._searches.search_family(record.id)
        layout = await self._layouts.of(record)
        if ask.count > at_once(layout, ask) or not await self._reads.ready(family, ask.count):
            return ask, None
        if ask.tokens:
            parcels = await self._parcels(record, ask)
            if len(parcels) > 1:
                return ask, None
            vectors = await self._embedded(request, caller, record, parcels[0])
            ask = msgspec.structs.replace(ask, tokens=[], vectors=vectors)
            caller = msgspec.structs.replace(caller, key=None)  # embedding has charged the key
        else:
            noted(request, job_id(family, ulid()))  # in the form of a job's id, without a job
        ask = self._begun(request, ask)
        try:
            found = await self._found(request, caller, record, ask, layout)
            old = record.placed and (found is None or bool(found.missing))
        except Conflict as error:
            if error.code != "layout_changed":
                raise
            found, old = None, True
        if old:  # a replica may have moved, or a shard was split
            layout = await self._layouts.now(record)
            caller = msgspec.structs.replace(caller, key=None)
            found = await self._found(request, caller, record, ask, layout) or found
        if found is not None and found.missing and not ask.partial:
            return ask, None
        return ask, found

    async def _found(
        self,
        request: web.Request,
        caller: RequestContext,
        record: CollectionRecord,
        ask: SearchRequest,
        layout: ShardLayout,
    ) -> SearchResult | None:
        """Return the merged hits of a layout's shards, with the missing shards; None if no shard answered."""
        family, name = self._searches.search_family(record.id), request[REQUEST_ID]
        works = [
            search_work(record, ask, ask.vectors, ask.texts, layout, n) for n in layout.numbers
        ]

        async def found() -> list[SearchResult | MissingShard] | None:
            return await self._reads.search(
                family, works, ask.count, caller.deadline_ms, layout.holders()
            )

        results = await self._admission.read(caller, family, name, found)
        if results is None:
            return None
        pairs = list(zip(layout.numbers, results, strict=True))
        missing = [each for _, each in pairs if isinstance(each, MissingShard)]
        given = {number: [each] for number, each in pairs if isinstance(each, SearchResult)}
        if ask.partial or missing:
            return await merge(self._pool, given, layout, ask, ask.vectors, missing)
        return await merge(self._pool, given, layout, ask, ask.vectors)

    def _begun(self, request: web.Request, ask: SearchRequest) -> SearchRequest:
        """Return a search with the spent part of its time budget, if it has a budget."""
        if ask.budget_ms is None:
            return ask
        return msgspec.structs.replace(ask, spent_ms=self._receiver.spent_ms(request))

    async def _parcels(self, record: CollectionRecord, ask: SearchRequest) -> list[Parcel]:
        """Return the jobs that embed a search's questions."""
        spec = checked_encoder(record, await self._cards.specs())
        return parcels_of(spec, ask.tokens, await self._limits.encoders(), question=True)

    async def _embedded(
        self, request: web.Request, caller: RequestContext, record: CollectionRecord, parcel: Parcel
    ) -> bytes:
        """Return the float32 rows of one parcel of questions."""
        model = record.model or ""
        family = await self._cards.family(model, request.remote or "", next(self._turns))
        options = ResponseOptions(kind="embed", model=model, tokens=parcel.tokens)
        spec = JobSpec(family, EMBED_CLASSES, parcel, options, parcel.tokens, QUESTION)
        result = await self._replies.fetch(request, caller, spec)
        return cast("EmbedResult", result).vectors

    async def _spec(self, record: CollectionRecord) -> Spec | None:
        """Return the encoder's spec for tokenizing; a spec that does not match is refused once the body is parsed."""
        if record.model is None:
            return None
        specs = await self._cards.specs()
        return specs.get(record.model) or next(iter(specs.values()), None)
