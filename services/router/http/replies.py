"""Responses that are one JSON body: results, errors in OpenAI's shape, and aiohttp's own refusals in that shape."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from aiohttp import web

from common.errors import (
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    SpillwayError,
    TooLarge,
)


def reply(body: bytes, status: int = 200, headers: dict[str, Any] | None = None) -> web.Response:
    """Return a JSON response of encoded JSON."""
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def reply_json(
    value: object, status: int = 200, headers: dict[str, Any] | None = None
) -> web.Response:
    """Return a JSON response of a value."""
    return reply(msgspec.json.encode(value), status, headers)


def error_response(error: SpillwayError) -> web.Response:
    """Return an error in OpenAI's shape, with the headers that OpenAI's clients obey."""
    response = reply_json(error.body(), status=error.http_status)
    if error.http_status in {429, 503}:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    response.headers["x-should-retry"] = "true" if error.retryable else "false"
    if error.http_status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.http_status in {408, 413} or error.code == "draining":
        response.force_close()
    return response


def from_http(error: web.HTTPException, request: web.BaseRequest) -> web.Response:
    """Return a refusal by aiohttp in OpenAI's shape; answer OPTIONS of a known path."""
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
