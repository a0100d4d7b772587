"""One client's connection: bytes that are not HTTP, or arrive too slowly, get an error in OpenAI's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_protocol import RequestHandler

from common import log
from common.errors import InternalError, InvalidRequest, RequestTimeout, SpillwayError, Unavailable
from common.ids import ulid
from services.router.http.replies import error_response, from_http

_BROKEN_BODY = (web.RequestPayloadError, HttpProcessingError)
TOO_MANY = Unavailable("too many connections; try again", code="too_many_connections")
_NEVER_S = 1e8
_MOST_HELD = 65_536
_HEAD_ENDS = b"\r\n\r\n"
_PLAIN_METHODS = frozenset({"GET", "POST", "DELETE"})
_log = log.get("router")


class Quick(Protocol):
    """A way to answer requests as their bytes arrive, without aiohttp."""

    def begin(
        self, data: bytes, answered: Callable[[bytes | None], None]
    ) -> asyncio.Future[bytes] | None:
        """Begin to answer a request whose bytes are all of `data`; None if aiohttp must answer.

        `answered` gets the bytes of the reply, or None if aiohttp must answer after all. Cancelling the returned future
        ends the request, and `answered` is not called.
        """

    def learn(self, head: bytes, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Learn from the head of a request that aiohttp has read, and from the response that was sent."""


class ClientConnection(RequestHandler):
    """aiohttp's connection with our errors; closed after `idle_s` without a request, with 408 if a head is incomplete.

    Only public names of aiohttp are used: its own idle timer never expires, and `note_requests` reports complete heads.
    Requests that `quick` takes arrive in one piece and never reach aiohttp.
    """

    __slots__ = (
        "_closes_at",
        "_fed",
        "_head",
        "_head_begun",
        "_held",
        "_idle_s",
        "_idle_timer",
        "_last_sent",
        "_most",
        "_quick",
        "_searching",
        "_serving",
        "_site",
        "_turns",
    )

    def __init__(
        self,
        site: web.Server,
        most: int,
        idle_s: float,
        quick: Quick | None = None,
        *,
        loop: asyncio.AbstractEventLoop,
        **options: Any,
    ) -> None:
        super().__init__(site, keepalive_timeout=_NEVER_S, loop=loop, **options)
        self._site: web.Server | None = site
        self._most, self._idle_s = most, idle_s
        self._closes_at = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._head_begun = self._serving = self._last_sent = False
        self._quick, self._turns = quick, loop
        self._searching: asyncio.Future[bytes] | None = None
        self._held = bytearray()  # the bytes that arrived during a quick search
        self._head, self._fed = b"", 0  # aiohttp's request: its head, its bytes so far

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; if there are too many connections, reply with 503 and close."""
        if self._site is None or len(self._site.connections) >= self._most:
            # No check by isinstance, since uvloop's transports derive from no class of asyncio.
            cast("asyncio.Transport", transport).write(_raw(b"503 Service Unavailable", TOO_MANY))
            transport.close()
            self._site = None
            return
        super().connection_made(transport)
        self._rest()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End, unless the connection was one too many and never began."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._searching is not None:
            self._searching.cancel()
        if self._site is not None:
            self._site = None
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes: the beginning of a head between two requests, the rest of a body after the last response."""
        if self._site is None:
            return
        if self._searching is not None:
            self._hold(data)
        elif self._fed or self._last_sent or not self._begun_quickly(data):
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        """Give bytes to aiohttp."""
        if not self._fed:
            self._head = data[: data.find(_HEAD_ENDS) + len(_HEAD_ENDS)]
        self._fed += len(data)
        super().data_received(data)
        between = not self._serving and not self._last_sent
        self._head_begun = self._head_begun or (bool(data) and between)

    def _begun_quickly(self, data: bytes) -> bool:
        """Begin a quick search if `data` is the whole of one, and all earlier replies have been sent."""
        transport = self.transport
        if self._quick is None or transport is None or transport.get_write_buffer_size():
            return False
        self._searching = self._quick.begin(data, partial(self._answered, data))
        self._serving = self._searching is not None
        return self._serving

    def _hold(self, data: bytes) -> None:
        full, transport = len(self._held) > _MOST_HELD, self.transport
        self._held += data
        if len(self._held) > _MOST_HELD and not full and transport and not transport.is_closing():
            transport.pause_reading()

    def _answered(self, data: bytes, reply: bytes | None) -> None:
        """Send the reply to a quick search, or give its bytes to aiohttp; then take bytes that arrived meanwhile."""
        self._searching = None
        if self._site is None or self.transport is None:
            return
        self._rest()
        if reply is None:
            self._feed(data)
        else:
            self.transport.write(reply)
        if self._held:
            held, self._held = bytes(self._held), bytearray()
            if len(held) > _MOST_HELD and not self.transport.is_closing():
                self.transport.resume_reading()
            self.data_received(held)

    def begin(self) -> None:
        """Record that a request's head is complete."""
        self._serving, self._head_begun = True, False

    def _rest(self) -> None:
        """Wait for the next request, at most `idle_s`; one timer serves all of a connection's requests."""
        self._serving, self._closes_at = False, self._turns.time() + self._idle_s
        if self._idle_timer is None:
            self._idle_timer = self._turns.call_at(self._closes_at, self._look)

    def _look(self) -> None:
        # One round of the loop later, so that a request whose last bytes arrived in this round has begun.
        self._turns.call_soon(self._end_if_idle)

    def _end_if_idle(self) -> None:
        if self._idle_timer is None:
            return
        now = self._turns.time()
        if self._serving or now < self._closes_at:
            again_at = now + self._idle_s if self._serving else self._closes_at
            self._idle_timer = self._turns.call_at(again_at, self._look)
            return
        if self._head_begun and self.transport is not None:
            error = RequestTimeout(f"the request's head did not arrive within {self._idle_s:g} s")
            self.transport.write(_raw(b"408 Request Timeout", error))
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to a request that is not HTTP, or to an error outside of the application."""
        if request.writer.output_size > 0:
            raise ConnectionError("a reply has begun already")
        error: SpillwayError
        if status >= 500:
            _log.error("connection_failed", exc_info=exc)
            error = InternalError("an internal error; the log has it")
        elif isinstance(exc, LineTooLong):
            error = InvalidRequest(
                f"a line of the request's head is longer than {self.max_line_size} bytes",
                code="head_too_large",
            )
        else:
            reason = (message or "it cannot be parsed").partition("\n")[0].rstrip(":")
            error = InvalidRequest(f"the request is not HTTP/1.1: {reason}", code="invalid_http")
        response = _with_id(error_response(error))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response; a refusal by aiohttp itself gets OpenAI's shape, too."""
        if isinstance(resp, web.HTTPException):
            resp = _with_id(from_http(resp, request))
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._last_sent = resp.keep_alive is False
            self._learn(request, resp)
            self._rest()

    def _learn(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Record whether all bytes so far were one request, so that the next request may be a quick search."""
        head, self._head = self._head, b""
        known = head.endswith(_HEAD_ENDS)
        whole = known and self._fed == len(head) + (request.content_length or 0)
        if whole and request.method in _PLAIN_METHODS and "Upgrade" not in request.headers:
            self._fed = 0
            if self._quick is not None:
                self._quick.learn(head, request, response)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log an error, except for a broken body, which is the client's fault and was reported to the client."""
        if not isinstance(kw.get("exc_info"), _BROKEN_BODY):
            _log.error(
                "connection_failed", what=args[0] if args else "", exc_info=kw.get("exc_info")
            )


def note_requests(site: web.Server) -> None:
    """Make a server call each `ClientConnection` when one of its requests begins."""
    make = site.request_factory

    def begun(*arguments: Any) -> web.BaseRequest:
        request = make(*arguments)
        connection = request.protocol
        if isinstance(connection, ClientConnection):
            connection.begin()
        return request

    site.request_factory = begun


def _with_id(response: web.Response) -> web.Response:
    response.headers["x-request-id"] = f"req-{ulid()}"
    return response


def _raw(status: bytes, error: SpillwayError) -> bytes:
    body = error_response(error).body
    assert isinstance(body, bytes)
    return (
        b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 1\r\n"
        b"x-should-retry: true\r\nx-request-id: req-%s\r\nContent-Length: %d\r\n\r\n%s"
        % (status, ulid().encode(), len(body), body)
    )
