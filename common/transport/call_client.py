"""Client of calls over framed TCP: one connection to one process, with any number of calls in flight."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

from common.transport.frames import CALL, ERROR, HELLO, RESULT, BadFrame, FrameReader, frame


class CallLost(ConnectionError):
    """The connection ended before the answer: the call may have been executed, or not."""


class CallFailed(Exception):
    """The process answered with an error, whose encoded form is `payload`."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("the call failed")
        self.payload = payload


class CallClient(asyncio.Protocol):
    """Sends calls to one process; `open` connects, and a client whose connection ended is of no more use."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._reader = FrameReader(self._take)
        self._transport: asyncio.Transport | None = None
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._last = 0

    @classmethod
    async def open(cls, host: str, port: int, token: str, timeout_s: float) -> CallClient:
        """Connect to the process with this token; OSError (CallLost, TimeoutError too) if it is not there."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            _, client = await loop.create_connection(partial(cls, token), host, port)
            try:
                await client._greeted
            except BaseException:
                client.close()
                raise
        return client

    @property
    def usable(self) -> bool:
        """Whether the connection stands."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def in_flight(self) -> int:
        """Calls without an answer yet."""
        return len(self._waiting)

    def call(self, payload: bytes, left_ms: int) -> asyncio.Future[bytes]:
        """Send a call that must be answered within `left_ms`; its future gives the result, CallFailed or CallLost.

        Cancelling the future leaves the answer unread. Raises CallLost if the connection has ended.
        """
        if self._transport is None or self._transport.is_closing():
            raise CallLost("the connection has ended")
        self._last = number = self._last + 1 & 0xFFFFFFFF
        sent = frame(CALL, number, payload, max(left_ms, 0))
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._transport.write(sent)
        return answer

    def close(self) -> None:
        """Close the connection; calls without an answer get CallLost."""
        if self._transport is not None:
            self._transport.abort()

    # -- the protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        self._transport.write(frame(HELLO, 0, self._token.encode()))

    def data_received(self, data: bytes) -> None:
        """Take answers."""
        self._reader.feed_from(self._transport, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the calls that wait."""
        self._transport = None
        lost = CallLost(f"the connection ended: {exc or 'closed by the other side'}")
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(lost)
                answer.exception()  # whoever waited may have left
        if not self._greeted.done():
            self._greeted.set_exception(lost)

    def _take(self, kind: int, call: int, _left_ms: int, payload: bytes) -> None:
        if kind == HELLO:
            if not self._greeted.done():
                self._greeted.set_result(None)
            return
        if kind not in (RESULT, ERROR):
            raise BadFrame(f"a frame of kind {kind} from a server")
        answer = self._waiting.pop(call, None)
        if answer is None or answer.done():
            return
        if kind == RESULT:
            answer.set_result(payload)
        else:
            answer.set_exception(CallFailed(payload))
            answer.exception()
