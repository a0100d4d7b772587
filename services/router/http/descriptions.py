"""Descriptions of the router for machines, on the public port if a setting says so: /metrics and /openapi.json."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib import resources

import msgspec
import yaml
from aiohttp import web
from prometheus_client import REGISTRY
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from common.config import RouterConfig
from common.errors import NotFound
from services.router.http.replies import reply


@cache
def openapi_json() -> bytes:
    """Return the API's document as JSON; parsing it takes a fraction of a second."""
    text = resources.files("services.router").joinpath("openapi.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return msgspec.json.encode(yaml.load(text, Loader=loader))  # noqa: S506 - both are safe ones


class DescriptionsApi:
    """Shows the router's metrics and its API; each route is off by default, and then answers 404."""

    def __init__(self, config: RouterConfig) -> None:
        self._metrics, self._openapi = config.public_metrics, config.public_openapi

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get("/metrics", self.metrics), web.get("/openapi.json", self.openapi)]

    async def metrics(self, _request: web.Request) -> web.Response:
        """Return all metrics of this router in Prometheus' text format."""
        if not self._metrics:
            raise _off("SPILLWAY_PUBLIC_METRICS", "/metrics")
        text = await asyncio.to_thread(generate_latest, REGISTRY)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def openapi(self, _request: web.Request) -> web.Response:
        """Return docs/openapi.yaml as JSON."""
        if not self._openapi:
            raise _off("SPILLWAY_PUBLIC_OPENAPI", "/openapi.json")
        return reply(await asyncio.to_thread(openapi_json))


def _off(setting: str, path: str) -> NotFound:
    return NotFound(f"no route {path!r}: {setting} is off", code="route_not_found")
