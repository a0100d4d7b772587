"""The history of sessions and of the pages that they share, learned from the chains of turns."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.pages.identity import PageId
from engine.decoder.kv.eviction.hazard import EVERY, NEVER, Hazard

FIRST_FITS = (8, 16, 32)  # turns after which a young history is fitted, too
FLOOR_S = 1e-3  # shorter idle times count as this
MOST_RETURNS = 1e6  # expected of a page in no chain
LIMIT = 1 << 18  # remembered ids of pages, also of pages in no tier: about 50 MB


class PageRun:
    """A run of pages that the same sessions share: in all their chains `pages` begin at position `start`."""

    __slots__ = ("children", "copies", "named", "pages", "parent", "slot", "start")

    def __init__(self, slot: int, start: int, pages: list[PageId], *, named: bool = True) -> None:
        self.slot, self.start, self.pages, self.named = slot, start, pages, named
        self.parent: PageRun | None = None
        self.children = 0
        self.copies = 0  # copies of its pages in all tiers

    @property
    def end(self) -> int:
        """The position after the last page."""
        return self.start + len(self.pages)


class Watcher(Protocol):
    """The interface of a tier's policy for the history: it is notified of turns and of changes of nodes."""

    def used(self, chain: Sequence[PageId]) -> None:
        """Record that a turn reads or has written these pages."""

    def moved(self, source: PageRun, target: PageRun) -> int:
        """Record that pages of node `source` now belong to `target`; return the number of their copies in the tier."""


class History:
    """The sessions of a process and the tree of their pages, shared by all its tiers.

    A session is a chain of pages that turns extend. A turn whose chain begins with the whole session continues the
    session; a turn that diverges earlier begins a new session, which shares the pages before the fork. At most `limit`
    ids of pages are remembered: above that, sessions without a copy in any tier are forgotten, the longest idle first;
    the last session is kept.

    Each node has a slot in the arrays: `parent` is the parent's slot, or -1; `tip_s` is the last activity of the
    session that ends in the node (-inf: none ends there); `used_s` and `uses` are the time of the last turn, and the
    number of turns, that used all its pages; `answer` is the number of pages of the last answer.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.now_s = 0.0
        self.size = 0  # number of slots ever used
        self.parent: NDArray[np.int64] = np.full(64, -1)
        self.tip_s: NDArray[np.float64] = np.full(64, -math.inf)
        self.used_s: NDArray[np.float64] = np.zeros(64)
        self.uses: NDArray[np.int64] = np.zeros(64, np.int64)
        self.answer: NDArray[np.int64] = np.zeros(64, np.int64)
        self._hazard = Hazard()
        self._turns = 0
        self._free: list[int] = []
        self._nodes: dict[PageId, PageRun] = {}
        self._depths: dict[PageId, int] = {}
        self._idle: OrderedDict[int, PageRun] = OrderedDict()  # nodes by slot, next to forget first
        self._watchers: list[Watcher] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def watch(self, watcher: Watcher) -> None:
        """Report turns and moves of pages to `watcher` from now on."""
        self._watchers.append(watcher)

    def begin(self, chain: Sequence[PageId], now_s: float) -> None:
        """Record the arrival of a turn whose prompt has the full pages `chain`; `now_s` must never decrease."""
        self._take(chain, now_s, begins=True)

    def end(self, chain: Sequence[PageId], now_s: float) -> None:
        """Record the end of a turn; `chain` includes the answer's full pages."""
        self._take(chain, now_s, begins=False)

    def depth(self, page: PageId) -> int:
        """Return the page's position in its chains; 0 if no chain contains it."""
        return self._depths.get(page, 0)

    def node(self, page: PageId) -> PageRun:
        """Return the node of a known page; KeyError for an unknown one."""
        return self._nodes[page]

    def last_s(self, page: PageId) -> float:
        """Return when a turn last used the page; the time of the latest turn if no chain contains the page."""
        node = self._nodes.get(page)
        return self.now_s if node is None else float(self.used_s[node.slot])

    def idleness(self, now_s: float) -> NDArray[np.float64]:
        """Return by slot the sum of 1 / idle seconds over the sessions that end at the node or below it."""
        tip_s = self.tip_s[: self.size]
        rates = np.where(tip_s > -math.inf, 1 / np.maximum(now_s - tip_s, FLOOR_S), 0.0)
        return self._sum_up(rates)

    def _sum_up(self, rates: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for each slot the sum of `rates` over the node and all nodes below it."""
        sums = rates.copy()
        parents = self.parent[: self.size]
        slots = np.flatnonzero(parents >= 0)
        carried = rates[slots]
        while slots.size:  # one pass per level of the tree, over fewer and fewer nodes
            level = np.bincount(parents[slots], carried, self.size).astype(np.float64, copy=False)
            sums += level
            slots = np.flatnonzero((level > 0) & (parents >= 0))
            carried = level[slots]
        return sums

    def hazards(self, now_s: float) -> NDArray[np.float64]:
        """Return by slot the learned rates of return, summed over the turns that end at the node or below it."""
        return self._sum_up(self._hazard.rates(self.used_s[: self.size], now_s))

    def returns(self, pages: Sequence[PageId], now_s: float) -> NDArray[np.float64]:
        """Return the number of turns expected to use each page from now on; MOST_RETURNS for a page in no chain."""
        expected = self._sum_up(self._hazard.returns(self.used_s[: self.size], now_s))
        nodes = [self._nodes.get(page) for page in pages]
        return np.array(
            [
                MOST_RETURNS if node is None or not node.named else expected[node.slot]
                for node in nodes
            ],
            dtype=np.float64,
        )

    def hold(self, page: PageId) -> PageRun:
        """Record a new copy in a tier and return its node; a page in no chain becomes a session, used just now."""
        node = self._nodes.get(page)
        if node is None:
            node = self._nodes[page] = self._new(0, [page], named=False)
            self.tip_s[node.slot] = self.used_s[node.slot] = self.now_s
            self._classify(node, NEVER)
        node.copies += 1
        self._idle.pop(node.slot, None)
        return node

    def drop(self, page: PageId) -> PageRun:
        """Record that a tier has lost a copy, and return its node."""
        node = self._nodes[page]
        node.copies -= 1
        if node.named:
            self._consider(node)
            self._forget()
        elif not node.copies:
            del self._nodes[page]
            self._remove(node)
        return node

    def _take(self, chain: Sequence[PageId], now_s: float, *, begins: bool) -> None:
        self.now_s = max(self.now_s, now_s)
        if not chain:
            return
        path, known = self._walk(chain)
        rest = list(chain[known:])
        self._check(rest, known)
        for node in path:
            returned = begins and node is path[-1]
            self._hazard.leave(node.slot, self.used_s[node.slot], self.now_s, returned=returned)
        if path and path[-1].end > known:
            path[-1] = self._split(path[-1], known - path[-1].start)
        tip = next((node for node in reversed(path) if self.tip_s[node.slot] > -math.inf), None)
        answer = len(chain) - tip.end if tip is not None and not begins else 0
        if rest and tip is not None and tip is path[-1] and not tip.children:
            self._append(tip, rest)
        elif rest:
            path.append(self._grow(path[-1] if path else None, known, rest))
        if tip is not None:
            self.tip_s[tip.slot] = -math.inf
        self.tip_s[path[-1].slot] = self.now_s
        self._note(path, answer, begins=begins)
        self._consider(path[-1])
        for watcher in self._watchers:
            watcher.used(chain)
        self._forget()

    def _note(self, path: list[PageRun], answer: int, *, begins: bool) -> None:
        """Record that a turn used these nodes, or ended there with `answer` pages of answer."""
        for node in path:
            self.used_s[node.slot] = self.now_s
            self.uses[node.slot] += begins
            if not begins:
                self.answer[node.slot] = answer
                # A prompt shorter than a page has no chain: only the turn's end is recorded.
                self.uses[node.slot] = max(1, self.uses[node.slot])
            self._classify(node, NEVER if begins else self.now_s)
        self._turns += begins
        if begins and (self._turns % EVERY == 0 or self._turns in FIRST_FITS):
            self._hazard.fit(self.used_s[: self.size], self.now_s)

    def _classify(self, node: PageRun, counted_s: float) -> None:
        kind = 2 if node.children else 0 if node.parent is None else 1
        slot = node.slot
        size = int(self.uses[slot]), int(self.answer[slot]), node.end
        self._hazard.enter(slot, kind, size, counted_s)

    def _walk(self, chain: Sequence[PageId]) -> tuple[list[PageRun], int]:
        """Return the nodes along the chain, and the number of the chain's known pages."""
        path: list[PageRun] = []
        known = 0
        while known < len(chain):
            node = self._nodes.get(chain[known])
            if node is None or not node.named or node.start != known:
                break
            path.append(node)
            part = chain[known : node.end]
            same = next(
                (n for n, (a, b) in enumerate(zip(part, node.pages, strict=False)) if a != b),
                len(part),
            )
            known += same
            if same < len(node.pages):
                break
        return path, known

    def _check(self, pages: list[PageId], start: int) -> None:
        seen: set[PageId] = set()
        for depth, page in enumerate(pages, start):
            if page in self._depths or page in seen:
                raise ValueError(
                    f"page {page.hex()} stands at position {depth} and in another chain or place; "
                    "expected ids that name all that stands before"
                )
            seen.add(page)

    def _new(self, start: int, pages: list[PageId], *, named: bool = True) -> PageRun:
        if not self._free and self.size == len(self.parent):
            self.parent = np.concatenate([self.parent, np.full(self.size, -1)])
            self.tip_s = np.concatenate([self.tip_s, np.full(self.size, -math.inf)])
            self.used_s = np.concatenate([self.used_s, np.zeros(self.size)])
            self.uses = np.concatenate([self.uses, np.zeros(self.size, np.int64)])
            self.answer = np.concatenate([self.answer, np.zeros(self.size, np.int64)])
        if self._free:
            slot = self._free.pop()
        else:
            slot, self.size = self.size, self.size + 1
        self.parent[slot], self.tip_s[slot] = -1, -math.inf
        self.used_s[slot], self.uses[slot], self.answer[slot] = self.now_s, 0, 0
        return PageRun(slot, start, pages, named=named)

    def _split(self, node: PageRun, at: int) -> PageRun:
        """Split a node in two; return the new node, with the first `at` pages. The session ends in the old one."""
        upper = self._new(node.start, node.pages[:at])
        self._hang(upper, node.parent)
        for array in (self.used_s, self.uses, self.answer):
            array[upper.slot] = array[node.slot]
        node.start, node.pages = node.start + at, node.pages[at:]
        upper.children = 1
        node.parent, self.parent[node.slot] = upper, upper.slot
        for page in upper.pages:
            self._nodes[page] = upper
        self._classify(node, self.now_s)  # the node's idle time continues under its new kind
        self._tell(node, upper)
        return upper

    def _grow(self, parent: PageRun | None, start: int, pages: list[PageId]) -> PageRun:
        node = self._new(start, [])
        if parent is not None:
            parent.children += 1
            self._idle.pop(parent.slot, None)
        self._hang(node, parent)
        self._append(node, pages)
        return node

    def _hang(self, node: PageRun, parent: PageRun | None) -> None:
        node.parent, self.parent[node.slot] = parent, -1 if parent is None else parent.slot

    def _append(self, node: PageRun, pages: list[PageId]) -> None:
        """Add pages to a node; a tier may already hold some of them, from before any chain contained them."""
        for depth, page in enumerate(pages, node.end):
            before = self._nodes.get(page)
            self._nodes[page], self._depths[page] = node, depth
            node.pages.append(page)
            if before is not None:
                self._tell(before, node)
                self._remove(before)

    def _tell(self, source: PageRun, target: PageRun) -> None:
        copies = sum(watcher.moved(source, target) for watcher in self._watchers)
        source.copies -= copies
        target.copies += copies
        self._consider(source)
        self._consider(target)

    def _consider(self, node: PageRun, *, last: bool = True) -> None:
        """Record whether a node may be forgotten: a leaf without copies may; with `last` after all other nodes."""
        self._idle.pop(node.slot, None)
        if not node.copies and not node.children:
            self._idle[node.slot] = node
            self._idle.move_to_end(node.slot, last=last)

    def _forget(self) -> None:
        # The last node is kept, since its turn may be running.
        while len(self._idle) > 1 and len(self._nodes) > self.limit:
            _, node = self._idle.popitem(last=False)
            parent = node.parent
            for page in node.pages:
                del self._nodes[page]
                self._depths.pop(page, None)
            if parent is not None:
                parent.children -= 1
                # The shortened session ends in the parent, unless another session ends there.
                if self.tip_s[parent.slot] == -math.inf:
                    self.tip_s[parent.slot] = self.tip_s[node.slot]
                self._consider(parent, last=False)
            self._remove(node)

    def _remove(self, node: PageRun) -> None:
        self._idle.pop(node.slot, None)
        self.parent[node.slot], self.tip_s[node.slot] = -1, -math.inf
        self._hazard.remove(node.slot)
        self._free.append(node.slot)
