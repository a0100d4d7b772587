"""What happens to every request: an id, errors in OpenAI's shape, metrics, the key's tenant, and draining."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from common import log, tracing
from common.errors import (
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    SpillwayError,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from common.ids import ulid
from common.registry.api_keys import KEY_PREFIX
from services.router import metrics
from services.router.http import dashboard_files
from services.router.http.context import KEY, MODEL, REQUEST_ID, ROUTER, TENANT, reply

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"}) | dashboard_files.PATHS
DEFAULT_TENANT = "default"
_CONTROL = re.compile(r"%(?:0[0-9a-fA-F]|1[0-9a-fA-F]|7[fF])")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = log.get("router")


def error_response(error: SpillwayError) -> web.Response:
    """Return an error in OpenAI's shape, with the headers its clients obey."""
    response = reply(msgspec.json.encode(error.body()), status=error.http_status)
    if error.http_status in {429, 503}:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    response.headers["x-should-retry"] = "true" if error.retryable else "false"
    if error.http_status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.http_status in {408, 413} or error.code == "draining":
        response.force_close()
    return response


def from_http(error: web.HTTPException, request: web.BaseRequest) -> web.Response:
    """Return aiohttp's own refusals in our shape; OPTIONS of a known path is answered."""
    known: SpillwayError
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        if request.method == "OPTIONS":
            return web.Response(status=204, headers={"Allow": f"{allowed}, OPTIONS"})
        known = MethodNotAllowed(f"{request.method} is not allowed here; expected one of {allowed}")
        response = error_response(known)
        response.headers["Allow"] = allowed
        return response
    if error.status == 404:
        known = NotFound(f"no route {request.path[:200]!r}", code="route_not_found")
    elif error.status == 413:
        known = TooLarge("the body is too large", code="body_too_large")
    elif error.status < 500:
        known = InvalidRequest(error.reason or "the request cannot be understood")
    else:
        known = InternalError(error.reason or "internal error")
    return error_response(known)


def _id(request: web.Request) -> str:
    """Return the request's id: its job's, or one of its own where it came to none."""
    if REQUEST_ID not in request:
        request[REQUEST_ID] = f"req-{ulid()}"
    return request[REQUEST_ID]


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"


@web.middleware
async def outer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every response an id, every error its shape, and count it."""
    router = request.app[ROUTER]
    began = time.perf_counter()
    router.entered()
    response: web.StreamResponse | None = None
    try:
        response = await _traced(request, handler)
    finally:
        router.left()
        status = response.status if response is not None else 499
        labels = _route(request), request.get(MODEL, "")
        metrics.REQUESTS.labels(*labels, str(status)).inc()
        metrics.DURATION.labels(*labels).observe(time.perf_counter() - began)
    if not response.prepared:
        response.headers["x-request-id"] = _id(request)
    return response


async def _traced(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer within the trace a client's `traceparent` names, and in a span of this router's if it makes any."""
    header = request.headers.get("traceparent")
    if header is None and not tracing.on():
        return await _answered(request, handler)
    with tracing.use(tracing.remote(header or "")):
        if request.path in OPEN_PATHS or not tracing.on():
            return await _answered(request, handler)
        route = _route(request)
        told = {"http.request.method": request.method, "http.route": route}
        with tracing.span(f"{request.method} {route}", "server", told) as span:
            response = await _answered(request, handler)
            span.set_attributes(
                {"http.response.status_code": response.status, **_told(request, route)}
            )
            if response.status >= 500:
                tracing.fail(span, str(response.status))
            return response


def _told(request: web.Request, route: str) -> dict[str, str]:
    """Return what a request turned out to be, by OpenTelemetry's names."""
    found = {"spillway.request_id": _id(request)}
    if model := request.get(MODEL):
        found |= {"gen_ai.request.model": model, "gen_ai.provider.name": "spillway"}
    if operation := _OPERATIONS.get(route):
        found["gen_ai.operation.name"] = operation
    return found


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except SpillwayError as error:
        if error.http_status == 500:
            _log.error("request_failed", request_id=_id(request), code=error.code)
        return error_response(error)
    except web.HTTPException as error:
        return from_http(error, request)
    except asyncio.CancelledError:
        raise
    except Exception:  # noqa: BLE001 - the boundary of a request: a bug must not end the connection silently
        _log.exception("request_crashed", request_id=_id(request), route=_route(request))
        return error_response(InternalError("an internal error; the log has it under x-request-id"))


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse while draining, paths with control characters, and keys that are missing or wrong."""
    router = request.app[ROUTER]
    if request.path in OPEN_PATHS:
        return await handler(request)
    if router.admission.draining and request.method not in {"GET", "HEAD"}:
        metrics.REFUSED.labels("draining").inc()
        raise Unavailable("this router is stopping; try again", code="draining", retry_after_s=1)
    if _CONTROL.search(request.rel_url.raw_path):
        raise InvalidRequest("the path holds a control character", code="invalid_path")
    text = _bearer(request)
    if router.keys_on and not text:
        raise Unauthenticated(
            "no API key: send Authorization: Bearer sk-sw-…; `spillway keys create` makes one",
            code="missing_api_key",
        )
    # Where none is needed, clients that must send something send anything; what is meant as a key is held to be one.
    if router.keys_on or (text.startswith(KEY_PREFIX) and router.config.keys != "off"):
        key = await router.keys.check(text)
        request[KEY], request[TENANT] = key, key.tenant
    else:
        request[TENANT] = DEFAULT_TENANT
    return await handler(request)


def _bearer(request: web.Request) -> str:
    """Return the text a request sends as its key, "" if it sends none."""
    scheme, _, text = request.headers.get("Authorization", "").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else ""
