"""Client of calls over framed TCP: one connection to one process, with any number of calls in flight."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import NamedTuple, cast

from common.transport.frame_writer import FrameWriter
from common.transport.frames import CALL, ERROR, HELLO, RESULT, BadFrame, FrameReader, frame


class CallLost(ConnectionError):
    """The connection ended before the answer: the call may have been executed, or not."""


class CallFailed(Exception):
    """The process answered with an error, whose encoded form is `payload`."""

    def __init__(self, payload: bytes) -> None:
        super().__init__("the call failed")
        self.payload = payload


class _Waiting(NamedTuple):
    """A call without an answer, and its deadline by the loop's clock."""

    answer: asyncio.Future[bytes]
    due: float


class CallClient(asyncio.Protocol):
    """Sends calls to one process; `open` connects. A client cannot be used after its connection has ended.

    One timer ends calls at their deadlines: it is set for the earliest deadline, and then for the next.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._reader = FrameReader(self._take)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._writer: FrameWriter | None = None
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self._waiting: dict[int, _Waiting] = {}
        self._last = 0
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = math.inf

    @classmethod
    async def open(cls, host: str, port: int, token: str, timeout_s: float) -> CallClient:
        """Connect to the process that has this token; OSError (also CallLost or TimeoutError) if that fails."""
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
        """Whether the connection is open."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def in_flight(self) -> int:
        """The number of calls without an answer."""
        return len(self._waiting)

    def call(self, payload: bytes, left_ms: int) -> asyncio.Future[bytes]:
        """Send a call; return a future of the result, or of CallFailed, CallLost, or TimeoutError after `left_ms`.

        Cancelling the future leaves the answer unread. Raises CallLost if the connection has ended.
        """
        if self._writer is None or not self.usable:
            raise CallLost("the connection has ended")
        self._last = number = self._last + 1 & 0xFFFFFFFF
        left_ms = max(left_ms, 0)
        self._writer.write(frame(CALL, number, payload, left_ms))
        answer: asyncio.Future[bytes] = self._loop.create_future()
        due = self._loop.time() + left_ms / 1000
        self._waiting[number] = _Waiting(answer, due)
        if due < self._looks_at:
            self._look_at(due)
        return answer

    def close(self) -> None:
        """Close the connection; calls without an answer get CallLost."""
        if self._transport is not None:
            self._transport.abort()

    # -- the protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the HELLO frame."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._writer = FrameWriter(self._transport)
        self._writer.write(frame(HELLO, 0, self._token.encode()))

    def data_received(self, data: bytes) -> None:
        """Read frames of answers."""
        self._reader.feed_from(self._transport, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the waiting calls with CallLost."""
        self._transport = self._writer = None
        self._look_at(math.inf)
        lost = CallLost(f"the connection ended: {exc or 'closed by the other side'}")
        waiting, self._waiting = self._waiting, {}
        for answer, _ in waiting.values():
            if not answer.done():
                answer.set_exception(lost)
                answer.exception()  # read the error: asyncio logs errors that no one reads
        if not self._greeted.done():
            self._greeted.set_exception(lost)

    def _take(self, kind: int, call: int, _left_ms: int, payload: bytes) -> None:
        if kind == HELLO:
            if not self._greeted.done():
                self._greeted.set_result(None)
            return
        if kind not in (RESULT, ERROR):
            raise BadFrame(f"a frame of kind {kind} from a server")
        waiting = self._waiting.pop(call, None)
        if waiting is None or waiting.answer.done():
            return
        answer = waiting.answer
        if kind == RESULT:
            answer.set_result(payload)
        else:
            answer.set_exception(CallFailed(payload))
            answer.exception()

    # -- deadlines

    def _look_at(self, due: float) -> None:
        """Set the timer for a time by the loop's clock (infinity: never), in place of the last one."""
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at = due
        self._timer = None if due == math.inf else self._loop.call_at(due, self._look)

    def _look(self) -> None:
        """End the calls whose deadline has passed; they count as in flight until their answers come."""
        now = self._loop.time()
        left = [each for each in self._waiting.values() if not each.answer.done()]
        for answer, due in left:
            if due <= now:
                answer.set_exception(TimeoutError("the deadline passed before the answer"))
                answer.exception()  # read the error: asyncio logs errors that no one reads
        self._look_at(min((due for _, due in left if due > now), default=math.inf))
