"""The last minutes of this router's metrics and of the encoders' batches."""

from __future__ import annotations

import asyncio

from common import log
from common.bus import Bus, BusDown
from services.router.cards import Cards
from services.router.mesh import recent_batches, recent_counts
from services.router.mesh.recent_batches import RecentBatches
from services.router.mesh.recent_counts import RecentCounts

ENCODERS = ("embed", "rerank")  # the kinds of families whose batches are recorded
_log = log.get("router")


class MeshHistory:
    """Records metrics and batches while the router runs."""

    def __init__(self, bus: Bus, cards: Cards) -> None:
        self._bus, self._cards = bus, cards
        self.counts, self.batches = RecentCounts(bus.clock), RecentBatches(bus.clock)

    def start(self) -> list[asyncio.Task[None]]:
        """Begin to record, and return the tasks that record until they are ended."""
        self.counts.note()
        supervisor = self._bus.supervisor
        return [
            supervisor.process(self._note_metrics(), "window"),
            supervisor.process(self._note_batches(), "batches"),
        ]

    async def _note_metrics(self) -> None:
        while True:
            await asyncio.sleep(recent_counts.EVERY_S)
            self.counts.note()

    async def _note_batches(self) -> None:
        while True:
            try:
                for family in await self._cards.families():
                    if family.kind in ENCODERS:
                        roster = await self._bus.workers.all(family)
                        self.batches.note(family, [record for record, _ in roster])
            except BusDown:
                pass  # the next round may reach Redis
            except Exception:  # noqa: BLE001 - noting must outlive a bad reply
                _log.exception("batches_unnoted")
            await asyncio.sleep(recent_batches.EVERY_S)
