"""The registry of quantizers: the quantizer for the codes of a collection's rows, and the lock for training one."""

from __future__ import annotations

from common.bus import Bus, keys
from common.bus.keys import CHANGES, QUANTIZERS
from common.ids import ulid
from common.redis.lock import RedisLock
from common.redis.replies import hash_of
from common.wire.message import decode, encode
from common.wire.registry import QuantizerRecord

_LOCK_MS = 15_000


class Quantizers:
    """The records of quantizers, by the collection's id; their bytes go from process to process."""

    def __init__(self, bus: Bus) -> None:
        self._redis, self._clock = bus.connection, bus.clock

    async def get(self, collection: str) -> QuantizerRecord | None:
        """Return the record of a collection's quantizer; None without one."""
        raw = await self._redis.call("HGET", QUANTIZERS, collection)
        return None if raw is None else decode(raw, QuantizerRecord)

    async def all(self) -> dict[str, QuantizerRecord]:
        """Return the record of every collection's quantizer by the collection's id."""
        rows = hash_of(await self._redis.call("HGETALL", QUANTIZERS))
        return {name.decode(): decode(raw, QuantizerRecord) for name, raw in rows.items()}

    async def replace(self, known: QuantizerRecord | None, new: QuantizerRecord) -> bool:
        """Replace a collection's `known` quantizer by `new`; False if another one was registered meanwhile."""
        expected = encode(known) if known is not None else b""
        args = [new.collection, expected, encode(new), ulid()]
        return bool(await self._redis.script("place", [QUANTIZERS, CHANGES], args))

    async def remove(self, collection: str) -> None:
        """Remove the record of a deleted collection's quantizer."""
        await self._redis.call("HDEL", QUANTIZERS, collection)

    def lock(self, collection: str, owner: str) -> RedisLock:
        """Return the lock of the one process that trains a quantizer for a collection."""
        name = keys.quantizing(collection)
        return RedisLock(self._redis.call, name, owner, _LOCK_MS, self._clock)
