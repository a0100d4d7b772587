"""A server that misbehaves as a test says: real HTTP on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import hypothesis.internal.conjecture.optimiser  # noqa: F401 - as in tests/conftest.py
import pytest
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Server:
    """Answers request n with `answers[n]` (the last one from then on) and remembers what it was asked."""

    answers: list[Handler] = field(default_factory=list)
    seen: list[web.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer the next request."""
        self.seen.append(request)
        self.bodies.append(await request.read())
        handler = self.answers[min(len(self.seen), len(self.answers)) - 1]
        try:
            return await handler(request)
        except asyncio.CancelledError:
            self.gone.set()
            raise


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """Yield a server whose answers the test sets."""
    state = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", state.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    state.url = f"http://{host}:{port}"
    yield state
    await runner.cleanup()
