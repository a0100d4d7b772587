"""Eviction policies: the order in which a tier drops its copies. Each tier has a policy; all share one history."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from common.pages.identity import PageId
from engine.decoder.kv.eviction.history import History, PageRun, Watcher
from engine.decoder.kv.eviction.value import Price, ValuePolicy

NAMES = ("lru", "lru-conversation", "s3fifo", "pensieve", "spillway")


class Policy(Watcher, Protocol):
    """The order in which a tier drops its copies. All copies of a tier have the same number of bytes."""

    def add(self, page: PageId, back_s: float = math.inf) -> None:
        """Add a copy that may be dropped, or update `back_s` of an added copy.

        `back_s` is the seconds to fetch the page back from the next tier that holds it (inf: no tier does).
        """

    def discard(self, page: PageId) -> None:
        """Remove a copy that is gone or in use, so that it may not be dropped; an unknown copy is ignored."""

    def victims(self, count: int, now_s: float) -> list[PageId]:
        """Return the first `count` pages to drop, or all, least value first; none is removed from the policy."""

    def __len__(self) -> int: ...


def make_policy(name: str, history: History, price: Price) -> Policy:
    """Return a policy by name; ValueError for an unknown name.

    `price` returns the seconds to recompute pages, by their positions in the chain (0-based).
    """
    policy: Policy
    match name:
        case "lru":
            policy = Lru()
        case "lru-conversation":
            policy = LruConversation(history)
        case "s3fifo":
            policy = S3Fifo()
        case "pensieve":
            policy = ValuePolicy(history, price, history.idleness)
        case "spillway":
            policy = ValuePolicy(history, price, history.hazards)
        case _:
            raise ValueError(f"eviction policy {name!r}: expected one of {', '.join(NAMES)}")
    history.watch(policy)
    return policy


class Lru:
    """LRU: drops the pages that no turn has used for the longest time; among one turn's pages, leading ones first."""

    def __init__(self) -> None:
        self._pages: OrderedDict[PageId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, page: PageId, back_s: float = math.inf) -> None:  # noqa: ARG002 - no use for it
        """A new copy counts as used now."""
        self._pages.setdefault(page)

    def discard(self, page: PageId) -> None:
        """See Policy."""
        self._pages.pop(page, None)

    def used(self, chain: Sequence[PageId]) -> None:
        """Record that a turn used these pages, in order."""
        for page in chain:
            if page in self._pages:
                self._pages.move_to_end(page)

    def moved(self, source: PageRun, target: PageRun) -> int:  # noqa: ARG002 - it keeps nothing by node
        """Return 0, since this policy keeps no data by node."""
        return 0

    def victims(self, count: int, now_s: float) -> list[PageId]:  # noqa: ARG002 - order, not time
        """See Policy."""
        return list(islice(self._pages, max(0, count)))


class LruConversation:
    """Drops all pages of the conversation that has been idle for longest, then of the next.

    A page belongs to the conversation that used it last; two that ended at the same instant are one. `victims` returns
    whole conversations, so it may return more than it was asked for.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._last_s: dict[PageId, float] = {}
        self._parts: dict[float, set[PageId]] = {}  # pages held, by when they were used

    def __len__(self) -> int:
        return len(self._last_s)

    def add(self, page: PageId, back_s: float = math.inf) -> None:  # noqa: ARG002 - no use for it
        """See Policy."""
        if page not in self._last_s:
            self._put(page, self._history.last_s(page))

    def discard(self, page: PageId) -> None:
        """See Policy."""
        last_s = self._last_s.pop(page, None)
        if last_s is not None:
            part = self._parts[last_s]
            part.remove(page)
            if not part:
                del self._parts[last_s]

    def used(self, chain: Sequence[PageId]) -> None:
        """Record that a turn used these pages."""
        for page in chain:
            if page in self._last_s:
                self.discard(page)
                self._put(page, self._history.now_s)

    def moved(self, source: PageRun, target: PageRun) -> int:  # noqa: ARG002 - it keeps nothing by node
        """Return 0, since this policy keeps no data by node."""
        return 0

    def victims(self, count: int, now_s: float) -> list[PageId]:  # noqa: ARG002 - order, not time
        """See Policy; the last conversation is returned whole."""
        found: list[PageId] = []
        for last_s in sorted(self._parts):
            if len(found) >= count:
                break
            found += sorted(self._parts[last_s], key=self._history.depth)
        return found

    def _put(self, page: PageId, last_s: float) -> None:
        self._last_s[page] = last_s
        self._parts.setdefault(last_s, set()).add(page)


class S3Fifo:
    """S3-FIFO: pages used only once leave through a small queue; other pages get one more round for each use.

    A page that was in use and comes back enters the main queue, like a page that comes back soon after its drop.
    """

    def __init__(self) -> None:
        self._small: OrderedDict[PageId, int] = OrderedDict()  # uses since it was added, at most 3
        self._main: OrderedDict[PageId, int] = OrderedDict()
        self._ghosts: OrderedDict[PageId, None] = OrderedDict()
        self._offered: set[PageId] = set()
        self._target = 0

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def add(self, page: PageId, back_s: float = math.inf) -> None:  # noqa: ARG002 - no use for it
        """See Policy."""
        if page in self._small or page in self._main:
            return
        known = page in self._ghosts
        self._ghosts.pop(page, None)
        (self._main if known else self._small)[page] = 0

    def discard(self, page: PageId) -> None:
        """See Policy."""
        if page in self._small:
            del self._small[page]
            self._remember(page)
        elif page in self._main:
            del self._main[page]
            if page not in self._offered:
                self._remember(page)
        self._offered.discard(page)

    def used(self, chain: Sequence[PageId]) -> None:
        """Record that a turn used these pages."""
        for page in chain:
            for queue in (self._small, self._main):
                if page in queue:
                    queue[page] = min(3, queue[page] + 1)

    def moved(self, source: PageRun, target: PageRun) -> int:  # noqa: ARG002 - it keeps nothing by node
        """Return 0, since this policy keeps no data by node."""
        return 0

    def victims(self, count: int, now_s: float) -> list[PageId]:  # noqa: ARG002 - order, not time
        """See Policy."""
        self._target = max(0, len(self) - count)
        found: list[tuple[PageId, OrderedDict[PageId, int]]] = []
        while len(found) < count and len(self):
            if len(self._small) > max(1, self._target // 10) or not self._main:
                page, uses = self._small.popitem(last=False)
                if uses:
                    self._main[page] = 0
                else:
                    found.append((page, self._small))
            else:
                page, uses = self._main.popitem(last=False)
                if uses:
                    self._main[page] = uses - 1
                else:
                    found.append((page, self._main))
        for page, queue in reversed(found):
            queue[page] = 0
            queue.move_to_end(page, last=False)
        pages = [page for page, _ in found]
        self._offered = set(pages)
        return pages

    def _remember(self, page: PageId) -> None:
        self._ghosts[page] = None
        while len(self._ghosts) > max(1, self._target):
            self._ghosts.popitem(last=False)
