"""The cache announcer: publishes the session pages and the prompt prefixes that this worker holds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from msgspec.structs import replace

from common import log
from common.bus import BusDown, BusFull
from common.pages.identity import PAGE, PageId, marks_of
from common.registry.cache_directory import HELD_S, CacheDirectory
from common.wire.registry import Held
from common.worker.worker import Worker
from engine.decoder.kv.page_table import PageTable
from engine.decoder.kv.prefix_index import PrefixIndex

EVERY_S = 1.0
SESSIONS, MARKS = 32, 512  # examined in one round
_log = log.get("engine")


class CacheAnnouncer:
    """Publishes one engine's pages to the cache directory; entries that Redis loses come back as turns end."""

    def __init__(self, worker: Worker, table: PageTable, prefixes: PrefixIndex) -> None:
        self._worker, self._table, self._prefixes = worker, table, prefixes
        self._told: dict[str, Held] = {}
        self._names: set[str] = set()  # this worker's names in all incarnations
        self._at = 0

    async def ended(self, session: str, ids: Sequence[PageId]) -> None:
        """Publish that this worker computed a session's turn with these full pages, unless the bus is away."""
        self._prefixes.left(session, ids)
        with contextlib.suppress(BusDown, BusFull):  # a later round publishes the session
            await self._tell(session)

    async def mark(self, ids: Sequence[PageId]) -> None:
        """Publish that this worker computed a chain, unless it is the only worker, or the bus is away."""
        worker = self._worker
        with contextlib.suppress(BusDown, BusFull):
            if (marks := marks_of(ids)) and not await self._alone():
                await CacheDirectory(worker.bus).publish_marks(worker.family, worker.name, marks)

    async def _alone(self) -> bool:
        return len(await self._worker.bus.workers.registered(self._worker.family)) < 2

    async def run(self) -> None:
        """Publish changes of the remembered sessions and prefixes, some in each round, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.look()
            except (BusDown, BusFull):
                continue
            except Exception:  # noqa: BLE001 - the directory is only a hint
                _log.exception("holdings_untold")

    async def look(self) -> None:
        """Publish the next sessions and marks that have changed or were published long ago."""
        sessions = self._prefixes.sessions
        self._told = {name: self._told[name] for name in sessions if name in self._told}
        begin = self._at if self._at < len(sessions) else 0
        self._at = begin + SESSIONS
        for session in sessions[begin : begin + SESSIONS]:
            await self._look_at(session)
        if not await self._alone():
            await self._look_at_marks()

    async def _look_at_marks(self) -> None:
        worker, marks = self._worker, self._prefixes.some_marks(MARKS)
        there = [mark for mark in marks if self._table.keeps(mark)]
        gone = set(marks).difference(there)
        self._prefixes.unmark(gone)
        await CacheDirectory(worker.bus).publish_marks(
            worker.family, worker.name, there, sorted(gone)
        )
        await CacheDirectory(worker.bus).trim_marks(worker.family)

    async def _look_at(self, session: str) -> None:
        told, held = self._told.get(session), self._held(session)
        if told is None:
            return
        same = replace(held, at_ms=told.at_ms) == told
        if same and held.at_ms - told.at_ms < 1000 * HELD_S / 2:
            return
        known = await CacheDirectory(self._worker.bus).held(session)
        ours = known is not None and known.worker in self._names
        if not ours or not self._prefixes.chain(session):
            self._told.pop(session, None)  # the session is gone, or continued on another worker
            return
        await self._tell(session)

    async def _tell(self, session: str) -> None:
        held = self._held(session)
        self._names.add(held.worker)
        await CacheDirectory(self._worker.bus).publish_held(session, held)
        self._told[session] = held

    def _held(self, session: str) -> Held:
        chain = self._prefixes.chain(session)
        device, host = self._table.resident(chain)
        return Held(
            worker=self._worker.name,
            device_tokens=device * PAGE,
            host_tokens=host * PAGE,
            page=chain[-1] if chain else b"",
            at_ms=self._worker.bus.clock.now_ms(),
        )
