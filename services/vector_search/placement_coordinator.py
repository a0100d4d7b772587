"""The coordinator of placements: the one process that holds a lock makes the changes that concern several processes.

Every step may be repeated. If two processes coordinate for a moment, or one dies in between, the registry refuses
changes that were made to an older version of a placement.
"""

from __future__ import annotations

import asyncio

from common import log
from common.bus import Bus
from common.bus.writes import id_pair
from common.redis.lock import RedisLock
from common.registry import placement_plan
from common.registry.placements import Placements
from common.wire.registry import CollectionPlacement, PlacedShard
from services.vector_search.shard_manager import ShardManager

_EVERY_S = 1.0
_QUICK_S = 0.1  # seconds between steps while a split waits
_log = log.get("vector_search")


class PlacementCoordinator:
    """Seals shards whose children are in step, puts the children in their place, and forgets replicas that left."""

    def __init__(self, shards: ShardManager, bus: Bus, owner: str) -> None:
        self._shards, self._bus = shards, bus
        self._placements = Placements(bus)
        self._lock: RedisLock = self._placements.lock(owner)
        self._next_s = 0.0

    async def step(self) -> None:
        """Coordinate all placements, at most every _EVERY_S, if this process gets or has the lock."""
        now = asyncio.get_running_loop().time()
        if now < self._next_s or not self._shards.placements:
            return
        self._next_s = now + _EVERY_S
        if await self._lock.acquire() == "other":
            return
        for placement in list(self._shards.placements.values()):
            for one in placement.shards:
                await self._forget_left(placement, one)
                if one.split is not None:
                    self._next_s = now + _QUICK_S
                    await self._split(placement, one)

    async def release(self) -> None:
        """Release the lock, so that another process may coordinate at once."""
        if self._lock.held:
            await self._lock.release()

    async def _forget_left(self, placement: CollectionPlacement, one: PlacedShard) -> None:
        """Stop keeping writes for replicas that the placement no longer names: they would be kept for ever."""
        named = {each.name for each in one.replicas}
        for name in (
            await self._bus.writes.applied(placement.collection, one.number)
        ).keys() - named:
            newest = await self._placements.get(placement.collection)
            if newest is not None and newest.version == placement.version:
                await self._bus.shard_replicas.unregister(placement.collection, one.number, name)

    async def _split(self, placement: CollectionPlacement, one: PlacedShard) -> None:
        collection, split, writes = placement.collection, one.split, self._bus.writes
        family = writes.search_family(collection)
        living = {worker.replica for worker in await self._bus.workers.living(family)}
        if split is None or not placement_plan.may_seal(one, living):
            return
        seal = await writes.seal(collection, one.number)
        applied = [await writes.applied(collection, number) for number in split.numbers]
        complete = {
            name
            for name in split.ready
            if all(id_pair(rows.get(name, "0-0")) >= id_pair(seal) for rows in applied)
        }
        serving = {each.name for each in one.replicas if each.state == "serving"}
        if not complete or not (serving & living) <= complete:
            return  # replicas still apply the last writes
        for number in split.numbers:
            await writes.keep_ids_rising(collection, number, seal)
        done = await self._placements.update(
            collection,
            lambda known: placement_plan.split_done(known, one.number, seal, complete),
        )
        if done is None:
            return
        _log.info("shard_split", id=collection, shard=one.number, children=list(split.numbers))
        await writes.drop_shard(collection, one.number, split=True)
