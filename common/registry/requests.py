"""Requests' records beside their jobs: the last reader's time, and the router that answers for a resumable request.

Each router records that it lives; the requests of a silent router are its orphans.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.bus import Bus, keys
from common.ids import Family, family_of
from common.redis.replies import hash_of

SEEN_S = 600
KEPT_MS = 600_000  # the record of a resumable request outlives its deadline by this
_REMOVED_AT_ONCE = 200


class Requests:
    """Readers, routers and leftovers of requests. Every method raises BusDown while Redis is away."""

    def __init__(self, bus: Bus) -> None:
        self._clock, self._redis = bus.clock, bus.connection

    async def note_reader(self, request: str) -> None:
        """Record that a client asks for a request now, at any router."""
        await self._redis.call("SET", keys.seen(request), self._clock.now_ms(), "EX", SEEN_S)

    async def read_within(self, request: str, seconds: float) -> bool:
        """Return whether a client asked for a request within the last `seconds`, at most 600."""
        raw = await self._redis.call("GET", keys.seen(request))
        return raw is not None and self._clock.now_ms() - int(raw) <= seconds * 1000

    async def remove(self, jobs: Sequence[str]) -> None:
        """Remove the records and logs of jobs, many per command, since a command costs more than a job's end."""
        by_family: dict[Family, list[str]] = {}
        for job in jobs:
            by_family.setdefault(family_of(job), []).extend(
                (keys.log(job), keys.job(job), keys.control(job))
            )
        for names in by_family.values():
            for first in range(0, len(names), 3 * _REMOVED_AT_ONCE):
                await self._redis.call("UNLINK", *names[first : first + 3 * _REMOVED_AT_ONCE])

    async def hold(self, request: str, router: str, resume_s: float, deadline_ms: int) -> None:
        """Record that `router` answers for a request, which may run for `resume_s` without a reader."""
        name = keys.orphans(family_of(request), router)
        await self._redis.call("HSET", name, request, resume_s)
        left_ms = max(deadline_ms - self._clock.now_ms(), 0)
        await self._redis.call("PEXPIRE", name, max(left_ms + KEPT_MS, 2 * KEPT_MS))

    async def release(self, request: str, router: str) -> None:
        """Record that `router` no longer answers for a request."""
        await self._redis.call("HDEL", keys.orphans(family_of(request), router), request)

    async def held(self, family: Family, router: str) -> dict[str, float]:
        """Return the requests of a family that `router` answers for, each with its `resume_s`."""
        flat = await self._redis.call("HGETALL", keys.orphans(family, router))
        return {raw.decode(): float(seconds) for raw, seconds in hash_of(flat).items()}

    async def note_router(self, router: str) -> None:
        """Record that a router lives."""
        await self._redis.call("ZADD", keys.ROUTERS, self._clock.now_ms(), router, timeout_s=1.0)

    async def silent_routers(self, silent_ms: int) -> dict[str, int]:
        """Return the routers without a sign of life for `silent_ms`, each with its silence in milliseconds."""
        now_ms = self._clock.now_ms()
        rows = await self._redis.call(
            "ZRANGEBYSCORE", keys.ROUTERS, "-inf", now_ms - silent_ms, "WITHSCORES"
        )
        silent = zip(rows[::2], rows[1::2], strict=True)
        return {raw.decode(): now_ms - int(float(score)) for raw, score in silent}

    async def forget_router(self, router: str) -> None:
        """Remove a router that no longer answers for any request."""
        await self._redis.call("ZREM", keys.ROUTERS, router)
