"""Ids of the pages that a conversation filled, computed from the tokens of its turns."""

from __future__ import annotations

from typing import NamedTuple

from common.pages.identity import PAGE, PageId, page_ids
from common.wire.sessions import Turn


class ChainPlace(NamedTuple):
    """A page's place in its chain: the page before it, and the number of pages before it."""

    parent: PageId
    depth: int


class Chain:
    """All full pages of a conversation, turn by turn; `root` is the parent of its first page.

    Two chains of the same turns and different roots have the same pages in the same order, under different ids.
    """

    def __init__(self, root: PageId) -> None:
        self.root = root
        self.places: dict[PageId, ChainPlace] = {}
        self._tokens: list[int] = []
        self._ids: list[PageId] = []

    def add(self, turn: Turn) -> None:
        """Append a turn; it keeps the first `turn.history` tokens of the conversation and replaces the rest."""
        del self._tokens[turn.history :]
        self._tokens += turn.prompt + turn.output
        kept = self._ids[: turn.history // PAGE]
        self._ids = page_ids(self.root, self._tokens, kept)
        for depth in range(len(kept), len(self._ids)):
            parent = self._ids[depth - 1] if depth else self.root
            self.places.setdefault(self._ids[depth], ChainPlace(parent, depth))
