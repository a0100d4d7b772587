"""Reports of the shards that a process holds, from which placements are planned and shown."""

from __future__ import annotations

import asyncio

from common.bus import Bus
from common.registry.placements import Placements
from common.wire.registry import HeldShard, Holding
from services.vector_search.shard_manager import ShardManager

_EVERY_S = 1.0


class HoldingReports:
    """Publishes a replica's shards of placed collections whenever they have changed, at most once a second."""

    def __init__(self, shards: ShardManager, bus: Bus, memory_bytes: int) -> None:
        self._shards, self._placements, self._memory = shards, Placements(bus), memory_bytes
        self.why: dict[tuple[str, int], str] = {}  # the reason why a shard is not complete
        self._told: Holding | None = None
        self._at = -_EVERY_S

    async def publish(self) -> None:
        """Publish the shards held if they have changed, at most every _EVERY_S; call again after BusDown or BusFull."""
        now = asyncio.get_running_loop().time()
        if now - self._at < _EVERY_S:
            return
        self._at = now
        holding = Holding(replica=self._shards.name, memory_bytes=self._memory, shards=self._held())
        if holding != self._told:
            await self._placements.report(holding)
            self._told = holding

    def _held(self) -> list[HeldShard]:
        found = []
        for collection in self._shards.placements:
            for one in self._shards.mine(collection):
                key = collection, one.number
                handle = self._shards.handles.get(key)
                shard = handle.shard if handle is not None else None
                why = self.why.get(key, "")
                if handle is not None and handle.error is not None:
                    why = handle.error.message
                rows, size = (
                    (shard.chunks, int(shard.stats()["bytes"])) if shard is not None else (0, 0)
                )
                found.append(HeldShard(*key, rows, size, why))
        return sorted(found, key=lambda each: (each.collection, each.number))
