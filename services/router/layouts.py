"""The layouts of collections as this router knows them."""

from __future__ import annotations

import asyncio

from common.bus import Bus
from common.registry.layout import ShardLayout
from common.registry.placements import Placements
from common.wire.registry import CollectionRecord

FRESH_S = 0.5
_AGAIN_S = 0.05
_MOST = 10_000


class Layouts:
    """Layouts, at most half a second old: shards refuse a request made with an outdated layout."""

    def __init__(self, bus: Bus) -> None:
        self._placements, self._clock = Placements(bus), bus.clock
        self._known: dict[str, tuple[float, ShardLayout]] = {}

    async def of(self, record: CollectionRecord) -> ShardLayout:
        """Return a collection's layout; a collection without a placement needs no look-up."""
        return self.known(record) or await self.now(record)

    def known(self, record: CollectionRecord) -> ShardLayout | None:
        """Return a collection's layout if no look-up is needed, else None."""
        known = self._known.get(record.id)
        if known is not None and self._clock.monotonic() - known[0] < FRESH_S:
            return known[1]
        return None if record.placed else ShardLayout.of(record, None)

    async def now(self, record: CollectionRecord) -> ShardLayout:
        """Return a collection's layout as it is registered at this moment."""
        at = self._clock.monotonic()
        layout = ShardLayout.of(record, await self._placements.get(record.id))
        self._known.pop(record.id, None)
        moves = any(each.state != "serving" for one in layout.shards for each in one.replicas)
        if layout.shards and not moves:  # a changing layout is read every time
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[record.id] = (at, layout)
        return layout

    async def newer(
        self, record: CollectionRecord, than: ShardLayout, deadline_ms: int
    ) -> ShardLayout:
        """Return the layout that follows `than`, once there is one; at the deadline return the layout as it is.

        A shard that was sealed has successors within a moment.
        """
        while True:
            layout = await self.now(record)
            if layout.numbers != than.numbers or self._clock.now_ms() >= deadline_ms:
                return layout
            await asyncio.sleep(_AGAIN_S)
