"""The sequence, as the scheduler sees it: its tokens, the positions that are still to be computed, and its pages."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from common.pages.identity import PAGE, Owner, PageId, long_root, page_ids
from engine.decoder.executor.interface import LocalTier

Range = tuple[int, int]


class TokenSequence:
    """A prompt and the tokens generated after it; positions count from 0 over both.

    `todo` are the ranges of positions whose keys and values are needed but missing, in rising order; the last range
    ends with the last token, whose row yields the next token. `pages[g][l]` is the physical page of logical page l in
    layer group g, -1 if there is none. A sequence without pages is not admitted yet, or was preempted. `order` is its
    place in the order of arrival, `due_ms` when it should have ended; `most` is the most tokens it can have, `owner`
    the owner of its pages. `home` is the tier of all its pages, but with a `front` that many first pages of a sequence
    at home on the device are on the host: full pages, which nobody writes. `settled` is the number of steps since its
    pages came there, `skipped` the number of steps in a row in which the sequence had no row though it decodes.

    Keys of texts longer than `short_context` tokens are rotated by the long frequencies, from the first position on
    (LongRoPE; 0: never). A sequence is `long` if its pages are those of such a text. A sequence that has `outgrown` the
    short context begins again, and computes all positions anew, as transformers does.

    `spans` are the ranges of positions of passages whose keys and values are computed alone, behind the first token,
    and put into their places: an approximation. So pages from the first span on have no ids, and are found by nobody.
    """

    def __init__(
        self,
        job: str,
        choice: int,
        order: int,
        prompt: Sequence[int],
        *,
        root: PageId,
        most: int,
        output: Iterable[int] = (),
        due_ms: int = 0,
        low: bool = False,
        owner: Owner = b"",
        short_context: int = 0,
        spans: Iterable[Range] = (),
    ) -> None:
        self.job, self.choice, self.order = job, choice, order
        self.due_ms, self.low_priority = due_ms, low
        self.prompt = list(prompt)
        self.spans = list(spans)
        self.output = list(output)
        self.length = len(self.prompt) + len(self.output)  # the present number of tokens
        self.owner, self.most, self.short_context = owner, most, short_context
        self.todo: list[Range] = [(0, self.length)]
        self.pages: list[list[int]] = []
        self.home: LocalTier = "device"
        self.front = 0
        self.settled = self.skipped = 0
        self.recomputes = False  # pages on the host are recomputed: faster than loading
        self.cached = -1  # prompt tokens found in the cache at the first admission; -1 before
        self.low: list[int] = []  # per group: logical pages below this are released for good
        self.preempted = 0
        self.over = False  # True after the sequence has left the scheduler
        # While pages that save computing may arrive, the scheduler holds the sequence, or limits its rows to `cap`.
        self.hold_until_s = self.cap_until_s = 0.0
        self.cap = 0
        self._root = root
        self._ids: list[PageId] = []
        self.long = self._exceeds

    @property
    def _exceeds(self) -> bool:
        return 0 < self.short_context < self.length

    @property
    def outgrown(self) -> bool:
        """True if the kind of its pages, short or long, does not fit its length any more."""
        return self.long is not self._exceeds

    @property
    def until(self) -> int:
        """The first position whose row does not fit the kind, short or long, of the sequence's pages."""
        return sys.maxsize if self.long or not self.short_context else self.short_context

    @property
    def root(self) -> PageId:
        """The parent of its first page."""
        return long_root(self._root) if self.long else self._root

    def begin_again(self) -> None:
        """Reset the sequence: no pages, and all positions to compute."""
        if self.outgrown:
            self.long, self._ids = self._exceeds, []
        self.pages, self.home, self.front = [], "device", 0
        self.settled = self.skipped = 0
        self.recomputes = False
        self.todo = [(0, self.length)]

    def tier(self, page: int) -> LocalTier:
        """Return the tier of a logical page."""
        return "host" if page < self.front else self.home

    @property
    def urgency(self) -> tuple[bool, int, int]:
        """The sort key of the order of service: low priority last, then the earliest due, then the first to arrive."""
        return self.low_priority, self.due_ms, self.order

    @property
    def rows(self) -> int:
        """The number of rows to compute before the next token can be drawn."""
        if len(self.todo) == 1:  # the usual case: called for every sequence at every step
            start, end = self.todo[0]
            return end - start
        return sum(end - start for start, end in self.todo)

    def at_once(self, now_s: float) -> int:
        """Return the most rows that a step may compute at the present time."""
        return min(self.rows, self.cap) if now_s < self.cap_until_s else self.rows

    @property
    def decodes(self) -> bool:
        """True if one row yields the next token."""
        return len(self.todo) == 1 and self.todo[0][0] == self.length - 1

    @property
    def ids(self) -> list[PageId]:
        """The ids of all full pages before the first span."""
        if len(self._ids) < self.findable:
            text = self.tokens()
            text = text[: self.findable * PAGE] if self.spans else text
            self._ids = page_ids(self.root, text, self._ids)
        return self._ids

    @property
    def findable(self) -> int:
        """The number of full pages that hold what their tokens alone decide: those before the first span."""
        full = self.length // PAGE
        return min(full, self.spans[0][0] // PAGE) if self.spans else full

    def tokens(self) -> list[int]:
        """Return prompt and output."""
        return self.prompt + self.output

    def at(self, positions: Iterable[int]) -> list[int]:
        """Return the tokens at `positions`."""
        first = len(self.prompt)
        return [self.prompt[p] if p < first else self.output[p - first] for p in positions]

    def next_rows(self, count: int) -> list[int]:
        """Return the next `count` positions to compute, or all that are left, in rising order."""
        positions: list[int] = []
        for start, end in self.todo:
            positions.extend(range(start, min(end, start + count - len(positions))))
            if len(positions) >= count:
                break
        return positions

    def computed(self, count: int) -> None:
        """Remove the next `count` positions from `todo`, since they were computed."""
        todo: list[Range] = []
        for start, end in self.todo:
            done = min(count, end - start)
            count -= done
            if start + done < end:
                todo.append((start + done, end))
        self.todo = todo

    def skip(self, page: int) -> None:
        """Remove a logical page from `todo`, in which it was whole, since the page arrived from another tier."""
        start, end = page * PAGE, (page + 1) * PAGE
        pieces = [((a, min(b, start)), (max(a, end), b)) for a, b in self.todo]
        self.todo = [piece for pair in pieces for piece in pair if piece[0] < piece[1]]

    def append(self, token: int) -> None:
        """Append a drawn token; its row is computed next."""
        assert not self.todo
        self.output.append(token)
        self.length += 1
        self.todo = [(self.length - 1, self.length)]

    def resume(self, output: Iterable[int]) -> None:
        """Continue after tokens generated earlier; all positions are to be computed."""
        assert not self.pages
        self.output = list(output)
        self.length = len(self.prompt) + len(self.output)
        self.begin_again()

    def rewrite(self, prompt: Sequence[int], spans: Iterable[Range] = ()) -> None:
        """Replace the prompt and its spans, by any length, and keep the output; all positions are to be computed."""
        assert not self.pages
        self.spans = list(spans)
        pairs = zip(self.prompt, prompt, strict=False)
        same = next(
            (at for at, (a, b) in enumerate(pairs) if a != b), min(len(self.prompt), len(prompt))
        )
        self._ids = self._ids[: min((same, *(begin for begin, _ in self.spans[:1]))) // PAGE]
        self.most += len(prompt) - len(self.prompt)
        self.prompt = list(prompt)
        self.length = len(self.prompt) + len(self.output)
        self.begin_again()

    def missing(self, page: int) -> bool:
        """True if any row of logical page `page` is still to be computed."""
        start, end = page * PAGE, (page + 1) * PAGE
        return any(a < end and start < b for a, b in self.todo)


def touched(positions: Sequence[int]) -> Iterator[int]:
    """Yield the logical pages of rising positions, each once."""
    at = 0
    while at < len(positions):
        page = positions[at] // PAGE
        yield page
        at = bisect_left(positions, (page + 1) * PAGE, at, min(at + PAGE, len(positions)))
