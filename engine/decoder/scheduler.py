"""The scheduler: `schedule`, which plans a step and changes nothing, and the state that plans are applied to. No I/O.

Policy: low priority last, then the earliest deadline first; with deadlines equally far from arrival that is first come,
first served. Sequences that decode get their row first, then prompts that are under way, in chunks, then new sequences,
in order of urgency, while budget, slots and pages suffice. When pages run out, the least urgent sequence loses its own
and is recomputed later; a page is never taken from a more urgent sequence for a less urgent one.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from common.pages.identity import PAGE
from engine.decoder.executor.interface import ModelShape, PageMove
from engine.decoder.kv.page_table import PageTable, PrefixMatch
from engine.decoder.kv.tiers import PLAIN, TierPolicy
from engine.decoder.sequence import TokenSequence

RESERVE = 0.1  # share of the pages kept for running sequences to grow into (Pensieve, 3.3)


class StepLimits(NamedTuple):
    """The largest step: rows in all, and sequences that hold pages."""

    tokens: int
    running: int


class StepPlan(NamedTuple):
    """One step: sequences that lose their pages, sequences admitted with the pages found, positions to compute."""

    preempt: list[TokenSequence]
    admit: list[tuple[TokenSequence, PrefixMatch]]
    rows: list[tuple[TokenSequence, list[int]]]


class ScheduledRows(NamedTuple):
    """One sequence's part of a step; with `draws` its last row yields a token.

    The last rows are those of `guesses`, tokens that the rows before them may yield, or of `ahead` tokens, each
    of which the row before it yields in the same step.
    """

    sequence: TokenSequence
    positions: list[int]
    draws: bool
    guesses: Sequence[int] = ()
    ahead: int = 0

    @property
    def known(self) -> list[int]:
        """The positions of the tokens that are known before the step."""
        return self.positions[: len(self.positions) - len(self.guesses) - self.ahead]


class Scheduler:
    """Sequences that wait and run, and their page table: `add`, then for each step `step`, `moved`, `commit`; `drop`.

    Only these methods write its state: the prefetcher reports pages on their way by `hold`, `slow` and `resume`, copies
    are reported by `moved`. `loads` are the pages to copy to the device for the rows of the last planned step.
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
        """Add a sequence that fits; it waits until a step admits it."""
        insort(self.waiting, sequence, key=lambda item: item.urgency)

    def drop(self, sequences: Iterable[TokenSequence]) -> None:
        """Remove sequences and release their pages at once; sequences that are not here are ignored."""
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
        """Plan the next step, of at most `tokens` rows if given, and apply the plan to pages and sequences.

        Returns the rows to compute; the copies of `loads` must be made even if there are no rows.
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

    def guess(self, part: ScheduledRows, guesses: Sequence[int]) -> ScheduledRows:
        """Return a decoding sequence's part with rows for guessed tokens; unchanged if there are no pages for them."""
        first = part.positions[-1] + 1
        positions = [*part.positions, *range(first, first + len(guesses))]
        wanted = self.table.wants(part.sequence, positions)
        if wanted > min(pool.available for pool in self.table.pools):
            return part
        self.table.grow(part.sequence, positions)
        return part._replace(positions=positions, guesses=guesses)

    def extend(self, parts: list[ScheduledRows], count: int) -> list[ScheduledRows]:
        """Return parts that decode with rows for `count` tokens more; unchanged if there are no pages for all of them.

        Only for a step that is all the scheduler has to do: no sequence waits, and no page is copied for its rows.
        """
        if count <= 0 or self.waiting or self.loads:
            return parts
        extended = [
            part._replace(
                positions=[
                    *part.positions,
                    *range(part.positions[-1] + 1, part.positions[-1] + 1 + count),
                ],
                ahead=count,
            )
            for part in parts
        ]
        wanted = sum(self.table.wants(part.sequence, part.positions) for part in extended)
        if wanted > min(pool.available for pool in self.table.pools):
            return parts
        for part in extended:
            self.table.grow(part.sequence, part.positions)
        return extended

    def follow(
        self,
        parts: Sequence[ScheduledRows],
        ending: Container[TokenSequence],
        *,
        now_s: float = 0.0,
    ) -> list[ScheduledRows]:
        """Plan the step after `parts`, which are being computed: one row for each sequence that they draw for.

        Sequences in `ending` have no row. Empty unless `step` would plan nothing else: no sequence waits, no page is
        copied, every running sequence draws, and there are pages for all rows.
        """
        if self.waiting or self.loads or len(parts) != len(self.running):
            return []
        if not all(part.draws and part.sequence.pages for part in parts):
            return []
        following = [
            ScheduledRows(part.sequence, [part.sequence.length + part.ahead], draws=True)
            for part in parts
            if part.sequence not in ending
        ]
        wanted = sum(self.table.wants(part.sequence, part.positions) for part in following)
        if wanted > min(pool.available for pool in self.table.pools):
            return []
        self.table.tiers.now_s = now_s
        for part in following:
            self.table.grow(part.sequence, part.positions)
        return following

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
        """Note that a page was copied; if it is not `sound`, sequences that hold it begin again and compute it."""
        page = move.target
        self.table.tiers.moved(move, sound=sound)
        if sound or move.kind == "save":
            return
        for sequence in list(self.running):
            if page in sequence.pages[move.group]:
                self.table.release(sequence)
                self.running.remove(sequence)
                self.add(sequence)

    def hold(self, sequence: TokenSequence, until_s: float) -> None:
        """Do not admit a sequence before `until_s`: pages that save computing may arrive by then."""
        sequence.hold_until_s = until_s

    def slow(self, sequence: TokenSequence, until_s: float, rows: int) -> None:
        """Compute at most `rows` rows of a sequence in a step until `until_s`, while its pages arrive."""
        sequence.cap_until_s, sequence.cap = until_s, rows

    def resume(self, sequence: TokenSequence) -> None:
        """End `hold` and `slow` for a sequence."""
        sequence.hold_until_s = sequence.cap_until_s = 0.0

    def held_until_s(self) -> float:
        """Return when the first of the sequences that wait may be admitted; 0.0 if none is held."""
        return min((sequence.hold_until_s for sequence in self.waiting), default=0.0)

    def commit(self, part: ScheduledRows, token: int | None) -> None:
        """Note that rows were computed and gave `token` (None: no token); ignored if the sequence has left since."""
        sequence = part.sequence
        if not sequence.pages:
            return
        sequence.computed(len(part.positions))
        self.table.settle(sequence, part.positions)
        if token is not None:
            sequence.append(token)

    def check(self, parts: Sequence[ScheduledRows] = ()) -> None:
        """Raise AssertionError if a page leaks or is owned twice, or a sequence has two parts in a step (for tests)."""
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


class _Ledger:
    """Counts the pages available in each group while a step is planned; the pools do not change."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self.left = [pool.available for pool in table.pools]
        self._dropped: list[Counter[int]] = [Counter() for _ in self.left]
        self._held: list[set[int]] = [set() for _ in self.left]

    def take(self, pages: int) -> None:
        self.left = [left - pages for left in self.left]

    def release(self, sequence: TokenSequence) -> None:
        for group, pages in enumerate(self._table.yields(sequence)):
            for page, references in pages.items():
                self._dropped[group][page] += 1
                self.left[group] += self._dropped[group][page] == references

    def holding(self, match: PrefixMatch) -> list[int]:
        """Return per group how many cached pages a match would take into use."""
        return [
            sum(page >= 0 and not pool.references(page) and page not in taken for page in pages)
            for pool, pages, taken in zip(self._table.pools, match.pages, self._held, strict=True)
        ]

    def hold(self, match: PrefixMatch) -> None:
        for group, count in enumerate(self.holding(match)):
            self.left[group] -= count + len(match.loads[group])
            self._held[group].update(page for page in match.pages[group] if page >= 0)


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
            # The sequence is the least urgent, and the others need the pages that it holds.
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
    promised = _promised(prefilling, rows, table)
    reserve = int(RESERVE * min(pool.total for pool in table.pools))
    for sequence in waiting:
        if tokens <= 0 or len(active) + len(admitted) >= bounds.running:
            break
        if sequence.hold_until_s > table.tiers.now_s:
            continue
        match = table.match(sequence)
        if _computed_soon(sequence, match, prefilling):
            break  # the next step finds these pages computed
        new = sum((end - 1) // PAGE - start // PAGE + 1 for start, end in match.todo)
        limits = table.most(sequence, bounds.tokens)
        short = (
            min(new + len(loads), limit) + held + promised + reserve > left
            for limit, loads, held, left in zip(
                limits, match.loads, ledger.holding(match), ledger.left, strict=True
            )
        )
        if any(short) and (active or admitted):
            break
        ledger.hold(match)
        if min(ledger.left) <= 0:
            break  # no other sequence runs, and pages are on their way to the host: the next step has them
        most = tokens if table.tiers.now_s >= sequence.cap_until_s else min(tokens, sequence.cap)
        positions = _first_rows(match, most, min(ledger.left))
        taken = len({p // PAGE for p in positions})
        ledger.take(taken)
        promised += new - taken
        tokens -= len(positions)
        rows.append((sequence, positions))
        admitted.append((sequence, match))
        prefilling.append((sequence, match.todo))
    return admitted


def _promised(
    prefilling: Sequence[tuple[TokenSequence, list[tuple[int, int]]]],
    rows: Sequence[tuple[TokenSequence, list[int]]],
    table: PageTable,
) -> int:
    """Return the pages that prompts under way need after this step.

    These pages are theirs: a later prompt must not be admitted only to be preempted.
    """
    scheduled = {sequence.order: positions for sequence, positions in rows}
    promised = 0
    for sequence, _ in prefilling:
        promised += table.wants(sequence, sequence.next_rows(sequence.rows))
        promised -= table.wants(sequence, scheduled.get(sequence.order, []))
    return promised


def _first_rows(match: PrefixMatch, most: int, pages: int) -> list[int]:
    """Return the first positions to compute of a new sequence: at most `most`, on at most `pages` new pages."""
    positions = [p for start, end in match.todo for p in range(start, min(end, start + most))]
    return [p for p in positions[:most] if _place(match, p) < pages]


def _place(match: PrefixMatch, position: int) -> int:
    """Return how many of the pages to compute come before the page of `position`."""
    count = 0
    for start, end in match.todo:
        if position < end:
            return count + position // PAGE - start // PAGE
        count += (end - 1) // PAGE - start // PAGE + 1
    return count


def _computed_soon(
    sequence: TokenSequence,
    match: PrefixMatch,
    prefilling: Sequence[tuple[TokenSequence, list[tuple[int, int]]]],
) -> bool:
    """Return whether an earlier sequence is about to compute the first page that `sequence` is missing."""
    page = match.todo[0][0] // PAGE
    if page >= (sequence.length - 1) // PAGE:
        return False  # each sequence computes its own last page
    start, end = page * PAGE, (page + 1) * PAGE
    return any(
        len(other.ids) > page
        and other.ids[page] == sequence.ids[page]
        and any(a < end and start < b for a, b in todo)
        for other, todo in prefilling
    )
