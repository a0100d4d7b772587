"""A response that is sent in one piece says what aiohttp's own would, on every kind of connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from services.router.http.replies import reply
from services.router.http.whole_reply import WholeReply

WAIT_S = 10.0
BODY = b'{"data":[1,2,3]}'


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a server that replies both ways."""

    async def whole(_: web.Request) -> web.Response:
        return _named(WholeReply(BODY))

    async def general(_: web.Request) -> web.Response:
        return _named(reply(BODY))

    app = web.Application()
    app.router.add_post("/whole", whole)
    app.router.add_post("/general", general)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


def _named(response: web.Response) -> web.Response:
    response.headers["x-request-id"] = "req-1"
    return response


async def _answers(port: int, path: str, version: str, connection: str) -> list[bytes]:
    """Return the lines of two responses on one connection, sorted, without the date; of one if it was closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/{version}\r\nHost: here\r\nContent-Length: 2\r\n{connection}\r\n"
    async with asyncio.timeout(WAIT_S):
        told = b""
        for number in (1, 2):
            writer.write(head.encode() + b"{}")
            while told.count(BODY) < number and (part := await reader.read(65536)):
                told += part
    writer.close()
    return sorted(line for line in told.split(b"\r\n") if not line.startswith(b"Date: "))


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("connection", ["", "Connection: close\r\n", "Connection: keep-alive\r\n"])
async def test_both_ways_say_the_same(port: int, version: str, connection: str) -> None:
    """Status, heads, body, and whether the connection is kept."""
    whole = await _answers(port, "/whole", version, connection)
    assert whole == await _answers(port, "/general", version, connection)
    assert b"x-request-id: req-1" in whole
    assert any(BODY in line for line in whole)
