"""Pins of sessions: a pinned session's pages stay in Redis until the session ends or is unpinned.

The pins of pages are recomputed every few seconds, from the pinned sessions and the pages in Redis. Sessions are served
in the order of pinning, up to the bytes that a tenant may pin; pages on disk are requested if the whole session fits.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from common import log
from common.bus import Bus, BusDown
from common.errors import Conflict, Unavailable
from common.pages.identity import owner_id
from common.pages.keys import GROUPS, PARTITIONS, PageKey
from common.pages.pins import PagePins
from common.pages.store import FREE, PageStore, TierDown
from common.registry.sessions import SessionEnds, Sessions
from common.wire.sessions import SessionRecord
from services.kv_store import metrics
from services.kv_store.pages.eviction import AskLimits
from services.kv_store.pages.session_pages import session_pages

RENEW_S = 5.0
ALL, ONE = 0.8, 0.5  # shares of the tier that all tenants, and one tenant without a limit, may pin
_AT_ONCE = 2000
_log = log.get("kv_store")
Ends = dict[PageKey, int]


class SessionPins:
    """Pins sessions' pages in the pages Redis; several processes may renew the pins."""

    def __init__(self, bus: Bus, store: PageStore, limits: AskLimits) -> None:
        self._bus, self._store, self._limits = bus, store, limits
        self._page_pins = PagePins(store)
        self._chains: dict[str, tuple[int, list[PageKey]]] = {}  # by session: version and pages

    async def run(self) -> None:
        """Renew the pins until cancelled."""
        while True:
            try:
                await self.renew()
            except (BusDown, TierDown) as error:
                _log.warning("pins_not_renewed", why=str(error))
            except Exception:  # noqa: BLE001 - housekeeping must outlive a bad reply
                _log.exception("pins_not_renewed")
            await asyncio.sleep(RENEW_S)

    async def pin(self, record: SessionRecord) -> None:
        """Pin a session. Conflict `pin_over_budget` if its pages are more than may be pinned; Unavailable, BusDown."""
        try:
            refused = await self.renew(record)
        except TierDown as error:
            raise _down() from error
        if record.id in refused and not record.pinned:
            await self.unpin(record)  # some pages may be pinned already
            need, left = refused[record.id]
            raise Conflict(
                f"the session's pages take {need} bytes more than the {left} that can still be pinned: unpin "
                "another session, or raise --page-bytes of the tenant's keys",
                code="pin_over_budget",
            )
        await Sessions(self._bus).pin(record.id)

    async def unpin(self, record: SessionRecord) -> None:
        """Unpin a session; if the pages Redis is away, its pages are unpinned soon after it is back. Raises BusDown."""
        await Sessions(self._bus).unpin(record.id)
        try:
            await self.renew()
        except TierDown as error:
            _log.warning("pins_not_renewed", why=str(error))

    async def renew(self, new: SessionRecord | None = None) -> dict[str, tuple[int, int]]:
        """Recompute all pins; return the sessions that did not fit, with (bytes beyond the room, bytes of room).

        `new` is a session that is about to be pinned. Raises BusDown, TierDown.
        """
        records = await self._pinned()
        if new is not None and new.id not in {record.id for record in records}:
            records.append(new)
        limits = await self._limits() if records else {}
        room = self._store.room * PARTITIONS
        ends: Ends = {}
        taken: Counter[str] = Counter()  # by tenant
        refused = {}
        known, self._chains = self._chains, {}
        for record in records:
            name = record.id
            self._chains[name] = chained = await self._chain(record, known.get(name))
            limit = limits.get(owner_id(record.tenant), int(ONE * room))
            left = int(min((1 - FREE) * limit - taken[record.tenant], ALL * room - taken.total()))
            until_ms = await self._until(name)
            shared = [key for key in chained[1] if key in ends]
            ends |= {key: max(ends[key], until_ms) for key in shared}
            held, below, over = await self._fitting(
                [key for key in chained[1] if key not in ends], left
            )
            ends |= dict.fromkeys(held, until_ms)
            taken[record.tenant] += sum(held.values())
            if over:
                refused[name] = over, max(left, 0)
            else:
                for first in range(0, len(below), _AT_ONCE):  # the next round pins these pages
                    await self._store.recall(below[first : first + _AT_ONCE])
        await self._page_pins.replace(ends)
        metrics.PINNED.set(taken.total())
        return refused

    async def _pinned(self) -> list[SessionRecord]:
        """Return the pinned sessions, the longest pinned first; unpin sessions that have ended."""
        found = []
        for name in await Sessions(self._bus).pinned():
            record = await Sessions(self._bus).get(name)
            if record is not None and record.pinned:
                found.append(record)
            else:
                await Sessions(self._bus).unpin(name)
        return found

    async def _chain(
        self, record: SessionRecord, known: tuple[int, list[PageKey]] | None
    ) -> tuple[int, list[PageKey]]:
        if known is not None and known[0] == record.version:
            return known
        ids = await session_pages(self._bus, record.id)
        return record.version, [PageKey(page, group) for page in ids for group in range(GROUPS)]

    async def _fitting(
        self, keys: list[PageKey], left: int
    ) -> tuple[dict[PageKey, int], list[PageKey], int]:
        """Return the pages in Redis that fit in `left` bytes, with sizes; the pages only on disk; and the bytes beyond.

        A page that is not in Redis counts as large as the session's largest page there, and as 0 bytes if it has none.
        """
        sizes = await self._page_pins.sizes(keys)
        # Few models have several layer groups.
        groups = {key.group for key in sizes} or range(GROUPS)
        missing = [key for key in keys if key not in sizes and key.group in groups]
        held: dict[PageKey, int] = {}
        over = 0
        for key, size in sizes.items():
            if size <= left:
                held[key] = size
                left -= size
            else:
                over += size
        over += max(len(missing) * max(sizes.values(), default=0) - max(left, 0), 0)
        below = []
        for first in range(0, len(missing), _AT_ONCE):
            some = missing[first : first + _AT_ONCE]
            where = await self._store.where(some)
            below += [key for key, tier in zip(some, where, strict=True) if tier == "disk"]
        return held, below, over

    async def _until(self, session: str) -> int:
        return self._store.now_ms() + await SessionEnds(self._bus).left_ms(session)


def _down() -> Unavailable:
    return Unavailable(
        "the Redis of KV pages is away: nothing can be pinned now; try again",
        code="pages_down",
        retry_after_s=5,
    )
