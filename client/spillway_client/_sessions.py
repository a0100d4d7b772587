"""Sessions: conversations that the server remembers, so that a turn sends only the new messages."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import Any, Unpack

from ._chat import ChatCompletionsResource, ChatOptions, Messages
from ._resources import segment
from ._transport import GENERATION_TIMEOUT_S, Transport
from .generation import ChatCompletion
from .streams import ChatStream
from .types import DeletedSession, LoadedPages, SessionInfo, SessionPage, build, items

PAGES_TYPE = "application/octet-stream"


def _info(payload: Any) -> SessionInfo:
    return build(SessionInfo, payload, details=payload)


class SessionsResource:
    """The tenant's sessions."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self,
        *,
        model: str | None = None,
        ttl_s: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> SessionInfo:
        """Create a session, which expires `ttl_s` seconds after its last use."""
        given = {"model": model, "ttl_s": ttl_s, "metadata": metadata}
        body = {name: value for name, value in given.items() if value is not None}
        answer = await self._transport.call(
            "POST",
            "/v1/sessions",
            body=body,
            timeout_s=timeout_s,
            idempotency_key=idempotency_key,
        )
        return _info(answer.payload)

    async def list(
        self, *, limit: int | None = None, after: str | None = None, timeout_s: float | None = None
    ) -> SessionPage:
        """Return one page of sessions; its `next` is the `after` of the following page."""
        query = {"limit": limit, "after": after}
        answer = await self._transport.call("GET", "/v1/sessions", query=query, timeout_s=timeout_s)
        return build(
            SessionPage, answer.payload, data=[_info(item) for item in items(answer.payload)]
        )

    async def iterate(
        self, *, page: int = 100, timeout_s: float | None = None
    ) -> AsyncIterator[SessionInfo]:
        """Yield every session, asking for `page` at a time."""
        after: str | None = None
        while True:
            found = await self.list(limit=page, after=after, timeout_s=timeout_s)
            for session in found.data:
                yield session
            if not found.has_more or found.next is None:
                return
            after = found.next

    async def get(
        self, session: str, *, include_messages: bool = False, timeout_s: float | None = None
    ) -> SessionInfo:
        """Return a session, with its messages if requested; NotFoundError if it is gone."""
        path = f"/v1/sessions/{segment(session)}"
        query = {"include": "messages" if include_messages else None}
        return _info(
            (await self._transport.call("GET", path, query=query, timeout_s=timeout_s)).payload
        )

    async def update(
        self,
        session: str,
        *,
        ttl_s: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        pin: bool | None = None,
        timeout_s: float | None = None,
    ) -> SessionInfo:
        """Set a session's `ttl_s` (seconds), metadata, or `pin`, which keeps its pages from eviction; None: no change.

        ConflictError (`pin_over_budget`) if no more sessions can be pinned.
        """
        given = {"ttl_s": ttl_s, "metadata": metadata, "pin": pin}
        body = {name: value for name, value in given.items() if value is not None}
        path = f"/v1/sessions/{segment(session)}"
        answer = await self._transport.call("PATCH", path, body=body, timeout_s=timeout_s)
        return _info(answer.payload)

    async def delete(self, session: str, *, timeout_s: float | None = None) -> DeletedSession:
        """Delete a session and all its data; the result lists, as a proof, the searched stores and the removed data."""
        path = f"/v1/sessions/{segment(session)}"
        answer = await self._transport.call("DELETE", path, timeout_s=timeout_s)
        return build(DeletedSession, {"id": session, **answer.payload}, details=answer.payload)

    async def export(self, session: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the whole session as a JSON document for `load`, on this or another instance."""
        path = f"/v1/sessions/{segment(session)}/export"
        answer = await self._transport.call("GET", path, timeout_s=timeout_s)
        document: dict[str, Any] = answer.payload
        return document

    async def load(
        self,
        document: Mapping[str, Any],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> SessionInfo:
        """Make a session of an exported document, for its model or another one; the session gets a new id."""
        answer = await self._transport.call(
            "POST",
            "/v1/sessions/import",
            body=dict(document),
            query={"model": model},
            timeout_s=timeout_s,
            idempotency_key=idempotency_key,
        )
        return _info(answer.payload)

    async def export_pages(
        self, session: str, *, timeout_s: float | None = GENERATION_TIMEOUT_S
    ) -> AsyncIterator[bytes]:
        """Yield the bytes of a session's computed pages that are stored outside the workers, for `load_pages`."""
        path = f"/v1/sessions/{segment(session)}/export/pages"
        headers = {"Accept": PAGES_TYPE}
        async for data in self._transport.stream(path, headers=headers, timeout_s=timeout_s):
            yield data

    async def load_pages(
        self,
        session: str,
        pages: bytes | Iterable[bytes] | AsyncIterable[bytes],
        *,
        timeout_s: float | None = None,
    ) -> LoadedPages:
        """Store the exported pages of a loaded session, from the same model; the call may be repeated.

        ConflictError (`fingerprint_mismatch`) if another model computed them.
        """
        answer = await self._transport.send(
            f"/v1/sessions/{segment(session)}/import/pages",
            _parts(pages),
            content_type=PAGES_TYPE,
            timeout_s=timeout_s,
        )
        return build(LoadedPages, answer.payload)


async def _parts(data: bytes | Iterable[bytes] | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    if isinstance(data, AsyncIterable):
        async for part in data:
            yield part
        return
    for part in [data] if isinstance(data, bytes) else data:
        yield part


class Session:
    """One conversation: `chat` and `stream` send only the new messages."""

    def __init__(self, transport: Transport, id: str) -> None:
        self._chat = ChatCompletionsResource(transport)
        self._sessions = SessionsResource(transport)
        self.id = id

    async def chat(self, message: Messages, **options: Unpack[ChatOptions]) -> ChatCompletion:
        """Send a text or messages, and return the answer; the server remembers both.

        ConflictError (`session_busy`) while another turn is being answered.
        """
        return await self._chat.create(message, **self._turn(options))

    async def stream(self, message: Messages, **options: Unpack[ChatOptions]) -> ChatStream:
        """Send a text or messages, and return the answer as a stream."""
        return await self._chat.stream(message, **self._turn(options))

    def _turn(self, options: ChatOptions) -> ChatOptions:
        turn = options.copy()
        turn.setdefault("session", self.id)
        return turn

    async def get(
        self, *, include_messages: bool = False, timeout_s: float | None = None
    ) -> SessionInfo:
        """Return the session's state, with its messages if requested."""
        return await self._sessions.get(
            self.id, include_messages=include_messages, timeout_s=timeout_s
        )

    async def delete(self, *, timeout_s: float | None = None) -> DeletedSession:
        """Delete the session."""
        return await self._sessions.delete(self.id, timeout_s=timeout_s)

    async def export(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the whole session as a JSON document."""
        return await self._sessions.export(self.id, timeout_s=timeout_s)
