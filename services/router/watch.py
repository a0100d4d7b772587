"""Looks around once a second: is Redis there, which workers live, how full are the lanes."""

from __future__ import annotations

import asyncio
import contextlib

from common import log
from common.bus import Bus, BusDown, LaneState
from common.health import Health
from common.ids import Family
from common.registry.dead_letters import DeadLetters
from services.router import metrics
from services.router.admission.controller import AdmissionController
from services.router.admission.orphan_reaper import OrphanReaper
from services.router.admission.policy import CLASSES_OF
from services.router.admission.request_store import RequestStore
from services.router.cards import Cards
from services.router.lane_depths import LaneDepths
from services.router.text.pool import TextPool

EVERY_S = 1.0
DOWN_S = 2.0
USED_S = 60.0
MOST_FAMILIES = 64
SWEEP_TURNS = 3
SESSIONS = Family("sessions")
NOTHING = LaneState(0, 0, 0, 0, 0.0, 0)
_log = log.get("router")


class Watch:
    """Keeps readiness, lane gauges and the depths that bound parcels up to date."""

    def __init__(
        self,
        bus: Bus,
        health: Health,
        cards: Cards,
        pool: TextPool,
        depths: LaneDepths,
        admission: AdmissionController,
        store: RequestStore,
        orphans: OrphanReaper,
        partitions: int,
    ) -> None:
        self._bus, self._health, self._cards, self._pool = bus, health, cards, pool
        self._depths, self._admission = depths, admission
        self._store, self._orphans = store, orphans
        self._requests = [Family("request", n) for n in range(partitions)]
        self._task: asyncio.Task[None] | None = None
        self._lanes: set[str] = set()
        self._seen: set[str] = set()
        self._families: set[Family] = set()
        self._condemned: set[Family] | None = None
        self._restarts = 0
        self._turn = 0

    def start(self) -> None:
        """Begin to look."""
        self._task = self._bus.supervisor.process(self._run(), "watch")

    async def stop(self) -> None:
        """Stop looking."""
        if self._task is not None:
            await self._bus.supervisor.end(self._task)

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
        down_s = self._bus.connection.down_s()
        metrics.BUS_DOWN.set(down_s)
        why = "" if down_s < DOWN_S else f"Redis has been away for {down_s:.0f} s"
        self._health.set("bus", not why, why)

    async def look(self) -> None:
        """Look once."""
        await self._bus.connection.call(
            "EXISTS", "models", timeout_s=1.0
        )  # PING names no node of a Cluster
        self._note_bus()
        with contextlib.suppress(BusDown):
            await self._memory()
        self._seen = set()
        metrics.TEXT_RESTARTS.inc(self._pool.restarts - self._restarts)
        self._restarts = self._pool.restarts
        models = await self._cards.families()
        for family in models:
            await self._family(family)
        ready = any(self._depths.of(family.name) for family in models if _serves(family))
        why = "" if ready else "no worker that embeds or generates is up"
        self._health.set("workers", ready, why)
        await self._store.sweep()
        if self._condemned is None:
            self._condemned = set(await DeadLetters(self._bus).families())
        others = {*self._requests, SESSIONS, *self._used(set(models)), *self._condemned} - set(
            models
        )
        await self._graces([*models, *others])
        for family in others:
            await self._family(family)
        for gone in self._lanes - self._seen:
            _forget(gone)
        self._lanes = self._seen
        for family in self._families - {*models, *others}:
            metrics.WORKERS.remove(str(family))
            metrics.DEAD_LETTERS.remove(str(family))
        self._families = {*models, *others}

    async def _memory(self) -> None:
        """Note how full Redis is: of a Cluster, its fullest node."""
        used, limit = 0, 0
        for call in self._bus.connection.callers():
            lines = (await call("INFO", "memory")).decode().splitlines()
            info = dict(line.split(":", 1) for line in lines if ":" in line)
            one, most = int(info["used_memory"]), int(info["maxmemory"])
            if one * max(limit, 1) >= used * max(most, 1):
                used, limit = one, most
        metrics.BUS_MEMORY.set(used)
        metrics.BUS_LIMIT.set(limit)

    async def _graces(self, families: list[Family]) -> None:
        """Say that this router lives; now and then, look after the requests of those that do not any more."""
        await self._orphans.beat()
        self._turn += 1
        if self._turn % SWEEP_TURNS == 0:
            await self._orphans.sweep(families)

    def _used(self, but: set[Family]) -> list[Family]:
        used = self._admission.used_within(USED_S)
        return [family for family in used if family not in but][:MOST_FAMILIES]

    async def _family(self, family: Family) -> None:
        lanes = await self._bus.lanes.states(family)
        workers = [w for w in await self._bus.workers.living(family) if not w.draining]
        metrics.WORKERS.labels(str(family)).set(len(workers))
        letters = await DeadLetters(self._bus).count(family)
        metrics.DEAD_LETTERS.labels(str(family)).set(letters)
        if self._condemned is not None:
            (self._condemned.add if letters else self._condemned.discard)(family)
        shared = {cls: lane for cls, lane in lanes.items() if not cls.startswith("w.")}
        deepest = [
            (lane.depth_items, lane.depth_tokens) for lane in shared.values() if lane.depth_items
        ]
        self._depths.note(family.name, deepest)
        known = dict.fromkeys(CLASSES_OF.get(family.name.split(".")[0], ()), NOTHING)
        for cls, lane in (known | shared).items():
            self._seen.add(f"{family}:{cls}")
            _gauge(f"{family}:{cls}", lane)


def _serves(family: Family) -> bool:
    return family.name.startswith(("embed.", "chat."))


def _gauge(name: str, lane: LaneState) -> None:
    metrics.DEPTH.labels(name, "items").set(lane.depth_items)
    metrics.DEPTH.labels(name, "tokens").set(lane.depth_tokens)
    metrics.USED.labels(name, "items").set(lane.items)
    metrics.USED.labels(name, "tokens").set(lane.tokens)
    metrics.OLDEST.labels(name).set(lane.oldest_age_s)
    metrics.PENDING.labels(name).set(lane.pending)
    metrics.QUEUED.labels(name).set(lane.queued)
    metrics.STRANDED.labels(name).set(lane.stranded)
    metrics.ADMITTED.labels(name)  # a lane that nothing spilled to counts 0


def _forget(name: str) -> None:
    """Drop the gauges of a lane nobody uses any more."""
    for gauge in (metrics.DEPTH, metrics.USED):
        for unit in ("items", "tokens"):
            gauge.remove(name, unit)
    for gauge in (metrics.OLDEST, metrics.PENDING, metrics.QUEUED, metrics.STRANDED):
        gauge.remove(name)
