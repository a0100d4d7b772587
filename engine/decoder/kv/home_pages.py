"""Pages of sequences that come home to a tier: those that stand there are shared, the others are copied there once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from common.pages.identity import PageId
from engine.decoder.executor.interface import LocalTier
from engine.decoder.kv.page_pool import PagePool


class HomePages:
    """Takes references to pages of a tier for sequences that come home to it in the step that is being planned.

    `counts` are pages with which sequences came home to the host: `shared` with a sequence that uses them there,
    `found` there with none, or `copied` there.
    """

    def __init__(self, pools: Mapping[LocalTier, Sequence[PagePool]]) -> None:
        """Begin with the pools of both tiers, one for each layer group."""
        self.counts: Counter[str] = Counter()
        self._pools = pools
        # Full pages on their way between the tiers by copies of the step: they have no id there yet.
        self._sent: dict[tuple[LocalTier, int, PageId], int] = {}

    def find(self, tier: LocalTier, group: int, page_id: PageId) -> int | None:
        """Take a reference to a page that stands in a tier; None if the tier does not have it."""
        pool = self._pools[tier][group]
        page = pool.find(page_id)
        if page is not None:
            if tier == "host":
                self.counts["shared" if pool.references(page) else "found"] += 1
            pool.hold(page)
        return page

    def in_use(self, tier: LocalTier, group: int, page_id: PageId) -> bool:
        """Return whether a sequence in a tier has a full page, or will by the copies of the step."""
        return self._pools[tier][group].holds(page_id) or (tier, group, page_id) in self._sent

    def send(self, tier: LocalTier, group: int, page_id: PageId) -> tuple[int, bool]:
        """Take a reference to a page of a tier to copy to; return it, and whether the step copies it there already.

        What copies of several sequences make of one full page is one page; `page_id` is empty if it is not full.
        IndexError if none is available.
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
        """Note that the steps planned so far have ended: what they copied is found by its id."""
        self._sent = {}
