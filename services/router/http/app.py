"""The aiohttp application: its routes, and what stands in front of every one."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from aiohttp import web

from services.router import metrics
from services.router.http import (
    chat,
    collections,
    completions,
    dashboard_files,
    documents,
    embeddings,
    mesh,
    models,
    request_events,
    requests,
    rerank,
    search,
    session_pages,
    sessions,
    timeline,
)
from services.router.http.connection import ClientConnection, note_requests
from services.router.http.context import ROUTER, Router
from services.router.http.middleware import guard, outer

HEADER_TIMEOUT_S = 30.0
LINGER_S = 2.0


def build(router: Router) -> web.Application:
    """Return the application with every route of docs/openapi.yaml, and the dashboard."""
    app = web.Application(middlewares=[outer, guard], client_max_size=router.config.max_body_bytes)
    app[ROUTER] = router
    app[mesh.MESH] = mesh.MeshView(router)
    app.cleanup_ctx.append(app[mesh.MESH].noting)
    name = "/v1/collections/{name}"
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat.create),
            web.post("/v1/completions", completions.create),
            web.post("/v1/embeddings", embeddings.create),
            web.post("/v1/rerank", rerank.create),
            web.post("/rerank", rerank.create),
            web.get("/v1/models", models.list_all),
            web.get("/v1/models/{model:.+}", models.get),
            web.get("/v1/collections", collections.list_all),
            web.post("/v1/collections", collections.create),
            web.get(name, collections.get),
            web.delete(name, collections.delete),
            web.post(f"{name}/reembed", collections.reembed),
            web.post(f"{name}/search", search.create),
            web.get(f"{name}/documents", documents.list_page),
            web.post(f"{name}/documents", documents.store),
            web.post(f"{name}/documents/delete", documents.delete_many),
            web.get(f"{name}/documents/{{id:.+}}", documents.get),
            web.delete(f"{name}/documents/{{id:.+}}", documents.delete),
            web.get("/v1/sessions", sessions.list_page),
            web.post("/v1/sessions", sessions.create),
            web.post("/v1/sessions/import", sessions.load),
            web.get("/v1/sessions/{id}", sessions.get),
            web.post("/v1/sessions/{id}", sessions.change),
            web.patch("/v1/sessions/{id}", sessions.change),
            web.delete("/v1/sessions/{id}", sessions.delete),
            web.get("/v1/sessions/{id}/export", sessions.export),
            web.get("/v1/sessions/{id}/export/pages", session_pages.export),
            web.post("/v1/sessions/{id}/import/pages", session_pages.load),
            web.get("/v1/sessions/{id}/pages", sessions.pages),
            web.get("/v1/requests/{id}", requests.get),
            web.delete("/v1/requests/{id}", requests.cancel),
            web.post("/v1/requests/{id}/cancel", requests.cancel),
            web.get("/v1/requests/{id}/events", request_events.events),
            web.get("/v1/requests/{id}/timeline", timeline.get),
            web.get("/v1/mesh", mesh.get),
            web.get("/livez", router.health.livez),
            web.get("/readyz", router.health.readyz),
            web.get("/health", router.health.readyz),
            *dashboard_files.routes(),
        ]
    )
    return app


class Server:
    """The listening socket: connections are counted, idle or slow ones are closed."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._idle_s = min(HEADER_TIMEOUT_S, router.config.body_timeout_s)
        self._options: dict[str, Any] = {"access_log": None, "lingering_time": LINGER_S}
        self._runner = web.AppRunner(
            build(router),
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
        most, loop = self._router.config.max_connections, asyncio.get_running_loop()

        def make() -> ClientConnection:
            metrics.CONNECTIONS.set(len(server.connections))
            return ClientConnection(server, most, self._idle_s, loop=loop, **self._options)

        return make

    async def stop(self) -> None:
        """Stop listening and close every connection."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
