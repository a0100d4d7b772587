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

from common.metrics import version
from services.router.context import ROUTER, Router, reply
from services.router.survey import Survey, lanes_of, workers_of
from services.router.window import EVERY_S, Window


class Mesh:
    """What the route needs between two looks."""

    def __init__(self, router: Router) -> None:
        self.survey, self.window = Survey(router), Window(router.clock)
        self.started_ms = router.clock.now_ms()

    async def noting(self, _app: web.Application) -> AsyncIterator[None]:
        """Note the metrics while the application runs."""
        self.window.note()

        async def note() -> None:
            while True:
                await asyncio.sleep(EVERY_S)
                self.window.note()

        task = asyncio.create_task(note(), name="window")
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


MESH = web.AppKey("mesh", Mesh)


async def get(request: web.Request) -> web.Response:
    """Return what the mesh is and does now; 503 `bus_down` if Redis is away."""
    router, mesh = request.app[ROUTER], request.app[MESH]
    states = await mesh.survey.states()
    models = {card.family: card.name for card in (await router.cards.cards()).values()}
    lanes = lanes_of(states, models)
    for lane in lanes:
        lane["history"] = mesh.window.used(lane["lane"])
    body = {
        "object": "mesh",
        "time": router.clock.now_ms() / 1000,
        "version": version(),
        "router": {
            "name": router.dispatch.router,
            "started": mesh.started_ms / 1000,
            "draining": router.dispatch.draining,
            "keys": router.keys_on,
        },
        "history_every_s": EVERY_S,
        "lanes": lanes,
        "workers": workers_of(states, models),
        "window": mesh.window.summary(),
    }
    return reply(msgspec.json.encode(body), headers={"Cache-Control": "no-store"})
