"""The monitor of a router: once a second it checks Redis, workers and lanes, and ends requests without a reader."""

from __future__ import annotations

import asyncio
import contextlib

from common import log
from common.bus import Bus, BusDown
from common.health import Health
from services.router import metrics
from services.router.admission.orphan_reaper import OrphanReaper
from services.router.admission.request_store import RequestStore
from services.router.cards import Cards
from services.router.mesh.lane_depths import LaneDepths
from services.router.mesh.lane_monitor import LaneMonitor
from services.router.text.pool import TextPool

EVERY_S = 1.0
DOWN_S = 2.0
SWEEP_ROUNDS = 3
_log = log.get("router")


class MeshMonitor:
    """Keeps a router's readiness and gauges up to date, and sweeps delivered requests and orphans."""

    def __init__(
        self,
        bus: Bus,
        health: Health,
        cards: Cards,
        pool: TextPool,
        depths: LaneDepths,
        lanes: LaneMonitor,
        store: RequestStore,
        orphans: OrphanReaper,
    ) -> None:
        self._bus, self._health, self._cards, self._pool = bus, health, cards, pool
        self._depths, self._lanes, self._store, self._orphans = depths, lanes, store, orphans
        self._restarts = 0
        self._rounds = 0

    def start(self) -> asyncio.Task[None]:
        """Begin to monitor, and return the task that monitors until it is ended."""
        return self._bus.supervisor.process(self._run(), "mesh monitor")

    async def _run(self) -> None:
        while True:
            try:
                await self._round()
            except BusDown:
                self._note_bus()
            except Exception:  # noqa: BLE001 - the monitor must outlive a bad reply
                _log.exception("watch_failed")
            await asyncio.sleep(EVERY_S)

    async def _round(self) -> None:
        await self._bus.connection.probe(timeout_s=1.0)
        self._note_bus()
        with contextlib.suppress(BusDown):
            used, limit = await self._bus.connection.memory()
            metrics.BUS_MEMORY.set(used)
            metrics.BUS_LIMIT.set(limit)
        metrics.TEXT_RESTARTS.inc(self._pool.restarts - self._restarts)
        self._restarts = self._pool.restarts
        models = await self._cards.families()
        for family in models:
            await self._lanes.read(family)
        serving = [family for family in models if family.kind in {"embed", "chat"}]
        ready = any(self._depths.of(family.name) for family in serving)
        why = "" if ready else "no worker that embeds or generates is up"
        self._health.set("workers", ready, why)
        await self._store.sweep()
        others = await self._lanes.others(models)
        await self._orphans.beat()
        self._rounds += 1
        if self._rounds % SWEEP_ROUNDS == 0:
            await self._orphans.sweep([*models, *others])
        for family in others:
            await self._lanes.read(family)
        self._lanes.end_round()

    def _note_bus(self) -> None:
        down_s = self._bus.connection.policy.down_s()
        metrics.BUS_DOWN.set(down_s)
        why = "" if down_s < DOWN_S else f"Redis has been away for {down_s:.0f} s"
        self._health.set("bus", not why, why)
