"""Load of a family's lanes, and the number of leases that each worker holds on them."""

from __future__ import annotations

from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from common.bus import keys
from common.bus.connection import Connection
from common.bus.workers import Workers
from common.ids import Family
from common.redis.replies import hash_of


class LaneState(NamedTuple):
    """The load of a lane, as metrics and the dashboard show it.

    `pending` counts leases, `stranded` those of dead workers; `queued` counts jobs that no worker holds.
    """

    items: int
    tokens: int
    depth_items: int
    depth_tokens: int
    oldest_age_s: float
    pending: int
    stranded: int = 0
    queued: int = 0


class Lanes:
    """Reads use, depth and pending entries of lanes."""

    def __init__(self, redis: Connection, workers: Workers) -> None:
        self._redis, self._workers = redis, workers

    async def use(self, family: Family) -> dict[str, tuple[int, int]]:
        """Return class -> (items, tokens) of the queued and running jobs."""
        flat = {
            k.decode(): int(v)
            for k, v in hash_of(await self._redis.call("HGETALL", keys.use(family))).items()
        }
        classes = {name.rsplit(":", 1)[0] for name in flat if ":" in name}
        return {c: (flat.get(f"{c}:items", 0), flat.get(f"{c}:tokens", 0)) for c in sorted(classes)}

    async def states(self, family: Family) -> dict[str, LaneState]:
        """Return every lane of a family with use, depth, age of its oldest entry, and pending entries."""
        used, depth = await self.use(family), dict[str, tuple[int, int]]()
        workers = await self._workers.living(family)
        living = {record.worker for record in workers}
        for record in workers:
            open_to = () if record.closed else record.classes
            for cls in () if record.draining else (*open_to, keys.own(record.worker)):
                items, tokens = depth.get(cls, (0, 0))
                depth[cls] = (items + record.depth_items, tokens + record.depth_tokens)
        states = {}
        for cls in sorted({*used, *depth}):
            length = await self._redis.call("XLEN", keys.lane(family, cls))
            oldest = await self._redis.call("XRANGE", keys.lane(family, cls), "-", "+", "COUNT", 1)
            age = self._redis.clock.now_ms() - int(oldest[0][0].split(b"-")[0]) if oldest else 0
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
        reply = await self.of_group("XPENDING", keys.lane(family, cls), keys.GROUP)
        return {name.decode(): int(count) for name, count in (reply[3] or () if reply else ())}

    async def of_group(self, *command: object) -> Any:
        """Run a command on a lane's group; [] if the group is gone, as a lane may be reaped at any moment."""
        try:
            return await self._redis.call(*command)
        except ResponseError as error:
            if "NOGROUP" in str(error) or "no such key" in str(error):
                return []
            raise
