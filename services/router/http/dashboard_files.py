"""The dashboard's files: `/` and the files under `/dashboard/`, served from memory to anybody.

The files hold no data of the mesh: the pages ask the API for data, with the key that the user types in.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import NamedTuple

from aiohttp import web

INDEX = "index.html"
PREFIX = "/dashboard/"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# No inline scripts, no resources of other origins, no frames, since the pages show texts of documents and answers.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated each time: 304 if unchanged
}


class DashboardFile(NamedTuple):
    """One file of the dashboard, in memory."""

    body: bytes
    content_type: str
    etag: str


def _read() -> dict[str, DashboardFile]:
    found = {}
    for file in resources.files("services.router").joinpath("dashboard").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix not in _TYPES:
            continue
        body = file.read_bytes()
        path = "/" if file.name == INDEX else PREFIX + file.name
        etag = hashlib.blake2b(body, digest_size=12).hexdigest()
        found[path] = DashboardFile(body, _TYPES[suffix], etag)
    return found


PAGES = _read()
PATHS = frozenset(PAGES)


async def get(request: web.Request) -> web.Response:
    """Return a file, or 304 to a browser that has the file."""
    page = PAGES.get(request.path)
    if page is None:
        raise web.HTTPNotFound
    known = request.if_none_match or ()
    if any(tag.value in {page.etag, "*"} for tag in known):
        response = web.Response(status=304, headers=HEADERS)
    else:
        response = web.Response(
            body=page.body, headers=HEADERS, content_type=page.content_type, charset="utf-8"
        )
    response.etag = page.etag
    return response


def routes() -> list[web.RouteDef]:
    """Return the routes of the pages; they are no part of the API."""
    return [web.get("/", get), web.get(PREFIX + "{file}", get)]
