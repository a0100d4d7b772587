"""Receiving: bodies within their limits of size and time, and the headers that control how a request is treated."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Mapping

from aiohttp import web
from aiohttp.client_exceptions import ClientError
from aiohttp.http_exceptions import HttpProcessingError

from common.clock import Clock
from common.config import RouterConfig
from common.errors import InvalidRequest, RequestTimeout, TooLarge
from common.registry.api_keys import ApiKey
from services.router.admission.job_spec import RequestContext
from services.router.admission.policy import LOW_SHARE

# Values that middlewares and handlers attach to a request.
KEY = web.RequestKey("key", ApiKey)
TENANT = web.RequestKey("tenant", str)
REQUEST_ID = web.RequestKey("request_id", str)
MODEL = web.RequestKey("model", str)
BEGAN_S = web.RequestKey("began_s", float)  # by the clock's `perf_s`

MAX_RESUME_S = 300.0
GENERATION_S = 300.0
MOST_LISTED = 1000
_BROKEN = (web.RequestPayloadError, HttpProcessingError, ClientError)


class Receiver:
    """Reads the bodies and the headers of requests; every fault of a client is a SpillwayError of status 4xx."""

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self._config, self._clock = config, clock

    async def body(self, request: web.Request) -> bytes:
        """Return a request's whole body; 413 over `max_body_bytes`, 408 after `body_timeout_s`."""
        most, limit_s = self._config.max_body_bytes, self._config.body_timeout_s
        if (request.content_length or 0) > most:
            raise _too_large(most)
        if request.content.is_eof():  # small bodies arrive with the head
            return _at_hand(request, most)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(limit_s):
                while chunk := await request.content.readany():
                    size += len(chunk)
                    if size > most:
                        raise _too_large(most)
                    chunks.append(chunk)
        except TimeoutError:
            raise RequestTimeout(
                f"the body did not arrive within {limit_s:g} s; {size} bytes came"
            ) from None
        except _BROKEN as error:
            raise _broken(error) from None
        return b"".join(chunks)

    def takes(self, raw: bytes) -> bool:
        """Return whether a body is not larger than `max_body_bytes`."""
        return len(raw) <= self._config.max_body_bytes

    async def parts(self, request: web.Request) -> AsyncIterator[bytes]:
        """Yield a body of any size as it arrives; 408 if nothing arrives for `body_timeout_s`."""
        limit_s = self._config.body_timeout_s
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    part = await request.content.readany()
            except TimeoutError:
                raise RequestTimeout(
                    f"nothing more of the body arrived for {limit_s:g} s"
                ) from None
            except _BROKEN as error:
                raise _broken(error) from None
            if not part:
                return
            yield part

    def context(
        self, request: web.Request, raw: bytes = b"", *, default_timeout_s: float | None = None
    ) -> RequestContext:
        """Return the caller, the deadline and the other options in the headers; 400 for invalid headers."""
        default = default_timeout_s or self._config.request_timeout_s
        owner: ApiKey | None = request.get(KEY)
        own_s = self._own_s(request.headers, owner)
        low = _is_low(request, owner.priority if owner else "normal")
        key = _idempotency_key(request) if request.method == "POST" else ""
        now_ms = self._clock.now_ms()
        return RequestContext(
            tenant=request[TENANT],
            key=owner,
            deadline_ms=now_ms + int((own_s or default) * 1000),
            came_ms=now_ms,
            own=own_s is not None,
            share=LOW_SHARE if low else 1.0,
            resume_s=_seconds(request.headers, "Spillway-Resume", 0.0, MAX_RESUME_S, 0.0),
            idempotency_key=key,
            body_hash=_body_hash(request, raw) if key else b"",
        )

    def timeout_ms(self, headers: Mapping[str, str], owner: ApiKey | None) -> int:
        """Return the timeout in milliseconds of a request with these headers and the key `owner`."""
        return int((self._own_s(headers, owner) or self._config.request_timeout_s) * 1000)

    def _own_s(self, headers: Mapping[str, str], owner: ApiKey | None) -> float | None:
        """Return the timeout that a client or else its key sets, at most `max_timeout_s`; None if neither sets one."""
        most_s, key_s = self._config.max_timeout_s, owner.timeout_s if owner else 0.0
        found = _seconds(headers, "Spillway-Timeout", 0.001, most_s, key_s)
        return min(found, most_s) if found > 0 else None

    def spent_ms(self, request: web.Request) -> float:
        """Return the milliseconds since a request arrived."""
        return 1000 * (self._clock.perf_s() - request[BEGAN_S])

    def generation_context(self, request: web.Request, raw: bytes) -> RequestContext:
        """Return the context of a generation, whose default timeout is longer: answers take longer than vectors."""
        config = self._config
        default_s = min(max(config.request_timeout_s, GENERATION_S), config.max_timeout_s)
        return self.context(request, raw, default_timeout_s=default_s)


def page_limit(request: web.Request) -> int:
    """Return the number of items that a client asks for in one page of a list."""
    return query_count(request, "limit", 100, MOST_LISTED)


def query_count(request: web.Request, name: str, default: int, most: int) -> int:
    """Return the count named `name` in a URL's query, else `default`; 400 for a count that is not 1 to `most`."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= most):
        raise InvalidRequest(
            f"{name} is {text[:40]!r}: expected 1 to {most}", code="invalid_value", param=name
        )
    return int(text)


def _at_hand(request: web.Request, most: int) -> bytes:
    """Return a body that has arrived completely."""
    try:
        raw = request.content.read_nowait()
    except _BROKEN as error:
        raise _broken(error) from None
    if len(raw) > most:
        raise _too_large(most)
    return raw


def _broken(error: Exception) -> InvalidRequest:
    reason = " ".join(str(error).removeprefix("400, message:").split())
    return InvalidRequest(f"the body is broken: {reason}", code="invalid_body")


def _too_large(most: int) -> TooLarge:
    return TooLarge(
        f"the body is larger than {most} bytes; split the request", code="body_too_large"
    )


def _seconds(
    headers: Mapping[str, str], name: str, lowest: float, most: float, default: float
) -> float:
    text = headers.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not lowest <= value < math.inf:
        raise InvalidRequest(
            f"{name} is {text[:80]!r}: expected seconds, at least {lowest:g}",
            code="invalid_header",
            param=name,
        )
    return min(value, most)


def _is_low(request: web.Request, key_priority: str) -> bool:
    """Return whether a request has low priority: by `Spillway-Priority`, else by the key."""
    text = request.headers.get("Spillway-Priority", key_priority)
    if text not in ("low", "normal"):
        raise InvalidRequest(
            f"Spillway-Priority is {text[:80]!r}: expected low or normal",
            code="invalid_header",
            param="Spillway-Priority",
        )
    return text == "low"


def _idempotency_key(request: web.Request) -> str:
    """Return the client's idempotency key, "" without one."""
    key = request.headers.get("Idempotency-Key", "")
    if len(key) > 255 or not key.isascii() or (key and not key.isprintable()):
        raise InvalidRequest(
            "Idempotency-Key: expected at most 255 printable ASCII characters",
            code="invalid_header",
            param="Idempotency-Key",
        )
    return key


def _body_hash(request: web.Request, raw: bytes) -> bytes:
    """Return a digest of a request, which differs for different requests under one idempotency key."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (request.method.encode(), request.rel_url.raw_path.encode(), raw):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
