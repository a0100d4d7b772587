"""Server of calls over framed TCP: takes calls on any number of connections and answers each once."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import Callable
from functools import partial
from typing import cast

from common.transport.frame_writer import FrameWriter
from common.transport.frames import (
    CALL,
    ERROR,
    HELLO,
    MAX_HELLO,
    MAX_PAYLOAD,
    RESULT,
    BadFrame,
    FrameReader,
    frame,
)

HELLO_S = 5.0


class Call:
    """One call: its payload, its deadline by the loop's clock, and its one answer."""

    __slots__ = ("_number", "_served", "deadline", "payload")

    def __init__(self, payload: bytes, deadline: float, served: _Served, number: int) -> None:
        self.payload, self.deadline = payload, deadline
        self._served, self._number = served, number

    def reply(self, payload: bytes, *, alone: bool = False) -> None:
        """Answer with a result; with `alone` at once, else with all answers of this turn of the loop."""
        self._served.answer(RESULT, self._number, payload, alone=alone)

    def fail(self, payload: bytes) -> None:
        """Answer with an error."""
        self._served.answer(ERROR, self._number, payload)


class CallServer:
    """Listens for callers that know its `token`, and hands every call to `take`."""

    def __init__(self, take: Callable[[Call], None]) -> None:
        self.token = secrets.token_hex(16)
        self._take = take
        self._listener: asyncio.Server | None = None
        self._connections: set[_Served] = set()

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and return the host and port; OSError if they cannot be used."""
        loop = asyncio.get_running_loop()
        made = partial(_Served, self._take, self.token, self._connections)
        self._listener = await loop.create_server(made, host, port, backlog=128)
        name = self._listener.sockets[0].getsockname()
        return name[0], name[1]

    async def close(self) -> None:
        """Stop listening and close every connection; calls without an answer fail at their callers."""
        if self._listener is not None:
            self._listener.close()
        for each in list(self._connections):
            each.close()


class _Served(asyncio.Protocol):
    """One connection of a caller."""

    def __init__(self, take: Callable[[Call], None], token: str, connections: set[_Served]) -> None:
        self._take_call, self._token, self._connections = take, token, connections
        self._reader = FrameReader(self._take, MAX_HELLO)
        self._known = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._writer: FrameWriter | None = None
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._writer = FrameWriter(self._transport)
        self._connections.add(self)
        self._late = self._loop.call_later(HELLO_S, self.close)

    def data_received(self, data: bytes) -> None:
        self._reader.feed_from(self._transport, data)

    def pause_writing(self) -> None:
        """Read no more calls while the caller does not read its answers."""
        if self._transport is not None:
            with contextlib.suppress(RuntimeError):
                self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._connections.discard(self)
        self._transport = self._writer = None
        if self._late is not None:
            self._late.cancel()

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _take(self, kind: int, call: int, left_ms: int, payload: bytes) -> None:
        if self._writer is None or self._transport is None or self._transport.is_closing():
            return
        if not self._known:
            if kind != HELLO or not hmac.compare_digest(payload, self._token.encode()):
                raise BadFrame("no hello with this process' token")
            self._known = True
            self._reader.most = MAX_PAYLOAD
            if self._late is not None:
                self._late.cancel()
            self._writer.write(frame(HELLO, 0, b""))
            return
        if kind != CALL:
            raise BadFrame(f"a frame of kind {kind} from a caller")
        deadline = self._loop.time() + left_ms / 1000
        self._take_call(Call(payload, deadline, self, call))

    def answer(self, kind: int, call: int, payload: bytes, *, alone: bool = False) -> None:
        """Answer a call; an answer after the connection's end is dropped."""
        if self._writer is not None:
            self._writer.write(frame(kind, call, payload), alone=alone)
