"""GET /v1/requests/{id}/events: a request's log as server-sent events; `Last-Event-ID` resumes at any router.

A generation's events are the chunks of its stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from aiohttp import web

from common.bus import Bus, Notifications
from common.errors import InvalidRequest
from common.wire.results import Event
from common.wire.workflows import ResponseOptions
from services.router.admission.controller import AdmissionController
from services.router.admission.job_spec import RequestContext
from services.router.admission.request_store import RequestStore
from services.router.http.answers import AnswerWriter, ReaderAnswer, last_position
from services.router.http.event_stream import copy, end, event_stream, last_event_id, streamed_body
from services.router.http.receiver import MODEL, REQUEST_ID, TENANT
from services.router.responses.answer_sources import AnswerSources
from services.router.responses.outcomes import error_of

# Seconds between reads of a log: many streams may wait for long, and notifications wake them in between.
LOOK_S = 10.0


class RequestEventsApi:
    """Streams the events of requests, whichever router accepted them, to readers that come back."""

    def __init__(
        self,
        bus: Bus,
        notifications: Notifications,
        admission: AdmissionController,
        store: RequestStore,
        sources: AnswerSources,
        answers: AnswerWriter,
    ) -> None:
        self._bus, self._notifications = bus, notifications
        self._admission, self._store = admission, store
        self._sources, self._answers = sources, answers

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.get("/v1/requests/{id}/events", self.get)]

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Stream the events of a request until it is over; a reader slower than SLOW_S is disconnected."""
        name = request.match_info["id"]
        await self._store.owned(name, request[TENANT])
        options = await self._sources.options(name)
        if options is not None:
            return await self._chunks(request, name, options)
        start = _start(request)
        state = await self._bus.jobs.get(name)
        await self._store.note_reader(name)
        response = event_stream(name)
        request[REQUEST_ID] = name
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        try:
            if state is None or state.over:
                for event in await self._bus.jobs.log(name, start):
                    await response.write(_frame(event))
            else:
                until_ms = state.deadline_ms + 1000
                events = self._notifications.events(name, start, until_ms, look_s=LOOK_S)
                await copy(_frames(events), response)
        except (TimeoutError, ConnectionResetError):
            return response
        await end(response)
        return response

    async def _chunks(
        self, request: web.Request, name: str, options: ResponseOptions
    ) -> web.StreamResponse:
        """Stream a generation's chunks; a client that comes back keeps a resumable request alive."""
        position = last_position(request)
        state = await self._bus.jobs.get(name)
        deadline_ms = state.deadline_ms if state is not None else 0
        caller = RequestContext(
            tenant=request[TENANT],
            key=None,
            deadline_ms=deadline_ms + 1000,
            resume_s=options.resume_s,
        )
        if state is not None and not state.over:
            await self._admission.take_over(name, options.resume_s, deadline_ms)
        options = msgspec.structs.replace(options, stream=True)
        source = self._sources.of(name)
        answer = ReaderAnswer(caller, name, options, source, position, owner=False)
        request[REQUEST_ID], request[MODEL] = name, options.model
        return await self._answers.stream(request, answer)


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


def _frame(event: Event) -> bytes:
    """Return one event as a frame of the stream."""
    data: dict[str, Any] = {"index": event.index, "kind": event.kind}
    if event.kind == "progress" and event.data[:1] == b"{":
        data["progress"] = msgspec.Raw(event.data)
    elif event.ends and event.kind != "result":
        data |= streamed_body(error_of(event))
    body = msgspec.json.encode(data)
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.index, event.kind.encode(), body)


async def _frames(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            yield _frame(event)
            if event.ends:
                return
