"""Who serves a family, and how full its lanes are."""

from __future__ import annotations

from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from common.bus import keys
from common.bus.connection import Connection
from common.ids import Family
from common.wire.messages import WorkerRecord, decode

FRESH_S = 0.5


class LaneState(NamedTuple):
    """A lane as metrics and the dashboard see it.

    `stranded` of the pending leases have a worker that does not live; `queued` jobs are at no worker.
    """

    items: int
    tokens: int
    depth_items: int
    depth_tokens: int
    oldest_age_s: float
    pending: int
    stranded: int = 0
    queued: int = 0


class Workers(Connection):
    """Workers of a family, read at most every half second; the door itself checks who lives."""

    _rosters: dict[Family, tuple[float, dict[str, WorkerRecord]]]

    async def _records(self, family: Family) -> dict[str, WorkerRecord]:
        if not hasattr(self, "_rosters"):
            self._rosters = {}
        cached = self._rosters.get(family)
        if cached is not None and self.clock.monotonic() - cached[0] < FRESH_S:
            return cached[1]
        flat = hash_of(await self.call("HGETALL", keys.workers(family)))
        records = {name.decode(): decode(raw, WorkerRecord) for name, raw in flat.items()}
        self._rosters[family] = (self.clock.monotonic(), records)
        return records

    async def registered(self, family: Family) -> dict[str, WorkerRecord]:
        """Return the records of a family's workers, living or not; at most half a second old."""
        return dict(await self._records(family))

    def knows_roster(self, family: Family) -> bool:
        """True if the next use of the workers is served from memory."""
        cached = getattr(self, "_rosters", {}).get(family)
        return cached is not None and self.clock.monotonic() - cached[0] < FRESH_S

    def forget_roster(self, family: Family) -> None:
        """Read the workers anew at the next use."""
        if hasattr(self, "_rosters"):
            self._rosters.pop(family, None)

    async def hearts(self, family: Family) -> dict[str, str]:
        """Return worker -> heartbeat key of every registered worker, living or not."""
        return {name: keys.heart(family, name) for name in await self._records(family)}

    async def workers(self, family: Family) -> list[WorkerRecord]:
        """Return the records of the workers that have a heartbeat now."""
        return [record for record, alive in await self.roster(family) if alive]

    async def roster(self, family: Family) -> list[tuple[WorkerRecord, bool]]:
        """Return every registered worker's record and whether it has a heartbeat now.

        A worker that died stays registered until another one reaps it.
        """
        records = await self._records(family)
        return [
            (record, bool(await self.call("EXISTS", keys.heart(family, name))))
            for name, record in records.items()
        ]

    async def use(self, family: Family) -> dict[str, tuple[int, int]]:
        """Return class -> (items, tokens), queued and running."""
        flat = {
            k.decode(): int(v)
            for k, v in hash_of(await self.call("HGETALL", keys.use(family))).items()
        }
        classes = {name.rsplit(":", 1)[0] for name in flat if ":" in name}
        return {c: (flat.get(f"{c}:items", 0), flat.get(f"{c}:tokens", 0)) for c in sorted(classes)}

    async def lanes(self, family: Family) -> dict[str, LaneState]:
        """Return every lane of a family with use, depth, age of its oldest entry, and pending entries."""
        used, depth = await self.use(family), dict[str, tuple[int, int]]()
        workers = await self.workers(family)
        living = {record.worker for record in workers}
        for record in workers:
            open_to = () if record.closed else record.classes
            for cls in () if record.draining else (*open_to, keys.own(record.worker)):
                items, tokens = depth.get(cls, (0, 0))
                depth[cls] = (items + record.depth_items, tokens + record.depth_tokens)
        states = {}
        for cls in sorted({*used, *depth}):
            length = await self.call("XLEN", keys.lane(family, cls))
            oldest = await self.call("XRANGE", keys.lane(family, cls), "-", "+", "COUNT", 1)
            age = self.clock.now_ms() - int(oldest[0][0].split(b"-")[0]) if oldest else 0
            pending = await self.pending(family, cls)
            states[cls] = LaneState(
                *used.get(cls, (0, 0)),
                *depth.get(cls, (0, 0)),
                max(age, 0) / 1000,
                sum(pending.values()),
                sum(n for who, n in pending.items() if who not in {*living, keys.RETURNED}),
                max(length - sum(n for who, n in pending.items() if who != keys.RETURNED), 0),
            )
        return states

    async def pending(self, family: Family, cls: str) -> dict[str, int]:
        """Return consumer -> number of leases on one lane."""
        reply = await self._of_group("XPENDING", keys.lane(family, cls), keys.GROUP)
        return {name.decode(): int(count) for name, count in (reply[3] or () if reply else ())}

    async def _of_group(self, *command: object) -> Any:
        """Ask a lane's group; an empty list where there is none: a lane may be reaped at any moment."""
        try:
            return await self.call(*command)
        except ResponseError as error:
            if "NOGROUP" in str(error) or "no such key" in str(error):
                return []
            raise


def hash_of(reply: list[bytes]) -> dict[bytes, bytes]:
    """Return a flat reply of fields and values as a dict."""
    return dict(zip(reply[::2], reply[1::2], strict=True))
