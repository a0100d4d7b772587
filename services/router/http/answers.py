"""Answers of generations, streamed or whole, for the client that sent the request and for one that comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import NamedTuple

import msgspec
from aiohttp import web

from common import tracing
from common.clock import Clock
from common.errors import InvalidRequest, SpillwayError, Unavailable
from common.wire.control import Applied
from common.wire.results import Event, GenerateResult, Piece
from common.wire.workflows import ResponseOptions
from services.router import metrics
from services.router.admission.job_spec import RequestContext
from services.router.admission.request_runner import RequestRunner
from services.router.http.active_requests import OpenStreams
from services.router.http.event_stream import copy, end, event_stream, last_event_id, streamed_body
from services.router.http.receiver import BEGAN_S, MODEL, REQUEST_ID
from services.router.http.replies import reply
from services.router.responses.answer_format import AnswerFormat, Position
from services.router.responses.answer_sources import (
    AnswerEvent,
    AnswerSource,
    AnswerSources,
    SourceLookup,
)
from services.router.responses.model_response import ModelResponse, error_event
from services.router.responses.outcomes import error_of, result_of

_MOST_DIGITS = 9


class TokenLatency:
    """The latencies of one answer; `began` is the request's time by the clock's `perf_s`.

    Only the reader who sent the request `counts`.
    """

    def __init__(self, clock: Clock, model: str, began: float, *, counts: bool) -> None:
        self._clock, self._model, self._began, self._counts = clock, model, began, counts
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._tokens: dict[int, int] = {}

    def note(self, piece: Piece) -> None:
        """Record a piece that has just arrived."""
        if not piece.tokens or not self._counts:
            return
        now = self._clock.perf_s()
        if not self._first:
            tracing.current().add_event("first token")
            metrics.FIRST_TOKEN.labels(self._model).observe(now - self._began)
        self._first.setdefault(piece.choice, now)
        self._last[piece.choice] = now
        self._tokens[piece.choice] = self._tokens.get(piece.choice, 0) + len(piece.tokens)

    def end(self) -> None:
        """Record the complete answer's time per token in the metrics."""
        for choice, tokens in self._tokens.items():
            took_s = self._last[choice] - self._first[choice]
            if tokens > 1 and took_s > 0:
                metrics.PER_TOKEN.labels(self._model).observe(took_s / (tokens - 1))


class ReaderAnswer(NamedTuple):
    """One reader's answer: `source` looks its job up; `position` is the last piece that the reader has.

    `owner` means the connection that sent the request, whose end may cancel the request. `fresh` is false for a request
    that was known before: its latencies are not those of a generation.
    """

    caller: RequestContext
    request: str
    options: ResponseOptions
    source: SourceLookup
    position: Position | None = None
    owner: bool = True
    fresh: bool = True


def last_position(request: web.Request) -> Position | None:
    """Return the piece after which a stream resumes (`<at>.<choice>`), None from its start; 400 for anything else."""
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


class AnswerWriter:
    """Writes answers from the pieces of generate jobs, and settles their requests with the runner."""

    def __init__(
        self, runner: RequestRunner, sources: AnswerSources, streams: OpenStreams, clock: Clock
    ) -> None:
        self._runner, self._sources = runner, sources
        self._streams, self._clock = streams, clock

    async def deliver(self, request: web.Request, answer: ReaderAnswer) -> web.StreamResponse:
        """Answer an accepted request: by a stream if the client asked for one, else by one JSON body."""
        request[MODEL], request[REQUEST_ID] = answer.options.model, answer.request
        if answer.options.stream:
            return await self.stream(request, answer)
        latency = self._latency(answer, request[BEGAN_S])
        try:
            with self._runner.reading(answer.request):
                source = await answer.source()
                form = _form(answer.request, answer.options, source)
                pieces = self._sources.pieces(source, answer.caller.deadline_ms)
                outcome = await _taken(pieces, form, latency)
        except asyncio.CancelledError:
            self._runner.left(answer.caller, answer.request)
            raise
        result = await self._ended(answer, outcome, latency)
        self._runner.delivered(answer.caller, answer.request)
        return reply(form.whole(result))

    async def whole(self, request: str, options: ResponseOptions) -> bytes:
        """Return the whole answer of a request that is over, or raise its error."""
        source = await self._sources.of(request)()
        form = _form(request, options, source)
        outcome = await _taken(self._sources.pieces(source, self._clock.now_ms()), form)
        result = result_of(outcome)
        assert isinstance(result, GenerateResult)
        return form.whole(result)

    async def stream(self, request: web.Request, answer: ReaderAnswer) -> web.StreamResponse:
        """Write chunks as they arrive, a comment when none arrives for PING_S, and an error that ends the answer.

        A reader slower than SLOW_S is disconnected. A stopping router ends the stream with an error, from which the
        client resumes.
        """
        response = event_stream(answer.request)
        try:
            with self._runner.reading(answer.request), self._streams.open() as limit:
                await response.prepare(request)
                if request.method == "HEAD":
                    return response
                async with limit:
                    await copy(self._frames(answer, request[BEGAN_S]), response)
        except (TimeoutError, ConnectionResetError):
            if limit.expired():
                await _stop(response, answer.options)
                return response
            self._left(answer)
            return response
        except asyncio.CancelledError:
            self._left(answer)
            raise
        if answer.owner:
            self._runner.delivered(answer.caller, answer.request)
        await end(response)
        return response

    async def _frames(self, answer: ReaderAnswer, began: float) -> AsyncGenerator[bytes, None]:
        """Yield the frames that a reader does not have yet; an error is the last frame."""
        latency = self._latency(answer, began)
        try:
            source = await answer.source()
            form = _form(answer.request, answer.options, source)
            if answer.position is None:
                for head in form.heads():
                    yield head
            outcome: Event | None = None
            extensions: list[bytes] = []  # frames to yield before the next piece
            pieces = self._sources.pieces(source, answer.caller.deadline_ms)
            async with contextlib.aclosing(pieces):
                async for item in pieces:
                    if isinstance(item, Event):
                        outcome = item
                        break
                    if isinstance(item, Applied):
                        if (told := form.extended(item)) is not None:
                            extensions.append(told)
                        continue
                    latency.note(item)
                    chunk = form.chunk(item)
                    if (item.at, item.choice) > (answer.position or (-1, -1)):
                        for frame in (*extensions, chunk):
                            if frame is not None:
                                yield frame
                    extensions.clear()
            assert outcome is not None
            for frame in extensions:
                yield frame
            result = await self._ended(answer, outcome, latency)
            for frame in form.tail(result):
                yield frame
        except SpillwayError as error:
            yield _error_frame(error, answer.options)

    def _latency(self, answer: ReaderAnswer, began: float) -> TokenLatency:
        counts = answer.owner and answer.fresh
        return TokenLatency(self._clock, answer.options.model, began, counts=counts)

    async def _ended(
        self, answer: ReaderAnswer, outcome: Event, latency: TokenLatency
    ) -> GenerateResult:
        """Settle a request whose outcome its reader knows; return its result, or raise its error."""
        if answer.owner:
            await self._runner.ended(answer.caller, answer.request, outcome)
        else:
            self._runner.settled(answer.caller, answer.request, outcome)
        result = result_of(outcome)
        assert isinstance(result, GenerateResult)
        latency.end()
        return result

    def _left(self, answer: ReaderAnswer) -> None:
        if answer.owner or answer.caller.resume_s > 0:
            self._runner.left(answer.caller, answer.request)


async def _taken(
    pieces: AsyncGenerator[AnswerEvent, None],
    form: AnswerFormat | ModelResponse,
    latency: TokenLatency | None = None,
) -> Event:
    """Add all pieces of a job to an answer and return the job's outcome."""
    async with contextlib.aclosing(pieces):
        async for item in pieces:
            if isinstance(item, Event):
                return item
            if isinstance(item, Applied):
                form.extended(item)
                continue
            if latency is not None:
                latency.note(item)
            form.take(item)
    raise error_of(Event(index=-1, kind="expired"))


async def _stop(response: web.StreamResponse, options: ResponseOptions) -> None:
    error = Unavailable(
        "this router is stopping; go on at another one with Last-Event-ID",
        code="draining",
        retry_after_s=1,
    )
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        async with asyncio.timeout(1.0):
            await response.write(_error_frame(error, options))
            await response.write_eof()


def _form(
    request: str, options: ResponseOptions, source: AnswerSource
) -> AnswerFormat | ModelResponse:
    """Return the format of the answer to a request."""
    if options.kind == "response":
        return ModelResponse(request, options)
    return AnswerFormat(request, options, source.rests)


def _error_frame(error: SpillwayError, options: ResponseOptions) -> bytes:
    """Return an error as the last event of a stream."""
    if options.kind == "response":
        return error_event(error, streamed_body(error))
    return b"data: %s\n\n" % msgspec.json.encode(streamed_body(error))
