"""CORS: the headers with which browsers let pages of other origins use the API, for the origins of a setting."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from common.errors import ConfigError

_EXPOSED = "x-request-id, Retry-After, x-should-retry"
_METHODS = "GET, POST, PATCH, DELETE, OPTIONS"
_KEPT_S = "600"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def parse_origins(text: str) -> frozenset[str]:
    """Return the origins of the setting's text; ConfigError for an origin that no browser would send."""
    found = frozenset(filter(None, (origin.strip().lower() for origin in text.split(","))))
    for origin in found - {"*"}:
        scheme, _, host = origin.partition("://")
        if not scheme or not host or "/" in host:
            raise ConfigError(
                f"SPILLWAY_CORS_ORIGINS has {origin[:80]!r}: expected * or scheme://host[:port], several with commas"
            )
    return found


class CrossOrigin:
    """The outermost middleware: answers a browser's preflight requests, and adds headers to responses.

    Pages send keys in a header themselves, and browsers never do, so no response allows credentials.
    """

    def __init__(self, origins: frozenset[str]) -> None:
        self._origins = origins

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a preflight request, or handle a request and add headers to its response."""
        asked = "Access-Control-Request-Method" in request.headers
        if request.method == "OPTIONS" and asked and self._allows(request):
            wanted = request.headers.get("Access-Control-Request-Headers", "")
            answer = web.Response(status=204)
            answer.headers["Access-Control-Allow-Methods"] = _METHODS
            answer.headers["Access-Control-Max-Age"] = _KEPT_S
            if wanted.isascii() and wanted.isprintable():
                answer.headers["Access-Control-Allow-Headers"] = wanted
            self._mark(request, answer)
            return answer
        response = await handler(request)
        if not response.prepared:
            self._mark(request, response)
        return response

    async def prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add headers to a response before it is sent: a stream's head is sent before its handler returns."""
        self._mark(request, response)

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin", "").lower()
        return bool(origin) and ("*" in self._origins or origin in self._origins)

    def _mark(self, request: web.Request, response: web.StreamResponse) -> None:
        if "*" not in self._origins and "Vary" not in response.headers:
            response.headers["Vary"] = "Origin"
        if self._allows(request):
            origin = "*" if "*" in self._origins else request.headers["Origin"]
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED
