"""The answer to a generation, streamed or whole, for whoever asks: the client that sent it, or one that came back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import NamedTuple

import msgspec
from aiohttp import web

from common.errors import InvalidRequest, SpillwayError, Unavailable
from common.wire.results import Event, GenerateResult, Piece
from common.wire.workflows import ResponseOptions
from services.router.admission.job_spec import RequestContext
from services.router.http.context import MODEL, REQUEST_ID, ROUTER, Router, reply
from services.router.http.event_stream import copy, end, event_stream, last_event_id, streamed_body
from services.router.responses.chunks import AnswerFormat, Position
from services.router.responses.generation_events import follow
from services.router.responses.outcomes import error_of, result_of
from services.router.responses.sources import AnswerSource
from services.router.responses.timing import Timing
from services.router.workflows.progress import grounded_options

DONE = b"data: [DONE]\n\n"
_MOST_DIGITS = 9


class ReaderAnswer(NamedTuple):
    """One reader's answer: `source` may take its time; `position` is what the reader has already.

    `owner` is the connection that sent the request: its end may mean that nobody wants it any more. It is `fresh`
    unless the request was known before: then its times are no generation's.
    """

    caller: RequestContext
    request: str
    view: ResponseOptions
    source: Callable[[], Awaitable[AnswerSource]]
    position: Position | None = None
    owner: bool = True
    fresh: bool = True


def last_position(request: web.Request) -> Position | None:
    """Return the piece after which a stream goes on (`<at>.<choice>`), None from its start; 400 for anything else."""
    text = last_event_id(request)
    if not text:
        return None
    at, dot, choice = text.partition(".")
    digits = (at, choice or "0")
    if any(not (d.isascii() and d.isdigit() and len(d) <= _MOST_DIGITS) for d in digits):
        raise InvalidRequest(
            f"Last-Event-ID is {text[:40]!r}: expected the id of a chunk, <at>.<choice>",
            code="invalid_header",
            param="Last-Event-ID",
        )
    return int(at), int(choice) if dot else 1 << 30


async def deliver(request: web.Request, answer: ReaderAnswer, began: float) -> web.StreamResponse:
    """Answer a request that was accepted: a stream if it asked for one, else one JSON body."""
    request[MODEL], request[REQUEST_ID] = answer.view.model, answer.request
    if answer.view.stream:
        return await stream(request, answer, began)
    router = request.app[ROUTER]
    timing = Timing(answer.view.model, began, counts=answer.owner and answer.fresh)
    try:
        with router.runner.reading(answer.request):
            source = await answer.source()
            shape = AnswerFormat(answer.request, answer.view, source.extension)
            outcome = await _gather(router, answer, source, shape, timing)
    except asyncio.CancelledError:
        router.runner.left(answer.caller, answer.request)
        raise
    result = await _ended(router, answer, outcome, timing)
    router.runner.delivered(answer.caller, answer.request)
    return reply(shape.whole(result))


async def _gather(
    router: Router, answer: ReaderAnswer, source: AnswerSource, shape: AnswerFormat, timing: Timing
) -> Event:
    pieces = follow(router.notifications, source.job, answer.caller.deadline_ms, source.bell)
    async with contextlib.aclosing(pieces):
        async for item in pieces:
            if isinstance(item, Event):
                return item
            timing.note(item)
            shape.take(item)
    raise AssertionError("a job's pieces end with its outcome")


async def _ended(
    router: Router, answer: ReaderAnswer, outcome: Event, timing: Timing
) -> GenerateResult:
    """Note the outcome and return its result, or raise its error."""
    if answer.owner:
        await router.runner.ended(answer.caller, answer.request, outcome)
    else:
        router.runner.settled(answer.caller, answer.request, outcome)
    result = result_of(outcome)
    assert isinstance(result, GenerateResult)
    timing.end()
    return result


# -- streams -------------------------------------------------------------------------------------------


async def stream(request: web.Request, answer: ReaderAnswer, began: float) -> web.StreamResponse:
    """Write chunks as they come, a comment where none comes for a while, and the error that ends it, if one does.

    A reader slower than SLOW_S is let go. When the router stops, the stream ends with an error its client resumes from.
    """
    router = request.app[ROUTER]
    response = event_stream(answer.request)
    try:
        with router.runner.reading(answer.request), router.stoppable() as limit:
            await response.prepare(request)
            if request.method == "HEAD":
                return response
            async with limit:
                await copy(frames(router, answer, began), response)
    except (TimeoutError, ConnectionResetError):
        if limit.expired():
            await _stop(response)
            return response
        _left(router, answer)
        return response
    except asyncio.CancelledError:
        _left(router, answer)
        raise
    if answer.owner:
        router.runner.delivered(answer.caller, answer.request)
    await end(response)
    return response


def _left(router: Router, answer: ReaderAnswer) -> None:
    if answer.owner or answer.caller.resume_s > 0:
        router.runner.left(answer.caller, answer.request)


async def _stop(response: web.StreamResponse) -> None:
    error = Unavailable(
        "this router is stopping; go on at another one with Last-Event-ID",
        code="draining",
        retry_after_s=1,
    )
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        async with asyncio.timeout(1.0):
            await response.write(error_frame(error))
            await response.write_eof()


async def frames(router: Router, answer: ReaderAnswer, began: float) -> AsyncGenerator[bytes, None]:
    """Yield the frames of a stream, those its reader has left out; errors are its last one."""
    timing = Timing(answer.view.model, began, counts=answer.owner and answer.fresh)
    try:
        source = await answer.source()
        shape = AnswerFormat(answer.request, answer.view, source.extension)
        if answer.position is None:
            for head in shape.heads():
                yield head
        outcome: Event | None = None
        async with contextlib.aclosing(_items(router, answer, source)) as items:
            async for item in items:
                if isinstance(item, Event):
                    outcome = item
                    break
                timing.note(item)
                chunk = shape.chunk(item)
                if chunk is not None and (item.at, item.choice) > (answer.position or (-1, -1)):
                    yield chunk
        assert outcome is not None
        result = await _ended(router, answer, outcome, timing)
        if answer.view.include_usage:
            yield shape.usage_chunk(result)
        yield DONE
    except SpillwayError as error:
        yield error_frame(error)


def _items(
    router: Router, answer: ReaderAnswer, source: AnswerSource
) -> AsyncGenerator[Piece | Event, None]:
    return follow(router.notifications, source.job, answer.caller.deadline_ms, source.bell)


def error_frame(error: SpillwayError) -> bytes:
    """Return an error as the last event of a stream."""
    return b"data: %s\n\n" % msgspec.json.encode(streamed_body(error))


# -- coming back ---------------------------------------------------------------------------------------


async def view_of(router: Router, request: str) -> ResponseOptions | None:
    """Return how a generation's answer looks, whichever router accepted it; None if the request is no generation."""
    view = await router.requests.options(request)
    if view is not None:
        return view if view.kind in {"chat", "completion"} else None
    state = await router.bus.jobs.get(request)
    if state is None or not request.startswith("chat."):
        return None if state is None else await grounded_options(router.bus, request)
    cards = (await router.cards.cards()).values()
    family = request.split("~", maxsplit=1)[0]
    model = next((card.name for card in cards if card.family == family), family)
    return ResponseOptions(kind="chat", model=model, choices=state.items, stream=True)


async def whole(router: Router, request: str, view: ResponseOptions, source: AnswerSource) -> bytes:
    """Return the whole answer of a request that is over; its error if it has one."""
    shape = AnswerFormat(request, view, source.extension)
    items = follow(router.notifications, source.job, router.clock.now_ms())
    async with contextlib.aclosing(items):
        async for item in items:
            if isinstance(item, Piece):
                shape.take(item)
            else:
                result = result_of(item)
                assert isinstance(result, GenerateResult)
                return shape.whole(result)
    raise error_of(Event(index=-1, kind="expired"))
