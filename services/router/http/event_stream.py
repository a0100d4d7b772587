"""Server-sent events: a stream's headers, the position where its reader resumes, and the writing of its frames."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from common.errors import SpillwayError

PING_S = 10.0
SLOW_S = 30.0


def event_stream(request_id: str) -> web.StreamResponse:
    """Return the response for a request's events, with headers that stop proxies from buffering them."""
    return web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            "x-request-id": request_id,
        }
    )


def streamed_body(error: SpillwayError) -> dict[str, Any]:
    """Return an error's body for a stream, with the status in the body, since the HTTP status has been sent."""
    body = error.body()
    body["error"]["status"] = error.http_status
    return body


def last_event_id(request: web.Request) -> str:
    """Return the id after which a reader resumes, from the header or the query; "" means from the start."""
    return request.headers.get("Last-Event-ID", request.query.get("last_event_id", "")).strip()


async def copy(source: AsyncGenerator[bytes, None], response: web.StreamResponse) -> None:
    """Write frames as they arrive, and a comment after PING_S without a frame.

    Raises TimeoutError for a reader slower than SLOW_S.

    One task per stream pings, so that a frame needs no task. Once the last frame is written, the reader has the whole
    stream, so a later cancellation is ignored.
    """
    loop = asyncio.get_running_loop()
    wrote = [loop.time()]
    pinger = asyncio.create_task(_ping(response, wrote))
    whole = False
    try:
        async with contextlib.aclosing(source):
            async for frame in source:
                async with asyncio.timeout(SLOW_S):
                    await response.write(frame)
                wrote[0] = loop.time()
        whole = True
    finally:
        pinger.cancel()
        with contextlib.suppress(*((asyncio.CancelledError,) if whole else ())):
            await asyncio.gather(pinger, return_exceptions=True)


async def end(response: web.StreamResponse) -> None:
    """Write the end of a stream that `copy` has written whole; ignore that its reader may have left."""
    with contextlib.suppress(ConnectionResetError, asyncio.CancelledError):
        await response.write_eof()


async def _ping(response: web.StreamResponse, wrote: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(max(wrote[0] + PING_S - loop.time(), 0.01))
        if loop.time() - wrote[0] >= PING_S:
            wrote[0] = loop.time()
            # No blank line: the openai client takes a blank line for the end of an event once it has read an id.
            await response.write(b": ping\n")
