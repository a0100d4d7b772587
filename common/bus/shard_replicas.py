"""The replicas of shards for which streams of writes are kept."""

from __future__ import annotations

from common.bus import keys
from common.bus.connection import Connection
from common.bus.writes import START, Writes


class ShardReplicas:
    """Registers replicas: a shard's stream keeps the writes that some registered replica's snapshot lacks."""

    def __init__(self, redis: Connection, writes: Writes) -> None:
        self._redis, self._writes = redis, writes

    async def may_be_cut(self, collection: str, shard: int) -> bool:
        """Return whether a shard's stream may lack its first writes, since some replica has a snapshot with them."""
        name = keys.snapshots(self._writes.search_family(collection), collection, shard)
        return bool(await self._redis.call("EXISTS", name))

    async def register(self, collection: str, shard: int, replica: str) -> None:
        """Keep a shard's writes from now on for a replica without any of them; no change if it is registered."""
        name = keys.applied(self._writes.search_family(collection), collection, shard)
        await self._redis.call("HSETNX", name, replica, START)

    async def unregister(self, collection: str, shard: int, replica: str) -> None:
        """Stop keeping writes of a shard for a replica that no longer holds it."""
        family = self._writes.search_family(collection)
        for name in (keys.applied, keys.snapshots):
            await self._redis.call("HDEL", name(family, collection, shard), replica)
