"""Drive an executor by hand: sequences on scattered pages, in any pieces and batches, for exactness."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from common.pages.identity import PAGE, short_context
from engine.decoder.executor.interface import SamplingRequest, SequenceInput
from engine.decoder.executor.torch_executor import TorchExecutor


class Scatter:
    """Hands out physical pages in random order, a free list per layer group."""

    def __init__(self, runner: TorchExecutor, draw: random.Random) -> None:
        self._draw = draw
        self.short_context = short_context(runner.fingerprint)
        self.free = [list(range(runner.shape.pages)) for _ in runner.shape.windows]

    def take(self, group: int) -> int:
        """Return a page that nobody holds."""
        free = self.free[group]
        at = self._draw.randrange(len(free))
        free[at], free[-1] = free[-1], free[at]
        return free.pop()

    def give(self, group: int, page: int) -> None:
        """Take a page back."""
        self.free[group].append(page)


class Line:
    """One sequence: its tokens, and where each logical page lies in each group (-1: nowhere)."""

    def __init__(self, scatter: Scatter, tokens: Iterable[int]) -> None:
        self._scatter = scatter
        self.tokens = list(tokens)
        self.pages: list[list[int]] = [[] for _ in scatter.free]
        self.computed = 0

    def append(self, token: int) -> None:
        """Add a token; a text that outgrows its model's short context has no pages then, and all to compute."""
        self.tokens.append(token)
        if len(self.tokens) == self._scatter.short_context + 1 > 1:
            self.lose(range(max(map(len, self.pages))))
            self.computed = 0

    def rows(
        self, positions: Sequence[int], sample: SamplingRequest | None = None
    ) -> SequenceInput:
        """Return rows at these positions, with pages for them."""
        logical = {position // PAGE for position in positions}
        for group, table in enumerate(self.pages):
            table.extend([-1] * (max(logical) + 1 - len(table)))
            for each in logical:
                if table[each] < 0:
                    table[each] = self._scatter.take(group)
        tokens = [self.tokens[position] for position in positions]
        tables = [list(table) for table in self.pages]
        long = 0 < self._scatter.short_context < len(self.tokens)
        return SequenceInput(tokens, list(positions), tables, sample, long=long)

    def next_rows(self, count: int, sample: SamplingRequest | None = None) -> SequenceInput:
        """Return the next `count` rows in order of position, fewer at the end."""
        start, end = self.computed, min(self.computed + count, len(self.tokens))
        self.computed = end
        return self.rows(range(start, end), sample)

    def leave_windows(self, windows: Sequence[int | None]) -> int:
        """Give back the pages that no later row can see; return how many."""
        gone = 0
        for group, (window, table) in enumerate(zip(windows, self.pages, strict=True)):
            if window is None:
                continue
            for each in range(min(max(self.computed - window + 1, 0) // PAGE, len(table))):
                gone += table[each] >= 0
                self._lose(group, each)
        return gone

    def lose(self, logical: Iterable[int]) -> None:
        """Give pages back in every group, as if they had been evicted."""
        for each in logical:
            for group in range(len(self.pages)):
                self._lose(group, each)

    def close(self) -> None:
        """Give everything back."""
        self.lose(range(max(len(table) for table in self.pages)))

    def _lose(self, group: int, logical: int) -> None:
        page = self.pages[group][logical]
        if page >= 0:
            self._scatter.give(group, page)
            self.pages[group][logical] = -1
