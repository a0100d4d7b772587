"""Looks around once a second: is Redis there, which workers live, how full are the lanes."""

from __future__ import annotations

import asyncio

from common import log
from common.bus import BusDown, LaneState
from common.ids import Family
from services.router import metrics
from services.router.context import Router

EVERY_S = 1.0
DOWN_S = 2.0
USED_S = 60.0
MOST_FAMILIES = 64
SWEEP_TURNS = 3
_log = log.get("router")


class Watch:
    """Keeps readiness, lane gauges and the depths that bound parcels up to date."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._task: asyncio.Task[None] | None = None
        self._lanes: set[str] = set()
        self._seen: set[str] = set()
        self._turn = 0

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except BusDown:
                self._note_bus()
            except Exception:  # noqa: BLE001 - watching must outlive a bad reply
                _log.exception("watch_failed")
            await asyncio.sleep(EVERY_S)

    def _note_bus(self) -> None:
        down_s = self._router.bus.down_s()
        metrics.BUS_DOWN.set(down_s)
        why = "" if down_s < DOWN_S else f"Redis has been away for {down_s:.0f} s"
        self._router.health.set("bus", not why, why)

    async def look(self) -> None:
        """Look once."""
        router = self._router
        await router.bus.call("EXISTS", "models", timeout_s=1.0)  # PING names no node of a Cluster
        self._note_bus()
        self._seen = set()
        metrics.TEXT_RESTARTS.set(router.pool.restarts)
        models = await router.families()
        for family in models:
            await self._family(family)
        ready = any(family.name in router.depths for family in models if _serves(family))
        why = "" if ready else "no worker that embeds or generates is up"
        router.health.set("workers", ready, why)
        await router.dispatch.sweep()
        await self._graces(models)
        for family in self._used(set(models)):
            await self._family(family)
        for gone in self._lanes - self._seen:
            _forget(gone)
        self._lanes = self._seen

    async def _graces(self, models: list[Family]) -> None:
        """Say that this router lives; now and then, look after the requests of those that do not any more."""
        graces = self._router.dispatch.graces
        await graces.beat()
        self._turn += 1
        if self._turn % SWEEP_TURNS == 0:
            requests = [Family("request", n) for n in range(self._router.config.partitions)]
            await graces.sweep([*(f for f in models if not _embeds(f)), *requests])

    def _used(self, but: set[Family]) -> list[Family]:
        now, seen = self._router.clock.monotonic(), self._router.dispatch.families
        for family, at in list(seen.items()):
            if now - at > USED_S:
                del seen[family]
        recent = sorted((f for f in seen if f not in but), key=lambda f: -seen[f])
        return recent[:MOST_FAMILIES]

    async def _family(self, family: Family) -> None:
        lanes = await self._router.bus.lanes(family)
        shared = {cls: lane for cls, lane in lanes.items() if not cls.startswith("w.")}
        deepest = [
            (lane.depth_items, lane.depth_tokens) for lane in shared.values() if lane.depth_items
        ]
        if deepest:
            items, tokens = zip(*deepest, strict=True)
            self._router.depths[family.name] = (max(items), max(tokens))
        else:
            self._router.depths.pop(family.name, None)
        for cls, lane in shared.items():
            self._seen.add(f"{family}:{cls}")
            _gauge(f"{family}:{cls}", lane)


def _serves(family: Family) -> bool:
    return family.name.startswith(("embed.", "chat."))


def _embeds(family: Family) -> bool:
    return family.name.startswith("embed.")


def _gauge(name: str, lane: LaneState) -> None:
    metrics.DEPTH.labels(name, "items").set(lane.depth_items)
    metrics.DEPTH.labels(name, "tokens").set(lane.depth_tokens)
    metrics.USED.labels(name, "items").set(lane.items)
    metrics.USED.labels(name, "tokens").set(lane.tokens)
    metrics.OLDEST.labels(name).set(lane.oldest_age_s)
    metrics.PENDING.labels(name).set(lane.pending)


def _forget(name: str) -> None:
    """Drop the gauges of a lane nobody uses any more."""
    for gauge in (metrics.DEPTH, metrics.USED):
        for unit in ("items", "tokens"):
            gauge.remove(name, unit)
    metrics.OLDEST.remove(name)
    metrics.PENDING.remove(name)
