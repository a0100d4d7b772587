"""Nodes of the tree of pages, and the interface of policies that keep data by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.pages.identity import PageId


class PageRun:
    """A run of pages that the same sessions share: `pages` stand at `start` and after it in all their chains."""

    __slots__ = ("children", "copies", "named", "pages", "parent", "slot", "start")

    def __init__(self, slot: int, start: int, pages: list[PageId], *, named: bool = True) -> None:
        self.slot, self.start, self.pages, self.named = slot, start, pages, named
        self.parent: PageRun | None = None
        self.children = 0
        self.copies = 0  # of its pages, in all tiers

    @property
    def end(self) -> int:
        """Position after the last page."""
        return self.start + len(self.pages)


class Watcher(Protocol):
    """A tier's policy as the history sees it: it may keep data by node, and is told when nodes change."""

    def used(self, chain: Sequence[PageId]) -> None:
        """Note that a turn reads or has written these pages."""

    def moved(self, source: PageRun, target: PageRun) -> int:
        """Note that pages of `source` belong to `target` now; return how many copies of them the tier holds."""
