"""Ids of the pages that a conversation filled, computed from the tokens of its turns."""

from __future__ import annotations

from typing import NamedTuple

from common.pages.identity import PAGE, PageId, long_root, page_ids
from common.wire.sessions import Turn


class ChainPlace(NamedTuple):
    """A page's place in its chain: its predecessor, and the number of pages before it."""

    parent: PageId
    depth: int


class Chain:
    """All full pages of a conversation, turn by turn; `root` is the parent of its first page.

    A turn whose text grows beyond the model's `short_context` (0: none) fills pages of two kinds: pages of the short
    text, if its prompt was short, and pages of the long text. Two chains of the same turns with different roots have
    the same pages in the same order, under different ids.
    """

    def __init__(self, root: PageId, short_context: int) -> None:
        self.root = root
        self.places: dict[PageId, ChainPlace] = {}
        self._short_context = short_context
        self._tokens: list[int] = []
        self._ids: dict[
            PageId, list[PageId]
        ] = {}  # page ids of the latest tokens, by the first page's parent

    def add(self, turn: Turn) -> None:
        """Append a turn, which keeps the first `turn.history` tokens of the conversation and replaces the rest."""
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
        """Record the pages of the first `length` tokens."""
        kept = self._ids.get(root, [])
        ids = self._ids[root] = page_ids(root, self._tokens[:length], kept)
        for depth in range(len(kept), len(ids)):
            parent = ids[depth - 1] if depth else root
            self.places.setdefault(ids[depth], ChainPlace(parent, depth))
