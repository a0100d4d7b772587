"""Collections by name, as this router knows them."""

from __future__ import annotations

from common.bus import Bus
from common.registry.collections import Collections
from common.wire.registry import CollectionRecord

RECENT_S = 0.1
_MOST = 1024


class RecentCollections:
    """Records of collections, read at most RECENT_S ago: shards refuse a request made with an outdated record."""

    def __init__(self, bus: Bus) -> None:
        self._collections, self._clock = Collections(bus), bus.clock
        self._known: dict[tuple[str, str], tuple[float, CollectionRecord]] = {}

    async def now(self, tenant: str, name: str) -> CollectionRecord | None:
        """Return a tenant's collection as it is registered at this moment, or None."""
        return await self._collections.get(tenant, name)

    async def recent(self, tenant: str, name: str) -> CollectionRecord | None:
        """Return a tenant's collection as it was registered at most RECENT_S ago, or None."""
        if known := self.known(tenant, name):
            return known
        now = self._clock.monotonic()
        record = await self.now(tenant, name)
        if record is not None:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[tenant, name] = now, record
        return record

    def known(self, tenant: str, name: str) -> CollectionRecord | None:
        """Return a tenant's collection if it was read at most RECENT_S ago."""
        at, record = self._known.get((tenant, name), (0.0, None))
        return record if self._clock.monotonic() - at <= RECENT_S else None

    def forget(self, record: CollectionRecord) -> None:
        """Drop a collection's record, which this router has just changed, so that the next use looks it up."""
        self._known.pop((record.tenant, record.name), None)
