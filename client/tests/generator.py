"""A server that speaks the stream contract to the letter, and a proxy that cuts connections where it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Piece = tuple[int, int, str, str | None]  # at, choice, text, finish


@dataclass
class Generator:
    """Answers every chat with `pieces`; one request a key, its events told again from any id on.

    Before a piece of a number in `retrieved` stands a chunk that tells what was retrieved by then.
    """

    pieces: list[Piece]
    retrieved: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    error_after: int = 0
    endless: bool = False
    requests: dict[str, str] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    url: str = ""

    def frames(self, after: tuple[int, int] | None) -> list[bytes]:
        """Return the frames of a stream that goes on after a piece (None: from its beginning)."""
        made = []
        choices = sorted({piece[1] for piece in self.pieces})
        if after is None:
            for index in choices:
                first: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
                found = {
                    "collection": "c",
                    "found": 1,
                    "passages": [{"index": 1, "document_id": "d"}],
                }
                made.append(_frame(_chunk(index, first, {"retrieval": found} if not index else {})))
        for number, (at, index, text, finish) in enumerate(self.pieces):
            if self.error is not None and number == self.error_after:
                return [*made, b"data: %s\n\n" % json.dumps({"error": self.error}).encode()]
            if after is not None and (at, index) <= after:
                continue
            if number in self.retrieved:
                told = {"retrieval": self.retrieved[number]}
                made.append(_frame(_chunk(0, {"delta": {}, "finish_reason": None}, told)))
            delta: dict[str, Any] = {"content": text}
            if finish:
                mark = {"index": 1, "document_id": "d", "start": 3, "end": 9, "at": [0, 3]}
                delta["citations"] = [mark]
            made.append(
                _frame(_chunk(index, {"delta": delta, "finish_reason": finish}), f"{at}.{index}")
            )
            made.append(b": ping\n\n")
        used = {"prompt_tokens": 7, "completion_tokens": len(self.pieces), "total_tokens": 0}
        made.append(
            _frame({**_chunk(0, {}), "choices": [], "usage": used, "session": {"version": 3}})
        )
        return [*made, b"data: [DONE]\n\n"]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Begin a request, or attach to the one of this key."""
        self.bodies.append(await request.json())
        key = request.headers["Idempotency-Key"]
        name = self.requests.setdefault(key, f"chat.m~0~{len(self.requests)}")
        return await self._stream(request, name, None)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Go on with a request."""
        name = request.match_info["id"]
        if name not in self.requests.values():
            body = {"error": {"message": f"no request {name}", "code": "request_not_found"}}
            return web.json_response(body, status=404)
        last = request.headers.get("Last-Event-ID")
        at = None
        if last is not None:
            event, _, choice = last.partition(".")
            at = int(event), int(choice)
        return await self._stream(request, name, at)

    async def cancel(self, request: web.Request) -> web.Response:
        """Note what was cancelled."""
        self.cancelled.append(request.match_info["id"])
        return web.json_response({"cancelled": True})

    async def _stream(
        self, request: web.Request, name: str, after: tuple[int, int] | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "x-request-id": name}
        )
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for frame in self.frames(after):
                if self.endless and frame.startswith(b"data: [DONE]"):
                    await asyncio.Event().wait()
                await response.write(frame)
            await response.write_eof()
        return response


def _chunk(
    index: int, choice: dict[str, Any], more: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "id": "chat.m~0~0",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": index, "finish_reason": None, **choice}],
        "usage": None,
        **(more or {}),
    }


def _frame(payload: dict[str, Any], id: str | None = None) -> bytes:
    data = f"data: {json.dumps(payload, ensure_ascii=False)}\n\n"
    return (f"id: {id}\n{data}" if id is not None else data).encode()


@contextlib.asynccontextmanager
async def serving(generator: Generator) -> AsyncIterator[Generator]:
    """Run it on a free port."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", generator.chat)
    app.router.add_get("/v1/requests/{id}/events", generator.events)
    app.router.add_post("/v1/requests/{id}/cancel", generator.cancel)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    generator.url = f"http://{host}:{port}"
    try:
        yield generator
    finally:
        await runner.cleanup()


@dataclass
class Cutter:
    """A proxy whose n-th connection is cut after `cuts[n]` bytes of answers (later ones are left alone)."""

    target: str
    cuts: Sequence[tuple[int, bool]]
    connections: int = 0
    url: str = ""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        self.tasks.add(asyncio.create_task(self._carry(reader, writer)))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        limit, politely = self.cuts[number] if number < len(self.cuts) else (-1, True)
        host, _, port = self.target.removeprefix("http://").partition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        up = asyncio.create_task(self._copy(reader, back, -1))
        try:
            await self._copy(there, writer, limit)
        finally:
            up.cancel()
            if not politely:
                writer.transport.abort()
            # Both are closed before anything is awaited, since a cancellation may come there.
            writer.close()
            back.close()
            await asyncio.gather(up, return_exceptions=True)
            for end in (writer, back):
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    @staticmethod
    async def _copy(source: asyncio.StreamReader, to: asyncio.StreamWriter, limit: int) -> None:
        with contextlib.suppress(ConnectionError):
            while limit and (data := await source.read(limit if limit > 0 else 65536)):
                limit -= len(data) if limit > 0 else 0
                to.write(data)
                await to.drain()


@contextlib.asynccontextmanager
async def cutting(target: str, cuts: Sequence[tuple[int, bool]]) -> AsyncIterator[Cutter]:
    """Run a cutter on a free port."""
    cutter = Cutter(target, cuts)
    server = await asyncio.start_server(cutter.connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    cutter.url = f"http://{host}:{port}"
    try:
        yield cutter
    finally:
        server.close()
        # A connection that was accepted a moment ago begins its task only now.
        while running := {task for task in cutter.tasks if not task.done()}:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
