"""The stages of a write: look up the stored documents, split, embed, append, and wait until replicas have synced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import msgspec

from common.bus import Bus
from common.bus.writes import ShardSealed
from common.errors import Conflict, DeadlineExceeded, NotFound, Unavailable
from common.registry.collections import Collections
from common.registry.layout import ShardLayout
from common.wire.message import encode
from common.wire.registry import CollectionRecord
from common.wire.search import (
    Chunk,
    Document,
    DocumentsResult,
    DocumentsWork,
    StoredDocument,
    Write,
)
from common.wire.workflows import DeletePlan, RequestResult, StoreItem, WritePlan
from services.router.admission.controller import AdmissionController
from services.router.admission.policy import SEARCH_CLASSES
from services.router.admission.queue import Ticket
from services.router.text import collections as texts
from services.router.text.requests import Parcel
from services.router.text.tokens import Spec
from services.router.workflows.embed import embed, encoder_of
from services.router.workflows.workflow import Workflow, letters

T = TypeVar("T")
WRITE_BYTES = 4 * 1024 * 1024
KNOWN_AT_ONCE = 500
READY_S = 5.0
_CHUNK_BYTES = 512 * 1024
_LOOK_MS = 1000  # a write that stays unconfirmed checks this often that its shard exists


async def await_served(
    bus: Bus, admission: AdmissionController, record: CollectionRecord, layout: ShardLayout
) -> None:
    """Wait up to READY_S until a replica holds every shard, so that the next request finds one."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            for shard in layout.numbers:
                await _served(bus, admission, record, shard)


async def _served(
    bus: Bus, admission: AdmissionController, record: CollectionRecord, shard: int
) -> None:
    family = bus.writes.search_family(record.id)
    ticket = Ticket(admission.queue, family, 1.0)
    try:
        while True:
            ticket.begin()
            await bus.admission.ask_for_room(family)  # first, so that a later start is notified
            if await bus.writes.applied(record.id, shard):
                return
            await ticket.wait(READY_S)
    finally:
        ticket.leave()


async def drop_shards(
    bus: Bus, record: CollectionRecord, layout: ShardLayout, request: str, router: str
) -> None:
    """Tell every replica that a collection is dropped; replicas of a sealed shard learn it from the registry."""
    for shard in layout.numbers:
        write = Write(request=request, index=1 << 20, router=router, drop=True)
        with contextlib.suppress(ShardSealed):
            await bus.writes.append(record.id, shard, write)


async def _known(
    workflow: Workflow, record: CollectionRecord, ids: Sequence[str]
) -> tuple[dict[str, StoredDocument], ShardLayout]:
    """Return the stored documents among `ids`, and the layout used to look them up."""
    layout = await workflow.context.layouts.now(record)
    while True:
        try:
            return await _known_by(workflow, record, layout, ids), layout
        except Conflict as error:
            if error.code != "layout_changed":
                raise
            layout = await workflow.context.layouts.newer(record, layout, workflow.deadline_ms)


async def _known_by(
    workflow: Workflow, record: CollectionRecord, layout: ShardLayout, ids: Sequence[str]
) -> dict[str, StoredDocument]:
    parcels: list[Parcel] = []
    groups = layout.grouped(ids)
    writes = workflow.context.bus.writes
    # `after` makes any replica first apply all writes that were acknowledged before.
    after = await asyncio.gather(*(writes.acknowledged(record.id, shard) for shard in groups))
    for (shard, mine), acknowledged in zip(groups.items(), after, strict=True):
        for first in range(0, len(mine), KNOWN_AT_ONCE):
            some = mine[first : first + KNOWN_AT_ONCE]
            work = DocumentsWork(
                collection=record.id,
                op="get",
                ids=some,
                limit=len(some),
                with_text=False,
                after=acknowledged,
                shard=shard,
            )
            parcels.append(Parcel(encode(work), 1, 0))
    family = writes.search_family(record.id)
    stage = f"known{letters(layout.version) if layout.version else ''}"
    _, results = await workflow.gather(stage, [family], SEARCH_CLASSES, parcels)
    found = (doc for result in results for doc in cast("DocumentsResult", result).documents)
    return {doc.id: doc for doc in found}


async def _check_unchanged(workflow: Workflow, record: CollectionRecord) -> None:
    """Raise NotFound or Conflict if a collection was deleted or replaced, or is being re-embedded."""
    collections = Collections(workflow.context.bus)
    current = await collections.get(record.tenant, record.name)
    if current is None:
        raise NotFound(f"collection {record.name!r} was deleted", code="collection_not_found")
    if current.id != record.id:
        raise Conflict(
            f"collection {record.name!r} was replaced meanwhile; send the request again",
            code="collection_changed",
        )
    if await collections.reembedding(record):
        raise Conflict(
            f"collection {record.name!r} is being re-embedded; write to it when that is done",
            code="collection_busy",
        )


async def documents_of(
    workflow: Workflow,
    record: CollectionRecord,
    items: Sequence[StoreItem],
    parcel: tuple[int, int],
    stage: str,
) -> list[Document]:
    """Return items as documents to store, their texts split and embedded."""
    plain = [item for item in items if item.vector is None]
    pieces: list[list[tuple[int, int, list[int]]]] = []
    rows, size = b"", 4 * record.dimension
    if plain:
        spec = await encoder_of(workflow, record)
        pieces = await _split(workflow, record, spec, [item.text or "" for item in plain])
        lists = [ids for parts in pieces for _, _, ids in parts]
        rows = await embed(workflow, stage, spec, lists, parcel, bulk=True)
    parts_of = {item.id: parts for item, parts in zip(plain, pieces, strict=True)}
    out: list[Document] = []
    row = 0
    for item in items:
        chunks: list[Chunk] = []
        if item.vector is not None:
            chunks = [Chunk(0, len(item.text or ""), item.vector)]
        for start, end, _ in parts_of.get(item.id, ()):
            chunks.append(Chunk(start, end, rows[row * size : (row + 1) * size]))
            row += 1
        out.append(
            Document(
                id=item.id, hash=item.hash, chunks=chunks, text=item.text, metadata=item.metadata
            )
        )
    return out


async def _split(
    workflow: Workflow, record: CollectionRecord, spec: Spec, given: Sequence[str]
) -> list[list[tuple[int, int, list[int]]]]:
    """Chunk and tokenize texts in the pool, some hundred kilobytes a call."""
    out: list[list[tuple[int, int, list[int]]]] = []
    first = 0
    while first < len(given):
        last, held = first, 0
        while last < len(given) and (last == first or held + len(given[last]) <= _CHUNK_BYTES):
            held += len(given[last])
            last += 1
        chunking = record.chunking
        call = partial(
            texts.chunked,
            given[first:last],
            spec,
            chunking.max_tokens,
            chunking.overlap_tokens,
            record.document_prompt,
        )
        out += await workflow.context.pool.run(call, inline=held < 2048)
        first = last
    return out


def _writes(request: str, router: str, documents: Sequence[Document], first: int) -> list[Write]:
    """Group documents into writes of a bounded size."""
    groups: list[list[Document]] = [[]]
    held = 0
    for document in documents:
        size = (
            sum(len(chunk.vector) + 32 for chunk in document.chunks)
            + len(document.text or "") * 2
            + 1024
        )
        if groups[-1] and held + size > WRITE_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(document)
        held += size
    return [
        Write(request=request, index=first + i, router=router, upserts=group)
        for i, group in enumerate(groups)
        if group
    ]


async def _apply(
    workflow: Workflow,
    record: CollectionRecord,
    layout: ShardLayout,
    shard: int,
    writes: Sequence[Write],
) -> str:
    """Append writes to one shard and wait until enough replicas have synced the last; return the last entry's id."""
    context, entry = workflow.context, ""
    for write in writes:
        entry = await context.bus.writes.append(record.id, shard, write)
    if not record.name.startswith("."):
        # Re-embedding may have begun meanwhile and missed these writes: then the client must know.
        await _check_unchanged(workflow, record)
    await _await_applied(workflow, record, layout, shard, entry)
    return entry


async def _await_applied(
    workflow: Workflow, record: CollectionRecord, layout: ShardLayout, shard: int, entry: str
) -> None:
    """Wait until enough replicas have synced a write, at most all that serve the shard.

    A shard that was split has handed the write to its children.
    """
    context = workflow.context
    holders = dict(zip(layout.numbers, layout.holders(), strict=True)).get(shard)
    ack = context.search_ack if holders is None else min(context.search_ack, max(len(holders), 1))
    while True:
        now_ms = context.bus.clock.now_ms()
        if now_ms >= workflow.deadline_ms:
            raise DeadlineExceeded(
                "the write is stored but was not confirmed before the deadline; repeating it is safe",
                code="deadline_exceeded",
            )
        if await context.bus.writes.await_applied(
            record.id,
            shard,
            entry,
            ack,
            context.notifications,
            min(workflow.deadline_ms, now_ms + _LOOK_MS),
        ):
            return
        layout = await context.layouts.now(record)
        if any(shard in one.ancestors for one in layout.shards):
            return  # children join the layout once their replicas have applied all writes before the seal
        if shard not in layout.numbers:
            raise Unavailable(
                f"shard {shard} of collection {record.name!r} was given up; send the request again",
                code="shard_missing",
            )


async def store(
    workflow: Workflow,
    record: CollectionRecord,
    layout: ShardLayout,
    documents: Sequence[Document],
    first: int = 0,
) -> str:
    """Store documents on their shards; returns the token of the applied ids."""
    router = workflow.context.notifications.router

    def writes(name: str, shard: int, mine: Sequence[Document]) -> list[Write]:
        return _writes(name, router, mine, first + shard * 10_000)

    return await _spread(workflow, record, layout, {doc.id: doc for doc in documents}, writes)


async def _spread(
    workflow: Workflow,
    record: CollectionRecord,
    layout: ShardLayout,
    items: Mapping[str, T],
    writes: Callable[[str, int, Sequence[T]], list[Write]],
) -> str:
    """Apply to each shard the writes that `writes` makes of its items; return the token of the applied ids.

    A shard recognises a repeated write by its index and the name given to `writes`. If a shard was split meanwhile, its
    items go to its successors under another name: nobody repeats these writes, since a router that takes over this
    request first looks up the stored documents.
    """
    name = f"{workflow.request}@{layout.version}" if layout.version else workflow.request
    applied: dict[int, str] = {}
    groups = layout.grouped(items)
    while groups:
        outcomes = await asyncio.gather(
            *(
                _apply(workflow, record, layout, n, writes(name, n, [items[each] for each in mine]))
                for n, mine in groups.items()
            ),
            return_exceptions=True,
        )
        left: list[str] = []
        for (number, mine), outcome in zip(groups.items(), outcomes, strict=True):
            if isinstance(outcome, ShardSealed):
                left += mine
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                applied[number] = outcome
        if left:
            layout = await workflow.context.layouts.newer(record, layout, workflow.deadline_ms)
            name = f"{workflow.request}@{workflow.lease.epoch}.{layout.version}"
            if workflow.context.bus.clock.now_ms() >= workflow.deadline_ms:
                raise Unavailable(
                    f"a shard of collection {record.name!r} is being split; try again",
                    code="shard_missing",
                    retry_after_s=1,
                )
        groups = layout.grouped(left)
    return ShardLayout.token(applied)


async def write(workflow: Workflow, plan: WritePlan) -> RequestResult:
    """Store the new and the changed documents: split, embed, append, and wait until replicas have synced."""
    record = plan.collection
    items = msgspec.msgpack.decode(plan.items, type=list[StoreItem])
    known, layout = await _known(workflow, record, [item.id for item in items])
    fresh = [item for item in items if item.id not in known or known[item.id].hash != item.hash]
    documents = await documents_of(workflow, record, fresh, plan.parcel, "embed")
    applied = ""
    if documents:
        await _check_unchanged(workflow, record)
        applied = await store(workflow, record, layout, documents)
    stored = {doc.id: len(doc.chunks) for doc in documents}
    data = [
        {
            "id": item.id,
            "status": "stored" if item.id in stored else "unchanged",
            "chunks": stored[item.id] if item.id in stored else known[item.id].chunks,
        }
        for item in items
    ]
    return body_of(
        {"object": "list", "data": data, "applied": applied, "request_id": workflow.request}
    )


async def delete(workflow: Workflow, plan: DeletePlan) -> RequestResult:
    """Delete the documents that exist; NotFound if the only one asked for does not exist."""
    record = plan.collection
    ids = list(dict.fromkeys(plan.ids))
    known, layout = await _known(workflow, record, ids)
    if plan.single and not known:
        raise NotFound(
            f"collection {record.name!r} holds no document {ids[0]!r}", code="document_not_found"
        )
    await _check_unchanged(workflow, record)
    router = workflow.context.notifications.router

    def writes(name: str, shard: int, mine: Sequence[str]) -> list[Write]:
        return [Write(request=name, index=shard, router=router, deletes=list(mine))]

    there = {each: each for each in ids if each in known}
    applied = await _spread(workflow, record, layout, there, writes)
    body: dict[str, Any] = {"deleted": len(known), "applied": applied}
    if plan.single:
        body = {"object": "document", "id": ids[0], "deleted": True, "applied": body["applied"]}
    return body_of({**body, "request_id": workflow.request})


def body_of(value: dict[str, Any]) -> RequestResult:
    """Return the result of a request whose response body is `value` as JSON."""
    return RequestResult(body=msgspec.json.encode(value))
