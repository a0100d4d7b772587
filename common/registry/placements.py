"""The registry of placements: the processes that should hold a collection's shards, and the shards that each holds."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from common.bus import Bus
from common.bus.keys import CHANGES, HOLDINGS, PLACEMENTS, PLACING
from common.ids import ulid
from common.redis.lock import RedisLock
from common.redis.replies import hash_of
from common.wire.message import decode, encode
from common.wire.registry import CollectionPlacement, Holding

_LOCK_MS = 5000


class Placements:
    """Placements by the collection's id; a change applies to the version read, or not at all."""

    def __init__(self, bus: Bus) -> None:
        self._redis, self._clock = bus.connection, bus.clock

    async def get(self, collection: str) -> CollectionPlacement | None:
        """Return a collection's placement; None without one."""
        raw = await self._redis.call("HGET", PLACEMENTS, collection)
        return None if raw is None else decode(raw, CollectionPlacement)

    async def all(self) -> dict[str, CollectionPlacement]:
        """Return every placement by the collection's id."""
        rows = hash_of(await self._redis.call("HGETALL", PLACEMENTS))
        return {name.decode(): decode(raw, CollectionPlacement) for name, raw in rows.items()}

    async def put(self, placement: CollectionPlacement) -> None:
        """Register a placement, unless the registry has its version or a later one."""

        def newest(known: CollectionPlacement | None) -> CollectionPlacement | None:
            return placement if known is None or known.version < placement.version else None

        await self._change(placement.collection, newest)

    async def update(
        self,
        collection: str,
        change: Callable[[CollectionPlacement], CollectionPlacement | None],
    ) -> CollectionPlacement | None:
        """Replace a placement by the result of `change`, as the next version, and return it.

        None, without a change, if there is no placement, or `change` returns None. `change` may raise, and may be
        called again if another process was first.
        """

        def changed(known: CollectionPlacement | None) -> CollectionPlacement | None:
            made = change(known) if known is not None else None
            if made is None or known is None:
                return None
            return msgspec.structs.replace(made, version=known.version + 1)

        return await self._change(collection, changed)

    async def _change(
        self,
        collection: str,
        change: Callable[[CollectionPlacement | None], CollectionPlacement | None],
    ) -> CollectionPlacement | None:
        while True:  # repeated after a change by another process
            raw = await self._redis.call("HGET", PLACEMENTS, collection)
            made = change(None if raw is None else decode(raw, CollectionPlacement))
            if made is None:
                return None
            args = [collection, raw or b"", encode(made), ulid()]
            if await self._redis.script("place", [PLACEMENTS, CHANGES], args):
                return made

    async def remove(self, collection: str) -> None:
        """Remove the placement of a deleted collection."""
        await self._redis.call("HDEL", PLACEMENTS, collection)

    def lock(self, owner: str) -> RedisLock:
        """Return the lock of the one process that coordinates placements."""
        return RedisLock(self._redis.call, PLACING, owner, _LOCK_MS, self._clock)

    # -- holdings of processes

    async def report(self, holding: Holding) -> None:
        """Publish the shards that a process holds."""
        await self._redis.call("HSET", HOLDINGS, holding.replica, encode(holding))

    async def holdings(self) -> dict[str, Holding]:
        """Return the last report of each process, living or not, by its replica's name."""
        rows = hash_of(await self._redis.call("HGETALL", HOLDINGS))
        return {name.decode(): decode(raw, Holding) for name, raw in rows.items()}
