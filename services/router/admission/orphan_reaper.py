"""Requests that run on without a reader for a while, also when their router died: how long is kept on the bus.

Each router states that it lives; another's sweep cancels what a dead router's clients did not come back for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from common import log
from common.bus import Bus
from common.bus.keys import tag
from common.ids import Family, family_of
from common.redis.replies import hash_of

DEAD_MS = 5000
KEEP_MS = 600_000
_ROUTERS = "routers"
_log = log.get("router")


class OrphanReaper:
    """The resumable requests one router answers for; `seen` tells who was asked for lately, at whichever router."""

    def __init__(
        self, bus: Bus, router: str, seen: Callable[[str, float], Awaitable[bool]]
    ) -> None:
        self._bus, self._router, self._seen = bus, router, seen

    async def hold(self, request: str, resume_s: float, deadline_ms: int) -> None:
        """Answer for a request until `release`: if this router dies, it ends `resume_s` after the last `beat`."""
        name = _held(family_of(request), self._router)
        await self._bus.connection.call("HSET", name, request, resume_s)
        left_ms = max(deadline_ms - self._bus.clock.now_ms(), 0)
        await self._bus.connection.call("PEXPIRE", name, max(left_ms + KEEP_MS, 2 * KEEP_MS))

    async def release(self, request: str) -> None:
        """Answer for a request no more: it is over."""
        await self._bus.connection.call("HDEL", _held(family_of(request), self._router), request)

    async def beat(self) -> None:
        """State that this router lives."""
        now = self._bus.clock.now_ms()
        await self._bus.connection.call("ZADD", _ROUTERS, now, self._router, timeout_s=1.0)

    async def sweep(self, families: Iterable[Family]) -> list[str]:
        """Cancel what dead routers' clients did not come back for within its grace; return the requests cancelled.

        After an outage of Redis nobody is taken for dead before everybody had time to say otherwise.
        """
        if self._bus.connection.reached_for() * 1000 < DEAD_MS:
            return []
        now = self._bus.clock.now_ms()
        rows = await self._bus.connection.call(
            "ZRANGEBYSCORE", _ROUTERS, "-inf", now - DEAD_MS, "WITHSCORES"
        )
        cancelled: list[str] = []
        for raw, score in zip(rows[::2], rows[1::2], strict=True):
            router, silent_ms = raw.decode(), now - int(float(score))
            left = [await self._end(family, router, silent_ms, cancelled) for family in families]
            if router != self._router and not any(left) and silent_ms > DEAD_MS:
                await self._bus.connection.call("ZREM", _ROUTERS, router)
        return cancelled

    async def _end(self, family: Family, router: str, silent_ms: int, cancelled: list[str]) -> bool:
        """End what is due of one router in one family; True if something is still held there."""
        name, left = _held(family, router), False
        for raw, seconds in hash_of(await self._bus.connection.call("HGETALL", name)).items():
            request = raw.decode()
            state = await self._bus.jobs.get(request)
            mine = state is not None and not state.over and state.router == router
            early = silent_ms < float(seconds) * 1000
            if mine and (early or await self._seen(request, float(seconds))):
                left = True
                continue
            if mine:
                verdict = await self._bus.control.cancel(request)
                _log.info("request_abandoned", request_id=request, router=router, verdict=verdict)
                cancelled.append(request)
            await self._bus.connection.call("HDEL", name, request)
        return left


def _held(family: Family, router: str) -> str:
    return f"{tag(family)}:held:{router}"
