"""The physical pages of one layer group: who refers to them, and which full ones can be found again by id."""

from __future__ import annotations

from collections import OrderedDict

from common.pages.identity import PageId


class Pool:
    """Pages 0 … total-1; each is free, used (references > 0) or cached (none, but it has an id and can be found).

    Invariant: free + used + cached = total. A cached page is given away when no page is free, the least recently
    released first.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_id: dict[PageId, int] = {}
        self._ids: dict[int, PageId] = {}

    @property
    def available(self) -> int:
        """Pages that can be allocated now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Pages somebody refers to."""
        return len(self._references)

    @property
    def cached(self) -> int:
        """Pages nobody refers to that can be found by id."""
        return len(self._cached)

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    def references(self, page: int) -> int:
        """Return how many refer to `page`."""
        return self._references.get(page, 0)

    def find(self, page_id: PageId) -> int | None:
        """Return the page that has this id, or None; it takes no reference."""
        return self._by_id.get(page_id)

    def allocate(self) -> int:
        """Return an empty page with one reference; IndexError if none is available."""
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            del self._by_id[self._ids.pop(page)]
        else:
            raise IndexError(f"no page available of {self.total}")
        self._references[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Take one more reference to a used or cached page."""
        if page not in self._references and page not in self._cached:
            raise KeyError(f"page {page} holds nothing")
        self._cached.pop(page, None)
        self._references[page] = self._references.get(page, 0) + 1

    def publish(self, page: int, page_id: PageId) -> None:
        """Give a used page, whose keys and values are all written, its id; the first page of an id keeps it."""
        if page not in self._references:
            raise KeyError(f"page {page} is not used")
        if page not in self._ids and page_id not in self._by_id:
            self._ids[page] = page_id
            self._by_id[page_id] = page

    def release(self, page: int, *, soon: bool = False) -> None:
        """Drop one reference; without any the page is cached if it has an id (`soon`: the next to go), else free."""
        left = self._references[page] - 1
        if left:
            self._references[page] = left
            return
        del self._references[page]
        if page not in self._ids:
            self._free.append(page)
            return
        self._cached[page] = None
        if soon:
            self._cached.move_to_end(page, last=False)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken (for tests)."""
        states = [*self._free, *self._references, *self._cached]
        assert len(states) == len(set(states)) == self.total
        assert all(count > 0 for count in self._references.values())
        assert {page: name for name, page in self._by_id.items()} == self._ids
        assert set(self._cached) <= set(self._ids)
