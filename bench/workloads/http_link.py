"""A lean HTTP client for rows of servers: prepared requests over kept connections, almost no CPU of its own.

A general client takes as long for a request as a quick server, and both share the cores.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit


class HttpError(Exception):
    """A server answered with an error, or not in HTTP, or closed the connection."""


def post(url: str, path: str, body: bytes) -> bytes:
    """Return the bytes of a POST of JSON."""
    host = urlsplit(url).netloc
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Connection(asyncio.Protocol):
    """One kept connection, on which one request is open at a time."""

    def __init__(self) -> None:
        self._held = b""
        self._answer: asyncio.Future[bytes] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(HttpError(f"the connection was closed: {exc}"))

    def send(self, request: bytes) -> asyncio.Future[bytes]:
        """Send a request; its answer's body is the future's result."""
        if self.transport is None:
            raise HttpError("the connection was closed")
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._held = self._held + data if self._held else data
        try:
            found = answer_of(self._held)
        except (HttpError, ValueError) as error:
            self._held = b""
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(HttpError(str(error)))
            return
        if found is not None:
            self._held = b""
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(found)


def answer_of(data: bytes) -> bytes | None:
    """Return the body of a whole answer, None while some of it is missing; HttpError for one that is no success."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    lines = data[:end].split(b"\r\n")
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(b":") for line in lines[1:])
    }
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        body = _unchunked(data, end + 4)
    else:
        size = int(headers.get(b"content-length", b"0"))
        body = data[end + 4 : end + 4 + size] if len(data) >= end + 4 + size else None
    if body is not None and not lines[0].split(b" ", 2)[1].startswith(b"2"):
        raise HttpError(f"{lines[0].decode()}: {body[:300].decode(errors='replace')}")
    return body


def _unchunked(data: bytes, at: int) -> bytes | None:
    parts: list[bytes] = []
    while True:
        line = data.find(b"\r\n", at)
        if line < 0:
            return None
        size = int(data[at:line].partition(b";")[0], 16)
        if len(data) < line + 2 + size + 2:
            return None
        if not size:
            return b"".join(parts)
        parts.append(data[line + 2 : line + 2 + size])
        at = line + 2 + size + 2


class HttpLinks:
    """Kept connections to one server, as many as requests have been open at once; use as `async with`."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._host, self._port = where.hostname or "", where.port or 80
        self._idle: list[_Connection] = []
        self._made: list[_Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for each in self._made:
            if each.transport is not None:
                each.transport.close()

    async def send(self, request: bytes) -> bytes:
        """Send the bytes of a request and return the answer's body; HttpError where it is no success."""
        link = self._idle.pop() if self._idle else None
        if link is None or link.transport is None:
            loop = asyncio.get_running_loop()
            _, link = await loop.create_connection(_Connection, self._host, self._port)
            self._made.append(link)
        body = await link.send(request)
        self._idle.append(link)
        return body
