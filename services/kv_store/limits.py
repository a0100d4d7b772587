"""How many bytes of pages each tenant may have in a tier: what its API keys say, told to the pages Redis."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from common.pages import keys as names
from common.pages.identity import Owner, owner_id
from common.pages.keys import PARTITIONS
from common.pages.store import PageStore
from common.registry.api_keys import KeyStore

Limits = Mapping[Owner, int]
AskLimits = Callable[[], Awaitable[Limits]]  # BusDown where it cannot be told now


async def limits_of(keys: KeyStore) -> Limits:
    """Return the owners that have a limit: the largest of a tenant's keys, if none of them is unlimited. BusDown."""
    found: dict[str, int] = {}
    unlimited: set[str] = set()
    for key in await keys.list():
        found[key.tenant] = max(found.get(key.tenant, 0), key.page_bytes)
        if not key.page_bytes:
            unlimited.add(key.tenant)
    return {owner_id(tenant): most for tenant, most in found.items() if tenant not in unlimited}


async def tell(store: PageStore, limits: Limits) -> None:
    """Have Redis refuse what goes beyond the limits, a sixteenth of each in every partition. Raises TierDown."""
    parts = range(PARTITIONS)
    told = await store.server.pipeline([("HKEYS", names.limits(at)) for at in parts])
    words = [word for owner, most in limits.items() for word in (owner.hex(), most // PARTITIONS)]
    commands: list[tuple[object, ...]] = []
    for at, known in zip(parts, told, strict=True):
        gone = [owner for owner in known if bytes.fromhex(owner.decode()) not in limits]
        if gone:
            commands.append(("HDEL", names.limits(at), *gone))
        if words:
            commands.append(("HSET", names.limits(at), *words))
    await store.server.pipeline(commands)
