"""GET and POST /v1/collections/{name}/map: a collection in two dimensions, and where documents lie on it.

All shards draw in one plane, which comes from the first shard that has rows.
"""

from __future__ import annotations

import asyncio
import binascii
from array import array
from collections import defaultdict
from collections.abc import Sequence
from math import isfinite
from typing import Any, cast

import msgspec
from aiohttp import web

from common.bus.writes import Writes
from common.errors import InternalError, InvalidRequest
from common.wire.message import encode
from common.wire.registry import CollectionRecord
from common.wire.search import DocumentsResult, DocumentsWork, MapPart, MapPoint
from common.wire.workflows import ResponseOptions
from services.router.admission.job_spec import JobSpec, RequestContext
from services.router.admission.policy import SEARCH_CLASSES
from services.router.http.job_replies import JobReplies
from services.router.http.receiver import Receiver, query_count
from services.router.http.records import TenantRecords
from services.router.http.replies import reply_json
from services.router.layouts import Layouts
from services.router.responses.collection_map import collection_map, placed, positions
from services.router.text.bodies import MapBody, check_id, decode, pack_vector
from services.router.text.requests import Parcel

PATH = "/v1/collections/{name}/map"
MOST_POINTS = 5000
_SAMPLE = 2000


class CollectionMapApi:
    """Maps of collections, drawn by vector_search; answered with the parts drawn so far, or 202 if none is drawn."""

    def __init__(
        self,
        receiver: Receiver,
        records: TenantRecords,
        replies: JobReplies,
        searches: Writes,
        layouts: Layouts,
    ) -> None:
        self._receiver, self._records, self._layouts = receiver, records, layouts
        self._replies, self._searches = replies, searches

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get(PATH, self.get), web.post(PATH, self.place)]

    async def get(self, request: web.Request) -> web.Response:
        """Return the map of a sample of the collection's rows."""
        record = await self._records.collection(request)
        sample = query_count(request, "sample", _SAMPLE, MOST_POINTS)
        caller = self._receiver.context(request)
        shard, first = await self._first(request, caller, record, sample)
        parts = [first] if first.basis or first.pending else []
        if first.basis:
            free = msgspec.structs.replace(caller, key=None)  # the first read has charged the key
            numbers = (await self._layouts.of(record)).numbers
            others = (
                self._part(request, free, record, number, sample=sample, basis=first.basis)
                for number in (numbers[numbers.index(shard) + 1 :] if shard in numbers else ())
            )
            parts += await asyncio.gather(*others)
        body = collection_map(record.name, parts, sample)
        return _reply(body, waits=first.pending and not first.basis)

    async def place(self, request: web.Request) -> web.Response:
        """Return the positions of documents, chunks of documents, or any vector on the map."""
        record = await self._records.collection(request)
        raw = await self._receiver.body(request)
        body = decode(raw, MapBody)
        given = [body.ids, body.hits, body.vector]
        if sum(item is not None for item in given) != 1:
            raise InvalidRequest(
                "expected exactly one of ids, hits and vector", code="invalid_value"
            )
        hits = [(check_id(hit.id, "hits"), hit.chunk) for hit in body.hits or ()]
        ids = [check_id(name, "ids") for name in dict.fromkeys(body.ids or ())]
        vector = b""
        if body.vector is not None:
            vector = pack_vector(body.vector, record.dimension, record.metric, "vector")
        caller = msgspec.structs.replace(
            self._receiver.context(request), idempotency_key="", body_hash=b""
        )
        if body.basis is not None:
            basis = _basis(body.basis, record)
        else:
            _, first = await self._first(request, caller, record, 0)
            if not first.basis:
                return _reply(positions(b"", [], pending=first.pending), waits=first.pending)
            basis, caller = first.basis, msgspec.structs.replace(caller, key=None)
        if vector:
            return reply_json(positions(basis, [placed(basis, vector, record.metric)]))
        points = await self._points(request, caller, record, basis, ids, hits)
        return reply_json(positions(basis, points))

    async def _first(
        self, request: web.Request, caller: RequestContext, record: CollectionRecord, sample: int
    ) -> tuple[int, MapPart]:
        """Return the first shard that has rows, with its part in its own plane; an empty part if none has rows."""
        shard, part = 0, MapPart()
        for shard in (await self._layouts.of(record)).numbers:
            part = await self._part(request, caller, record, shard, sample=sample)
            if part.basis or part.pending:
                break
            caller = msgspec.structs.replace(caller, key=None)
        return shard, part

    async def _points(
        self,
        request: web.Request,
        caller: RequestContext,
        record: CollectionRecord,
        basis: bytes,
        ids: Sequence[str],
        hits: Sequence[tuple[str, int]],
    ) -> list[MapPoint]:
        """Return the points of all chunks of `ids`, or of `hits` (document, chunk), in the order of `ids` or `hits`."""
        asked: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        layout = await self._layouts.of(record)
        for name, chunk in hits or [(name, 0) for name in ids]:
            asked[layout.shard_of(name)].append((name, chunk))
        calls = []
        for shard, pairs in asked.items():
            chunks = [chunk for _, chunk in pairs] if hits else []
            names = [name for name, _ in pairs]
            part = self._part(request, caller, record, shard, ids=names, chunks=chunks, basis=basis)
            calls.append(part)
            caller = msgspec.structs.replace(caller, key=None)
        found = [point for part in await asyncio.gather(*calls) for point in part.points]
        order: dict[object, int] = {}
        for place, key in enumerate(hits or ids):
            order.setdefault(key, place)
        return sorted(found, key=lambda p: order[(p.id, p.chunk) if hits else p.id])

    async def _part(
        self,
        request: web.Request,
        caller: RequestContext,
        record: CollectionRecord,
        shard: int,
        *,
        sample: int = 0,
        basis: bytes = b"",
        ids: Sequence[str] = (),
        chunks: Sequence[int] = (),
    ) -> MapPart:
        work = DocumentsWork(
            collection=record.id,
            op="map",
            ids=list(ids),
            chunks=list(chunks),
            sample=sample,
            basis=basis,
            shard=shard,
        )
        family = self._searches.search_family(record.id)
        parcel = Parcel(encode(work), 1, 0)
        spec = JobSpec(family, SEARCH_CLASSES, parcel, ResponseOptions(kind="map"))
        result = cast("DocumentsResult", await self._replies.fetch(request, caller, spec))
        if result.map is None:
            raise InternalError("a shard answered a question for its map without one")
        return result.map


def _reply(body: dict[str, Any], *, waits: bool) -> web.Response:
    return reply_json(body, 202, {"Retry-After": "1"}) if waits else reply_json(body)


def _basis(text: str, record: CollectionRecord) -> bytes:
    """Return the plane that a client sends back; InvalidRequest if it cannot be of this collection."""
    try:
        raw = binascii.a2b_base64(text.replace("-", "+").replace("_", "/"), strict_mode=True)
    except ValueError:
        raw = b""
    if len(raw) != 12 * record.dimension or not all(map(isfinite, array("f", raw))):
        raise InvalidRequest(
            f"basis is {text[:20]!r}…: expected the basis of a map of collection {record.name!r}",
            code="invalid_value",
            param="basis",
        )
    return raw
