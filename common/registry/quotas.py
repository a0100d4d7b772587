"""Quotas of API keys: requests and tokens a minute, and requests at once.

A token bucket holds the instant (µs, by Redis' clock) at which it will be full again, and lives until then. One script
charges all quotas of a key or none, and one script gives a charge back.
"""

from __future__ import annotations

import msgspec

from common.bus import Bus, keys
from common.errors import RateLimited
from common.registry.api_keys import ApiKey

WINDOW_US = 60_000_000


class Charge(msgspec.Struct, frozen=True):
    """The charge of one request, kept so that it can be given back after a refusal."""

    key: ApiKey
    request: str
    requests: int
    tokens: int


class Quotas:
    """Charges requests to the quotas of their API keys."""

    def __init__(self, bus: Bus) -> None:
        self._redis = bus.connection

    async def charge(self, key: ApiKey, request: str, tokens: int, lease_end_ms: int) -> Charge:
        """Charge one request; if a quota is used up, charge nothing and raise RateLimited (`quota`) with the wait."""
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
        quota, wait_us = await self._redis.script("charge", _quotas(key), args)
        if quota:
            raise _over(key, quota, wait_us / 1e6)
        return charge

    async def refund(self, charge: Charge) -> None:
        """Give back the charge of a refused request."""
        costs = _costs_us(charge)
        if charge.key.concurrency or any(costs):
            await self._redis.script("refund", _quotas(charge.key), [charge.request, *costs])

    async def leave(self, key: ApiKey, request: str) -> None:
        """End a request's share of the key's concurrency."""
        if key.concurrency:
            await self._redis.call("ZREM", keys.quota(key.id, "running"), request)


def _quotas(key: ApiKey) -> list[str]:
    return [keys.quota(key.id, name) for name in ("running", "requests", "tokens")]


def _costs_us(charge: Charge) -> tuple[int, int]:
    """Return the microseconds by which a charge delays the instant at which each bucket is full; 0 without a quota."""
    key = charge.key
    asked = (
        (charge.requests, key.requests_per_minute),
        (charge.tokens, key.tokens_per_minute),
    )
    requests, tokens = (cost * WINDOW_US // limit if limit else 0 for cost, limit in asked)
    return requests, tokens


def _over(key: ApiKey, quota: int, wait_s: float) -> RateLimited:
    """Return the error of a used-up quota: 1 is the concurrency, 2 the requests, 3 the tokens."""
    if quota == 1:
        text, wait_s = f"the key may run {key.concurrency} requests at once", 1.0
    elif quota == 2:
        text = f"the key may spend {key.requests_per_minute} requests a minute"
    else:
        text = f"the key may spend {key.tokens_per_minute} tokens a minute"
    return RateLimited(text, code="quota", retry_after_s=wait_s)
