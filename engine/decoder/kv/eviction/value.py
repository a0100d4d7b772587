"""Eviction by value: the seconds that a copy saves, times the rate at which its sessions return."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from common.pages.identity import PageId
from engine.decoder.kv.eviction.history import History, PageRun

Price = Callable[[NDArray[np.float64]], NDArray[np.float64]]
Rates = Callable[[float], NDArray[np.float64]]
ASKED = 4096  # prices are recomputed after as many copies, since a worker refits its costs
Entry = tuple[float, int, PageId, float]  # seconds saved, position in the chain, page, back_s


class NodeCopies:
    """A tier's copies of one node's pages: the cheapest to restore first, among equals the leading one."""

    __slots__ = ("count", "entries")

    def __init__(self) -> None:
        self.entries: list[Entry] = []  # a heap, some of whose entries are out of date
        self.count = 0


class ValuePolicy:
    """Drops the copy of least value = min(seconds to recompute, seconds to fetch back) x rate of return.

    Among equals the leading page goes first. All pages of a node have the same rate, so the node's cheapest page
    represents all. Prices are computed when copies are added, and again every ASKED copies.
    """

    def __init__(self, history: History, price: Price, rates: Rates) -> None:
        self._history, self._price, self._rates = history, price, rates
        self._prices: NDArray[np.float64] = np.empty(0)
        self._added = 0
        self._held: dict[PageId, Entry] = {}
        self._shelves: dict[int, NodeCopies] = {}
        # The first entry of each node's copies, by slot: seconds saved (inf: no copies), and position.
        self._least: NDArray[np.float64] = np.full(64, math.inf)
        self._depth: NDArray[np.int64] = np.zeros(64, np.int64)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, page: PageId, back_s: float = math.inf) -> None:
        """See Policy; ValueError if `back_s` is negative or no number."""
        if not back_s >= 0:
            raise ValueError(f"back_s {back_s!r}: expected seconds, at least 0")
        entry = self._entry(page, back_s)
        before = self._held.get(page)
        if before == entry:
            return
        node = self._history.hold(page) if before is None else self._history.node(page)
        self._held[page] = entry
        shelf = self._shelves.setdefault(node.slot, NodeCopies())
        shelf.count += before is None
        heapq.heappush(shelf.entries, entry)
        self._refresh(node)

    def discard(self, page: PageId) -> None:
        """See Policy."""
        if self._held.pop(page, None) is None:
            return
        node = self._history.node(page)
        self._shelves[node.slot].count -= 1
        self._refresh(node)
        self._history.drop(page)

    def used(self, chain: Sequence[PageId]) -> None:
        """Do nothing, since the history records the turn."""

    def moved(self, source: PageRun, target: PageRun) -> int:
        """Move the copies of `target`'s pages from `source`'s copies; return their number."""
        shelf = self._shelves.pop(source.slot, None)
        if shelf is None:
            return 0
        parts: dict[PageRun, list[Entry]] = {source: [], target: []}
        for entry in self._current(shelf):
            page, back_s = entry[2:]
            if not source.named:  # the page's position was unknown until now
                self._held[page] = self._entry(page, back_s)
            parts[self._history.node(page)].append(self._held[page])
        for node, part in parts.items():
            if part:
                mine = self._shelves.setdefault(node.slot, NodeCopies())
                mine.count += len(part)
                mine.entries += part
                heapq.heapify(mine.entries)
            self._refresh(node)
        return len(parts[target])

    def victims(self, count: int, now_s: float) -> list[PageId]:
        """See Policy."""
        count = min(count, len(self._held))
        if count <= 0:
            return []
        rates = self._rates(now_s)
        slots = np.flatnonzero(self._least[: len(rates)] < math.inf)
        values = self._least[slots] * rates[slots]
        if count < len(slots):
            slots = slots[values <= np.partition(values, count - 1)[count - 1]]
        if count == 1:
            slot = int(slots[np.argmin(self._depth[slots])])
            return [self._shelves[slot].entries[0][2]]
        return self._merge(count, slots, rates)

    def _merge(
        self, count: int, slots: NDArray[np.int64], rates: NDArray[np.float64]
    ) -> list[PageId]:
        def ranked(slot: int) -> Iterator[tuple[float, int, int, PageId]]:
            rate = float(rates[slot])
            for cost, depth, page, _ in sorted(self._current(self._shelves[slot])):
                yield cost * rate, depth, slot, page

        heap = [
            (float(self._least[slot] * rates[slot]), int(self._depth[slot]), int(slot), b"")
            for slot in slots
        ]
        heapq.heapify(heap)
        queues: dict[int, Iterator[tuple[float, int, int, PageId]]] = {}
        found: list[PageId] = []
        while len(found) < count:
            *_, slot, page = heap[0]
            if page:
                found.append(page)
            queue = queues.setdefault(slot, ranked(slot))
            follower = next(queue, None)
            if follower is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, follower)
        return found

    def _entry(self, page: PageId, back_s: float) -> Entry:
        depth = self._history.depth(page)
        if depth >= len(self._prices) or self._added >= ASKED:
            count = max(64, len(self._prices), 2 * depth)
            self._prices, self._added = self._price(np.arange(count, dtype=np.float64)), 0
        self._added += 1
        return min(back_s, float(self._prices[depth])), depth, page, back_s

    def _current(self, shelf: NodeCopies) -> list[Entry]:
        """Return a node's copies that are up to date, each once."""
        return [entry for entry in shelf.entries if self._held.get(entry[2]) is entry]

    def _refresh(self, node: PageRun) -> None:
        """Bring the first entry of a node's copies up to date."""
        slot = node.slot
        self._grow()
        shelf = self._shelves.get(slot)
        if shelf is None or not shelf.count:
            self._shelves.pop(slot, None)
            self._least[slot] = math.inf
            return
        if len(shelf.entries) > 2 * shelf.count + 16:
            shelf.entries = self._current(shelf)
            heapq.heapify(shelf.entries)
        while self._held.get(shelf.entries[0][2]) is not shelf.entries[0]:
            heapq.heappop(shelf.entries)
        self._least[slot], self._depth[slot] = shelf.entries[0][:2]

    def _grow(self) -> None:
        more = self._history.size - len(self._least)
        if more > 0:
            more = max(more, len(self._least))
            self._least = np.concatenate([self._least, np.full(more, math.inf)])
            self._depth = np.concatenate([self._depth, np.zeros(more, np.int64)])
