"""The page table: the pools of all layer groups, and which pages a sequence holds, needs, shares and lets go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.pages.identity import PAGE
from services.gpu_worker.decide.batch import Shape
from services.gpu_worker.decide.pool import Pool
from services.gpu_worker.decide.sequence import Range, TokenSequence, touched


class Survey(NamedTuple):
    """What a sequence would start with: the ranges to compute, and the resident pages per group it would hold (-1)."""

    todo: list[Range]
    pages: list[list[int]]


class PageTable:
    """Every group has the same number of pages; a sequence has one page list per group."""

    def __init__(self, shape: Shape) -> None:
        self.windows = list(shape.windows)
        self._windowed = any(window is not None for window in shape.windows)
        self.pools = [Pool(shape.pages) for _ in shape.windows]

    def available(self) -> list[int]:
        """Return per group how many pages can be allocated now."""
        return [pool.available for pool in self.pools]

    # -- looking ---------------------------------------------------------------------------------------

    def survey(self, sequence: TokenSequence) -> Survey:
        """Find what is resident of a sequence without pages, and what must be computed; changes nothing.

        Missing pages are any set of ranges. The page of the last token is always computed, since its last row is
        wanted. Under a window, computing starts at the nearest position before whose window everything is resident.
        A page computed for one group is computed into new pages of all: nothing is written to what others hold.
        """
        ids, groups = sequence.ids, range(len(self.pools))
        last = (sequence.length - 1) // PAGE
        pages = [[-1] * (last + 1) for _ in groups]
        seen = [self._sees(g, last * PAGE) for g in groups]  # the lowest position later rows see
        computed = [last]
        for page in range(last - 1, -1, -1):
            needed = [g for g in groups if seen[g] < (page + 1) * PAGE]
            if not needed:
                break
            found = {g: self.pools[g].find(ids[page]) for g in needed}
            if None in found.values():
                computed.append(page)
                seen = [min(seen[g], self._sees(g, page * PAGE)) for g in groups]
            else:
                for g, physical in found.items():
                    pages[g][page] = -1 if physical is None else physical
        todo: list[Range] = []
        for page in reversed(computed):
            start, end = page * PAGE, min((page + 1) * PAGE, sequence.length)
            if todo and todo[-1][1] == start:
                start = todo.pop()[0]
            todo.append((start, end))
        return Survey(todo, pages)

    def _sees(self, group: int, position: int) -> int:
        """Return the lowest position that a row at `position` attends to."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def wants(self, sequence: TokenSequence, positions: Sequence[int]) -> int:
        """Return how many new pages each group must give for rows at `positions` (the same in each group)."""
        held = sequence.pages[0] if sequence.pages else []
        # Pages of rows to compute are allocated in all groups at once, so one group tells for all.
        if len(positions) == 1:
            page = positions[0] // PAGE
            return int(page >= len(held) or held[page] < 0)
        return sum(page >= len(held) or held[page] < 0 for page in touched(positions))

    def most(self, sequence: TokenSequence, chunk: int) -> list[int]:
        """Return per group the most pages a sequence can hold at once, computing at most `chunk` rows a step."""
        whole = -(-sequence.most // PAGE)
        return [
            whole if window is None else min(whole, (2 * window + chunk) // PAGE + 4)
            for window in self.windows
        ]

    def yields(self, sequence: TokenSequence) -> list[dict[int, int]]:
        """Return per group the pages a sequence holds, with their references (1: releasing makes it available)."""
        return [
            {page: pool.references(page) for page in held if page >= 0}
            for pool, held in zip(self.pools, sequence.pages, strict=False)
        ]

    # -- changing --------------------------------------------------------------------------------------

    def attach(self, sequence: TokenSequence, survey: Survey) -> None:
        """Give a sequence the resident pages of a survey made since the last change."""
        for pool, held in zip(self.pools, survey.pages, strict=True):
            for page in held:
                if page >= 0:
                    pool.hold(page)
        sequence.pages = [list(held) for held in survey.pages]
        sequence.todo = list(survey.todo)
        sequence.low = [0] * len(self.pools)
        if sequence.cached < 0:
            computed = sum(
                min(b, len(sequence.prompt)) - min(a, len(sequence.prompt)) for a, b in survey.todo
            )
            sequence.cached = len(sequence.prompt) - computed

    def grow(self, sequence: TokenSequence, positions: Sequence[int]) -> None:
        """Allocate what rows at `positions` need; IndexError if a pool cannot give it."""
        if not self.wants(sequence, positions):
            return
        for page in touched(positions):
            for pool, held in zip(self.pools, sequence.pages, strict=True):
                held.extend([-1] * (page + 1 - len(held)))
                if held[page] < 0:
                    held[page] = pool.allocate()

    def settle(self, sequence: TokenSequence, positions: Sequence[int]) -> None:
        """Rows at `positions` (already taken off `todo`) are written: publish full pages, drop what none will see."""
        if len(positions) == 1 and (positions[0] + 1) % PAGE and not self._windowed:
            return  # the usual step of a sequence that decodes: its page goes on
        full = sequence.length // PAGE
        for page in touched(positions):
            if page < full and not sequence.missing(page):
                for pool, held in zip(self.pools, sequence.pages, strict=True):
                    pool.publish(held[page], sequence.ids[page])
        following = sequence.todo[0][0] if sequence.todo else sequence.length
        for group, held in enumerate(sequence.pages):
            if self.windows[group] is None:
                continue
            end = min(self._sees(group, following) // PAGE, len(held))
            for page in range(sequence.low[group], end):
                if held[page] >= 0:
                    self.pools[group].release(held[page], soon=True)
                    held[page] = -1
            sequence.low[group] = max(end, sequence.low[group])

    def release(self, sequence: TokenSequence) -> None:
        """Let all pages of a sequence go, leading ones first: they are the first to be given to others."""
        for pool, held in zip(self.pools, sequence.pages, strict=False):
            for page in held:
                if page >= 0:
                    pool.release(page)
        sequence.pages = []
        sequence.todo = [(0, sequence.length)]
