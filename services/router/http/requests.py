"""/v1/requests/{id or idempotency key}: a request's state, result and cancellation, at any router."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from common import tracing
from common.errors import NotFound, SpillwayError
from common.registry.idempotency import Idempotency
from services.router.http.context import ROUTER, TENANT, Router, reply
from services.router.responses import answers
from services.router.responses.outcomes import error_of, result_of
from services.router.responses.results import present
from services.router.responses.sources import source_of


async def request_of(request: web.Request, router: Router) -> str:
    """Return the id of the request that a path names by id or idempotency key; NotFound unless it is the tenant's."""
    name = request.match_info["id"]
    if "~" not in name:  # not an id: the Idempotency-Key of a client that has no id yet
        name = await Idempotency(router.bus).claimed(request[TENANT], name) or name
    await router.requests.owned(name, request[TENANT])
    return name


async def get(request: web.Request) -> web.Response:
    """Return a request's state, and its result or error once it is over."""
    router = request.app[ROUTER]
    name = await request_of(request, router)
    await router.requests.note_reader(name)
    body = await _state(router, name)
    result = body.pop("result_body", None)
    encoded = msgspec.json.encode(body)
    if result is not None:
        encoded = encoded[:-1] + b',"result":' + result + b"}"
    return reply(encoded)


async def _state(router: Router, name: str) -> dict[str, Any]:
    state = await router.bus.jobs.get(name)
    if state is None:
        raise NotFound(f"no request {name!r}", code="request_not_found")
    body: dict[str, Any] = {
        "id": name,
        "object": "request",
        "state": state.state,
        "lane": state.lane,
        "created": state.created_ms // 1000,
        "deadline": state.deadline_ms / 1000,
        "attempts": state.attempts,
    }
    if state.traceparent:
        body["trace_id"] = tracing.trace_id(tracing.remote(state.traceparent))
    if state.replay_of:
        body["replay_of"] = state.replay_of
    if not state.over:
        return body
    events = await router.bus.jobs.log(name)
    if not events or not events[-1].ends:
        return body
    outcome = events[-1]
    if outcome.kind != "result":
        return {**body, **error_of(outcome).body()}
    try:
        view = await answers.view_of(router, name)
        if view is not None:
            source = await source_of(router, name)()
            body["result_body"] = await answers.whole(router, name, view, source)
            return body
        view = await router.requests.options(name)
        body["result_body"] = await present(router.bus, router.pool, name, result_of(outcome), view)
    except SpillwayError as error:
        body |= error.body()
    return body


async def cancel(request: web.Request) -> web.Response:
    """Cancel a request; one that is over stays as it is."""
    router = request.app[ROUTER]
    name = await request_of(request, router)
    verdict = await router.runner.cancel(name)
    state = await router.bus.jobs.get(name)
    body = {
        "id": name,
        "object": "request",
        "state": state.state if state else "cancelled",
        "cancelled": verdict in {"removed", "flagged"},
    }
    return reply(msgspec.json.encode(body))
