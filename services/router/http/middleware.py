"""Middlewares of every route: request ids, errors in OpenAI's shape, metrics, spans and keys."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from aiohttp import web

from common import log, tracing
from common.clock import Clock
from common.errors import InternalError, InvalidRequest, SpillwayError, Unauthenticated, Unavailable
from common.ids import ulid
from common.registry.api_keys import KEY_PREFIX, ApiKey, KeyStore
from services.router import metrics
from services.router.admission.controller import AdmissionController
from services.router.http import dashboard_files
from services.router.http.active_requests import ActiveRequests
from services.router.http.receiver import BEGAN_S, KEY, MODEL, REQUEST_ID, TENANT
from services.router.http.replies import error_response, from_http

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/openapi.json"}) | dashboard_files.PATHS
DEFAULT_TENANT = "default"
_CONTROL = re.compile(r"%(?:0[0-9a-fA-F]|1[0-9a-fA-F]|7[fF])")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/embed": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = log.get("router")


class RequestObserver:
    """The outermost middleware except for CORS: counts and traces every request, and gives every response an id."""

    def __init__(self, active: ActiveRequests, clock: Clock) -> None:
        self._active, self._clock = active, clock

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request; a client that leaves before its response counts as 499."""
        request[BEGAN_S] = self._clock.perf_s()
        response: web.StreamResponse | None = None
        with self._active:
            try:
                response = await _traced(request, handler)
            finally:
                status = response.status if response is not None else 499
                self._count(_route(request), request.get(MODEL, ""), status, request[BEGAN_S])
        if not response.prepared:
            response.headers["x-request-id"] = _id(request)
        return response

    def begin(self) -> None:
        """Count a request that skips the middlewares as in progress; `end` or `leave` must follow."""
        self._active.__enter__()

    def end(self, route: str, model: str, status: int, began_s: float) -> None:
        """Count the answer to a request that skipped the middlewares."""
        self._active.__exit__()
        self._count(route, model, status, began_s)

    def leave(self) -> None:
        """Stop counting a request that goes through the middlewares after all."""
        self._active.__exit__()

    def _count(self, route: str, model: str, status: int, began_s: float) -> None:
        metrics.requests(route, model, status).inc()
        metrics.duration(route, model).observe(self._clock.perf_s() - began_s)


class KnownCaller(NamedTuple):
    """A caller whose key, if it needs one, was checked a moment ago."""

    tenant: str
    key: ApiKey | None


class AccessGuard:
    """The inner middleware: finds the tenant of a key; refuses wrong keys, wrong paths, and writes while draining.

    With `keys_on` every request needs a key. With `checks` a sent key is checked even if none is needed.
    """

    def __init__(
        self, admission: AdmissionController, keys: KeyStore, *, keys_on: bool, checks: bool
    ) -> None:
        self._admission, self._keys = admission, keys
        self._keys_on, self._checks = keys_on, checks

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Pass a request on to its handler, or refuse the request."""
        if request.path in OPEN_PATHS:
            return await handler(request)
        if self._admission.draining and request.method not in {"GET", "HEAD"}:
            metrics.REFUSED.labels("draining").inc()
            raise Unavailable(
                "this router is stopping; try again", code="draining", retry_after_s=1
            )
        if _CONTROL.search(request.rel_url.raw_path):
            raise InvalidRequest("the path holds a control character", code="invalid_path")
        text = bearer(request.headers)
        if self._keys_on and not text:
            raise Unauthenticated(
                "no API key: send Authorization: Bearer sk-sw-…; `spillway keys create` makes one",
                code="missing_api_key",
            )
        if self._is_checked(text):
            key = await self._keys.check(text)
            request[KEY], request[TENANT] = key, key.tenant
        else:
            request[TENANT] = DEFAULT_TENANT
        return await handler(request)

    def known(self, text: str) -> KnownCaller | None:
        """Return the caller whose key is `text`; None if the key would have to be read from Redis."""
        if not self._is_checked(text):
            return KnownCaller(DEFAULT_TENANT, None)
        key = self._keys.known(text)
        return None if key is None else KnownCaller(key.tenant, key)

    def _is_checked(self, text: str) -> bool:
        # A client that cannot omit the key sends any text if none is needed; only a text in the form of a key is
        # checked.
        return self._keys_on or (text.startswith(KEY_PREFIX) and self._checks)


def _id(request: web.Request) -> str:
    """Return the request's id: its job's id, or a new id if no job was admitted."""
    if REQUEST_ID not in request:
        request[REQUEST_ID] = f"req-{ulid()}"
    return request[REQUEST_ID]


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"


async def _traced(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer within the trace of a client's `traceparent`, and in a span of this router if tracing is on."""
    header = request.headers.get("traceparent")
    if header is None and not tracing.on():
        return await _answered(request, handler)
    with tracing.use(tracing.remote(header or "")):
        if request.path in OPEN_PATHS or not tracing.on():
            return await _answered(request, handler)
        route = _route(request)
        attributes = {"http.request.method": request.method, "http.route": route}
        with tracing.span(f"{request.method} {route}", "server", attributes) as span:
            response = await _answered(request, handler)
            span.set_attributes(
                {"http.response.status_code": response.status, **_attributes(request, route)}
            )
            if response.status >= 500:
                tracing.fail(span, str(response.status))
            return response


def _attributes(request: web.Request, route: str) -> dict[str, str]:
    """Return the attributes of a handled request under OpenTelemetry's names."""
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


def bearer(headers: Mapping[str, str]) -> str:
    """Return the text that a request sends as its key, "" if it sends none."""
    scheme, _, text = headers.get("Authorization", "").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else ""
