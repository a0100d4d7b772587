"""What a client may send: bodies by size and by time, and the headers that say how a request is to be treated."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.client_exceptions import ClientError
from aiohttp.http_exceptions import HttpProcessingError

from common.config import RouterConfig
from common.errors import InvalidRequest, RequestTimeout, TooLarge

MAX_RESUME_S = 300.0
_BROKEN = (web.RequestPayloadError, HttpProcessingError, ClientError)


async def read_body(request: web.Request, config: RouterConfig) -> bytes:
    """Return a request's whole body; 413 over `max_body_bytes`, 408 after `body_timeout_s`."""
    most = config.max_body_bytes
    if (request.content_length or 0) > most:
        raise _too_large(most)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            while chunk := await request.content.readany():
                size += len(chunk)
                if size > most:
                    raise _too_large(most)
                chunks.append(chunk)
    except TimeoutError:
        raise RequestTimeout(
            f"the body did not arrive within {config.body_timeout_s:g} s; {size} bytes came"
        ) from None
    except _BROKEN as error:
        raise _broken(error) from None
    return b"".join(chunks)


async def body_parts(request: web.Request, config: RouterConfig) -> AsyncIterator[bytes]:
    """Yield a body of any size as it comes; 408 where nothing comes for `body_timeout_s`."""
    while True:
        try:
            async with asyncio.timeout(config.body_timeout_s):
                part = await request.content.readany()
        except TimeoutError:
            raise RequestTimeout(
                f"nothing more of the body arrived for {config.body_timeout_s:g} s"
            ) from None
        except _BROKEN as error:
            raise _broken(error) from None
        if not part:
            return
        yield part


def _broken(error: Exception) -> InvalidRequest:
    reason = " ".join(str(error).removeprefix("400, message:").split())
    return InvalidRequest(f"the body is broken: {reason}", code="invalid_body")


def _too_large(most: int) -> TooLarge:
    return TooLarge(
        f"the body is larger than {most} bytes; split the request", code="body_too_large"
    )


def _seconds(request: web.Request, name: str, lowest: float, most: float, default: float) -> float:
    text = request.headers.get(name)
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


def timeout_s(request: web.Request, config: RouterConfig, key_s: float) -> float | None:
    """Return the seconds the client (or its key, by `key_s` above 0) gives this request, at most `max_timeout_s`."""
    found = _seconds(request, "Spillway-Timeout", 0.001, config.max_timeout_s, key_s)
    return min(found, config.max_timeout_s) if found > 0 else None


def is_low(request: web.Request, key_priority: str) -> bool:
    """Return whether others go before this request: `Spillway-Priority`, else what its key says."""
    text = request.headers.get("Spillway-Priority", key_priority)
    if text not in ("low", "normal"):
        raise InvalidRequest(
            f"Spillway-Priority is {text[:80]!r}: expected low or normal",
            code="invalid_header",
            param="Spillway-Priority",
        )
    return text == "low"


def resume_s(request: web.Request) -> float:
    """Return for how long the request runs on without a reader; 0 means a disconnect cancels it."""
    return _seconds(request, "Spillway-Resume", 0.0, MAX_RESUME_S, 0.0)


def idempotency_key(request: web.Request) -> str:
    """Return the client's idempotency key, "" if there is none."""
    key = request.headers.get("Idempotency-Key", "")
    if len(key) > 255 or not key.isascii() or (key and not key.isprintable()):
        raise InvalidRequest(
            "Idempotency-Key: expected at most 255 printable ASCII characters",
            code="invalid_header",
            param="Idempotency-Key",
        )
    return key


def body_hash(request: web.Request, raw: bytes) -> bytes:
    """Return what tells two requests under one idempotency key apart."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (request.method.encode(), request.rel_url.raw_path.encode(), raw):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
