"""The sweep: erases the data of expired sessions, and finishes interrupted deletions."""

from __future__ import annotations

import asyncio
import contextlib
import random

from common import log
from common.bus import Bus, BusFull
from common.errors import SpillwayError
from common.ids import time_of, unique_of
from common.registry.sessions import YOUNG_MS, SessionEnds, Sessions
from services.kv_store import metrics
from services.kv_store.deletion.session_eraser import Named, SessionEraser

MOST = 2000
BATCH = 200
STOP_S = 10.0
_log = log.get("kv_store")


class Sweep:
    """Examines the sessions that are due, at most `MOST` each time; only one of several kv_stores sweeps."""

    def __init__(self, bus: Bus, eraser: SessionEraser, every_s: float) -> None:
        self._bus, self._eraser, self._every_s = bus, eraser, every_s
        self._begin = 0

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(self._every_s * random.uniform(0.5, 1.5))
            try:
                if await SessionEnds(self._bus).begin_sweep(int(400 * self._every_s)):
                    await self.once()
            except SpillwayError as error:
                _log.warning("sweep_interrupted", error=error.message)
            except Exception:  # noqa: BLE001 - housekeeping must outlive a bad reply
                _log.exception("sweep_failed")

    async def once(self) -> int:
        """Sweep once; return how many sessions were erased."""
        expired: list[Named] = []
        marked: list[Named] = []
        families = await Sessions(self._bus).families()
        left, at = MOST, self._begin % max(len(families), 1)
        for family in families[at:] + families[:at]:
            if left <= 0:
                break
            self._begin += 1  # the next sweep continues after these sessions
            for name, tenant in await Sessions(self._bus).due(family, left):
                left -= 1
                why = await self._over(name, tenant)
                if why:
                    (expired if why == "expired" else marked).append((name, tenant))
        for why, some in (("expired", expired), ("deleted", marked)):
            for first in range(0, len(some), BATCH):
                await self._erase(some[first : first + BATCH], why)
        return len(expired) + len(marked)

    async def _erase(self, some: list[Named], why: str) -> None:
        now_ms = self._bus.clock.now_ms()
        until_ms = now_ms + int(1000 * STOP_S)
        for name, tenant in some:  # sessions that cannot be erased now come after others next time
            await self._look(name, tenant, now_ms + int(1000 * self._every_s))
        await self._eraser.erase(some, until_ms, prove=why == "deleted")
        for name, tenant in some:
            await SessionEnds(self._bus).forget(name, tenant)
            metrics.ERASED.labels(why).inc()
        _log.info("sessions_swept", why=why, sessions=len(some))

    async def _over(self, name: str, tenant: str) -> str:
        """Return why to erase a session: "expired", "deleted" (long enough ago), or "" to keep it."""
        life = await SessionEnds(self._bus).life(name)
        now_ms = self._bus.clock.now_ms()
        if life is None:
            young_ms = time_of(unique_of(name)) + YOUNG_MS
            if now_ms > young_ms:
                return "expired"
            await self._look(name, tenant, young_ms)
            return ""
        if life.deleted_ms is not None:
            return "deleted" if now_ms - life.deleted_ms > 1000 * self._every_s else ""
        await Sessions(self._bus).mend(name, life.ttl_s)
        await self._look(name, tenant, now_ms + await SessionEnds(self._bus).left_ms(name))
        return ""

    async def _look(self, name: str, tenant: str, at_ms: int) -> None:
        """Examine a session again at a later time, or at every sweep while the bus is full."""
        with contextlib.suppress(BusFull):
            await Sessions(self._bus).look_at(name, tenant, at_ms)
