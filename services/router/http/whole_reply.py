"""A JSON response that is sent in one piece, without aiohttp's writing of heads, a tenth of a search's time."""

from __future__ import annotations

from collections.abc import Iterable
from email.utils import formatdate
from functools import lru_cache

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import SERVER_SOFTWARE

from common.clock import SYSTEM


class WholeReply(web.Response):
    """The response of status 200 to a POST; on a connection that is not kept, aiohttp writes it."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body=body, content_type="application/json")
        self._sent = False

    @property
    def prepared(self) -> bool:
        """Whether the response's head was sent."""
        return self._sent or super().prepared

    @property
    def sent_whole(self) -> bool:
        """Whether the response was sent in one piece, on a connection that is kept."""
        return self._sent

    @property
    def keep_alive(self) -> bool | None:
        """Whether the connection is kept after the response; None while that is unknown."""
        return True if self._sent else super().keep_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send the whole response; ConnectionResetError if the client has left."""
        plain = request.version == HttpVersion11 and request.keep_alive
        if not plain or self.keep_alive is False:
            return await super().prepare(request)
        if self._sent:
            return None
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        assert isinstance(self.body, bytes)
        transport.write(one_piece(200, "OK", self.headers.items(), self.body))
        self._sent = True
        await request.writer.drain()
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing if the whole response was sent."""
        if not self._sent:
            await super().write_eof(data)


def one_piece(status: int, reason: str, headers: Iterable[tuple[str, str]], body: bytes) -> bytes:
    """Return all bytes of a response on a connection that is kept."""
    head = "".join([f"{name}: {value}\r\n" for name, value in headers])
    return b"HTTP/1.1 %d %b\r\n%bContent-Length: %d\r\n%b\r\n%b" % (
        status,
        reason.encode(),
        head.encode(),
        len(body),
        _fixed(SYSTEM.unix_ns() // 1_000_000_000),
        body,
    )


@lru_cache(1)
def _fixed(second: int) -> bytes:
    """Return the lines of a head that depend only on the time."""
    return f"Date: {formatdate(second, usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n".encode()
