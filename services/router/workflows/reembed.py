"""Re-embedding a collection with the encoder served now, while searches still use the old vectors."""

from __future__ import annotations

from functools import partial
from typing import cast

import msgspec

from common.bus import BusDown
from common.bus.writes import START
from common.errors import Conflict, SpillwayError, Unprocessable
from common.redis.lock import RedisLock
from common.registry.collections import Collections
from common.registry.placements import Placements
from common.wire.message import encode
from common.wire.registry import (
    CollectionPlacement,
    CollectionRecord,
    PlacedReplica,
    PlacedShard,
)
from common.wire.search import DocumentsResult, DocumentsWork, StoredDocument, document_hash
from common.wire.workflows import ReembedPlan, RequestResult, StoreItem
from services.router.admission.policy import SEARCH_CLASSES
from services.router.text.requests import Parcel
from services.router.workflows.progress import StageProgress
from services.router.workflows.workflow import Workflow, letters
from services.router.workflows.write import (
    await_served,
    body_of,
    documents_of,
    drop_shards,
    store,
)

PAGE = 50


async def reembed(workflow: Workflow, plan: ReembedPlan) -> RequestResult:
    """Embed all texts of a collection into a new collection, which then takes the name; a lock keeps writers out."""
    old, new, bus = plan.collection, plan.target, workflow.context.bus
    current = await Collections(bus).get(old.tenant, old.name)
    if current is None or current.id not in {old.id, new.id}:
        raise Conflict(f"collection {old.name!r} was replaced meanwhile", code="collection_changed")
    lock = _lock(workflow, old)
    if await lock.acquire() == "other":
        raise Conflict(f"collection {old.name!r} is being re-embedded", code="collection_busy")
    done = await _replace(workflow, plan, lock) if current.id == old.id else 0
    await Collections(bus).unname(shadow_of(new))
    await lock.release()
    body = {"object": "collection", "name": new.name, "id": new.id, "documents": done}
    return body_of(
        {**body, "model": new.model, "fingerprint": new.fingerprint, "request_id": workflow.request}
    )


async def _replace(workflow: Workflow, plan: ReembedPlan, lock: RedisLock) -> int:
    """Fill the new collection, give it the name, and drop the old collection; return the number of documents."""
    old, new = plan.collection, plan.target
    shadow = shadow_of(new)
    workflow.on_cancel = partial(_undo, workflow, shadow, lock)
    try:
        await _register(workflow, old, shadow)
        done = await _copy(workflow, old, new, plan.parcel)
        if not await Collections(workflow.context.bus).replace(old, new):
            raise Conflict(f"collection {old.name!r} was replaced", code="collection_changed")
    except SpillwayError as error:
        if not isinstance(error, BusDown):
            await _undo(workflow, shadow, lock)
        raise
    context = workflow.context
    layout = await context.layouts.now(old)
    await drop_shards(context.bus, old, layout, workflow.request, context.notifications.router)
    return done


def shadow_of(record: CollectionRecord) -> CollectionRecord:
    """Return a collection's record under the name that the collection has while it is filled, unknown to clients."""
    return msgspec.structs.replace(record, name=f".{record.name}")


def _lock(workflow: Workflow, old: CollectionRecord) -> RedisLock:
    """Return the lock that keeps others from writing to a collection until a minute after the request's deadline."""
    bus = workflow.context.bus
    life_ms = max(workflow.deadline_ms - bus.clock.now_ms(), 0) + 60_000
    return Collections(bus).reembed_lock(old, workflow.request, life_ms)


async def _place(workflow: Workflow, old: CollectionRecord, new: CollectionRecord) -> None:
    """Place the new collection's shards on the processes of the old collection's shards, if those are placed."""
    placements = Placements(workflow.context.bus)
    known = await placements.get(old.id)
    if known is None or not new.placed or await placements.get(new.id) is not None:
        return
    shards = [
        PlacedShard(
            number, one.low, one.high, [PlacedReplica(each.name, "new") for each in one.replicas]
        )
        for number, one in enumerate(known.shards)
    ]
    await placements.put(
        CollectionPlacement(
            collection=new.id, shards=shards, replicas=known.replicas, next_number=len(shards)
        )
    )


async def _register(workflow: Workflow, old: CollectionRecord, shadow: CollectionRecord) -> None:
    """Register the new collection under its hidden name, instead of an earlier try's, and wait for its shards."""
    collections = Collections(workflow.context.bus)
    await _place(workflow, old, shadow)
    if not await collections.create(shadow):
        left = await collections.get(shadow.tenant, shadow.name)
        if left is not None and left.id != shadow.id:
            await collections.remove(left)
            await collections.create(shadow)
    layout = await workflow.context.layouts.now(shadow)
    await await_served(workflow.context.bus, workflow.context.admission, shadow, layout)


async def _undo(workflow: Workflow, shadow: CollectionRecord, lock: RedisLock) -> None:
    context = workflow.context
    await Collections(context.bus).remove(shadow)
    layout = await context.layouts.now(shadow)
    await drop_shards(context.bus, shadow, layout, workflow.request, context.notifications.router)
    await lock.release()


async def _copy(
    workflow: Workflow, old: CollectionRecord, new: CollectionRecord, parcel: tuple[int, int]
) -> int:
    """Embed and store all documents of `old` in `new`, page by page; return their number."""
    done, page, context = 0, 0, workflow.context
    family = workflow.context.bus.writes.search_family(old.id)
    layout, target = await context.layouts.now(old), await context.layouts.now(new)
    for shard in layout.numbers:
        newest = await workflow.context.bus.writes.last_write(old.id, shard)
        after = newest if newest != START else None
        cursor: str | None = None
        while True:
            work = DocumentsWork(
                collection=old.id,
                op="list",
                cursor=cursor,
                after=after,
                limit=PAGE,
                with_text=True,
                with_vectors=False,
                shard=shard,
            )
            _, results = await workflow.gather(
                f"page{letters(page)}", [family], SEARCH_CLASSES, [Parcel(encode(work), 1, 0)]
            )
            found = cast("DocumentsResult", results[0])
            items = [_item(old, doc) for doc in found.documents]
            documents = await documents_of(workflow, new, items, parcel, f"e{letters(page)}")
            if documents:
                first = (page + 1) * 100_000
                await store(workflow, shadow_of(new), target, documents, first)
            done, page, cursor = done + len(items), page + 1, found.cursor
            workflow.report(StageProgress("reembed", done, 0))
            if cursor is None:
                break
    return done


def _item(record: CollectionRecord, doc: StoredDocument) -> StoreItem:
    if doc.text is None:
        raise Unprocessable(
            f"document {doc.id!r} of {record.name!r} has no text to embed again",
            code="not_embeddable",
        )
    metadata = doc.metadata or {}
    return StoreItem(
        doc.id, document_hash(text=doc.text, metadata=metadata), doc.text, None, metadata
    )
