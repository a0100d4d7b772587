"""Streams of chat and completions: chunks as they come, the text so far, and the whole answer at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

from . import errors
from ._joining import whole_chat, whole_completion
from ._stream import Chunks
from ._transport import Transport
from .generation import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Retrieval,
    TokenUsage,
    chat_chunk,
    completion,
    joined_retrieval,
)

C = TypeVar("C", bound=ChatChunk | Completion)
W = TypeVar("W")


class Stream(Generic[C, W]):
    """An answer that arrives in chunks; use it with `async with`, or read it to its end, or `close()` it.

    A broken connection is replaced (`resumed` counts how often), without a chunk lost or yielded twice. An error of the
    server in mid-stream raises the class of its HTTP status. Leaving the `async with` before the end, `close()`,
    dropping the stream and cancelling the task that reads it end the work at the server; `detach()` leaves the work to
    another reader. The usage chunk is not yielded; `usage` has its numbers at the end.
    """

    def __init__(
        self,
        transport: Transport,
        source: Chunks,
        key: str | None,
        build: Callable[[object, str | None], C],
        join: Callable[[list[C], C | None, str | None], W],
    ) -> None:
        self._transport, self._source, self._key = transport, source, key
        self._build: Callable[[object, str | None], C] = build
        self._join: Callable[[list[C], C | None, str | None], W] = join
        self._chunks: list[C] = []
        self._begun: set[int] = set()
        self._retrieved = -1  # `at_token` of the last retrieval yielded
        self._closed = False
        self._error: errors.SpillwayError | None = None
        self._last: C | None = None
        self._loop = asyncio.get_running_loop()
        transport.leave_with(self)

    def __del__(self) -> None:
        """End the work of a stream that was dropped: `break` in a loop over it is enough."""
        if not getattr(self, "_closed", True) and self._loop.is_running():
            self._loop.call_soon_threadsafe(
                _leave, self._transport, self._source, self.request_id or self._key
            )

    @property
    def request_id(self) -> str | None:
        """The request's id, with which any process can go on with this stream (`resume`)."""
        return self._source.request_id

    @property
    def last_event_id(self) -> str | None:
        """The id of the last chunk that had one, None before; `resume` goes on after it."""
        return self._source.last_id

    @property
    def resumed(self) -> int:
        """The number of times that the connection was replaced."""
        return self._source.resumed

    @property
    def usage(self) -> TokenUsage | None:
        """The tokens used; None before the end of the stream."""
        return self._last.usage if self._last is not None else None

    @property
    def text(self) -> str:
        """The first choice's text so far."""
        return "".join(chunk.text for chunk in self._chunks)

    @property
    def retrieval(self) -> Retrieval | None:
        """The passages found so far for a grounded answer; None before the first chunk, and for other answers."""
        return joined_retrieval(
            chunk.retrieval for chunk in self._chunks if isinstance(chunk, ChatChunk)
        )

    def __aiter__(self) -> AsyncIterator[C]:
        return self

    async def __anext__(self) -> C:
        if self._error is not None:
            raise self._error
        try:
            while not self._closed and (taken := await self._source.next()) is not None:
                chunk = self._build(taken.payload, taken.id)
                if not chunk.choices:
                    self._last = chunk
                elif not self._seen(chunk):
                    self._chunks.append(chunk)
                    return chunk
        except asyncio.CancelledError:
            self._error = errors.APIConnectionError(
                "this stream was ended by the cancellation of the task that read it"
            )
            self.leave()
            raise
        except errors.SpillwayError as error:
            if self._closed:
                raise StopAsyncIteration from None
            self._error = error
            self.detach()
            raise
        self.detach()
        raise StopAsyncIteration

    def _seen(self, chunk: C) -> bool:
        """Return whether a chunk without an id, which opens a choice or tells a retrieval, was yielded before."""
        if chunk.event_id is not None:
            return False
        if isinstance(chunk, ChatChunk) and not any(one.delta.role for one in chunk.choices):
            records = chunk.retrieval.retrievals if chunk.retrieval is not None else []
            told = max((one.at_token for one in records), default=-1)
            again = told <= self._retrieved
            self._retrieved = max(self._retrieved, told)
            return again and bool(records)
        choices = {choice.index for choice in chunk.choices}
        again = choices <= self._begun and self._source.resumed > 0
        self._begun |= choices
        return again

    async def texts(self) -> AsyncIterator[str]:
        """Yield the first choice's text, piece by piece."""
        async for chunk in self:
            if chunk.text:
                yield chunk.text

    async def final(self) -> W:
        """Read the stream to its end, and return the whole answer."""
        async for _ in self:
            pass
        return self._join(self._chunks, self._last, self.request_id)

    async def close(self) -> None:
        """Close the stream; before its end this also ends the work at the server. Idempotent."""
        name = self._unfinished()
        self.detach()
        if name is not None:
            await self._transport.cancel(name)

    def leave(self) -> None:
        """Close the stream, and end the work at the server in the background."""
        name = self._unfinished()
        self.detach()
        if name is not None:
            self._transport.cancel_later(name)

    def detach(self) -> None:
        """Close the connection, and leave the work to a reader that calls `resume` within `resume_s` seconds."""
        self._closed = True
        self._source.close()

    def _unfinished(self) -> str | None:
        """Return the request id or key to cancel at the server; None if there is none."""
        over = self._closed or self._source.finished
        return None if over else self.request_id or self._key

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class ChatStream(Stream[ChatChunk, ChatCompletion]):
    """A chat answer that arrives in chunks."""

    def __init__(self, transport: Transport, source: Chunks, key: str | None = None) -> None:
        super().__init__(transport, source, key, chat_chunk, whole_chat)


class CompletionStream(Stream[Completion, Completion]):
    """A completion that arrives in chunks."""

    def __init__(self, transport: Transport, source: Chunks, key: str | None = None) -> None:
        super().__init__(transport, source, key, _completion_chunk, whole_completion)


def _leave(transport: Transport, source: Chunks, name: str | None) -> None:
    source.close()
    if name is not None and not source.finished:
        transport.cancel_later(name)


def _completion_chunk(payload: object, event_id: str | None) -> Completion:
    return completion(payload, None, event_id)
