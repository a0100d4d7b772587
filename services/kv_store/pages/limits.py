"""The limits on the bytes of pages that a tenant may have in a tier, by its API keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from common.pages.identity import Owner, owner_id
from common.registry.api_keys import KeyStore

Limits = Mapping[Owner, int]
AskLimits = Callable[[], Awaitable[Limits]]  # BusDown where the keys cannot be read now


async def limits_of(keys: KeyStore) -> Limits:
    """Return the limits of owners that have one: the largest of a tenant's keys, if all have one. Raises BusDown."""
    found: dict[str, int] = {}
    unlimited: set[str] = set()
    for key in await keys.list():
        found[key.tenant] = max(found.get(key.tenant, 0), key.page_bytes)
        if not key.page_bytes:
            unlimited.add(key.tenant)
    return {owner_id(tenant): most for tenant, most in found.items() if tenant not in unlimited}
