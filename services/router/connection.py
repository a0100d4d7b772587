"""One client's connection: what is not HTTP, or comes too slowly, is told so in the shape of every other error."""

from __future__ import annotations

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from common import log
from common.errors import InternalError, InvalidRequest, RequestTimeout, SpillwayError
from common.ids import ulid
from services.router.middleware import error_response

_log = log.get("router")


class Connection(RequestHandler):
    """aiohttp's connection with our errors; a head that does not arrive in `keepalive_timeout` gets 408."""

    __slots__ = ("_begun",)

    def data_received(self, data: bytes) -> None:
        """Take bytes; remember whether they began a head that is not complete yet."""
        super().data_received(data)
        self._begun = bool(data) and not self._messages and self._current_request is None

    def _process_keepalive(self) -> None:
        waiting = self._waiter is not None and not self._waiter.done()
        late = self._loop.time() > self._next_keepalive_close_time
        if waiting and late and getattr(self, "_begun", False) and self.transport is not None:
            error = RequestTimeout(
                f"the request's head did not arrive within {self.keepalive_timeout:g} s"
            )
            self.transport.write(_raw(error))
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
        response = error_response(error)
        response.headers["x-request-id"] = f"req-{ulid()}"
        response.force_close()
        return response


def _raw(error: SpillwayError) -> bytes:
    body = error_response(error).body
    assert isinstance(body, bytes)
    return (
        b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"x-should-retry: true\r\nx-request-id: req-%s\r\nContent-Length: %d\r\n\r\n%s"
        % (ulid().encode(), len(body), body)
    )
