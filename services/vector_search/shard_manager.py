"""The shards of a replica: opened, kept in step with the registry, dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

from common import log
from common.bus import Bus, BusDown
from common.bus.former import adopt_former, remove_former
from common.bus.writes import Shard as Key
from common.config import SearchConfig
from common.errors import Conflict, NotFound, SpillwayError, Unavailable
from common.registry import placement_plan
from common.registry.collections import Collections
from common.registry.layout import SPACE
from common.registry.placements import Placements
from common.tasks import in_pool
from common.wire.registry import CollectionPlacement, CollectionRecord, PlacedShard
from services.vector_search import metrics
from services.vector_search.collection_quantizer import CollectionQuantizers
from services.vector_search.replica_directory import ReplicaDirectory
from services.vector_search.shard import Shard
from services.vector_search.shard_handle import ShardHandle

_AGAIN_S = 60.0
_COMPARE_S = 30.0
_HELD_UP_S = 5.0
_log = log.get("vector_search")


class Source(NamedTuple):
    """The shard whose stream a child follows until it has its own, and the hashes of the child's documents."""

    parent: Key
    low: int
    high: int


class ShardManager:
    """The shards of one replica by key; `opened` and `dropped` are called as shards come and go.

    The manager reads the registry again when the count of changes differs, and every `_COMPARE_S` seconds, in case a
    change was not counted. Of a placed collection it opens only the shards that the placement gives to this replica's
    `name`: new shards, and shards whose files are complete. ShardFiller opens the shards that it filled, and
    ShardSplitter the children of a split.
    """

    def __init__(
        self,
        directory: ReplicaDirectory,
        bus: Bus,
        config: SearchConfig,
        *,
        name: str,
        threads: int,
        writer: Executor,
        quantizers: CollectionQuantizers,
        opened: Callable[[ShardHandle], None],
        dropped: Callable[[ShardHandle], None],
    ) -> None:
        self.handles: dict[Key, ShardHandle] = {}
        self.records: dict[str, CollectionRecord] = {}
        self.placements: dict[str, CollectionPlacement] = {}
        self.sources: dict[Key, Source] = {}  # by child of a shard that is being split
        self.lacking: set[Key] = (
            set()
        )  # of collections without a placement: to be filled from others
        self.name = name
        self.directory = self._directory = directory
        self._placements = Placements(bus)
        self._bus = bus
        self._config = config
        self._threads = threads
        self._writer = writer
        self._quantizers = quantizers
        self._opened = opened
        self._dropped = dropped
        self.all_open = asyncio.Event()  # set once the shards known at the start are open
        self._refreshing = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None  # the refresh that jobs wait for
        self._held_up: dict[str, float] = {}  # by collection: when holding it is tried again
        self._seen: bytes | None = None  # the registry's count of changes
        self._compared = -_COMPARE_S
        self._again: dict[Key, float] = {}
        self._saved: dict[str, CollectionPlacement] = {}  # placements followed so far

    async def start(self) -> None:
        """Open the collections on the disk and in the registry; register again those that the registry lost."""
        for record in await in_pool(self._writer, self._directory.records):
            self.records[record.id] = record
        for placement in await in_pool(self._writer, self._directory.placements):
            self.placements[placement.collection] = placement
        await self.refresh()
        self.all_open.set()

    async def find(self, collection: str, number: int) -> ShardHandle:
        """Return a shard's handle, opening a new shard first; NotFound (`collection_not_found`) if there is none.

        Unavailable (`shard_missing`) if only other processes hold the shard, (`shard_damaged`) if the collection cannot
        be opened yet; Conflict (`layout_changed`) if a placed collection has no such shard any more.
        """
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
        if (placement := self.placements.get(collection)) is not None:
            if all(shard.number != number for shard in placement.shards):
                raise Conflict(
                    f"collection {collection} has no shard {number} any more: ask again",
                    code="layout_changed",
                )
            raise Unavailable(
                f"shard {number} of collection {collection} is not complete here",
                code="shard_missing",
                retry_after_s=1,
            )
        if (collection, number) in self.lacking:
            raise Unavailable(
                f"shard {number} of collection {collection} is not complete here",
                code="shard_missing",
                retry_after_s=1,
            )
        raise NotFound(f"collection {collection} is not served here", code="collection_not_found")

    async def _look(self) -> None:
        """Wait for one refresh that all callers share; the refresh goes on when a caller leaves."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self.refresh())
        await asyncio.shield(self._looking)

    async def refresh(self) -> None:
        """Follow the registry: open new collections, drop removed ones, register again those that Redis lost."""
        async with self._refreshing:
            await self._open_again()
            changes = await Collections(self._bus).changes()
            now = asyncio.get_running_loop().time()
            due = now - self._compared >= _COMPARE_S
            if changes is None or changes != self._seen or due or self._unopened():
                await self._compare()
                self._seen, self._compared = changes, now
            if changes is None:  # no change was counted yet, though there may be collections
                await Collections(self._bus).mark_changed()

    async def _compare(self) -> None:
        registered = {record.id: record for record in await Collections(self._bus).all(None)}
        if any(record.placed for record in (*registered.values(), *self.records.values())):
            await self._compare_placements(registered)
        lost = [record for name, record in self.records.items() if name not in registered]
        removed = await Collections(self._bus).removed() if lost else set()
        for record in lost:
            await self._settle_lost(record, removed)
        for record in registered.values():
            if self.records.get(record.id) != record or self._lacks(record):
                await self._try_to_hold(record)
        for gone in self._held_up.keys() - registered.keys():
            del self._held_up[gone]

    async def _compare_placements(self, registered: dict[str, CollectionRecord]) -> None:
        """Read the placements; put back those that the registry lost, or has only in an older version."""
        found = await self._placements.all()
        for name, known in list(self.placements.items()):
            if name in registered and (name not in found or found[name].version < known.version):
                _log.warning("placement_registered_again", id=name, version=known.version)
                await self._placements.put(known)
                found[name] = known
        for name, placement in found.items():
            if self.placements.get(name) != placement and name in registered:
                self.placements[name] = placement

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
        """Return whether a collection has shards to open here, or a placement that was not yet followed here."""
        if not record.placed:
            held = self.handles.keys() | self.lacking
            return any((record.id, number) not in held for number in range(record.shards))
        return self._saved.get(record.id) != self.placements.get(record.id) or any(
            self._state(one) in {"new", "serving"} and (record.id, one.number) not in self.handles
            for one in self.mine(record.id)
        )

    def mine(self, collection: str) -> list[PlacedShard]:
        """Return the shards of a placed collection that its placement gives to this replica."""
        placement = self.placements.get(collection)
        return [] if placement is None else [s for s in placement.shards if self._state(s)]

    def serving(self, collection: str) -> list[PlacedShard]:
        """Return the shards of a placed collection that this replica serves."""
        return [one for one in self.mine(collection) if self._state(one) == "serving"]

    def children_of(self, key: Key) -> list[Key]:
        """Return the open children of a shard that is being split."""
        return [child for child, source in self.sources.items() if source.parent == key]

    def splitting(self, key: Key) -> bool:
        """Return whether a shard is being split."""
        return any(one.number == key[1] and one.split is not None for one in self.mine(key[0]))

    def filling(self, collection: str) -> list[PlacedShard]:
        """Return the shards of a collection that this replica must copy from other processes."""
        lacking = [n for name, n in self.lacking if name == collection]
        return [one for one in self.mine(collection) if self._state(one) == "filling"] + [
            PlacedShard(number, 0, SPACE, []) for number in lacking
        ]

    def _state(self, one: PlacedShard) -> str:
        found = placement_plan.replica_of(one, self.name)
        return found.state if found is not None else ""

    def _children(self, collection: str) -> set[int]:
        """Return the numbers of the children of this replica's shards that are being split."""
        splits = (one.split for one in self.mine(collection))
        return {number for split in splits if split is not None for number in split.numbers}

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
        if record.placed:
            self.lacking = {key for key in self.lacking if key[0] != record.id}
            await self._hold_placed(record)
            return
        there = await in_pool(self._writer, self._directory.numbers, record.id)
        for number in range(record.shards):
            key = record.id, number
            if key in self.handles or key in self.lacking:
                continue
            if number not in there and await self._bus.shard_replicas.may_be_cut(*key):
                self.lacking.add(key)  # its stream may lack the first writes
            else:
                await self.open(record, number)

    async def _hold_placed(self, record: CollectionRecord) -> None:
        """Open the replica's shards of a placed collection, and delete those that its placement does not give it."""
        placement = self.placements.get(record.id)
        if placement is None:
            return  # the next comparison finds it: placements are registered before their collections
        if self._saved.get(record.id) != placement:
            await in_pool(self._writer, self._directory.save_placement, placement)
        there = await in_pool(self._writer, self._directory.numbers, record.id)
        held = {number for name, number in self.handles if name == record.id}
        wanted = {one.number for one in self.mine(record.id)} | self._children(record.id)
        # Parents go first: a child reads its own stream only where its parent answers no more searches.
        for number in (there | held) - wanted:
            await self._release(record.id, number)
        for one in self.mine(record.id):
            key = record.id, one.number
            if key in self.handles:
                if (
                    key in self.sources and self._state(one) == "filling"
                ):  # not ready before the seal
                    await self._release(*key)
                elif self.sources.pop(key, None) is not None:
                    self._opened(self.handles[key])
                continue
            state = self._state(one)
            if state == "new" or (state == "serving" and one.number in there):
                await self.open(record, one.number)
                if state == "new":
                    await self._note(placement_plan.opened, record.id, one.number)
            elif state == "serving":
                _log.error("shard_files_gone", id=record.id, shard=one.number)
                await self._note(placement_plan.emptied, record.id, one.number)
        self._saved[record.id] = placement

    async def _note(
        self,
        change: Callable[[CollectionPlacement, int, str], CollectionPlacement | None],
        collection: str,
        number: int,
    ) -> None:
        """Register a `change` of this replica's copy of a shard."""
        made = await self._placements.update(
            collection, lambda known: change(known, number, self.name)
        )
        if made is not None:
            self.placements[collection] = made

    async def served(self, collection: str, number: int) -> None:
        """Register that this replica's copy of a shard, which was filled, serves from now on."""
        await self._note(placement_plan.opened, collection, number)

    async def ready_to_split(self, collection: str, number: int) -> None:
        """Register that both children of a shard are in step here."""
        await self._note(placement_plan.children_ready, collection, number)

    async def _release(self, collection: str, number: int) -> None:
        """Delete a shard that the placement no longer gives to this replica, and stop keeping its stream for it."""
        handle = self.handles.pop((collection, number), None)
        self.sources.pop((collection, number), None)
        if handle is not None:
            shard = handle.move()
            self._dropped(handle)
            if shard is not None:
                await in_pool(self._writer, shard.close)
        await self._bus.shard_replicas.unregister(collection, number, self.name)
        await in_pool(self._writer, self._directory.remove_shard, collection, number)
        self._count()
        _log.info("shard_released", id=collection, shard=number)

    async def open(
        self, record: CollectionRecord, number: int, source: Source | None = None
    ) -> None:
        """Open a shard, whose files are new or complete; a child of a split follows its `source`."""
        await adopt_former(self._bus, record.id, number)
        shard = await self._loaded(record, number)
        handle = ShardHandle(record.id, number, shard)
        if source is not None:
            self.sources[record.id, number] = source
        if isinstance(shard, Shard):
            if source is None:
                await self._bus.writes.keep_ids_rising(record.id, number, shard.applied)
            _log.info("shard_opened", id=record.id, shard=number, **shard.stats())
        self.handles[record.id, number] = handle
        self.lacking.discard((record.id, number))
        self._opened(handle)
        self._count()

    def _count(self) -> None:
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
        """Try again to open the shards that failed to open, after the seconds that their errors give."""
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
        return Shard(
            directory,
            record,
            self._config,
            threads=self._threads,
            clock=self._bus.clock,
            quantizers=self._quantizers.of(record.id),
        )

    async def drop(self, collection: str) -> None:
        """Forget a collection and delete its files and its streams."""
        record = self.records.pop(collection, None)
        placement = self.placements.pop(collection, None)
        self.lacking = {key for key in self.lacking if key[0] != collection}
        self._saved.pop(collection, None)
        if placement is not None:
            await self._placements.remove(collection)
            for number in range(placement.next_number):
                await self._bus.writes.drop_shard(collection, number)
        for key in [key for key in self.handles if key[0] == collection]:
            handle = self.handles.pop(key, None)
            if handle is None:
                continue  # dropped meanwhile, by its stream's last entry or by the registry
            self.sources.pop(key, None)
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
