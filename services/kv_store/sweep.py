"""The sweep: what expired leaves the indexes with all it left behind, and a deletion nobody finished is finished."""

from __future__ import annotations

import asyncio
import random

from common import log
from common.bus import Bus, keys
from common.errors import SpillwayError
from common.ids import Family, unique_of
from services.kv_store import metrics
from services.kv_store.erase import Eraser, Named

MOST = 2000
BATCH = 200
YOUNG_MS = (
    900_000  # longer than any request lasts: an import is in the index before its session exists
)
STOP_S = 10.0
LOCK = "{sessions/0}:sweep"
_log = log.get("kv_store")
_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"


class Sweep:
    """Goes round the indexes, at most `MOST` entries each time; of several kv_stores one sweeps."""

    def __init__(self, bus: Bus, eraser: Eraser, every_s: float) -> None:
        self._bus, self._eraser, self._every_s = bus, eraser, every_s
        self._cursors: dict[str, bytes] = {}
        self._begin = 0

    async def run(self) -> None:
        """Sweep for ever."""
        while True:
            await asyncio.sleep(self._every_s * random.uniform(0.5, 1.5))
            try:
                if await self._bus.call(
                    "SET", LOCK, "1", "NX", "PX", max(int(400 * self._every_s), 1)
                ):
                    await self.once()
            except SpillwayError as error:
                _log.warning("sweep_interrupted", error=error.message)
            except Exception:  # noqa: BLE001 - housekeeping must outlive a bad reply
                _log.exception("sweep_failed")

    async def once(self) -> int:
        """Sweep once; return how many sessions were erased."""
        expired: list[Named] = []
        marked: list[Named] = []
        indexes = [
            (family, raw.decode())
            for family in await self._bus.session_families()
            for raw in sorted(await self._bus.call("SMEMBERS", keys.tenants(family)))
        ]
        left, at = MOST, self._begin % max(len(indexes), 1)
        for family, tenant in indexes[at:] + indexes[:at]:
            if left <= 0:
                break
            self._begin += 1  # the next sweep begins where this one ends
            for name in await self._some(family, tenant):
                left -= 1
                why = await self._over(name)
                if why:
                    (expired if why == "expired" else marked).append((name, tenant))
        for why, some in (("expired", expired), ("deleted", marked)):
            for first in range(0, len(some), BATCH):
                await self._erase(some[first : first + BATCH], why)
        return len(expired) + len(marked)

    async def _erase(self, some: list[Named], why: str) -> None:
        until_ms = self._bus.clock.now_ms() + int(1000 * STOP_S)
        await self._eraser.erase(some, until_ms, prove=why == "deleted")
        for name, tenant in some:
            await self._eraser.forget(name, tenant)
            metrics.ERASED.labels(why).inc()
        _log.info("sessions_swept", why=why, sessions=len(some))

    async def _some(self, family: Family, tenant: str) -> list[str]:
        """Return the next entries of one index."""
        index = keys.sessions(family, tenant)
        cursor = self._cursors.get(index, b"0")
        cursor, flat = await self._bus.call("ZSCAN", index, cursor, "COUNT", BATCH)
        self._cursors[index] = cursor if isinstance(cursor, bytes) else str(cursor).encode()
        return [name.decode() for name in flat[::2]]

    async def _over(self, name: str) -> str:
        """Return why a session is to be erased: "expired", "deleted" long enough ago, or "" if it is not."""
        tenant, deleted, ttl = await self._bus.call(
            "HMGET", keys.session(name), "tenant", "deleted", "ttl"
        )
        now = self._bus.clock.now_ms()
        if tenant is None:
            return "expired" if now - made_ms(name) > YOUNG_MS else ""
        if deleted is not None:
            return "deleted" if now - int(deleted) > 1000 * self._every_s else ""
        await self._bus.mend_session(name, int(ttl))
        return ""


def made_ms(name: str) -> int:
    """Return when an id was made, by the ulid in it."""
    value = 0
    for character in unique_of(name)[:10]:
        value = value * 32 + _CROCKFORD.index(character)
    return value
