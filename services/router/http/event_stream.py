"""What every stream of server-sent events has: its headers, where its reader goes on, and how it is written."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from common.errors import SpillwayError

PING_S = 10.0
SLOW_S = 30.0


def event_stream(request_id: str) -> web.StreamResponse:
    """Return the response a request's events are written to; no proxy keeps them back."""
    return web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            "x-request-id": request_id,
        }
    )


def streamed_body(error: SpillwayError) -> dict[str, Any]:
    """Return an error as a stream says it, with the status that HTTP cannot say any more."""
    body = error.body()
    body["error"]["status"] = error.http_status
    return body


def last_event_id(request: web.Request) -> str:
    """Return the id a reader goes on after, from its header or query; "" from the start."""
    return request.headers.get("Last-Event-ID", request.query.get("last_event_id", "")).strip()


async def copy(source: AsyncGenerator[bytes, None], response: web.StreamResponse) -> None:
    """Write frames as they come, and a comment after PING_S without one; TimeoutError for a reader slower than SLOW_S.

    A task of its own pings, so that a frame costs no task. Once the last frame is written the reader has all of it,
    so one that leaves from then on has not left early: being cancelled then changes nothing.
    """
    wrote = [time.monotonic()]
    pinger = asyncio.create_task(_ping(response, wrote))
    whole = False
    try:
        async with contextlib.aclosing(source):
            async for frame in source:
                async with asyncio.timeout(SLOW_S):
                    await response.write(frame)
                wrote[0] = time.monotonic()
        whole = True
    finally:
        pinger.cancel()
        with contextlib.suppress(*((asyncio.CancelledError,) if whole else ())):
            await asyncio.gather(pinger, return_exceptions=True)


async def end(response: web.StreamResponse) -> None:
    """Write the end of a stream that `copy` has written whole; its reader may have left by now."""
    with contextlib.suppress(ConnectionResetError, asyncio.CancelledError):
        await response.write_eof()


async def _ping(response: web.StreamResponse, wrote: list[float]) -> None:
    while True:
        await asyncio.sleep(max(wrote[0] + PING_S - time.monotonic(), 0.01))
        if time.monotonic() - wrote[0] >= PING_S:
            wrote[0] = time.monotonic()
            await response.write(b": ping\n\n")
