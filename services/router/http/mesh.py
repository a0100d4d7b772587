"""GET /v1/mesh: lanes, workers, refusals and latencies, for the dashboard and for monitoring.

The response describes the whole mesh and no tenant, so any valid key may read it: it names models, workers and lanes,
and counts. The shards of all collections are one lane; no collection, session, request or key is named. Counts of
requests and their times are this router's own.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from common import log
from common.bus import Bus, BusDown
from common.metrics import version
from services.router import recent_batches
from services.router.admission.controller import AdmissionController
from services.router.cards import Cards
from services.router.http.replies import reply_json
from services.router.mesh_snapshot import ENCODERS, MeshSnapshot, kind_of, lanes_of, workers_of
from services.router.recent_batches import RecentBatches
from services.router.recent_counts import EVERY_S, RecentCounts

_log = log.get("router")


class MeshHistory:
    """The last minutes of this router's metrics and of the encoders' batches, noted while the router runs."""

    def __init__(self, bus: Bus, cards: Cards) -> None:
        self._bus, self._cards = bus, cards
        self.counts, self.batches = RecentCounts(bus.clock), RecentBatches(bus.clock)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to note."""
        self.counts.note()
        supervisor = self._bus.supervisor
        self._tasks = [
            supervisor.process(self._note_metrics(), "window"),
            supervisor.process(self._note_batches(), "batches"),
        ]

    async def stop(self) -> None:
        """Stop noting."""
        await self._bus.supervisor.end(*self._tasks)

    async def _note_metrics(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self.counts.note()

    async def _note_batches(self) -> None:
        while True:
            try:
                for family in await self._cards.families():
                    if kind_of(family) in ENCODERS:
                        roster = await self._bus.workers.all(family)
                        self.batches.note(family, [record for record, _ in roster])
            except BusDown:
                pass  # the next round may reach Redis
            except Exception:  # noqa: BLE001 - noting must outlive a bad reply
                _log.exception("batches_unnoted")
            await asyncio.sleep(recent_batches.EVERY_S)


class MeshApi:
    """Describes the mesh as it is now."""

    def __init__(
        self,
        bus: Bus,
        cards: Cards,
        snapshot: MeshSnapshot,
        history: MeshHistory,
        admission: AdmissionController,
        *,
        keys_on: bool,
    ) -> None:
        self._clock, self._cards = bus.clock, cards
        self._snapshot, self._history, self._admission = snapshot, history, admission
        self._keys_on, self._started_ms = keys_on, bus.clock.now_ms()

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.get("/v1/mesh", self.get)]

    async def get(self, _request: web.Request) -> web.Response:
        """Return lanes, workers and recent counts; 503 `bus_down` if Redis is away."""
        states = await self._snapshot.states()
        models = {card.family: card.name for card in (await self._cards.cards()).values()}
        counts, policy = self._history.counts, self._admission.policy
        lanes = lanes_of(states, models)
        for lane in lanes:
            lane["history"] = counts.used(lane["lane"])
        body = {
            "object": "mesh",
            "time": self._clock.now_ms() / 1000,
            "version": version(),
            "router": {
                "name": self._admission.router,
                "started": self._started_ms / 1000,
                "draining": self._admission.draining,
                "keys": self._keys_on,
                "admission": policy.name,
                "hop_s": round(policy.hops.p99_s, 6),
            },
            "history_every_s": EVERY_S,
            "lanes": lanes,
            "workers": workers_of(states, models, self._history.batches, policy.hops.p99_s),
            "window": {**counts.summary(), "minute": counts.minute()},
        }
        return reply_json(body, headers={"Cache-Control": "no-store"})
