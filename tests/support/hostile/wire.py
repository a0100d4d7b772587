"""HTTP by hand: requests that no well-behaved client would send, and the replies to them."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Reply:
    """What came back until the server closed; status 0 if nothing did."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


@contextlib.contextmanager
def connection(port: int, timeout_s: float = TIMEOUT_S) -> Iterator[socket.socket]:
    """Open a connection to the router."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as made:
        yield made


def head(
    method: str, target: str | bytes, key: str = "", headers: Mapping[str, str] | None = None
) -> bytes:
    """Return a request's head without its last empty line."""
    raw = target if isinstance(target, bytes) else target.encode()
    lines = [b"%s %s HTTP/1.1" % (method.encode(), raw), b"Host: hostile"]
    if key:
        lines.append(b"Authorization: Bearer " + key.encode())
    for name, value in (headers or {}).items():
        lines.append(name.encode() + b": " + value.encode("utf-8", "surrogateescape"))
    return b"\r\n".join(lines) + b"\r\n"


def read(made: socket.socket) -> Reply:
    """Read a reply until the server closes; a reset counts as a close."""
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionResetError):
        while part := made.recv(65536):
            parts.append(part)
    return parse(b"".join(parts))


def parse(raw: bytes) -> Reply:
    """Take a raw reply apart."""
    if not raw:
        return Reply(0, {}, b"")
    top, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    headers = {n.strip().lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _unchunked(body)
    return Reply(int(first.split(" ")[1]), headers, body)


def _unchunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        parts.append(body[:length])
        body = body[length + 2 :]
    return b"".join(parts)


def ask(
    port: int,
    method: str,
    target: str | bytes,
    body: bytes | None = None,
    *,
    key: str = "",
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Reply:
    """Send one request and return its reply."""
    top = head(method, target, key, {"Connection": "close", **(headers or {})})
    if body is not None:
        top += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    with connection(port, timeout_s) as made:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            made.sendall(top + b"\r\n" + (body or b""))
        return read(made)
