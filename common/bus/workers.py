"""Records of the workers that serve a family, and which of the workers live."""

from __future__ import annotations

from common.bus import keys
from common.bus.connection import Connection
from common.ids import Family
from common.redis.replies import hash_of
from common.wire.message import decode
from common.wire.registry import WorkerRecord

FRESH_S = 0.5


class Workers:
    """Reads the workers of families, at most every half second; the script `admit` checks which of them live."""

    def __init__(self, redis: Connection) -> None:
        self._redis = redis
        self._rosters: dict[Family, tuple[float, dict[str, WorkerRecord]]] = {}

    async def records(self, family: Family) -> dict[str, WorkerRecord]:
        """Return the records by worker, at most half a second old; callers must not change the dict."""
        if (recent := self.recent(family)) is not None:
            return recent
        flat = hash_of(await self._redis.call("HGETALL", keys.workers(family)))
        records = {name.decode(): decode(raw, WorkerRecord) for name, raw in flat.items()}
        self._rosters[family] = (self._redis.clock.monotonic(), records)
        return records

    async def registered(self, family: Family) -> dict[str, WorkerRecord]:
        """Return the records of a family's workers, living or not; at most half a second old."""
        return dict(await self.records(family))

    def recent(self, family: Family) -> dict[str, WorkerRecord] | None:
        """Return the records of a family by worker if they are in memory and recent enough to be used."""
        cached = self._rosters.get(family)
        fresh = cached is not None and self._redis.clock.monotonic() - cached[0] < FRESH_S
        return cached[1] if cached is not None and fresh else None

    def known(self, family: Family) -> bool:
        """Return whether the records of a family are in memory and recent enough to be used."""
        return self.recent(family) is not None

    def forget(self, family: Family) -> None:
        """Drop a family's records from memory, so that the next use reads them anew."""
        self._rosters.pop(family, None)

    async def heartbeats(self, family: Family) -> dict[str, str]:
        """Return worker -> heartbeat key of every registered worker, living or not."""
        return {name: keys.heart(family, name) for name in await self.records(family)}

    async def living(self, family: Family) -> list[WorkerRecord]:
        """Return the records of the workers that have a heartbeat now."""
        return [record for record, alive in await self.all(family) if alive]

    async def all(self, family: Family) -> list[tuple[WorkerRecord, bool]]:
        """Return every registered worker's record and whether it has a heartbeat now.

        A worker that died stays registered until another one reaps it.
        """
        records = await self.records(family)
        return [
            (record, bool(await self._redis.call("EXISTS", keys.heart(family, name))))
            for name, record in records.items()
        ]
