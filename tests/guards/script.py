"""Asks an instance and writes down what it answers, in a form that two runs share."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.guards import plain
from tests.guards.plain import Plain

TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Reply:
    """An answer as it came."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def request(self) -> str:
        """Return the id of the request that was answered."""
        return self.headers["x-request-id"]


class Script:
    """A conversation with one instance: exchanges by name, in the order they happened."""

    def __init__(self, url: str, key: str = "") -> None:
        self.address = urlsplit(url).netloc
        self.key = key
        self.known: dict[str, str] = {}
        self.exchanges: dict[str, Any] = {}

    def know(self, name: str, text: str) -> str:
        """Give an id a name, under which it stands in what is written down."""
        self.known[text] = name
        return text

    @contextmanager
    def open(
        self,
        method: str,
        target: str,
        body: Any = None,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Ask, and return the answer as soon as its headers have come; `key` "" asks without one."""
        key = self.key if key is None else key
        sent = {"Authorization": f"Bearer {key}"} if key else {}
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        if raw is not None:
            sent["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection(self.address, timeout=TIMEOUT_S)
        try:
            connection.request(method, target, raw, {**sent, **(headers or {})})
            yield connection.getresponse()
        finally:
            connection.close()

    def begun(self, answer: http.client.HTTPResponse) -> None:
        """Read a stream up to its first token, so that the request is known to run."""
        while line := answer.readline():
            if line.startswith(b"id:"):
                return
        raise EOFError("the stream ended before its first token")

    def ask(self, method: str, target: str, body: Any = None, **more: Any) -> Reply:
        """Ask without writing the answer down."""
        with self.open(method, target, body, **more) as answer:
            headers = {name.lower(): text for name, text in answer.getheaders()}
            return Reply(answer.status, headers, answer.read())

    def call(
        self,
        name: str,
        method: str,
        target: str,
        body: Any = None,
        *,
        shape: bool = False,
        **more: Any,
    ) -> Reply:
        """Ask and write the answer down under a name; with `shape` only which fields it has."""
        reply = self.ask(method, target, body, **more)
        self.note(name, method, target, reply, shape=shape)
        return reply

    def note(
        self, name: str, method: str, target: str, reply: Reply, *, shape: bool = False
    ) -> None:
        """Write an answer down."""
        made = Plain(self.known)
        found = {
            "asked": f"{method} {made.text(target)}",
            "status": reply.status,
            "headers": made.headers(reply.headers),
        }
        kind = reply.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            found["stream"] = plain.stream(reply.body.decode(), made)
        elif kind.startswith("application/json") and reply.body:
            whole = reply.json
            found["body"] = plain.shape(whole) if shape else made.value(whole)
        elif kind.startswith("application/octet-stream"):
            first, _, rest = reply.body.partition(b"\n")
            found["first line"] = made.value(json.loads(first))
            found["bytes follow"] = bool(rest)
        self.add(name, found)

    def add(self, name: str, value: Any) -> None:
        """Write any value down; ValueError if the name is taken."""
        if name in self.exchanges:
            raise ValueError(f"two exchanges are named {name!r}")
        self.exchanges[name] = value

    def raw(self, name: str, sent: bytes) -> None:
        """Send bytes as they are, read until the server closes, and write down status and code."""
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as made:
            made.sendall(sent)
            got = b"".join(iter(lambda: made.recv(65536), b""))
        top, _, body = got.partition(b"\r\n\r\n")
        first = top.split(b"\r\n")[0].decode("latin-1")
        code = json.loads(body)["error"]["code"] if body.startswith(b"{") else ""
        self.add(name, {"answer": first, "code": code})
