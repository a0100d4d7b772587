"""The locations of a session's pages: on a worker, by that worker's last report, and in the lower tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from common.bus import Bus
from common.ids import family_of
from common.pages.identity import PAGE, PageId
from common.pages.keys import PageKey
from common.pages.store import PageStore, TierDown
from common.registry.cache_directory import CacheDirectory
from common.wire.registry import Held
from common.wire.sessions import SessionWork
from services.kv_store.pages.session_pages import session_pages
from services.kv_store.sessions.session_store import session_of

_GROUPS = 2  # layer groups to look for: full attention and at most one kind of window
_AT_ONCE = 2000


class PageLocations:
    """Finds sessions' pages; `store` is None without tiers below the host."""

    def __init__(self, bus: Bus, store: PageStore | None) -> None:
        self._bus, self._store = bus, store

    async def perform(self, work: SessionWork) -> bytes:
        """Return as JSON the number of a session's pages in each tier; null for a tier that cannot be asked.

        NotFound if the session is not the tenant's. Raises BusDown.
        """
        record = await session_of(self._bus, work)
        ids, held = await session_pages(self._bus, record.id), await self._held(record.id)
        redis, disk = await self._below(ids)
        found: dict[str, Any] = {
            "object": "session.pages",
            "pages": len(ids),
            "tiers": {
                "device": held.device_tokens // PAGE if held else 0,
                "host": held.host_tokens // PAGE if held else 0,
                "redis": redis,
                "disk": disk,
            },
            "worker": held.worker if held else None,
            "told": held.at_ms / 1000 if held else None,
        }
        return msgspec.json.encode(found)

    async def _held(self, session: str) -> Held | None:
        """Return the last report of a session's worker about its pages; None without one, or if the worker is dead."""
        held = await CacheDirectory(self._bus).held(session)
        alive = {record.worker for record in await self._bus.workers.living(family_of(session))}
        return held if held is not None and held.worker in alive else None

    async def _below(self, ids: Sequence[PageId]) -> tuple[int | None, int | None]:
        if self._store is None:
            return None, None
        redis, disk = set[PageId](), set[PageId]()
        try:
            for first in range(0, len(ids), _AT_ONCE):
                names = [
                    PageKey(i, g) for i in ids[first : first + _AT_ONCE] for g in range(_GROUPS)
                ]
                for key, tier in zip(names, await self._store.where(names), strict=True):
                    if tier is not None:
                        (redis if tier == "redis" else disk).add(key.id)
        except TierDown:
            return None, None
        return len(redis), len(disk - redis)
