"""Blocking chat, completions, sessions, and their streams."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Literal, Self, TypeVar, Unpack, overload

from ._chat import (
    ChatCompletionsResource,
    ChatOptions,
    CompletionOptions,
    CompletionsResource,
    Messages,
    Prompt,
)
from ._portal import Bound, Portal, call, each, iterated
from ._sessions import Session, SessionsResource
from .generation import ChatChunk, ChatCompletion, Completion, Retrieval, TokenUsage
from .streams import Stream

C = TypeVar("C", bound=ChatChunk | Completion)
W = TypeVar("W")


class SyncStream(Generic[C, W]):
    """An answer that arrives in chunks: iterate, or `final()`; in a `with` block, leaving early ends the work."""

    def __init__(self, portal: Portal, inner: Stream[C, W]) -> None:
        self._portal, self._inner = portal, inner

    @property
    def request_id(self) -> str | None:
        """The request's id, with which any process can go on with this stream (`resume`)."""
        return self._inner.request_id

    @property
    def last_event_id(self) -> str | None:
        """The id of the last chunk that had one, None before; `resume` goes on after it."""
        return self._inner.last_event_id

    @property
    def resumed(self) -> int:
        """The number of times that the connection was replaced."""
        return self._inner.resumed

    @property
    def text(self) -> str:
        """The first choice's text so far."""
        return self._inner.text

    @property
    def retrieval(self) -> Retrieval | None:
        """The passages found so far for a grounded answer; None before the first chunk, and for other answers."""
        return self._inner.retrieval

    @property
    def usage(self) -> TokenUsage | None:
        """The tokens used; None before the end of the stream."""
        return self._inner.usage

    def __iter__(self) -> Iterator[C]:
        return iterated(self._portal, self._inner)

    def texts(self) -> Iterator[str]:
        """Yield the first choice's text, piece by piece."""
        return iterated(self._portal, self._inner.texts())

    def final(self) -> W:
        """Read the stream to its end, and return the whole answer."""
        return self._portal.run(self._inner.final())

    def detach(self) -> None:
        """Close the connection, and leave the work to a reader that calls `resume` within `resume_s` seconds."""
        self._portal.run(self._detached())

    async def _detached(self) -> None:
        self._inner.detach()

    def close(self) -> None:
        """Close the stream; before its end this also ends the work at the server. Idempotent."""
        self._portal.run(self._inner.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


SyncChatStream = SyncStream[ChatChunk, ChatCompletion]
SyncCompletionStream = SyncStream[Completion, Completion]


class SyncChatCompletions(Bound[ChatCompletionsResource]):
    """Answers to conversations."""

    @overload
    def create(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> ChatCompletion: ...

    @overload
    def create(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> SyncChatStream: ...

    def create(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> ChatCompletion | SyncChatStream:
        """Answer a conversation, whole or in chunks."""
        if stream:
            return self.stream(messages, **options)
        return self._portal.run(self._inner.create(messages, **options))

    def stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> SyncChatStream:
        """Answer a conversation in chunks; returns when the server has accepted it."""
        inner = self._portal.run(self._inner.stream(messages, **options))
        return SyncStream(self._portal, inner)

    def resume(
        self,
        request_id: str,
        *,
        last_event_id: str | None = None,
        timeout_s: float | None = None,
    ) -> SyncChatStream:
        """Go on with a stream begun elsewhere, after `last_event_id` (None: from its beginning)."""
        work = self._inner.resume(request_id, last_event_id=last_event_id, timeout_s=timeout_s)
        return SyncStream(self._portal, self._portal.run(work))


class SyncChat:
    """Chat; `completions` has the calls, as in OpenAI's client."""

    def __init__(self, portal: Portal, inner: ChatCompletionsResource) -> None:
        self.completions = SyncChatCompletions(portal, inner)


class SyncCompletions(Bound[CompletionsResource]):
    """Continuations of bare prompts."""

    @overload
    def create(
        self,
        prompt: Prompt,
        *,
        stream: Literal[False] = False,
        **options: Unpack[CompletionOptions],
    ) -> Completion: ...

    @overload
    def create(
        self, prompt: Prompt, *, stream: Literal[True], **options: Unpack[CompletionOptions]
    ) -> SyncCompletionStream: ...

    def create(
        self, prompt: Prompt, *, stream: bool = False, **options: Unpack[CompletionOptions]
    ) -> Completion | SyncCompletionStream:
        """Continue a prompt, whole or in chunks."""
        if stream:
            return self.stream(prompt, **options)
        return self._portal.run(self._inner.create(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> SyncCompletionStream:
        """Continue a prompt in chunks; returns when the server has accepted it."""
        inner = self._portal.run(self._inner.stream(prompt, **options))
        return SyncStream(self._portal, inner)

    def resume(
        self,
        request_id: str,
        *,
        last_event_id: str | None = None,
        timeout_s: float | None = None,
    ) -> SyncCompletionStream:
        """Go on with a stream begun elsewhere, after `last_event_id` (None: from its beginning)."""
        work = self._inner.resume(request_id, last_event_id=last_event_id, timeout_s=timeout_s)
        return SyncStream(self._portal, self._portal.run(work))


class SyncSessions(Bound[SessionsResource]):
    """The tenant's sessions."""

    create = call(SessionsResource.create)
    get = call(SessionsResource.get)
    update = call(SessionsResource.update)
    delete = call(SessionsResource.delete)
    export = call(SessionsResource.export)
    load = call(SessionsResource.load)
    export_pages = each(SessionsResource.export_pages)
    load_pages = call(SessionsResource.load_pages)
    iterate = each(SessionsResource.iterate)
    list = call(SessionsResource.list)


class SyncSession(Bound[Session]):
    """One conversation: `chat` and `stream` send only the new messages."""

    @property
    def id(self) -> str:
        """The session's id."""
        return self._inner.id

    def stream(self, message: Messages, **options: Unpack[ChatOptions]) -> SyncChatStream:
        """Send a text or messages, and return the answer as a stream."""
        inner = self._portal.run(self._inner.stream(message, **options))
        return SyncStream(self._portal, inner)

    chat = call(Session.chat)
    get = call(Session.get)
    delete = call(Session.delete)
    export = call(Session.export)
