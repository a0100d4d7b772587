"""Ids of the pages that a conversation filled, computed from the tokens of its turns."""

from __future__ import annotations

from typing import NamedTuple

from common.pages.identity import PAGE, PageId, long_root, page_ids
from common.wire.sessions import Turn


class ChainPlace(NamedTuple):
    """A page's place in its chain: the page before it, and the number of pages before it."""

    parent: PageId
    depth: int


class Chain:
    """All full pages of a conversation, turn by turn; `root` is the parent of its first page.

    A turn that grows beyond the model's `short_context` (0: there is none) filled pages of two kinds: those of the text
    while it was short, if its prompt was, and those of the long text. Two chains of the same turns and different roots
    have the same pages in the same order, under different ids.
    """

    def __init__(self, root: PageId, short_context: int) -> None:
        self.root = root
        self.places: dict[PageId, ChainPlace] = {}
        self._short_context = short_context
        self._tokens: list[int] = []
        self._ids: dict[
            PageId, list[PageId]
        ] = {}  # of the latest tokens, by the parent of the first

    def add(self, turn: Turn) -> None:
        """Append a turn; it keeps the first `turn.history` tokens of the conversation and replaces the rest."""
        del self._tokens[turn.history :]
        for ids in self._ids.values():
            del ids[turn.history // PAGE :]
        self._tokens += turn.prompt
        prompt, short = len(self._tokens), self._short_context
        self._tokens += turn.output
        length = len(self._tokens)
        if not short or prompt <= short:
            self._fill(self.root, min(length, short or length))
        if 0 < short < length:
            self._fill(long_root(self.root), length)

    def _fill(self, root: PageId, length: int) -> None:
        """Note the pages of the first `length` tokens."""
        kept = self._ids.get(root, [])
        ids = self._ids[root] = page_ids(root, self._tokens[:length], kept)
        for depth in range(len(kept), len(ids)):
            parent = ids[depth - 1] if depth else root
            self.places.setdefault(ids[depth], ChainPlace(parent, depth))
