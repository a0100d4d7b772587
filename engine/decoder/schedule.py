"""What runs in the next step: a pure function of the sequences, the page table and the limits; it changes nothing.

Policy: what is of low priority last, and the earliest deadline first; with deadlines equally far from arrival that is
first come, first served. Sequences that decode get their row first, then prompts that are under way, in chunks, then
new sequences, in order of urgency, while budget, slots and pages suffice. When pages run out the least urgent sequence
loses its own and is recomputed later; a page is never taken from a more urgent one for a less urgent one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from common.pages.identity import PAGE
from engine.decoder.kv.page_table import PageTable, PrefixMatch
from engine.decoder.sequence import TokenSequence

RESERVE = 0.1  # share of the pages that nobody is admitted to: running sequences grow into them (Pensieve, 3.3)


class StepLimits(NamedTuple):
    """The largest step: rows in all, and sequences that hold pages."""

    tokens: int
    running: int


class StepPlan(NamedTuple):
    """One step: who loses its pages, who is admitted with what, and then the positions to compute of whom."""

    preempt: list[TokenSequence]
    admit: list[tuple[TokenSequence, PrefixMatch]]
    rows: list[tuple[TokenSequence, list[int]]]


class _Ledger:
    """Pages available per group as the plan goes on, without touching the pools."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self.left = table.available()
        self._dropped: list[Counter[int]] = [Counter() for _ in self.left]
        self._held: list[set[int]] = [set() for _ in self.left]

    def take(self, pages: int) -> None:
        self.left = [left - pages for left in self.left]

    def release(self, sequence: TokenSequence) -> None:
        for group, pages in enumerate(self._table.yields(sequence)):
            for page, references in pages.items():
                self._dropped[group][page] += 1
                self.left[group] += self._dropped[group][page] == references

    def holding(self, survey: PrefixMatch) -> list[int]:
        """Return per group how many cached pages a survey would make used."""
        return [
            sum(page >= 0 and not pool.references(page) and page not in taken for page in pages)
            for pool, pages, taken in zip(self._table.pools, survey.pages, self._held, strict=True)
        ]

    def hold(self, survey: PrefixMatch) -> None:
        for group, count in enumerate(self.holding(survey)):
            self.left[group] -= count + len(survey.loads[group])
            self._held[group].update(page for page in survey.pages[group] if page >= 0)


def schedule(
    running: Sequence[TokenSequence],
    waiting: Sequence[TokenSequence],
    table: PageTable,
    bounds: StepLimits,
) -> StepPlan:
    """Plan the next step; `running` and `waiting` are in order of urgency, and the plan is empty only if both are.

    Each sequence must fit the pools alone (`PageTable.most`), or it may never be scheduled.
    """
    counts, left = _share(running, bounds.tokens, table.tiers.now_s)
    ledger = _Ledger(table)
    active, preempt, rows = list(running), [], []
    at = 0
    while at < len(active):
        sequence = active[at]
        positions = sequence.next_rows(counts[sequence.order]) if counts[sequence.order] else []
        wants = table.wants(sequence, positions)
        while wants > min(ledger.left) and active[-1] is not sequence:
            preempt.append(active.pop())
            ledger.release(preempt[-1])
        if wants > min(ledger.left):
            positions = _affordable(table, sequence, positions, min(ledger.left))
            wants = table.wants(sequence, positions)
        if not positions and counts[sequence.order] and len(active) > 1:
            # it is the least urgent, and the others need what it holds
            preempt.append(active.pop())
            ledger.release(preempt[-1])
            break
        if positions:
            ledger.take(wants)
            rows.append((sequence, positions))
        at += 1
    admit = [] if preempt else _admit(active, rows, waiting, table, ledger, bounds, left)
    return StepPlan(preempt, admit, rows)


def _share(
    running: Sequence[TokenSequence], tokens: int, now_s: float
) -> tuple[dict[int, int], int]:
    """Return rows per sequence (by order) and what is left of the budget: decode first, then prompts."""
    counts = {}
    for decodes in (True, False):
        for sequence in running:
            if sequence.decodes is decodes:
                counts[sequence.order] = min(sequence.at_once(now_s), tokens)
                tokens -= counts[sequence.order]
    return counts, tokens


def _affordable(
    table: PageTable, sequence: TokenSequence, positions: list[int], pages: int
) -> list[int]:
    """Cut `positions` at the end until they need at most `pages` new pages."""
    while positions and table.wants(sequence, positions) > pages:
        page = positions[-1] // PAGE
        while positions and positions[-1] // PAGE == page:
            positions.pop()
    return positions


def _admit(
    active: Sequence[TokenSequence],
    rows: list[tuple[TokenSequence, list[int]]],
    waiting: Sequence[TokenSequence],
    table: PageTable,
    ledger: _Ledger,
    bounds: StepLimits,
    tokens: int,
) -> list[tuple[TokenSequence, PrefixMatch]]:
    """Admit from the front of `waiting`; their rows are appended to `rows`."""
    admitted: list[tuple[TokenSequence, PrefixMatch]] = []
    prefilling = [(sequence, sequence.todo) for sequence in active if not sequence.decodes]
    scheduled = {sequence.order: positions for sequence, positions in rows}
    # What prompts under way still need is theirs: a later one must not be admitted only to be preempted.
    promised = 0
    for sequence, _ in prefilling:
        everything = sequence.next_rows(sequence.rows)
        promised += table.wants(sequence, everything)
        promised -= table.wants(sequence, scheduled.get(sequence.order, []))
    reserve = int(RESERVE * min(pool.total for pool in table.pools))
    for sequence in waiting:
        if tokens <= 0 or len(active) + len(admitted) >= bounds.running:
            break
        if sequence.hold_until_s > table.tiers.now_s:
            continue
        survey = table.survey(sequence)
        if _computed_soon(sequence, survey, prefilling):
            break  # the next step finds these pages computed
        new = sum((end - 1) // PAGE - start // PAGE + 1 for start, end in survey.todo)
        limits = table.most(sequence, bounds.tokens)
        short = (
            min(new + len(loads), limit) + held + promised + reserve > left
            for limit, loads, held, left in zip(
                limits, survey.loads, ledger.holding(survey), ledger.left, strict=True
            )
        )
        if any(short) and (active or admitted):
            break
        ledger.hold(survey)
        if min(ledger.left) <= 0:
            break  # it is alone, and pages are on their way to the host: the next step has them
        positions = [
            p for start, end in survey.todo for p in range(start, min(end, start + tokens))
        ]
        most = tokens if table.tiers.now_s >= sequence.cap_until_s else min(tokens, sequence.cap)
        positions = [p for p in positions[:most] if _place(survey, p) < min(ledger.left)]
        taken = len({p // PAGE for p in positions})
        ledger.take(taken)
        promised += new - taken
        tokens -= len(positions)
        rows.append((sequence, positions))
        admitted.append((sequence, survey))
        prefilling.append((sequence, survey.todo))
    return admitted


def _place(survey: PrefixMatch, position: int) -> int:
    """Return how many pages are computed before the one of a position to compute."""
    count = 0
    for start, end in survey.todo:
        if position < end:
            return count + position // PAGE - start // PAGE
        count += (end - 1) // PAGE - start // PAGE + 1
    return count


def _computed_soon(
    sequence: TokenSequence,
    survey: PrefixMatch,
    prefilling: Sequence[tuple[TokenSequence, list[tuple[int, int]]]],
) -> bool:
    """True if an earlier sequence is about to compute the first page this one is missing."""
    page = survey.todo[0][0] // PAGE
    if page >= (sequence.length - 1) // PAGE:
        return False  # the last page is nobody else's
    start, end = page * PAGE, (page + 1) * PAGE
    return any(
        len(other.ids) > page
        and other.ids[page] == sequence.ids[page]
        and any(a < end and start < b for a, b in todo)
        for other, todo in prefilling
    )
