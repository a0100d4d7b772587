"""API keys, their tenants and quotas, under `{key/<id>}`; secrets are hashed at rest and shown once.

A token bucket holds the instant (µs, by Redis' clock) at which it will be full again, and lives until then. One script
charges all quotas of a key or none, and one gives a charge back.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
from typing import Literal

import msgspec

from common.bus import Bus
from common.errors import NotFound, RateLimited, Unauthenticated

CHECK_S = 1.0
WINDOW_US = 60_000_000
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
KEY_PREFIX = "sk-sw-"
_KEY = re.compile(r"sk-sw-([a-z2-9]{12})-([A-Za-z0-9_-]{20,100})\Z")
_TENANT = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}\Z")
_CACHED = 10_000


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One API key; a quota of 0 means unlimited, `digest` is the hash of its secret.

    `page_bytes` is how much of its tenant's KV pages a tier may hold.
    `timeout_s` (0: none) and `priority` hold for its requests that do not say otherwise.
    """

    id: str
    tenant: str
    name: str = ""
    digest: bytes = b""
    created_ms: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0
    timeout_s: float = 0.0
    priority: Literal["low", "normal"] = "normal"
    page_bytes: int = 0


class Charge(msgspec.Struct, frozen=True):
    """What a request was charged, so that a refusal can give it back."""

    key: ApiKey
    request: str
    requests: int
    tokens: int


def _record(key_id: str) -> str:
    return "{key/" + key_id + "}:record"


def _bucket(key_id: str, what: str) -> str:
    return "{key/" + key_id + "}:" + what


def _digest(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode(), digest_size=32, person=b"spillway-key").digest()


class KeyStore:
    """Create, list, rotate, revoke and check keys, and charge their quotas."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._checked: dict[str, tuple[float, bytes, ApiKey]] = {}

    async def create(
        self,
        tenant: str,
        *,
        name: str = "",
        requests_per_minute: int = 0,
        tokens_per_minute: int = 0,
        concurrency: int = 0,
        timeout_s: float = 0.0,
        priority: Literal["low", "normal"] = "normal",
        page_bytes: int = 0,
    ) -> tuple[ApiKey, str]:
        """Return a new key and its secret text, which is shown this once; ValueError on a bad tenant or quota."""
        if not _TENANT.match(tenant):
            raise ValueError(f"tenant {tenant!r}: expected 1 to 63 of a-z, 0-9, '.', '_' and '-'")
        if min(requests_per_minute, tokens_per_minute, concurrency, page_bytes) < 0:
            raise ValueError("a quota is negative: expected 0 (unlimited) or more")
        if not 0 <= timeout_s < math.inf:
            raise ValueError("the timeout is negative or endless: expected seconds, 0 for none")
        key_id = "".join(secrets.choice(_ALPHABET) for _ in range(12))
        secret = secrets.token_hex(32)
        key = ApiKey(
            id=key_id,
            tenant=tenant,
            name=name,
            digest=_digest(secret),
            created_ms=self._bus.clock.now_ms(),
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            concurrency=concurrency,
            timeout_s=timeout_s,
            priority=priority,
            page_bytes=page_bytes,
        )
        await self._bus.connection.call("SET", _record(key_id), msgspec.msgpack.encode(key))
        await self._bus.connection.call("SADD", "keys", key_id)
        return key, f"sk-sw-{key_id}-{secret}"

    async def list(self) -> list[ApiKey]:
        """Return all keys, oldest first."""
        names = sorted(
            name.decode() for name in await self._bus.connection.call("SMEMBERS", "keys")
        )
        found = [await self._get(name) for name in names]
        return sorted((key for key in found if key), key=lambda key: (key.created_ms, key.id))

    async def rotate(self, key_id: str) -> tuple[ApiKey, str]:
        """Return the key with a new secret; the old one is refused within a second. NotFound if there is none."""
        key = await self._get(key_id)
        if key is None:
            raise NotFound(
                f"no key {key_id!r}; `spillway keys list` shows them", code="key_not_found"
            )
        secret = secrets.token_hex(32)
        key = msgspec.structs.replace(key, digest=_digest(secret))
        await self._bus.connection.call("SET", _record(key_id), msgspec.msgpack.encode(key), "XX")
        self._checked.pop(key_id, None)
        return key, f"sk-sw-{key_id}-{secret}"

    async def revoke(self, key_id: str) -> bool:
        """Remove a key; it is refused within a second. False if there was none."""
        removed = await self._bus.connection.call("DEL", _record(key_id))
        await self._bus.connection.call("SREM", "keys", key_id)
        self._checked.pop(key_id, None)
        return bool(removed)

    async def any(self) -> bool:
        """Return whether any key exists."""
        return bool(await self._bus.connection.call("SCARD", "keys"))

    async def check(self, text: str) -> ApiKey:
        """Return the key a bearer text is, read at most once a second; Unauthenticated if it is none."""
        match = _KEY.match(text)
        if match is None:
            raise Unauthenticated("the API key is malformed: expected sk-sw-<id>-<secret>")
        key_id, digest = match[1], _digest(match[2])
        now = self._bus.clock.monotonic()
        cached = self._checked.get(key_id)
        if cached and now - cached[0] < CHECK_S and hmac.compare_digest(cached[1], digest):
            return cached[2]
        key = await self._get(key_id)
        if key is None or not hmac.compare_digest(key.digest, digest):
            raise Unauthenticated("the API key is unknown, rotated or revoked")
        if len(self._checked) >= _CACHED:
            self._checked.clear()
        self._checked[key_id] = (now, digest, key)
        return key

    async def _get(self, key_id: str) -> ApiKey | None:
        raw = await self._bus.connection.call("GET", _record(key_id))
        return None if raw is None else msgspec.msgpack.decode(raw, type=ApiKey)

    # -- quotas ------------------------------------------------------------------------------------------

    async def charge(self, key: ApiKey, request: str, tokens: int, lease_end_ms: int) -> Charge:
        """Charge one request; RateLimited `quota` with the seconds to wait, and nothing charged, if over."""
        if key.tokens_per_minute and tokens > key.tokens_per_minute:
            raise RateLimited(
                f"the request costs {tokens} tokens: the key may spend {key.tokens_per_minute} a minute",
                code="quota",
                retry_after_s=60.0,
            )
        charge = Charge(key, request, 1, tokens)
        costs = _costs_us(charge)
        if not key.concurrency and not any(costs):
            return charge
        args = [request, key.concurrency, lease_end_ms, WINDOW_US, *costs]
        quota, wait_us = await self._bus.connection.script("charge", _quotas(key), args)
        if quota:
            raise _over(key, quota, wait_us / 1e6)
        return charge

    async def refund(self, charge: Charge) -> None:
        """Give back what a refused request was charged."""
        costs = _costs_us(charge)
        if charge.key.concurrency or any(costs):
            await self._bus.connection.script(
                "refund", _quotas(charge.key), [charge.request, *costs]
            )

    async def leave(self, key: ApiKey, request: str) -> None:
        """End a request's share of the key's concurrency."""
        if key.concurrency:
            await self._bus.connection.call("ZREM", _bucket(key.id, "running"), request)


def _quotas(key: ApiKey) -> list[str]:
    return [_bucket(key.id, what) for what in ("running", "requests", "tokens")]


def _costs_us(charge: Charge) -> tuple[int, int]:
    """Return the microseconds by which a charge puts off the instant at which each bucket is full; 0 is no quota."""
    key = charge.key
    asked = (
        (charge.requests, key.requests_per_minute),
        (charge.tokens, key.tokens_per_minute),
    )
    requests, tokens = (cost * WINDOW_US // limit if limit else 0 for cost, limit in asked)
    return requests, tokens


def _over(key: ApiKey, quota: int, wait_s: float) -> RateLimited:
    """Return the refusal of one quota: 1 is the concurrency, 2 the requests, 3 the tokens."""
    if quota == 1:
        text, wait_s = f"the key may run {key.concurrency} requests at once", 1.0
    elif quota == 2:
        text = f"the key may spend {key.requests_per_minute} requests a minute"
    else:
        text = f"the key may spend {key.tokens_per_minute} tokens a minute"
    return RateLimited(text, code="quota", retry_after_s=wait_s)
