"""Sessions: conversations the server remembers, so that a turn carries only what is new."""

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
        """Create a session; it ends `ttl_s` seconds after its last use."""
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
        """Return one page; its `next` is the `after` of the following one."""
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
        """Return a session, with what was said in it if asked for; NotFoundError if there is none any more."""
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
        """Set how long it is kept, its metadata, or whether what was computed for it stays; what is not given stays.

        ConflictError (`pin_over_budget`) where more cannot be pinned.
        """
        given = {"ttl_s": ttl_s, "metadata": metadata, "pin": pin}
        body = {name: value for name, value in given.items() if value is not None}
        path = f"/v1/sessions/{segment(session)}"
        answer = await self._transport.call("PATCH", path, body=body, timeout_s=timeout_s)
        return _info(answer.payload)

    async def delete(self, session: str, *, timeout_s: float | None = None) -> DeletedSession:
        """Delete a session and everything kept of it; the proof lists what was looked through and removed."""
        path = f"/v1/sessions/{segment(session)}"
        answer = await self._transport.call("DELETE", path, timeout_s=timeout_s)
        return build(DeletedSession, {"id": session, **answer.payload}, details=answer.payload)

    async def export(self, session: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the whole session as a JSON document that `load` takes, here or on another instance."""
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
        """Make a session of an exported document, for its model or another one; it gets an id of its own."""
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
        """Yield the bytes of what was computed for a session and is kept below the workers, for `load_pages`."""
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
        """Have a loaded session find what was computed for it elsewhere, by the same model; may be repeated.

        ConflictError (`fingerprint_mismatch`) where it was another model.
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
    """One conversation: `chat` and `stream` send only what is new."""

    def __init__(self, transport: Transport, id: str) -> None:
        self._chat = ChatCompletionsResource(transport)
        self._sessions = SessionsResource(transport)
        self.id = id

    async def chat(self, message: Messages, **options: Unpack[ChatOptions]) -> ChatCompletion:
        """Say something (a text, or messages), and return the answer; both are remembered.

        ConflictError (`session_busy`) while another turn is being answered.
        """
        return await self._chat.create(message, **self._turn(options))

    async def stream(self, message: Messages, **options: Unpack[ChatOptions]) -> ChatStream:
        """Say something, and return the answer as it is made."""
        return await self._chat.stream(message, **self._turn(options))

    def _turn(self, options: ChatOptions) -> ChatOptions:
        turn = options.copy()
        turn.setdefault("session", self.id)
        return turn

    async def get(
        self, *, include_messages: bool = False, timeout_s: float | None = None
    ) -> SessionInfo:
        """Return what the server knows of it, with what was said in it if asked for."""
        return await self._sessions.get(
            self.id, include_messages=include_messages, timeout_s=timeout_s
        )

    async def delete(self, *, timeout_s: float | None = None) -> DeletedSession:
        """Delete it."""
        return await self._sessions.delete(self.id, timeout_s=timeout_s)

    async def export(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return all of it as a JSON document."""
        return await self._sessions.export(self.id, timeout_s=timeout_s)
