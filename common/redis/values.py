"""Connections for large values: each value is read from the socket into a buffer of its own size.

redis-py's parser copies a value of some hundred kilobytes several times, and takes six times as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

Reply = bytearray | bytes | int | ResponseError | None
_LINES_BYTES = 1 << 13  # the buffer between values, and the longest line of a reply
_END = b"\r\n"


def packed(command: Sequence[Any]) -> bytes:
    """Return a command in Redis' protocol; its words are bytes, texts or numbers."""
    words = [word if isinstance(word, bytes) else str(word).encode() for word in command]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


class ReplyReader(asyncio.BufferedProtocol):
    """Reads replies other than arrays: statuses as bytes, numbers, values as bytearrays, None, and errors."""

    def __init__(self) -> None:
        self.lost = False
        self._transport: asyncio.Transport | None = None
        self._lines, self._filled = bytearray(_LINES_BYTES), 0
        self._value: bytearray | None = None  # the value being read; `_got` bytes of it have come
        self._got = 0
        self._skip = 0  # bytes of the last value's line end still to come
        self._replies: list[Reply] = []
        self._wanted = 0
        self._all: asyncio.Future[list[Reply]] | None = None

    async def ask(self, commands: Sequence[Sequence[Any]]) -> list[Reply]:
        """Send commands together and return their replies; RedisConnectionError if the connection is lost.

        A cancelled caller must close the connection, since replies may still come.
        """
        if self.lost or self._transport is None:
            raise RedisConnectionError("the connection is closed")
        self._replies, self._wanted = [], len(commands)
        self._all = asyncio.get_running_loop().create_future()
        self._transport.write(b"".join(map(packed, commands)))
        return await self._all

    def close(self) -> None:
        """Close the connection at once."""
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's are no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait for replies with an error."""
        self._fail(f"the server closed the connection ({exc})" if exc else "closed by the server")

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Return the buffer for the next bytes: the rest of the value being read, or of the lines."""
        if self._value is not None:
            return memoryview(self._value)[self._got :]
        return memoryview(self._lines)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Read the `nbytes` bytes that came into the buffer."""
        if self._value is None:
            self._filled += nbytes
            self._read_lines()
            return
        self._got += nbytes
        if self._got == len(self._value):
            self._replied(self._value)
            self._value, self._skip = None, len(_END)

    def _read_lines(self) -> None:
        at, lines = 0, self._lines
        while at < self._filled and self._value is None:
            if self._skip:
                step = min(self._skip, self._filled - at)
                self._skip, at = self._skip - step, at + step
                continue
            end = lines.find(_END, at, self._filled)
            if end < 0:
                break
            kind, text = lines[at : at + 1], bytes(lines[at + 1 : end])
            at = end + len(_END)
            if kind != b"$":
                self._replied(_plain(kind, text))
            elif (size := int(text)) < 0:
                self._replied(None)
            else:
                at += self._begin(size, at)
        left = self._filled - at
        if left >= _LINES_BYTES:
            self._fail(f"a line of a reply has more than {_LINES_BYTES} bytes")
            self.close()
            return
        lines[:left] = lines[at : self._filled]
        self._filled = left

    def _begin(self, size: int, at: int) -> int:
        """Begin to read a value of `size` bytes; return how many of these are in the lines from `at` on."""
        step = min(size, self._filled - at)
        value = bytearray(size)
        value[:step] = self._lines[at : at + step]
        if step == size:
            self._replied(value)
            self._skip = len(_END)
        else:
            self._value, self._got = value, step
        return step

    def _replied(self, reply: Reply) -> None:
        self._replies.append(reply)
        if len(self._replies) == self._wanted and self._all is not None and not self._all.done():
            self._all.set_result(self._replies)

    def _fail(self, why: str) -> None:
        self.lost = True
        if self._all is not None and not self._all.done():
            self._all.set_exception(RedisConnectionError(why))


def _plain(kind: bytes | bytearray, text: bytes) -> Reply:
    if kind == b"-":
        return ResponseError(text.decode(errors="replace"))
    return int(text) if kind == b":" else text


class ValueConnections:
    """A pool of connections: one for each call in flight; idle connections are used again.

    `options` are the parts of a URL by redis-py's `parse_url`; `timeout_s` bounds one call, `connect_s` the opening of
    one connection. Errors are those of redis-py, and TimeoutError.
    """

    def __init__(self, options: Mapping[str, Any], *, timeout_s: float, connect_s: float) -> None:
        self._options, self._timeout_s, self._connect_s = options, timeout_s, connect_s
        self._idle: list[ReplyReader] = []

    async def ask(self, commands: Sequence[Sequence[Any]]) -> list[Reply]:
        """Return the replies of commands sent together; a refused command's is its ResponseError."""
        reader: ReplyReader | None = None
        while self._idle and (reader is None or reader.lost):
            reader = self._idle.pop()
        if reader is None or reader.lost:
            reader = await self._open()
        try:
            async with asyncio.timeout(self._timeout_s):
                replies = await reader.ask(commands)
        except BaseException:
            reader.close()  # no later call may read its replies
            raise
        self._idle.append(reader)
        return replies

    def close(self) -> None:
        """Close every idle connection."""
        while self._idle:
            self._idle.pop().close()

    async def _open(self) -> ReplyReader:
        options, reader = self._options, ReplyReader()
        path = options.get("path")
        host, port = options.get("host", "localhost"), int(options.get("port", 6379))
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                if path:
                    await loop.create_unix_connection(lambda: reader, path)
                else:
                    await loop.create_connection(lambda: reader, host, port)
                await self._greet(reader)
        except OSError as error:
            reader.close()
            raise RedisConnectionError(f"{path or f'{host}:{port}'}: {error}") from error
        except BaseException:
            reader.close()
            raise
        return reader

    async def _greet(self, reader: ReplyReader) -> None:
        options, commands = self._options, list[Sequence[Any]]()
        if password := options.get("password"):
            user = options.get("username")
            commands.append(("AUTH", user, password) if user else ("AUTH", password))
        if number := int(options.get("db") or 0):
            commands.append(("SELECT", number))
        if not commands:
            return
        for reply in await reader.ask(commands):
            if isinstance(reply, ResponseError):
                raise RedisConnectionError(str(reply))
