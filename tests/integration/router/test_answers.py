"""A stream's connection: comments where nothing comes, and readers that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from openai._streaming import SSEDecoder

from services.router.http import event_stream


async def _serve(handler: Handler) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    return runner, f"http://127.0.0.1:{port}/"


async def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first frame and between two, comments come, which the openai client's decoder takes for no event."""
    monkeypatch.setattr(event_stream, "PING_S", 0.02)
    go = asyncio.Event()

    async def frames() -> AsyncGenerator[bytes, None]:
        await go.wait()
        go.clear()
        yield b"id: 1\ndata: 1\n\n"
        await go.wait()
        yield b"id: 2\ndata: 2\n\n"

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await event_stream.copy(frames(), response)
        return response

    runner, url = await _serve(handler)
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        found: list[bytes] = []
        for end in (b"data: 1\n", b"data: 2\n"):
            while not found or found[-1] != b": ping\n":
                found.append(await response.content.readline())
            go.set()
            while found[-1] != end:
                found.append(await response.content.readline())
        found.append(await response.content.read())
    await runner.cleanup()

    raw = b"".join(found)
    assert b": ping\n" in raw
    told = [event.data for event in SSEDecoder().iter_bytes(iter([raw]))]
    assert told == ["1", "2"]


async def test_a_reader_that_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written for it is bounded: when the buffers are full and stay so, its stream ends."""
    monkeypatch.setattr(event_stream, "SLOW_S", 0.2)
    written, ended = [0], asyncio.Event()

    async def frames() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"data: " + b"x" * 65536 + b"\n\n"
            written[0] += 1

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with pytest.raises(TimeoutError):
            await event_stream.copy(frames(), response)
        ended.set()
        return response

    runner, url = await _serve(handler)
    async with aiohttp.ClientSession(read_bufsize=1024) as http, http.get(url) as response:
        async with asyncio.timeout(60):
            await ended.wait()
        assert written[0] < 1000
        response.close()
    await runner.cleanup()
