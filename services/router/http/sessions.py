"""/v1/sessions: conversations the server keeps: create, list, read, change, delete with proof, export, import."""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec
from aiohttp import web

from common.errors import InvalidRequest, NotFound, TooLarge
from common.ids import Family, job_id, ulid
from common.registry.idempotency import Idempotency
from common.registry.sessions import Sessions
from common.wire.message import encode
from common.wire.session_views import messages, shown
from common.wire.sessions import SessionRecord, SessionResult, SessionWork
from common.wire.workflows import ResponseOptions
from services.router.admission.job_spec import JobSpec, RequestContext
from services.router.http.context import MODEL, ROUTER, TENANT, Router, reply
from services.router.text.bodies import check_metadata, decode
from services.router.text.grounding import with_citations
from services.router.text.requests import Parcel, choose
from services.router.text.session_bodies import SessionBody, SessionChangeBody, SessionImportBody
from services.router.text.tokens import Spec

FAMILY, CLASSES = Family("sessions"), ("kv",)
_MOST = 1000


# -- one session, read and written here ----------------------------------------------------------------------


async def create(request: web.Request) -> web.Response:
    """Create a session; under the same Idempotency-Key the same one."""
    router = request.app[ROUTER]
    raw = await router.body(request)
    body = decode(raw, SessionBody) if raw.strip() else SessionBody()
    caller = router.caller(request, raw)
    metadata = body.metadata or {}
    check_metadata(metadata, "metadata")
    spec = await _model(router, body.model)
    request[MODEL] = spec.name
    name = await _new_id(router, spec)
    if caller.idempotency_key:
        name = await Idempotency(router.bus).claim(
            caller.tenant, caller.idempotency_key, caller.body_hash, name
        )
        known = await Sessions(router.bus).get(name)
        if known is not None:
            return reply(msgspec.json.encode(shown(known)), status=201)
    now = router.clock.now_ms()
    record = SessionRecord(
        id=name,
        tenant=caller.tenant,
        model=spec.name,
        fingerprint=spec.fingerprint,
        version=0,
        tokens=0,
        turns=0,
        ttl_s=body.ttl_s or router.config.session_ttl_s,
        created_ms=now,
        updated_ms=now,
        metadata=msgspec.json.encode(metadata),
    )
    await Sessions(router.bus).create(record)
    return reply(msgspec.json.encode(shown(record)), status=201)


async def _model(router: Router, name: str | None) -> Spec:
    default = name or await router.cards.generate_default()
    return choose(await router.cards.specs(), name, default, ("generate",))


async def _new_id(router: Router, spec: Spec) -> str:
    unique = ulid(router.clock.now_ms())
    return job_id(await router.cards.family(spec.name, unique), unique)


async def own(request: web.Request, *, deleted: bool = False) -> SessionRecord:
    """Return the session a path names; NotFound if the tenant has none of that id."""
    router, name = request.app[ROUTER], request.match_info["id"]
    try:
        found = await Sessions(router.bus).stored(name)
    except ValueError:
        found = None
    if found is None or found.tenant != request[TENANT] or (found.deleted and not deleted):
        raise NotFound(
            f"no session {name[:120]!r}: it is unknown, deleted or expired",
            code="session_not_found",
        )
    request[MODEL] = found.model
    return found


async def get(request: web.Request) -> web.Response:
    """Return a session, with the request its running turn is, and with its messages if asked for."""
    router = request.app[ROUTER]
    record = await own(request)
    include = [part for part in request.query.get("include", "").split(",") if part]
    if set(include) - {"messages"}:
        raise InvalidRequest(
            f"include is {request.query['include'][:40]!r}: expected messages",
            code="invalid_value",
            param="include",
        )
    body = shown(record) | {"running": await _running(router, record)}
    if include:
        body["messages"] = with_citations(messages(await Sessions(router.bus).turns(record.id)))
    return reply(msgspec.json.encode(body))


async def _running(router: Router, record: SessionRecord) -> str | None:
    """Return the request that is a session's turn now, if one runs."""
    state = await router.bus.jobs.get(record.busy) if record.busy else None
    if state is None or state.over:
        return None
    jobs = await Sessions(router.bus).jobs(record.id)
    return jobs.get(record.busy) or record.busy


async def change(request: web.Request) -> web.Response:
    """Set a session's time to live and metadata, and pin or unpin it; it lives that long from now on."""
    router = request.app[ROUTER]
    raw = await router.body(request)
    caller = router.caller(request, raw)
    record = await own(request)
    body = decode(raw, SessionChangeBody) if raw.strip() else SessionChangeBody()
    metadata = None
    if body.metadata is not None:
        check_metadata(body.metadata, "metadata")
        metadata = msgspec.json.encode(body.metadata)
    if body.pin is not None:
        await _work(request, caller, "pin" if body.pin else "unpin", session=record.id)
    await Sessions(router.bus).touch(record.id, body.ttl_s or 0, metadata)
    return reply(msgspec.json.encode(shown(await own(request))))


# -- what kv_store does --------------------------------------------------------------------------------------


async def list_page(request: web.Request) -> web.Response:
    """List the tenant's sessions, last used first."""
    text = request.query.get("limit", "100")
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= _MOST):
        raise InvalidRequest(
            f"limit is {text[:40]!r}: expected 1 to {_MOST}", code="invalid_value", param="limit"
        )
    after = request.query.get("after") or None
    if after is not None and (len(after) > 300 or not after.isprintable()):
        raise InvalidRequest(
            "after: expected `next` of the page before", code="invalid_cursor", param="after"
        )
    caller = request.app[ROUTER].caller(request)
    return reply(await _work(request, caller, "list", cursor=after, limit=int(text)))


async def export(request: web.Request) -> web.Response:
    """Return a session as one document."""
    caller = request.app[ROUTER].caller(request)
    record = await own(request)
    return reply(await _work(request, caller, "export", session=record.id))


async def pages(request: web.Request) -> web.Response:
    """Return in which tiers a session's pages lie."""
    caller = request.app[ROUTER].caller(request)
    record = await own(request)
    return reply(
        await _work(request, caller, "places", session=record.id),
        headers={"Cache-Control": "no-store"},
    )


async def delete(request: web.Request) -> web.Response:
    """Delete a session with everything run for it; the answer says what was removed and searched."""
    caller = request.app[ROUTER].caller(request)
    record = await own(request, deleted=True)
    return reply(await _work(request, caller, "delete", session=record.id))


async def load(request: web.Request) -> web.Response:
    """Make a session of an exported document; `?model=` names another model than the document's."""
    router = request.app[ROUTER]
    raw = await router.body(request)
    caller = router.caller(request, raw)
    body = decode(raw, SessionImportBody)
    check_metadata(body.metadata, "metadata")
    spec = await _model(router, request.query.get("model") or body.model)
    name = await _new_id(router, spec)
    ttl_s = body.ttl_s or router.config.session_ttl_s
    made = await _work(request, caller, "import", session=name, body=raw, ttl_s=ttl_s)
    return reply(made, status=201)


async def _work(
    request: web.Request,
    caller: RequestContext,
    op: Literal["list", "export", "import", "delete", "pin", "unpin", "places"],
    **given: Any,
) -> bytes:
    """Have kv_store do something and return its JSON."""
    router = request.app[ROUTER]
    work = SessionWork(op=op, tenant=caller.tenant, **given)
    try:
        payload = encode(work)
    except ValueError as error:
        raise TooLarge(f"the session is too large: {error}", code="session_too_large") from None
    view = ResponseOptions(kind="session", model=request.get(MODEL, ""))
    ask = JobSpec(FAMILY, CLASSES, Parcel(payload, 1, 0), view)
    name, answer = await router.run(request, caller, ask)
    router.runner.delivered(caller, name)
    return cast("SessionResult", answer).body
