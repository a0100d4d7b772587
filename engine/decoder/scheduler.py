"""The scheduler's state: who waits, who runs, and the page table; it applies plans and commits steps. No I/O."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.decoder.executor.interface import ModelShape, PageMove
from engine.decoder.kv.page_table import PageTable
from engine.decoder.kv.tiers import PLAIN, TierPolicy
from engine.decoder.schedule import StepLimits, StepPlan, schedule
from engine.decoder.sequence import TokenSequence


class ScheduledRows(NamedTuple):
    """One sequence's part of a step; `draws` if its last row yields a token."""

    sequence: TokenSequence
    positions: list[int]
    draws: bool


class Scheduler:
    """Sequences enter by `add`, leave by `drop`; in between, each step is `step`, `moved` and then `commit`.

    `loads` are the pages to be copied to the device before the rows of the step planned last see them.
    """

    def __init__(self, shape: ModelShape, bounds: StepLimits, keeping: TierPolicy = PLAIN) -> None:
        self.table = PageTable(shape, keeping)
        self.bounds = bounds
        self._pages = shape.pages
        self.loads: list[PageMove] = []
        self.running: list[TokenSequence] = []
        self.waiting: list[TokenSequence] = []
        self.preemptions = 0
        self.short = False  # in the last step sequences waited for pages, not for budget or slots

    def fits(self, sequence: TokenSequence) -> bool:
        """True if the sequence, at its longest, fits the pools alone."""
        return max(self.table.most(sequence, self.bounds.tokens)) <= self._pages

    def add(self, sequence: TokenSequence) -> None:
        """Take in a sequence that fits; it waits for its turn."""
        insort(self.waiting, sequence, key=lambda item: item.urgency)

    def drop(self, sequences: Iterable[TokenSequence]) -> None:
        """Let sequences go, with their pages at once; those it does not have are ignored."""
        sequences = list(sequences)
        gone = {sequence.order for sequence in sequences}
        for sequence in sequences:
            sequence.over = True
        for sequence in self.running:
            if sequence.order in gone:
                self.table.tiers.history.end(sequence.ids, self.table.tiers.now_s)
                self.table.release(sequence)
        self.running = [item for item in self.running if item.order not in gone]
        self.waiting = [item for item in self.waiting if item.order not in gone]

    def step(self, tokens: int | None = None, *, now_s: float = 0.0) -> list[ScheduledRows]:
        """Plan the next step, of at most `tokens` rows if they are given; move pages and sequences accordingly.

        Returns what to compute; `loads` must be made even if that is nothing.
        """
        self.table.tiers.now_s = now_s
        self.loads = []
        for sequence in self.running:
            if sequence.rows > 1:
                self.loads += self.table.catch_up(sequence)
        bounds = self.bounds if tokens is None else self.bounds._replace(tokens=tokens)
        plan = schedule(self.running, self.waiting, self.table, bounds)
        self._apply(plan)
        parts = []
        for sequence, positions in plan.rows:
            self.table.grow(sequence, positions)
            parts.append(ScheduledRows(sequence, positions, len(positions) == sequence.rows))
        rows = sum(len(part.positions) for part in parts)
        room = rows < bounds.tokens and len(self.running) < bounds.running
        self.short = room and bool(self.waiting)
        return parts

    def _apply(self, plan: StepPlan) -> None:
        for sequence in plan.preempt:
            self.table.release(sequence)
            sequence.preempted += 1
            self.preemptions += 1
            self.running.remove(sequence)
            self.add(sequence)
        self.loads += self.table.attach(plan.admit)
        for sequence, _ in plan.admit:
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda item: item.urgency)

    def moved(self, move: PageMove, *, sound: bool) -> None:
        """A move was made; who got a page by it that is not sound begins again, and computes it."""
        page = move.target
        self.table.tiers.moved(move, sound=sound)
        if sound or move.kind == "save":
            return
        for sequence in list(self.running):
            if page in sequence.pages[move.group]:
                self.table.release(sequence)
                self.running.remove(sequence)
                self.add(sequence)

    def commit(self, part: ScheduledRows, token: int | None) -> None:
        """The part was computed and gave `token` (None: it draws none); ignored if its sequence has left meanwhile."""
        sequence = part.sequence
        if not sequence.pages:
            return
        sequence.computed(len(part.positions))
        self.table.settle(sequence, part.positions)
        if token is not None:
            sequence.append(token)

    def check(self, parts: Sequence[ScheduledRows] = ()) -> None:
        """Raise AssertionError if pages are leaked or owned twice, or a row would see what is not there (for tests)."""
        held: list[dict[int, int]] = [{} for _ in self.table.pools]
        for sequence in self.running:
            for group, pages in enumerate(sequence.pages):
                for page in pages:
                    if page >= 0:
                        held[group][page] = held[group].get(page, 0) + 1
        for move in self.table.tiers.moving:
            page = move.target if move.kind == "load" else move.source
            held[move.group][page] = held[move.group].get(page, 0) + 1
        for (tier, group, page), count in self.table.tiers.read.items():
            if tier == "device" and count:
                held[group][page] = held[group].get(page, 0) + count
        for pool, counts in zip(self.table.pools, held, strict=True):
            assert pool.used == len(counts)
            assert all(pool.references(page) == count for page, count in counts.items())
        self.table.tiers.check()
        assert all(not sequence.pages for sequence in self.waiting)
        assert len(parts) == len({part.sequence.order for part in parts})
