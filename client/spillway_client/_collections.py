"""Collections, their documents, and search."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from . import errors
from ._http import Answer
from ._resources import floats, segment
from ._transport import Transport
from .types import (
    Collection,
    CollectionMap,
    Deleted,
    Document,
    DocumentPage,
    EffortExplanation,
    Explanation,
    FilterExplanation,
    Hit,
    MapPoint,
    MapPositions,
    SearchReport,
    SearchResult,
    Shard,
    ShardExplanation,
    ShardList,
    ShardReplica,
    Tuning,
    Written,
    WrittenDocument,
    build,
    items,
)

DocumentInput = Mapping[str, Any]
_UNSET: Any = object()


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class CollectionsResource:
    """Named sets of documents with their vectors."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self,
        name: str,
        *,
        dimension: int | None = None,
        metric: str | None = None,
        model: str | None = _UNSET,
        chunking: Mapping[str, int] | None = None,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        shards: int | None = None,
        replicas: int | None = None,
        timeout_s: float | None = None,
    ) -> Collection:
        """Create a collection; ConflictError (`collection_exists`) if the name is taken.

        `model=None` makes a collection of vectors only (then `dimension` is needed); without `model` the default
        encoder embeds its texts. `metric` is cosine, dot or l2. `chunking` is {"max_tokens", "overlap_tokens"}. With
        `shards` or `replicas` the collection is spread over some of the vector_search processes; else each process
        holds all of it.
        """
        body = _given(
            name=name,
            dimension=dimension,
            metric=metric,
            chunking=dict(chunking) if chunking else None,
            query_prompt=query_prompt,
            document_prompt=document_prompt,
            shards=shards,
            replicas=replicas,
        )
        if model is not _UNSET:
            body["model"] = model
        answer = await self._transport.call(
            "POST", "/v1/collections", body=body, timeout_s=timeout_s
        )
        return build(Collection, answer.payload)

    async def list(self, *, timeout_s: float | None = None) -> list[Collection]:
        """Return the tenant's collections."""
        answer = await self._transport.call("GET", "/v1/collections", timeout_s=timeout_s)
        return [build(Collection, item) for item in items(answer.payload)]

    async def get(self, name: str, *, timeout_s: float | None = None) -> Collection:
        """Return a collection with its statistics; NotFoundError if there is no collection of this name."""
        path = f"/v1/collections/{segment(name)}"
        return build(
            Collection, (await self._transport.call("GET", path, timeout_s=timeout_s)).payload
        )

    async def explain(
        self,
        name: str,
        *,
        k: int | None = None,
        filter: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Explanation:
        """Explain a collection's searches for `k` hits: the kind of index, the efforts, and the path of a filter."""
        query = {"k": k, "filter": json.dumps(filter, allow_nan=False) if filter else None}
        path = f"/v1/collections/{segment(name)}/explain"
        answer = await self._transport.call("GET", path, query=query, timeout_s=timeout_s)
        shards = [_shard(item) for item in items(answer.payload, "shards")]
        return build(Explanation, answer.payload, shards=shards)

    async def tune(
        self,
        name: str,
        *,
        recall: float = 0.95,
        p99_ms: float | None = None,
        memory_bytes: int | None = None,
        plan_only: bool = False,
        timeout_s: float | None = None,
    ) -> Tuning:
        """Begin a tuning: find the best index that finds the share `recall` of the true neighbours, and build it.

        ConflictError (`tuning_under_way`) while another tuning is under way.
        """
        body = _given(recall=recall, p99_ms=p99_ms, memory_bytes=memory_bytes, plan_only=plan_only)
        path = f"/v1/collections/{segment(name)}/tune"
        answer = await self._transport.call("POST", path, body=body, timeout_s=timeout_s)
        return build(Tuning, answer.payload)

    async def tuning(self, name: str, *, timeout_s: float | None = None) -> Tuning:
        """Return the state and the results of the last tuning; NotFoundError if there was none."""
        path = f"/v1/collections/{segment(name)}/tune"
        return build(Tuning, (await self._transport.call("GET", path, timeout_s=timeout_s)).payload)

    async def cancel_tuning(self, name: str, *, timeout_s: float | None = None) -> Tuning:
        """End the running tuning, and return it; the collection keeps its index. An ended tuning is not changed.

        NotFoundError if there was none.
        """
        path = f"/v1/collections/{segment(name)}/tune"
        answer = await self._transport.call("DELETE", path, timeout_s=timeout_s)
        return build(Tuning, answer.payload)

    async def delete(self, name: str, *, timeout_s: float | None = None) -> None:
        """Delete a collection with all its documents."""
        await self._transport.call(
            "DELETE", f"/v1/collections/{segment(name)}", timeout_s=timeout_s
        )

    async def reembed(
        self, name: str, *, model: str | None = None, timeout_s: float | None = None
    ) -> Collection:
        """Embed every stored text with the current encoder (or `model`), and replace the collection's vectors."""
        path = f"/v1/collections/{segment(name)}/reembed"
        answer = await self._transport.call(
            "POST", path, body=_given(model=model), timeout_s=timeout_s
        )
        return build(Collection, {"name": name, **answer.payload})

    async def shards(self, name: str, *, timeout_s: float | None = None) -> ShardList:
        """Return the shards of a collection with their replicas, and which shards are missing."""
        return await self._place("GET", name, "shards", None, timeout_s)

    async def split_shard(
        self, name: str, shard: int, *, timeout_s: float | None = None
    ) -> ShardList:
        """Begin to split a shard into two; `shards` shows when the split is done."""
        return await self._place("POST", name, f"shards/{shard}/split", {}, timeout_s)

    async def move_shard(
        self,
        name: str,
        shard: int,
        *,
        source: str | None = None,
        target: str | None = None,
        timeout_s: float | None = None,
    ) -> ShardList:
        """Begin to move a replica of a shard from process `source` to `target`.

        Without `source` a replica is added; without `target` the server chooses a process.
        """
        body = {"from": source, "to": target}
        return await self._place("POST", name, f"shards/{shard}/move", body, timeout_s)

    async def drop_replica(
        self, name: str, shard: int, replica: str, *, timeout_s: float | None = None
    ) -> ShardList:
        """Remove one replica of a shard; ConflictError (`shard_busy`) if no other replica serves the shard."""
        body = {"replica": replica}
        return await self._place("POST", name, f"shards/{shard}/drop", body, timeout_s)

    async def reset_shard(
        self, name: str, shard: int, *, timeout_s: float | None = None
    ) -> ShardList:
        """Replace a lost shard by an empty one; ConflictError (`shard_busy`) while a living process serves it."""
        return await self._place("POST", name, f"shards/{shard}/reset", {}, timeout_s)

    async def set_replicas(
        self, name: str, replicas: int, *, timeout_s: float | None = None
    ) -> ShardList:
        """Set the number of replicas of each shard; missing replicas are filled from others."""
        return await self._place("POST", name, "replicas", {"replicas": replicas}, timeout_s)

    async def _place(
        self,
        method: str,
        name: str,
        verb: str,
        body: dict[str, Any] | None,
        timeout_s: float | None,
    ) -> ShardList:
        path = f"/v1/collections/{segment(name)}/{verb}"
        answer = await self._transport.call(method, path, body=body, timeout_s=timeout_s)
        data = [
            build(Shard, item, replicas=[build(ShardReplica, each) for each in item["replicas"]])
            for item in items(answer.payload)
        ]
        return build(ShardList, answer.payload, data=data)

    async def map(
        self, name: str, *, sample: int | None = None, timeout_s: float | None = None
    ) -> CollectionMap:
        """Return the map of up to `sample` chunks; while the map is `pending`, call again after a second."""
        path = f"/v1/collections/{segment(name)}/map"
        answer = await self._transport.call(
            "GET", path, query={"sample": sample}, timeout_s=timeout_s
        )
        points = [build(MapPoint, item) for item in items(answer.payload, "points")]
        return build(CollectionMap, answer.payload, points=points)

    async def place(
        self,
        name: str,
        *,
        ids: Iterable[str] | None = None,
        hits: Iterable[Hit] | None = None,
        vector: Sequence[float] | None = None,
        basis: str | None = None,
        timeout_s: float | None = None,
    ) -> MapPositions:
        """Return the places of documents (`ids`), hits, or a vector on the map of `basis`, else on the present map."""
        body = _given(
            ids=None if ids is None else list(ids),
            hits=None if hits is None else [{"id": hit.id, "chunk": hit.chunk} for hit in hits],
            vector=None if vector is None else list(vector),
            basis=basis,
        )
        path = f"/v1/collections/{segment(name)}/map"
        answer = await self._transport.call("POST", path, body=body, timeout_s=timeout_s)
        points = [build(MapPoint, item) for item in items(answer.payload)]
        return build(MapPositions, answer.payload, data=points)


class DocumentsResource:
    """The documents of one collection."""

    def __init__(self, transport: Transport, collection: str) -> None:
        self._transport = transport
        self._path = f"/v1/collections/{segment(collection)}/documents"

    async def add(
        self,
        documents: Iterable[DocumentInput],
        *,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> Written:
        """Store documents, replacing those with the same id; returns when they are durable.

        A document is {"id"?, "text" or "vector", "metadata"?}.
        """
        body = {"documents": [dict(document) for document in documents]}
        if not body["documents"]:
            raise errors.InvalidInputError("no documents; expected at least one")
        answer = await self._transport.call(
            "POST", self._path, body=body, timeout_s=timeout_s, idempotency_key=idempotency_key
        )
        written = [build(WrittenDocument, item) for item in items(answer.payload)]
        return Written(written, answer.payload.get("applied"), answer.request_id)

    async def list(
        self,
        *,
        limit: int | None = None,
        after: str | None = None,
        filter: Mapping[str, Any] | None = None,
        include: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> DocumentPage:
        """Return one page of documents; `include` may name text, metadata and vectors."""
        query = {
            "limit": limit,
            "after": after,
            "filter": json.dumps(filter, allow_nan=False) if filter else None,
            "include": ",".join(include) or None,
        }
        answer = await self._transport.call("GET", self._path, query=query, timeout_s=timeout_s)
        documents = [_document(item) for item in items(answer.payload)]
        return build(DocumentPage, answer.payload, data=documents)

    async def iterate(
        self,
        *,
        page: int = 500,
        filter: Mapping[str, Any] | None = None,
        include: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> AsyncIterator[Document]:
        """Yield every document, asking for `page` at a time; `timeout_s` bounds each page."""
        after: str | None = None
        while True:
            found = await self.list(
                limit=page, after=after, filter=filter, include=include, timeout_s=timeout_s
            )
            for document in found.data:
                yield document
            if not found.has_more or found.next is None:
                return
            after = found.next

    async def get(self, id: str, *, timeout_s: float | None = None) -> Document:
        """Return one document; NotFoundError if there is no document with this id."""
        path = f"{self._path}/{segment(id)}"
        return _document((await self._transport.call("GET", path, timeout_s=timeout_s)).payload)

    async def delete(self, ids: str | Iterable[str], *, timeout_s: float | None = None) -> Deleted:
        """Delete documents by id; unknown ids are no errors, and are not counted."""
        wanted = [ids] if isinstance(ids, str) else list(ids)
        if not wanted:
            return Deleted(0)
        answer = await self._transport.call(
            "POST", f"{self._path}/delete", body={"ids": wanted}, timeout_s=timeout_s
        )
        return build(Deleted, answer.payload)


def _shard(payload: Any) -> ShardExplanation:
    efforts = [build(EffortExplanation, item) for item in items(payload, "efforts")]
    met = payload.get("filter")
    way = build(FilterExplanation, met) if met is not None else None
    return build(ShardExplanation, payload, efforts=efforts, filter=way)


def _document(payload: Any) -> Document:
    document = build(Document, payload)
    if document.vectors and isinstance(document.vectors[0], str):
        rows = [floats(_unbase64(row)) for row in document.vectors]
        return dataclasses.replace(document, vectors=rows)
    return document


def _unbase64(row: Any) -> bytes:
    import base64  # noqa: PLC0415 - only for servers that answer vectors in base64

    return base64.b64decode(row)


async def search(
    transport: Transport, collection: str, body: dict[str, Any], timeout_s: float | None
) -> Answer:
    """Send one search."""
    path = f"/v1/collections/{segment(collection)}/search"
    return await transport.call("POST", path, body=body, timeout_s=timeout_s, reads=True)


def one_result(answer: Answer) -> SearchResult:
    """Decode the answer to a single query."""
    hits = [build(Hit, item) for item in items(answer.payload)]
    return _result(hits, answer)


def many_results(answer: Answer) -> list[SearchResult]:
    """Decode the answer to several queries, in their order."""
    rows = sorted(items(answer.payload), key=lambda row: int(row["index"]))
    return [_result([build(Hit, hit) for hit in items(row)], answer) for row in rows]


def _result(hits: list[Hit], answer: Answer) -> SearchResult:
    payload = answer.payload
    told = payload.get("search")
    report = build(SearchReport, told) if told is not None else None
    path, mode = payload.get("path", ""), payload.get("mode", "vector")
    missing = payload.get("missing") or []
    return SearchResult(
        hits, path, payload.get("applied"), answer.request_id, report, mode, missing
    )
