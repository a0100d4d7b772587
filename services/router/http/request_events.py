"""GET /v1/requests/{id}/events: a request's log as server-sent events; `Last-Event-ID` goes on at any router.

A generation's events are the chunks of its stream.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from aiohttp import web

from common.errors import InvalidRequest
from common.wire.results import Event
from common.wire.workflows import ResponseOptions
from services.router.admission.job_spec import RequestContext
from services.router.http.context import MODEL, REQUEST_ID, ROUTER, TENANT
from services.router.http.event_stream import copy, end, event_stream, last_event_id, streamed_body
from services.router.responses import answers
from services.router.responses.outcomes import error_of
from services.router.responses.sources import source_of

# Many streams may be open at once, and most wait for long: the bell rings them, so they seldom read the log.
LOOK_S = 10.0


def _start(request: web.Request) -> int:
    text = last_event_id(request)
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest(
            f"Last-Event-ID is {text[:40]!r}: expected the id of an event",
            code="invalid_header",
            param="Last-Event-ID",
        )
    return int(text) + 1


def frame(event: Event) -> bytes:
    """Return one event as it stands in the stream."""
    data: dict[str, Any] = {"index": event.index, "kind": event.kind}
    if event.kind == "progress" and event.data[:1] == b"{":
        data["progress"] = msgspec.Raw(event.data)
    elif event.ends and event.kind != "result":
        data |= streamed_body(error_of(event))
    body = msgspec.json.encode(data)
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.index, event.kind.encode(), body)


async def events(request: web.Request) -> web.StreamResponse:
    """Stream the events of a request until it is over; a reader slower than SLOW_S is let go."""
    router = request.app[ROUTER]
    name = request.match_info["id"]
    await router.requests.owned(name, request[TENANT])
    view = await answers.view_of(router, name)
    if view is not None:
        return await _chunks(request, name, view)
    start = _start(request)
    state = await router.bus.jobs.get(name)
    await router.requests.note_reader(name)
    response = event_stream(name)
    request[REQUEST_ID] = name
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    try:
        if state is None or state.over:
            for event in await router.bus.jobs.log(name, start):
                await response.write(frame(event))
        else:
            until_ms = state.deadline_ms + 1000
            stream = router.notifications.events(name, start, until_ms, look_s=LOOK_S)
            await copy(_frames(stream), response)
    except (TimeoutError, ConnectionResetError):
        return response
    await end(response)
    return response


async def _chunks(request: web.Request, name: str, view: ResponseOptions) -> web.StreamResponse:
    """Stream a generation's chunks; a client that comes back to a resumable one holds it as the first did."""
    router, position = request.app[ROUTER], answers.last_position(request)
    state = await router.bus.jobs.get(name)
    deadline_ms = state.deadline_ms if state is not None else 0
    caller = RequestContext(
        tenant=request[TENANT], key=None, deadline_ms=deadline_ms + 1000, resume_s=view.resume_s
    )
    if state is not None and not state.over:
        await router.admission.take_over(name, view.resume_s, deadline_ms)
    view = msgspec.structs.replace(view, stream=True)
    source = source_of(router, name)
    answer = answers.ReaderAnswer(caller, name, view, source, position, owner=False)
    request[REQUEST_ID], request[MODEL] = name, view.model
    return await answers.stream(request, answer, time.perf_counter())


async def _frames(stream: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(stream):
        async for event in stream:
            yield frame(event)
            if event.ends:
                return
