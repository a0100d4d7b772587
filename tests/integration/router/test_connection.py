"""A client's connection after its last response: the rest of a body is no request."""

from __future__ import annotations

import asyncio

from aiohttp import web

from common.errors import RequestTimeout
from services.router.http.connection import ClientConnection, note_requests
from services.router.http.replies import error_response


async def test_the_rest_of_a_refused_body_gets_no_second_response() -> None:
    """Bytes that follow the last response belong to its request: the connection ends without another error."""

    async def refuse(_request: web.BaseRequest) -> web.StreamResponse:
        return error_response(RequestTimeout("the body did not arrive"))

    site = web.Server(refuse)
    note_requests(site)
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(
        lambda: ClientConnection(site, 10, 0.3, loop=loop, lingering_time=60.0), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname()[:2])
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(b" ")
    rest = await reader.read()
    writer.close()
    listener.close()
    await site.shutdown()

    assert b"408" in head.splitlines()[0]
    assert rest.count(b"HTTP/1.1") == 0
    assert rest.count(b"request_timeout") == 1
