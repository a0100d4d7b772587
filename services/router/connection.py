"""One client's connection: what is not HTTP, or comes too slowly, is told so in the shape of every other error."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_protocol import RequestHandler

from common import log
from common.errors import InternalError, InvalidRequest, RequestTimeout, SpillwayError, Unavailable
from common.ids import ulid
from services.router.middleware import error_response, from_http

_BROKEN_BODY = (web.RequestPayloadError, HttpProcessingError)
TOO_MANY = Unavailable("too many connections; try again", code="too_many_connections")
_log = log.get("router")


class Connection(RequestHandler):
    """aiohttp's connection with our errors; a head that does not arrive in `keepalive_timeout` gets 408."""

    __slots__ = ("_begun", "_most")

    def __init__(self, manager: web.Server, most: int, **options: Any) -> None:
        super().__init__(manager, **options)
        self._most = most

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, or say that there are too many connections, and close."""
        if self._manager is None or len(self._manager.connections) >= self._most:
            # Not checked by isinstance: uvloop's transports derive from nothing of asyncio's.
            cast("asyncio.Transport", transport).write(_raw(b"503 Service Unavailable", TOO_MANY))
            transport.close()
            self._manager = None
            return
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Take bytes; remember whether they began a head that is not complete yet."""
        super().data_received(data)
        self._begun = bool(data) and not self._messages and self._current_request is None

    def _process_keepalive(self) -> None:
        waiting = self._waiter is not None and not self._waiter.done()
        late = self._loop.time() >= self._next_keepalive_close_time
        if waiting and late and getattr(self, "_begun", False) and self.transport is not None:
            error = RequestTimeout(
                f"the request's head did not arrive within {self.keepalive_timeout:g} s"
            )
            self.transport.write(_raw(b"408 Request Timeout", error))
        super()._process_keepalive()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return what a request that is not HTTP, or a fault outside of the application, is answered with."""
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
        """Send a response; what aiohttp refuses before the application is asked gets our shape, too."""
        if isinstance(resp, web.HTTPException):
            resp = _with_id(from_http(resp, request))
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log a fault; a body that was broken on its way is the client's, who has been told."""
        if not isinstance(kw.get("exc_info"), _BROKEN_BODY):
            _log.error(
                "connection_failed", what=args[0] if args else "", exc_info=kw.get("exc_info")
            )


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
