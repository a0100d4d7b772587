"""Measured depths of a family's devices, so that a worker with a known device need not probe."""

from __future__ import annotations

from common.bus import Bus, keys
from common.ids import Family
from common.wire.message import decode, encode
from common.wire.registry import DepthRecord


class MeasuredDepths:
    """Depth records of one family by the name of a device and its objective."""

    def __init__(self, bus: Bus, family: Family) -> None:
        self._redis, self._key = bus.connection, keys.depths(family)

    async def get(self, device: str) -> DepthRecord | None:
        """Return a device's record, or None if the device was not measured."""
        raw = await self._redis.call("HGET", self._key, device)
        return None if raw is None else decode(raw, DepthRecord)

    async def put(self, device: str, depth: DepthRecord) -> None:
        """Store a device's record."""
        await self._redis.call("HSET", self._key, device, encode(depth))
