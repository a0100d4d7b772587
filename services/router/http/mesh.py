"""GET /v1/mesh: lanes, workers, refusals and latencies, for the dashboard and for monitoring.

The response describes the whole mesh and no tenant, so any valid key may read it: it holds the names of models, workers
and lanes, and counts. The shards of all collections are one lane; no collection, session, request or key appears.
Counts of requests and their times are those of this router.
"""

from __future__ import annotations

from aiohttp import web

from common.bus import Bus
from common.metrics import version
from common.registry.processes import Processes
from services.router.admission.controller import AdmissionController
from services.router.cards import Cards
from services.router.http.replies import reply_json
from services.router.mesh.history import MeshHistory
from services.router.mesh.planned_costs import PlannedCosts
from services.router.mesh.processes import processes_of
from services.router.mesh.recent_counts import EVERY_S
from services.router.mesh.report import lanes_of, workers_of
from services.router.mesh.snapshot import MeshSnapshot


class MeshApi:
    """Describes the mesh as it is now."""

    def __init__(
        self,
        bus: Bus,
        cards: Cards,
        snapshot: MeshSnapshot,
        history: MeshHistory,
        admission: AdmissionController,
        planned: PlannedCosts,
        *,
        keys_on: bool,
    ) -> None:
        self._clock, self._cards = bus.clock, cards
        self._snapshot, self._history, self._admission = snapshot, history, admission
        self._processes, self._planned = Processes(bus), planned
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
            "processes": processes_of(await self._processes.living(), states),
            "planned_costs": self._planned.compare(),
        }
        return reply_json(body, headers={"Cache-Control": "no-store"})
