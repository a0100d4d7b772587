"""What every stream of server-sent events has: its headers, and where its reader goes on."""

from __future__ import annotations

from aiohttp import web


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


def last_event_id(request: web.Request) -> str:
    """Return the id a reader goes on after, from its header or query; "" from the start."""
    return request.headers.get("Last-Event-ID", request.query.get("last_event_id", "")).strip()
