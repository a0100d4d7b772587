"""The pages of sequences that get a home in a tier: pages found there are shared, all others are copied once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from common.pages.identity import PageId
from engine.decoder.executor.interface import LocalTier
from engine.decoder.kv.page_pool import PagePool


class HomePages:
    """References to a tier's pages for sequences that get a home there in the step being planned.

    `counts` counts the pages with which sequences got a home on the host: `shared` with a sequence there, `found` there
    without a holder, or `copied` there.
    """

    def __init__(self, pools: Mapping[LocalTier, Sequence[PagePool]]) -> None:
        """Begin with the pools of both tiers, one for each layer group."""
        self.counts: Counter[str] = Counter()
        self._pools = pools
        # Full pages that the step copies to a tier; the copies have no id there yet.
        self._sent: dict[tuple[LocalTier, int, PageId], int] = {}

    def find(self, tier: LocalTier, group: int, page_id: PageId) -> int | None:
        """Take a reference to a page in a tier; None if the tier does not have it."""
        pool = self._pools[tier][group]
        page = pool.find(page_id)
        if page is not None:
            if tier == "host":
                self.counts["shared" if pool.references(page) else "found"] += 1
            pool.hold(page)
        return page

    def in_use(self, tier: LocalTier, group: int, page_id: PageId) -> bool:
        """Return whether a sequence in a tier holds a full page, now or after the step's copies."""
        return self._pools[tier][group].holds(page_id) or (tier, group, page_id) in self._sent

    def send(self, tier: LocalTier, group: int, page_id: PageId) -> tuple[int, bool]:
        """Take a reference to a target page for a copy; return the page, and whether the step copies to it already.

        Several sequences share one copy of a full page; `page_id` is empty for a page that is not full. IndexError if
        no page is available.
        """
        pool, key = self._pools[tier][group], (tier, group, page_id)
        page = self._sent.get(key)
        if tier == "host":
            self.counts["copied" if page is None else "shared"] += 1
        if page is not None:
            pool.hold(page)
            return page, True
        page = pool.allocate()
        if page_id:
            self._sent[key] = page
        return page, False

    def ended(self) -> None:
        """Record that all planned steps have ended: the pages that they copied are now found by their ids."""
        self._sent = {}
