"""Idempotency keys: the request for which a client's key stands."""

from __future__ import annotations

from common.bus import Bus, keys
from common.errors import Conflict

CLAIM_S = 24 * 3600
BODY_HASH_BYTES = 16


class Idempotency:
    """Claims of idempotency keys."""

    def __init__(self, bus: Bus) -> None:
        self._redis = bus.connection

    async def claim(self, tenant: str, key: str, body_hash: bytes, request: str) -> str:
        """Claim (tenant, key) for `request` for 24 h; return the request to use: an earlier one's for the same body.

        Conflict (409 `idempotency_conflict`) if the key was used with another body.
        """
        name, mine = keys.claim(tenant, key), body_hash + request.encode()
        # First, since a claim that its request does not name would outlive the request's session.
        await self._redis.call("SET", keys.claimed(request), name, "EX", CLAIM_S + 60)
        stored: bytes = await self._redis.script("claim", [name], [mine, CLAIM_S])
        if stored[len(body_hash) :] != request.encode():
            await self._redis.call("DEL", keys.claimed(request))
        if stored[: len(body_hash)] != body_hash:
            raise Conflict(
                "Idempotency-Key was used with another body; use a new key for a new request",
                code="idempotency_conflict",
            )
        return stored[len(body_hash) :].decode()

    async def claimed(self, tenant: str, key: str) -> str | None:
        """Return the request for which (tenant, key) was claimed, or None."""
        stored = await self._redis.call("GET", keys.claim(tenant, key))
        return None if stored is None else str(stored[BODY_HASH_BYTES:].decode())

    async def release(self, tenant: str, key: str, request: str) -> None:
        """Release the claim of a request that was not admitted."""
        await self._redis.script("unclaim", [keys.claim(tenant, key)], [request])
        await self._redis.call("DEL", keys.claimed(request))
