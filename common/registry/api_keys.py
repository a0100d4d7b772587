"""API keys and their tenants; secrets are hashed at rest and shown once."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
from typing import Literal

import msgspec

from common.bus import Bus, keys
from common.errors import NotFound, Unauthenticated

CHECK_S = 1.0
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
KEY_PREFIX = "sk-sw-"
_KEY = re.compile(r"sk-sw-([a-z2-9]{12})-([A-Za-z0-9_-]{20,100})\Z")
_TENANT = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}\Z")
_CACHED = 10_000


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One API key; a quota of 0 means unlimited, `digest` is the hash of the key's secret.

    `page_bytes` limits the bytes of the tenant's KV pages in a tier. `timeout_s` (0: none) and `priority` are the
    defaults of requests.
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

    @property
    def counts_requests(self) -> bool:
        """Whether a request is charged to a quota even if it costs no token."""
        return bool(self.requests_per_minute or self.concurrency)


def _digest(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode(), digest_size=32, person=b"spillway-key").digest()


class KeyStore:
    """The store of API keys: creates, lists, rotates, revokes and checks keys."""

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
        """Return a new key and its secret text, which is shown only now; ValueError for a bad tenant or quota."""
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
        await self._bus.connection.call("SET", keys.api_key(key_id), msgspec.msgpack.encode(key))
        await self._bus.connection.call("SADD", keys.API_KEYS, key_id)
        return key, f"sk-sw-{key_id}-{secret}"

    async def list(self) -> list[ApiKey]:
        """Return all keys, oldest first."""
        names = sorted(
            name.decode() for name in await self._bus.connection.call("SMEMBERS", keys.API_KEYS)
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
        await self._bus.connection.call(
            "SET", keys.api_key(key_id), msgspec.msgpack.encode(key), "XX"
        )
        self._checked.pop(key_id, None)
        return key, f"sk-sw-{key_id}-{secret}"

    async def revoke(self, key_id: str) -> bool:
        """Remove a key; it is refused within a second. False if there was none."""
        removed = await self._bus.connection.call("DEL", keys.api_key(key_id))
        await self._bus.connection.call("SREM", keys.API_KEYS, key_id)
        self._checked.pop(key_id, None)
        return bool(removed)

    async def any(self) -> bool:
        """Return whether any key exists."""
        return bool(await self._bus.connection.call("SCARD", keys.API_KEYS))

    async def check(self, text: str) -> ApiKey:
        """Return the key of a bearer text, read at most once a second; Unauthenticated for other texts."""
        if (known := self.known(text)) is not None:
            return known
        match = _KEY.match(text)
        if match is None:
            raise Unauthenticated("the API key is malformed: expected sk-sw-<id>-<secret>")
        key_id, digest = match[1], _digest(match[2])
        now = self._bus.clock.monotonic()
        key = await self._get(key_id)
        if key is None or not hmac.compare_digest(key.digest, digest):
            raise Unauthenticated("the API key is unknown, rotated or revoked")
        if len(self._checked) >= _CACHED:
            self._checked.clear()
        self._checked[key_id] = (now, digest, key)
        return key

    def known(self, text: str) -> ApiKey | None:
        """Return the key of a bearer text if it was read within the last second, else None."""
        match = _KEY.match(text)
        cached = match and self._checked.get(match[1])
        if not match or not cached or self._bus.clock.monotonic() - cached[0] >= CHECK_S:
            return None
        return cached[2] if hmac.compare_digest(cached[1], _digest(match[2])) else None

    async def _get(self, key_id: str) -> ApiKey | None:
        raw = await self._bus.connection.call("GET", keys.api_key(key_id))
        return None if raw is None else msgspec.msgpack.decode(raw, type=ApiKey)
