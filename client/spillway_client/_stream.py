"""A generation's stream, over as many connections as needed, without an event lost or yielded twice."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import deque
from typing import Any, NamedTuple

import aiohttp

from . import errors
from ._http import BROKEN, Call, RetryableError, sentence
from ._resources import segment
from ._sse import Frame, Parser
from ._transport import Transport, log
from .types import UnexpectedResponseError

# The server sends a comment at least every 10 s; a connection that is silent for these seconds is broken.
SILENT_S = 35.0
FIRST_DELAY_S, MAX_DELAY_S, SPREAD_S = 0.2, 2.0, 0.1
# Codes of errors after which the request goes on: another connection has the rest of its stream.
_GOES_ON = frozenset({"bus_down", "draining"})


def reconnect_delay_s(attempt: int, jitter: float) -> float:
    """Return the seconds before reconnecting for the `attempt`-th time (from 0); `jitter` is in [0, 1).

    The first delay is up to SPREAD_S, so that a router's streams do not all reconnect at once; later ones begin at
    FIRST_DELAY_S, double up to MAX_DELAY_S, and are shortened by at most a quarter.
    """
    if attempt == 0:
        return SPREAD_S * jitter
    return min(FIRST_DELAY_S * 2.0 ** min(attempt - 1, 10), MAX_DELAY_S) * (1 - 0.25 * jitter)


def place(event_id: str | None) -> tuple[int, int] | None:
    """Return (event, choice) of a chunk's id `event.choice`; None for other ids."""
    event, _, choice = (event_id or "").partition(".")
    if event.isdigit() and choice.isdigit():
        return int(event), int(choice)
    return None


class Chunk(NamedTuple):
    """One chunk as it came: its JSON, and its id, None without one."""

    payload: dict[str, Any]
    id: str | None


class Chunks:
    """The chunks of one request, from its POST, or, given `request_id`, after `last_id`, to its end.

    A connection that breaks, ends early or falls silent is replaced by one that goes on after the last id seen, at any
    of the servers, for as long as the server keeps the request (`resume_s` seconds). `finished` is True after the last
    chunk or an error from the server.
    """

    def __init__(
        self,
        transport: Transport,
        call: Call,
        *,
        request_id: str | None = None,
        last_id: str | None = None,
    ) -> None:
        self._transport = transport
        self._call = call
        self._response: aiohttp.ClientResponse | None = None
        self._base = transport.servers.now
        self._parser, self._pending = Parser(), deque[Frame]()
        self._lost_at: float | None = None
        self._reconnects = 0
        self._closed = False
        self.request_id = request_id
        self.last_id = last_id
        self.resumed = 0
        self.finished = False

    async def open(self) -> None:
        """Send the call, with its retries; returns when the server has begun to answer."""
        if self.request_id is not None:
            self._call = self._resuming()
        self._response = await self._transport.tries(self._call, _stream_itself)
        self._base = str(self._response.url.origin())
        self.request_id = self.request_id or self._response.headers.get("x-request-id")

    def close(self) -> None:
        """Close the connection, or return it to the pool if the answer is at its end."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        if self._response is not None:
            if self.finished:
                self._response.release()
            else:
                self._response.close()

    async def next(self) -> Chunk | None:
        """Return the next chunk, None at the end; raises the server's errors in mid-stream."""
        while not self.finished:
            try:
                chunk = self._taken(await self._frame())
            except errors.APITimeoutError:
                raise
            except errors.APIConnectionError as lost:
                if self._closed:
                    raise
                self._drop()
                await self._reconnect(lost)
                continue
            if chunk is not None:
                return chunk
        return None

    def _taken(self, frame: Frame) -> Chunk | None:
        """Return a frame's chunk; None at the end, and for a chunk that came before."""
        if frame.data == "[DONE]":
            self.finished = True
            return None
        payload = _decoded(frame)
        if payload.get("error"):
            error = errors.from_frame(payload, request_id=self.request_id)
            if error.code in _GOES_ON:
                raise errors.APIConnectionError(str(error))
            self.finished = True
            raise error
        at, last = place(frame.id), place(self.last_id)
        if at is not None and last is not None and at < last:
            return None  # the server repeats chunks
        self.last_id = frame.id or self.last_id
        return Chunk(payload, frame.id)

    async def _frame(self) -> Frame:
        while not self._pending:
            data = await self._bytes()
            if not data:
                raise errors.APIConnectionError(f"{self._base}: the stream ended before its end")
            self._lost_at, frames = None, self._parser.feed(data)
            if frames:
                self._reconnects = 0
                self._pending.extend(frames)
        return self._pending.popleft()

    async def _bytes(self) -> bytes:
        """Return the connection's next bytes, b"" at its end."""
        assert self._response is not None
        try:
            async with asyncio.timeout(max(0.0, min(SILENT_S, self._call.remaining_s()))):
                return await self._response.content.readany()
        except BROKEN as broken:
            if self._call.remaining_s() <= 0:
                raise errors.APITimeoutError(
                    f"{self._base}: the stream did not end in time"
                ) from broken
            raise errors.APIConnectionError(sentence(broken, self._base)) from broken

    def _resuming(self) -> Call:
        """Return the call that goes on after the last id; the deadline stays the first call's."""
        headers = {
            name: value
            for name, value in self._call.headers.items()
            if name not in {"Content-Type", "Idempotency-Key", "Last-Event-ID"}
        }
        if self.last_id is not None:
            headers["Last-Event-ID"] = self.last_id
        path = f"/v1/requests/{segment(self.request_id or '')}/events"
        return Call("GET", path, None, headers, self._call.deadline)

    async def _reconnect(self, lost: errors.APIConnectionError) -> None:
        """Open the next connection; raises `lost` once the server no longer keeps the request."""
        if self.request_id is None or self._transport.resume_s == 0:
            raise lost
        self._lost_at = self._lost_at or time.monotonic()
        give_up = self._lost_at + self._transport.resume_s
        servers = self._transport.servers
        servers.leave(self._base)
        while True:
            delay = reconnect_delay_s(self._reconnects, random.random())
            if time.monotonic() + delay > give_up:
                raise lost
            if delay >= self._call.remaining_s():
                raise errors.APITimeoutError("the stream broke, and its deadline passed") from lost
            await asyncio.sleep(delay)
            base = servers.now
            self._reconnects += 1
            try:
                self._response = await self._transport.attempt(
                    self._resuming(), base, _stream_itself
                )
            except errors.APITimeoutError:
                raise
            except (errors.APIConnectionError, RetryableError) as error:
                log.debug("the stream of %s is not back yet: %s", self.request_id, error)
                servers.leave(base)
                continue
            self._base, self._parser = base, Parser()
            self.resumed += 1
            return


async def _stream_itself(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """Return a response that is a stream, without reading it; UnexpectedResponseError for another response."""
    kind = response.headers.get("Content-Type", "")
    if "text/event-stream" not in kind:
        raise UnexpectedResponseError(
            f"{response.url}: expected an event stream, got {kind!r}; is this a Spillway server?"
        )
    return response


def _decoded(frame: Frame) -> dict[str, Any]:
    try:
        payload = json.loads(frame.data)
    except ValueError as error:
        raise UnexpectedResponseError(f"a chunk is not JSON: {frame.data[:200]!r}") from error
    if not isinstance(payload, dict):
        raise UnexpectedResponseError(f"a chunk is not a JSON object: {frame.data[:200]!r}")
    return payload
