"""What an engine remembers of the chains that left it: whose pages they are, to be told of and to be forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from common.pages.identity import PageId
from common.pages.prefix_hashes import marks_of

MOST_PAGES = 1 << 17  # of all sessions' chains together
MOST_MARKS = 1 << 12


class PrefixIndex:
    """Chains by session, and marks of any prompt's prefix; of both the longest unused go first, but the last stays.

    A session's chain is that of its latest turn; pages of earlier ones that are not in it are still its own.
    """

    def __init__(self, most_pages: int = MOST_PAGES, most_marks: int = MOST_MARKS) -> None:
        self._most_pages, self._most_marks = most_pages, most_marks
        self._chains: OrderedDict[str, list[PageId]] = OrderedDict()
        self._earlier: dict[str, set[PageId]] = {}
        self._marks: OrderedDict[PageId, None] = OrderedDict()
        self._pages = 0

    @property
    def sessions(self) -> list[str]:
        """The sessions that are remembered, the longest unused first."""
        return list(self._chains)

    @property
    def marks(self) -> list[PageId]:
        """The marks that are remembered, the longest unused first."""
        return list(self._marks)

    def chain(self, session: str) -> list[PageId]:
        """Return the pages of a session's latest turn here; none if it is not remembered."""
        return self._chains.get(session, [])

    def left(self, session: str, ids: Sequence[PageId]) -> None:
        """A sequence with these full pages has left; `session` is empty where it was no session's turn."""
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
        """Remember a session no more; its pages stay where they are."""
        if session in self._chains:
            self._pages -= self._size(session)
            del self._chains[session], self._earlier[session]

    def unmark(self, marks: Iterable[PageId]) -> None:
        """Remember marks no more."""
        for mark in marks:
            self._marks.pop(mark, None)

    def some_marks(self, count: int) -> list[PageId]:
        """Return the marks looked at longest ago, at most `count`, which are now the last in turn."""
        some = list(islice(self._marks, count))
        for mark in some:
            self._marks.move_to_end(mark)
        return some

    def delete(self, session: str, ids: Iterable[PageId]) -> list[PageId]:
        """Drop a session; return those of its pages, `ids` among them, that no other session remembered here has."""
        mine = dict.fromkeys([*ids, *self.chain(session), *self._earlier.get(session, ())])
        self.drop(session)
        for other, chain in self._chains.items():
            for page in (*chain, *self._earlier[other]):
                mine.pop(page, None)
        self.unmark(mine)
        return list(mine)

    def _size(self, session: str) -> int:
        return len(self._chains[session]) + len(self._earlier[session])
