"""/v1/sessions: conversations that the server keeps: create, list, read, change, delete with proof, export, import."""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec
from aiohttp import web

from common.bus import Bus
from common.errors import InvalidRequest, TooLarge
from common.ids import job_id, ulid
from common.registry.idempotency import Idempotency
from common.registry.sessions import Sessions
from common.wire.message import encode
from common.wire.sessions import SessionRecord, SessionResult, SessionWork, messages, shown
from common.wire.workflows import ResponseOptions
from services.router.admission.job_spec import JobSpec, RequestContext
from services.router.admission.policy import SESSION_CLASSES, SESSIONS
from services.router.cards import Cards
from services.router.http.job_replies import JobReplies
from services.router.http.receiver import MODEL, Receiver, page_limit
from services.router.http.records import TenantRecords
from services.router.http.replies import reply, reply_json
from services.router.text.bodies import (
    SessionBody,
    SessionChangeBody,
    SessionImportBody,
    check_metadata,
    decode,
)
from services.router.text.passages import with_citations
from services.router.text.requests import Parcel, choose
from services.router.text.tokens import Spec


class SessionsApi:
    """Reads and writes sessions on the bus; kv_store does the operations that need pages or all sessions."""

    def __init__(
        self,
        receiver: Receiver,
        records: TenantRecords,
        bus: Bus,
        cards: Cards,
        replies: JobReplies,
        ttl_s: int,
    ) -> None:
        self._receiver, self._records, self._bus = receiver, records, bus
        self._cards, self._replies, self._ttl_s = cards, replies, ttl_s
        self._sessions = Sessions(bus)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of sessions, without those of the pages' bytes."""
        one = "/v1/sessions/{id}"
        return [
            web.get("/v1/sessions", self.list_page),
            web.post("/v1/sessions", self.create),
            web.post("/v1/sessions/import", self.load),
            web.get(one, self.get),
            web.post(one, self.change),
            web.patch(one, self.change),
            web.delete(one, self.delete),
            web.get(f"{one}/export", self.export),
            web.get(f"{one}/pages", self.pages),
        ]

    # -- by the router ---------------------------------------------------------------------------------

    async def create(self, request: web.Request) -> web.Response:
        """Create a session; the same Idempotency-Key returns the same session."""
        raw = await self._receiver.body(request)
        body = decode(raw, SessionBody) if raw.strip() else SessionBody()
        caller = self._receiver.context(request, raw)
        metadata = body.metadata or {}
        check_metadata(metadata, "metadata")
        spec = await self._model(body.model)
        request[MODEL] = spec.name
        name = await self._new_id(spec)
        if caller.idempotency_key:
            name = await Idempotency(self._bus).claim(
                caller.tenant, caller.idempotency_key, caller.body_hash, name
            )
            known = await self._sessions.get(name)
            if known is not None:
                return reply_json(shown(known), status=201)
        now = self._bus.clock.now_ms()
        record = SessionRecord(
            id=name,
            tenant=caller.tenant,
            model=spec.name,
            fingerprint=spec.fingerprint,
            version=0,
            tokens=0,
            turns=0,
            ttl_s=body.ttl_s or self._ttl_s,
            created_ms=now,
            updated_ms=now,
            metadata=msgspec.json.encode(metadata),
        )
        await self._sessions.create(record)
        return reply_json(shown(record), status=201)

    async def _model(self, name: str | None) -> Spec:
        default = name or await self._cards.generate_default()
        return choose(await self._cards.specs(), name, default, ("generate",))

    async def _new_id(self, spec: Spec) -> str:
        unique = ulid(self._bus.clock.now_ms())
        return job_id(await self._cards.family(spec.name, unique), unique)

    async def get(self, request: web.Request) -> web.Response:
        """Return a session with the request of its running turn, and its messages if the client asks for them."""
        record = await self._records.session(request)
        include = [part for part in request.query.get("include", "").split(",") if part]
        if set(include) - {"messages"}:
            raise InvalidRequest(
                f"include is {request.query['include'][:40]!r}: expected messages",
                code="invalid_value",
                param="include",
            )
        body = shown(record) | {"running": await self._running(record)}
        if include:
            body["messages"] = with_citations(messages(await self._sessions.turns(record.id)))
        return reply_json(body)

    async def _running(self, record: SessionRecord) -> str | None:
        """Return the request of a session's running turn, None if no turn runs."""
        if await self._sessions.running_turn(record) is None:
            return None
        jobs = await self._sessions.jobs(record.id)
        return jobs.get(record.busy) or record.busy

    async def change(self, request: web.Request) -> web.Response:
        """Set a session's time to live and metadata, and pin or unpin it; the time to live starts now."""
        raw = await self._receiver.body(request)
        caller = self._receiver.context(request, raw)
        record = await self._records.session(request)
        body = decode(raw, SessionChangeBody) if raw.strip() else SessionChangeBody()
        metadata = None
        if body.metadata is not None:
            check_metadata(body.metadata, "metadata")
            metadata = msgspec.json.encode(body.metadata)
        if body.pin is not None:
            await self._work(request, caller, "pin" if body.pin else "unpin", session=record.id)
        await self._sessions.touch(record.id, body.ttl_s or 0, metadata)
        return reply_json(shown(await self._records.session(request)))

    # -- by kv_store -----------------------------------------------------------------------------------

    async def list_page(self, request: web.Request) -> web.Response:
        """List the tenant's sessions, last used first."""
        limit = page_limit(request)
        after = request.query.get("after") or None
        if after is not None and (len(after) > 300 or not after.isprintable()):
            raise InvalidRequest(
                "after: expected `next` of the page before", code="invalid_cursor", param="after"
            )
        caller = self._receiver.context(request)
        return reply(await self._work(request, caller, "list", cursor=after, limit=limit))

    async def export(self, request: web.Request) -> web.Response:
        """Return a session as one document."""
        return reply(await self._of_one(request, "export"))

    async def pages(self, request: web.Request) -> web.Response:
        """Return the tiers in which a session's pages lie."""
        return reply(await self._of_one(request, "places"), headers={"Cache-Control": "no-store"})

    async def delete(self, request: web.Request) -> web.Response:
        """Delete a session with everything run for it; the response lists the removed items and the searched places."""
        return reply(await self._of_one(request, "delete", deleted=True))

    async def erase(
        self, request: web.Request, caller: RequestContext, session: str, turn: str = ""
    ) -> None:
        """Delete a session of the caller, or one of its turns, with everything run for it, within another request."""
        await self._work(request, caller, "delete", session=session, turn=turn)

    async def load(self, request: web.Request) -> web.Response:
        """Make a session from an exported document; `?model=` replaces the document's model."""
        raw = await self._receiver.body(request)
        caller = self._receiver.context(request, raw)
        body = decode(raw, SessionImportBody)
        check_metadata(body.metadata, "metadata")
        spec = await self._model(request.query.get("model") or body.model)
        name = await self._new_id(spec)
        ttl_s = body.ttl_s or self._ttl_s
        made = await self._work(request, caller, "import", session=name, body=raw, ttl_s=ttl_s)
        return reply(made, status=201)

    async def _of_one(
        self,
        request: web.Request,
        op: Literal["export", "delete", "places"],
        *,
        deleted: bool = False,
    ) -> bytes:
        caller = self._receiver.context(request)
        record = await self._records.session(request, deleted=deleted)
        return await self._work(request, caller, op, session=record.id)

    async def _work(
        self,
        request: web.Request,
        caller: RequestContext,
        op: Literal["list", "export", "import", "delete", "pin", "unpin", "places"],
        **given: Any,
    ) -> bytes:
        """Have kv_store carry out an operation and return its JSON."""
        work = SessionWork(op=op, tenant=caller.tenant, **given)
        try:
            payload = encode(work)
        except ValueError as error:
            raise TooLarge(f"the session is too large: {error}", code="session_too_large") from None
        options = ResponseOptions(kind="session", model=request.get(MODEL, ""))
        spec = JobSpec(SESSIONS, SESSION_CLASSES, Parcel(payload, 1, 0), options)
        return cast("SessionResult", await self._replies.fetch(request, caller, spec)).body
