"""GET /v1/mesh: lanes, workers, refusals and latencies, for the dashboard and for whoever watches.

What it tells is the whole mesh's and no tenant's: any valid key may see it. It names models, workers and lanes, and
counts; the shards of all collections are one lane, and no collection, session, request or key is named. Counts of
requests and their times are this router's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from common import log
from common.bus import BusDown
from common.metrics import version
from services.router import recent_batches
from services.router.http.context import ROUTER, Router, reply
from services.router.mesh_snapshot import ENCODERS, MeshSnapshot, kind_of, lanes_of, workers_of
from services.router.recent_batches import RecentBatches
from services.router.recent_counts import EVERY_S, RecentCounts

_log = log.get("router")


class MeshView:
    """What the route needs between two looks."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.survey, self.window = MeshSnapshot(router), RecentCounts(router.clock)
        self.batches = RecentBatches(router.clock)
        self.started_ms = router.clock.now_ms()

    async def noting(self, _app: web.Application) -> AsyncIterator[None]:
        """Note the metrics, and what encoders measure, while the application runs."""
        self.window.note()
        supervisor = self._router.bus.supervisor
        tasks = [
            supervisor.process(self._note_metrics(), "window"),
            supervisor.process(self._note_batches(), "batches"),
        ]
        yield
        await supervisor.end(*tasks)

    async def _note_metrics(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self.window.note()

    async def _note_batches(self) -> None:
        router = self._router
        while True:
            try:
                for family in await router.families():
                    if kind_of(family) in ENCODERS:
                        roster = await router.bus.workers.all(family)
                        self.batches.note(family, [record for record, _ in roster])
            except BusDown:
                pass  # the next look may find it
            except Exception:  # noqa: BLE001 - noting must outlive a bad reply
                _log.exception("batches_unnoted")
            await asyncio.sleep(recent_batches.EVERY_S)


MESH = web.AppKey("mesh", MeshView)


async def get(request: web.Request) -> web.Response:
    """Return what the mesh is and does now; 503 `bus_down` if Redis is away."""
    router, mesh = request.app[ROUTER], request.app[MESH]
    states = await mesh.survey.states()
    models = {card.family: card.name for card in (await router.cards.cards()).values()}
    lanes = lanes_of(states, models)
    for lane in lanes:
        lane["history"] = mesh.window.used(lane["lane"])
    policy = router.admission.policy
    body = {
        "object": "mesh",
        "time": router.clock.now_ms() / 1000,
        "version": version(),
        "router": {
            "name": router.admission.router,
            "started": mesh.started_ms / 1000,
            "draining": router.admission.draining,
            "keys": router.keys_on,
            "admission": policy.name,
            "hop_s": round(policy.hops.p99_s, 6),
        },
        "history_every_s": EVERY_S,
        "lanes": lanes,
        "workers": workers_of(states, models, mesh.batches, policy.hops.p99_s),
        "window": {**mesh.window.summary(), "minute": mesh.window.minute()},
    }
    return reply(msgspec.json.encode(body), headers={"Cache-Control": "no-store"})
