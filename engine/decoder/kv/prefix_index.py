"""The prefix index: the page chains of sequences that have left the engine, by session, and marks of their prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from common.pages.identity import PageId, marks_of

MOST_PAGES = 1 << 17  # in the chains of all sessions together
MOST_MARKS = 1 << 12


class PrefixIndex:
    """Chains by session, and marks of prompts' prefixes; the longest unused are dropped first, the last chain never.

    A session's chain is its latest turn's; the session also owns pages of earlier turns that are not in the chain.
    """

    def __init__(self, most_pages: int = MOST_PAGES, most_marks: int = MOST_MARKS) -> None:
        self._most_pages, self._most_marks = most_pages, most_marks
        self._chains: OrderedDict[str, list[PageId]] = OrderedDict()
        self._earlier: dict[str, set[PageId]] = {}
        self._marks: OrderedDict[PageId, None] = OrderedDict()
        self._pages = 0

    @property
    def sessions(self) -> list[str]:
        """The remembered sessions, the longest unused first."""
        return list(self._chains)

    @property
    def marks(self) -> list[PageId]:
        """The remembered marks, the longest unused first."""
        return list(self._marks)

    def chain(self, session: str) -> list[PageId]:
        """Return the page ids of a session's latest turn here; empty for an unknown session."""
        return self._chains.get(session, [])

    def left(self, session: str, ids: Sequence[PageId]) -> None:
        """Record the full pages of a sequence that has left; `session` is empty for a request without a session."""
        for mark in marks_of(ids):
            self._marks[mark] = None
            self._marks.move_to_end(mark)
        while len(self._marks) > self._most_marks:
            self._marks.popitem(last=False)
        if not session:
            return
        earlier = self._earlier.get(session, set()) | set(self.chain(session))
        self.drop(session)
        self._chains[session] = list(ids)
        self._earlier[session] = earlier.difference(ids)
        self._pages += self._size(session)
        while self._pages > self._most_pages and len(self._chains) > 1:
            self.drop(next(iter(self._chains)))

    def drop(self, session: str) -> None:
        """Drop a session from the index; its pages stay in their tiers."""
        if session in self._chains:
            self._pages -= self._size(session)
            del self._chains[session], self._earlier[session]

    def unmark(self, marks: Iterable[PageId]) -> None:
        """Drop marks from the index."""
        for mark in marks:
            self._marks.pop(mark, None)

    def some_marks(self, count: int) -> list[PageId]:
        """Return up to `count` marks, those returned longest ago first, and move them to the end."""
        some = list(islice(self._marks, count))
        for mark in some:
            self._marks.move_to_end(mark)
        return some

    def delete(self, session: str, ids: Iterable[PageId]) -> list[PageId]:
        """Drop a session; return its pages, including `ids`, that no other remembered session has."""
        mine = dict.fromkeys([*ids, *self.chain(session), *self._earlier.get(session, ())])
        self.drop(session)
        for other, chain in self._chains.items():
            for page in (*chain, *self._earlier[other]):
                mine.pop(page, None)
        self.unmark(mine)
        return list(mine)

    def _size(self, session: str) -> int:
        return len(self._chains[session]) + len(self._earlier[session])
