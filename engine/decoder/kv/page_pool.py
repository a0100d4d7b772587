"""A page pool: the physical pages of one layer group in one tier, their references, and full pages by id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from common.pages.identity import PageId
from engine.decoder.kv.eviction.policy import Policy


class PagePool:
    """Pages 0 … total-1: each is free, used (with references) or cached (without references, but found by its id).

    Invariant: free + used + cached = total. When no page is free, a cached page is evicted: first pages that no row
    will see or that are not worth a copy in a lower tier (worthless), then pages with a copy in a lower tier (backed),
    then all others (bare); the last two in the policy's order.
    """

    def __init__(
        self,
        total: int,
        order: Callable[[], Policy],
        now_s: Callable[[], float],
    ) -> None:
        self.total = total
        # Called with every id that is removed.
        self.gone: Callable[[PageId], None] = lambda _: None
        self._now_s = now_s
        self._free = list(range(total - 1, -1, -1))
        self._references: dict[int, int] = {}
        self._cached: set[int] = set()
        self._worthless: OrderedDict[int, None] = OrderedDict()
        self._bare, self._backed = order(), order()
        self._below: dict[PageId, float] = {}  # seconds to fetch a backed page from the lower tier
        self._by_id: dict[PageId, int] = {}
        self._ids: dict[int, PageId] = {}

    @property
    def available(self) -> int:
        """The number of pages that can be allocated now: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def spare(self) -> int:
        """The number of pages that can be allocated without loss: free, worthless or backed."""
        return len(self._free) + len(self._worthless) + len(self._backed)

    @property
    def used(self) -> int:
        """The number of pages with references."""
        return len(self._references)

    @property
    def cached(self) -> int:
        """The number of pages without references that can be found by id."""
        return len(self._cached)

    @property
    def free(self) -> int:
        """The number of empty pages."""
        return len(self._free)

    def references(self, page: int) -> int:
        """Return the number of references to `page`."""
        return self._references.get(page, 0)

    def holds(self, page_id: PageId) -> bool:
        """True if the page with this id has a reference."""
        return self._by_id.get(page_id, -1) in self._references

    def __iter__(self) -> Iterator[PageId]:
        """Yield the ids that can be found."""
        yield from self._by_id

    def find(self, page_id: PageId) -> int | None:
        """Return the page with this id, or None, without taking a reference."""
        return self._by_id.get(page_id)

    def bare(self, count: int) -> list[PageId]:
        """Return up to `count` ids of cached pages that no lower tier has, in the order to copy them down."""
        return self._bare.victims(count, self._now_s())

    def allocate(self) -> int:
        """Return an empty page with one reference; IndexError if no page is available."""
        self.free_up(1)
        if not self._free:
            raise IndexError(f"no page available of {self.total}")
        page = self._free.pop()
        self._references[page] = 1
        return page

    def free_up(self, count: int) -> None:
        """Evict cached pages until `count` pages are free, or no page is cached."""
        while len(self._free) < count and self._worthless:
            self.forget(self._ids[next(iter(self._worthless))])
        for order in (self._backed, self._bare):
            if len(self._free) < count and len(order):
                for page_id in order.victims(count - len(self._free), self._now_s()):
                    self.forget(page_id)

    def hold(self, page: int) -> None:
        """Take one more reference to a used or cached page."""
        if page not in self._references and page not in self._cached:
            raise KeyError(f"page {page} holds nothing")
        if page in self._cached:
            self._uncache(page)
        self._references[page] = self._references.get(page, 0) + 1

    def publish(self, page: int, page_id: PageId) -> None:
        """Give a fully written used page its id; if another page has the id already, nothing changes."""
        if page not in self._references:
            raise KeyError(f"page {page} is not used")
        if page not in self._ids and page_id not in self._by_id:
            self._ids[page] = page_id
            self._by_id[page_id] = page

    def forget(self, page_id: PageId) -> None:
        """Remove the id of a page; the page is then free unless it has references."""
        page = self._by_id.pop(page_id, None)
        if page is None:
            return
        if page in self._cached:
            self._uncache(page)
            self._free.append(page)
        del self._ids[page]
        self._below.pop(page_id, None)
        self.gone(page_id)

    def back(self, page_id: PageId, seconds: float | None) -> None:
        """Record that a lower tier has a copy of a page, fetched in `seconds`; None: no lower tier is to have a copy.

        A page that a lower tier has dropped, or that is not worth a copy, is evicted before all other cached pages.
        """
        page = self._by_id.get(page_id)
        if page is None:
            return
        cached = page in self._cached and page not in self._worthless
        if cached:
            self._uncache(page)
        if seconds is None:
            self._below.pop(page_id, None)
        else:
            self._below[page_id] = seconds
        if cached:
            self._cache(page, worthless=seconds is None)

    def release(self, page: int, *, unseen: bool = False) -> None:
        """Drop one reference; after the last a page with an id is cached (`unseen`: evicted first), else it is free."""
        left = self._references[page] - 1
        if left:
            self._references[page] = left
            return
        del self._references[page]
        if page not in self._ids:
            self._free.append(page)
        else:
            self._cache(page, worthless=unseen)

    def _cache(self, page: int, *, worthless: bool = False) -> None:
        page_id = self._ids[page]
        self._cached.add(page)
        if worthless:
            self._worthless[page] = None
        elif page_id in self._below:
            self._backed.add(page_id, self._below[page_id])
        else:
            self._bare.add(page_id)

    def _uncache(self, page: int) -> None:
        page_id = self._ids[page]
        self._cached.discard(page)
        if page in self._worthless:
            del self._worthless[page]
        elif page_id in self._below:
            self._backed.discard(page_id)
        else:
            self._bare.discard(page_id)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken (for tests)."""
        states = [*self._free, *self._references, *self._cached]
        assert len(states) == len(set(states)) == self.total
        assert all(count > 0 for count in self._references.values())
        assert {page: name for name, page in self._by_id.items()} == self._ids
        assert set(self._cached) <= set(self._ids)
        assert len(self._cached) == len(self._worthless) + len(self._backed) + len(self._bare)
        assert set(self._below) <= set(self._by_id)
