"""The shards of a replica: opened, kept in step with the registry, dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from common import log
from common.bus import Bus, BusDown
from common.bus.former import adopt_former, remove_former
from common.bus.writes import Shard as Key
from common.config import SearchConfig
from common.errors import NotFound, SpillwayError, Unavailable
from common.registry.collections import Collections
from common.tasks import in_pool
from common.wire.registry import CollectionRecord
from services.vector_search import metrics
from services.vector_search.replica_directory import ReplicaDirectory
from services.vector_search.shard import Shard
from services.vector_search.shard_handle import ShardHandle

_AGAIN_S = 60.0
_COMPARE_S = 30.0
_HELD_UP_S = 5.0
_log = log.get("vector_search")


class ShardManager:
    """The shards of one replica by key; `opened` and `dropped` are called as shards come and go.

    The registry is read again when its count of changes differs, and now and then, should a change not be counted.
    """

    def __init__(
        self,
        directory: ReplicaDirectory,
        bus: Bus,
        config: SearchConfig,
        *,
        threads: int,
        writer: Executor,
        opened: Callable[[ShardHandle], None],
        dropped: Callable[[ShardHandle], None],
    ) -> None:
        self.handles: dict[Key, ShardHandle] = {}
        self.records: dict[str, CollectionRecord] = {}
        self._directory = directory
        self._bus = bus
        self._config = config
        self._threads = threads
        self._writer = writer
        self._opened = opened
        self._dropped = dropped
        self.all_open = asyncio.Event()  # once what is known at the start has been opened
        self._refreshing = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None  # for a shard that a job asked for
        self._held_up: dict[str, float] = {}  # when to try again what could not be held
        self._seen: bytes | None = None  # the registry's count of changes
        self._compared = -_COMPARE_S
        self._again: dict[Key, float] = {}

    async def start(self) -> None:
        """Open what the disk holds and the registry knows; put back what the registry lost."""
        for record in await in_pool(self._writer, self._directory.records):
            self.records[record.id] = record
        await self.refresh()
        self.all_open.set()

    async def find(self, collection: str, number: int) -> ShardHandle:
        """Return a shard's handle, opening a new shard first; NotFound (`collection_not_found`) if there is none."""
        for look in range(3):
            handle = self.handles.get((collection, number))
            if handle is not None:
                return handle
            if look < 2:  # a look in progress may have begun before the collection was created
                await self._look()
        if collection in self._held_up:
            raise Unavailable(
                f"collection {collection} cannot be opened here yet",
                code="shard_damaged",
                retry_after_s=5,
            )
        raise NotFound(f"collection {collection} is not served here", code="collection_not_found")

    async def _look(self) -> None:
        """Refresh together with all others who wait for that; the refresh goes on though a caller leaves."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self.refresh())
        await asyncio.shield(self._looking)

    async def refresh(self) -> None:
        """Follow the registry: open what is new, drop what was removed, register what was lost with Redis."""
        async with self._refreshing:
            await self._open_again()
            changes = await Collections(self._bus).changes()
            now = asyncio.get_running_loop().time()
            due = now - self._compared >= _COMPARE_S
            if changes is None or changes != self._seen or due or self._unopened():
                await self._compare()
                self._seen, self._compared = changes, now
            if changes is None:  # nothing has been counted since the collections were kept
                await Collections(self._bus).mark_changed()

    async def _compare(self) -> None:
        registered = {record.id: record for record in await Collections(self._bus).all(None)}
        lost = [record for name, record in self.records.items() if name not in registered]
        removed = await Collections(self._bus).removed() if lost else set()
        for record in lost:
            await self._settle_lost(record, removed)
        for record in registered.values():
            if self.records.get(record.id) != record or self._lacks(record):
                await self._try_to_hold(record)
        for gone in self._held_up.keys() - registered.keys():
            del self._held_up[gone]

    async def _try_to_hold(self, record: CollectionRecord) -> None:
        """Hold a collection; an error of one collection is tried again later and does not touch the others."""
        now = asyncio.get_running_loop().time()
        if self._held_up.get(record.id, now) > now:
            return
        try:
            await self._hold(record)
        except BusDown:
            raise
        except Exception:  # noqa: BLE001 - one collection's fault is its own
            _log.exception("collection_not_held", id=record.id)
            self._held_up[record.id] = now + _HELD_UP_S
        else:
            self._held_up.pop(record.id, None)

    def _unopened(self) -> bool:
        now = asyncio.get_running_loop().time()
        return any(at <= now for at in self._held_up.values()) or any(
            self._lacks(r) for r in self.records.values() if r.id not in self._held_up
        )

    def _lacks(self, record: CollectionRecord) -> bool:
        return any((record.id, number) not in self.handles for number in range(record.shards))

    async def _settle_lost(self, record: CollectionRecord, removed: set[str]) -> None:
        # A name with a dot is the copy of a re-embedding that ended without taking its place.
        if record.id in removed or record.name.startswith("."):
            await self.drop(record.id)
            return
        if not await Collections(self._bus).create(record):
            _log.error("collection_name_taken", id=record.id, name=record.name)
            await self.drop(record.id)
            return
        _log.warning("collection_registered_again", id=record.id, name=record.name)
        await self._try_to_hold(record)

    async def _hold(self, record: CollectionRecord) -> None:
        if self.records.get(record.id) != record or not self._directory.holds(record.id):
            await in_pool(self._writer, self._directory.save_record, record)
        self.records[record.id] = record
        for number in range(record.shards):
            if (record.id, number) not in self.handles:
                await self._open(record, number)

    async def _open(self, record: CollectionRecord, number: int) -> None:
        await adopt_former(self._bus, record.id, number)
        shard = await self._loaded(record, number)
        handle = ShardHandle(record.id, number, shard)
        if isinstance(shard, Shard):
            await self._bus.writes.keep_ids_rising(handle.collection, handle.number, shard.applied)
            _log.info("shard_opened", id=record.id, shard=number, **shard.stats())
        self.handles[record.id, number] = handle
        self._opened(handle)
        metrics.SHARDS.labels(state="open").set(
            sum(u.shard is not None for u in self.handles.values())
        )
        metrics.SHARDS.labels(state="damaged").set(
            sum(u.shard is None for u in self.handles.values())
        )

    async def _loaded(self, record: CollectionRecord, number: int) -> Shard | SpillwayError:
        directory = self._directory.shard(record.id, number)
        try:
            return await in_pool(self._writer, self._load, directory, record)
        except SpillwayError as error:
            _log.error("shard_not_opened", path=str(directory), why=error.message)
            metrics.DAMAGED.labels(what="shard").inc()
            wait_s = error.retry_after_s or _AGAIN_S
            self._again[record.id, number] = asyncio.get_running_loop().time() + wait_s
            return error

    async def _open_again(self) -> None:
        """Try shards that could not be opened once more, as often as their error says."""
        now = asyncio.get_running_loop().time()
        for key, at in list(self._again.items()):
            handle, record = self.handles.get(key), self.records.get(key[0])
            if handle is None or record is None or handle.shard is not None:
                del self._again[key]
            elif now >= at:
                shard = await self._loaded(record, key[1])
                if isinstance(shard, Shard):
                    await self._bus.writes.keep_ids_rising(
                        handle.collection, handle.number, shard.applied
                    )
                    handle.restore(shard)
                    self._opened(handle)

    def _load(self, directory: Path, record: CollectionRecord) -> Shard:
        return Shard(directory, record, self._config, threads=self._threads, clock=self._bus.clock)

    async def drop(self, collection: str) -> None:
        """Forget a collection and delete its files and its streams."""
        record = self.records.pop(collection, None)
        for key in [key for key in self.handles if key[0] == collection]:
            handle = self.handles.pop(key, None)
            if handle is None:
                continue  # dropped meanwhile, by its stream's last entry or by the registry
            shard = handle.drop()
            self._dropped(handle)
            if shard is not None:
                await in_pool(self._writer, shard.close)
            await remove_former(self._bus, *key)
            await self._bus.writes.drop_shard(*key)
        if record is not None:
            await in_pool(self._writer, self._directory.remove, collection)
            _log.info("collection_dropped", id=collection, name=record.name)

    async def close(self) -> None:
        """Close every shard."""
        for handle in self.handles.values():
            if handle.shard is not None:
                await in_pool(self._writer, handle.shard.close)
