"""The registry of collections."""

from __future__ import annotations

from msgspec.structs import replace

from common.bus import Bus, keys
from common.bus.keys import CHANGES, COLLECTIONS, REMOVED
from common.ids import ulid
from common.redis.lock import RedisLock
from common.redis.replies import hash_of
from common.wire.message import decode, encode
from common.wire.registry import CollectionRecord


class Collections:
    """Collections by tenant and name, and the ids of removed ones."""

    def __init__(self, bus: Bus) -> None:
        self._redis, self._clock = bus.connection, bus.clock

    async def create(self, record: CollectionRecord) -> bool:
        """Register a collection; False if the tenant has another one of that name."""
        field = f"{record.tenant}/{record.name}"
        # One step: a collection whose creator leaves or dies here is opened by the replicas at once.
        args = [field, b"", encode(record), ulid()]
        if await self._redis.script("place", [COLLECTIONS, CHANGES], args):
            return True
        stored = await self.get(record.tenant, record.name)
        return stored is not None and stored.id == record.id  # the reply to an earlier try was lost

    async def get(self, tenant: str, name: str) -> CollectionRecord | None:
        """Return a tenant's collection by its name, or None."""
        raw = await self._redis.call("HGET", COLLECTIONS, f"{tenant}/{name}")
        return None if raw is None else decode(raw, CollectionRecord)

    async def all(self, tenant: str | None = None) -> list[CollectionRecord]:
        """Return a tenant's collections, or, for None, all tenants', ordered by name."""
        rows = hash_of(await self._redis.call("HGETALL", COLLECTIONS))
        records = [decode(raw, CollectionRecord) for _, raw in sorted(rows.items())]
        return [r for r in records if tenant is None or r.tenant == tenant]

    async def replace(self, old: CollectionRecord, new: CollectionRecord) -> bool:
        """Give the name of `old` to `new`, and record that `old` is gone; False if another collection has the name."""
        swapped = await self._swap(old, new)
        await self.mark_changed()
        return swapped

    async def remove(self, record: CollectionRecord) -> None:
        """Unregister a collection and record its id as removed, so that no replica registers it again."""
        await self._redis.call("SADD", REMOVED, record.id)
        await self._swap(record, None)
        await self.mark_changed()

    async def _swap(self, old: CollectionRecord, new: CollectionRecord | None) -> bool:
        """Replace `old` by `new`, or by nothing, under its name; False if another collection has the name."""
        field, value = f"{old.tenant}/{old.name}", encode(new) if new is not None else b""
        tried = False
        while True:  # repeated after a change of the record by another process
            raw = await self._redis.call("HGET", COLLECTIONS, field)
            found = decode(raw, CollectionRecord).id if raw is not None else None
            if tried and found == (new.id if new is not None else None):
                return True  # the reply to an earlier try was lost
            if found != old.id:
                return False
            if await self._redis.script(
                "swap", [COLLECTIONS, REMOVED], [field, raw, value, old.id]
            ):
                return True
            tried = True

    async def mark_placed(self, record: CollectionRecord) -> bool:
        """Record that a collection has a placement; False if another collection has its name by now."""
        field = f"{record.tenant}/{record.name}"
        while True:  # repeated after a change of the record by another process
            raw = await self._redis.call("HGET", COLLECTIONS, field)
            found = decode(raw, CollectionRecord) if raw is not None else None
            if found is None or found.id != record.id:
                return False
            if found.placed:
                return True
            args = [field, raw, encode(replace(found, placed=True)), ulid()]
            if await self._redis.script("place", [COLLECTIONS, CHANGES], args):
                return True

    async def unname(self, record: CollectionRecord) -> None:
        """Free the name of a collection that lives on under another name."""
        await self._redis.call("HDEL", COLLECTIONS, f"{record.tenant}/{record.name}")
        await self.mark_changed()

    def reembed_lock(self, record: CollectionRecord, request: str, life_ms: int) -> RedisLock:
        """Return the lock that lets only `request` write to a collection while it re-embeds the texts."""
        name = keys.reembedding(record.id)
        return RedisLock(self._redis.call, name, request, life_ms, self._clock)

    async def reembedding(self, record: CollectionRecord) -> bool:
        """Return whether a request re-embeds a collection now."""
        return bool(await self._redis.call("EXISTS", keys.reembedding(record.id)))

    async def mark_changed(self) -> None:
        """Publish that the registry was changed, so that replicas read it again; to call after the change."""
        await self._redis.call("SET", CHANGES, ulid())

    async def changes(self) -> bytes | None:
        """Return a mark that differs after each change of the registry; None before the first change."""
        raw: bytes | None = await self._redis.call("GET", CHANGES)
        return raw

    async def removed(self) -> set[str]:
        """Return the ids of collections that were removed."""
        return {item.decode() for item in await self._redis.call("SMEMBERS", REMOVED)}
