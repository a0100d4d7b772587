"""The aiohttp application and its listening socket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiohttp import web

from common.config import RouterConfig
from common.health import Health
from services.router import metrics
from services.router.http import dashboard_files
from services.router.http.connection import ClientConnection, Quick, note_requests
from services.router.http.cors import CrossOrigin
from services.router.http.middleware import AccessGuard, RequestObserver

HEADER_TIMEOUT_S = 30.0
LINGER_S = 2.0


class Api(Protocol):
    """The handlers of one group of routes."""

    def routes(self) -> list[web.RouteDef]:
        """Return the routes with their handlers."""


def application(
    apis: Sequence[Api],
    health: Health,
    observer: RequestObserver,
    guard: AccessGuard,
    max_body_bytes: int,
    origins: frozenset[str] = frozenset(),
) -> web.Application:
    """Return the application with every route of docs/openapi.yaml, and the dashboard.

    `origins` are those whose pages may call the API from a browser.
    """
    middlewares = [observer.middleware, guard.middleware]
    cross = CrossOrigin(origins)
    if origins:
        middlewares.insert(0, cross.middleware)
    app = web.Application(middlewares=middlewares, client_max_size=max_body_bytes)
    if origins:
        app.on_response_prepare.append(cross.prepare)
    for api in apis:
        app.add_routes(api.routes())
    app.add_routes(
        [
            web.get("/livez", health.livez),
            web.get("/readyz", health.readyz),
            web.get("/health", health.readyz),
            *dashboard_files.routes(),
        ]
    )
    return app


class HttpServer:
    """The listening socket: connections are counted, idle and slow connections are closed."""

    def __init__(self, app: web.Application, config: RouterConfig, quick: Quick) -> None:
        self._quick = quick
        self._most = config.max_connections
        self._idle_s = min(HEADER_TIMEOUT_S, config.body_timeout_s)
        self._options: dict[str, Any] = {"access_log": None, "lingering_time": LINGER_S}
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=1.0,
            **self._options,
        )
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen and return the port; OSError if the address cannot be used."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            self._factory(), host, port, ssl=tls, backlog=1024, reuse_address=True
        )
        chosen: int = self._listener.sockets[0].getsockname()[1]
        return chosen

    def _factory(self) -> Callable[[], asyncio.Protocol]:
        server = self._runner.server
        assert server is not None
        note_requests(server)
        loop = asyncio.get_running_loop()

        def make() -> ClientConnection:
            metrics.CONNECTIONS.set(len(server.connections))
            return ClientConnection(
                server, self._most, self._idle_s, self._quick, loop=loop, **self._options
            )

        return make

    async def stop(self) -> None:
        """Stop listening and close every connection."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
