"""The owners of a tier's pages: their bytes, and the pages to drop of an owner beyond its limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from common.pages.identity import Owner
from common.pages.keys import PageKey


class Share(Struct):
    """One owner's pages: their bytes by page, the page written first in front."""

    bytes: int = 0
    pages: dict[PageKey, int] = field(default_factory=dict)


class Owners:
    """Shares by owner; `limits` are the bytes that some of them may have."""

    def __init__(self) -> None:
        self.limits: Mapping[Owner, int] = {}
        self._shares: dict[Owner, Share] = {}

    def enter(self, owner: Owner, key: PageKey, size: int) -> None:
        """Note a page of an owner; it may have had another size before."""
        share = self._shares.setdefault(owner, Share())
        share.bytes += size - share.pages.get(key, 0)
        share.pages[key] = size

    def leave(self, owner: Owner, key: PageKey) -> None:
        """Forget a page of an owner."""
        share = self._shares[owner]
        share.bytes -= share.pages.pop(key)
        if not share.pages:
            del self._shares[owner]

    def excess(self, owner: Owner, size: int) -> list[PageKey]:
        """Return the pages to drop, the oldest first, so that an owner's next page is within its limit.

        ValueError if the page alone exceeds the limit.
        """
        limit = self.limits.get(owner)
        if limit is None:
            return []
        if size > limit:
            raise ValueError(f"page of {size} bytes; expected at most its owner's {limit}")
        share = self._shares.get(owner, Share())
        return list(_first(share, share.bytes + size - limit))


def _first(share: Share, need: int) -> Iterator[PageKey]:
    for key, size in share.pages.items():
        if need <= 0:
            return
        need -= size
        yield key
