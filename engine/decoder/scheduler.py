"""The scheduler: the pure function `schedule` plans a step, and `Scheduler` applies the plans. No I/O.

Policy: low priority last, then the earliest deadline first; if all deadlines are equally long after arrival, this is
first come, first served. Decoding sequences get their row first, then running prompts, in chunks, then new sequences,
in order of urgency, while budget, slots and pages suffice. When pages run out, the least urgent sequence loses its
pages and is recomputed later; a page is never taken from a more urgent sequence for a less urgent one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from common.pages.identity import PAGE
from engine.decoder.executor.interface import LocalTier, ModelShape, PageMove
from engine.decoder.kv.host_matches import front_on_host
from engine.decoder.kv.page_table import PageTable, PrefixMatch, computed_soon
from engine.decoder.kv.tiers import PLAIN, TierPolicy
from engine.decoder.offload.homes import HomePlan, HomePlanner, PlacedRows
from engine.decoder.passage_rows import computed_rows
from engine.decoder.sequence import Range, TokenSequence, touched

RESERVE = 0.1  # share of the pages kept for running sequences to grow into (Pensieve, 3.3)


class StepLimits(NamedTuple):
    """The largest step beside decoding sequences: rows in all, and sequences with pages."""

    tokens: int
    running: int


class StepPlan(NamedTuple):
    """The plan of one step: sequences that lose their pages, sequences to admit with pages, positions to compute."""

    preempt: list[TokenSequence]
    admit: list[tuple[TokenSequence, PrefixMatch]]
    rows: list[tuple[TokenSequence, list[int]]]


class ScheduledRows(NamedTuple):
    """One sequence's part of a step; with `draws` its last row yields a token.

    The last rows belong to `guesses` of the tokens that their previous rows may yield, or to `ahead` tokens, each
    yielded by its previous row in the same step. `attended` is the tier that attends to the sequence's pages, and
    `part` the sub-batch, 0 or 1.
    """

    sequence: TokenSequence
    positions: list[int]
    draws: bool
    guesses: Sequence[int] = ()
    ahead: int = 0
    attended: LocalTier = "device"
    part: int = 0

    @property
    def staged(self) -> bool:
        """True if only a step in stages can compute it."""
        sequence = self.sequence
        return sequence.home == "host" or sequence.front > 0 or self.part > 0

    @property
    def known(self) -> list[int]:
        """The positions of the tokens that are known before the step, without guesses and tokens ahead."""
        return self.positions[: len(self.positions) - len(self.guesses) - self.ahead]


class Scheduler:
    """Waiting and running sequences, and their page table: `add`, then for each step `step`, `moved`, `commit`; `drop`.

    Sequences in `paused` get no rows. They keep their pages until other sequences need the room; with homes their pages
    are released to the cache at once.

    Only the scheduler's methods change its state: the prefetcher reports pages on their way by `hold`, `slow` and
    `resume`, and finished copies are reported by `moved`. `loads` are the pages to copy to the device for the rows of
    the last planned step, `moves` the pages that the step itself copies for sequences that change their home.
    """

    def __init__(
        self,
        shape: ModelShape,
        bounds: StepLimits,
        keeping: TierPolicy = PLAIN,
        homes: HomePlanner | None = None,
    ) -> None:
        """`homes` plans the home of each sequence; without it all sequences are on the device."""
        self.table = PageTable(shape, keeping)
        self.bounds, self.homes = bounds, homes
        self._pages, self._host_pages = shape.pages, shape.host_pages
        self.loads: list[PageMove] = []
        self.moves: list[PageMove] = []
        self._moving: list[TokenSequence] = []  # sequences whose home the last planned step changes
        self._due: list[PageMove] = []  # loads for the next step, of rewritten sequences
        self.running: list[TokenSequence] = []
        self.waiting: list[TokenSequence] = []
        self.paused: list[TokenSequence] = []
        self.preemptions = 0
        self.outgrown = 0  # count of sequences that outgrew their short context
        self.short = False  # True if sequences of the last step waited only for pages

    def fits(self, sequence: TokenSequence) -> bool:
        """True if the sequence, at its longest and alone, fits the pools."""
        if self.homes is not None:
            return self.homes.fits(sequence, self._pages, self._host_pages, self.bounds.tokens)
        return max(self.table.most(sequence, self.bounds.tokens)) <= self._pages

    def add(self, sequence: TokenSequence) -> None:
        """Add a sequence that `fits`; it waits until a step admits it."""
        insort(self.waiting, sequence, key=lambda item: item.urgency)

    def drop(self, sequences: Iterable[TokenSequence]) -> None:
        """Remove sequences and release their pages at once; unknown sequences are ignored."""
        sequences = list(sequences)
        gone = {sequence.order for sequence in sequences}
        for sequence in sequences:
            sequence.over = True
        for sequence in (*self.running, *self.paused):
            if sequence.order in gone and sequence.pages:
                self.table.tiers.history.end(sequence.ids, self.table.tiers.now_s)
                self.table.release(sequence)
        self.running = [item for item in self.running if item.order not in gone]
        self.waiting = [item for item in self.waiting if item.order not in gone]
        self.paused = [item for item in self.paused if item.order not in gone]

    def pause(self, sequence: TokenSequence) -> None:
        """Plan no rows of a sequence from the next step on."""
        for sequences in (self.running, self.waiting):
            if sequence in sequences:
                sequences.remove(sequence)
                self.paused.append(sequence)
        if self.homes is not None and sequence.pages:
            self.table.release(sequence)

    def unpause(self, sequence: TokenSequence) -> None:
        """Plan rows of a paused sequence again; one that lost its pages waits to be admitted."""
        if sequence not in self.paused:
            return
        self.paused.remove(sequence)
        if sequence.pages:
            insort(self.running, sequence, key=lambda item: item.urgency)
        else:
            self.add(sequence)

    def rewrite(
        self, sequence: TokenSequence, prompt: Sequence[int], spans: Sequence[Range] = ()
    ) -> int:
        """Give a sequence another prompt, between two steps; return the number of rows that it must compute.

        It keeps its full pages up to the first changed token or the first span of the new prompt, and gets later pages
        before that span if they are on the device or host. Rows in spans are not computed, and do not count.
        """
        held = bool(sequence.pages)
        if held:
            self.table.release(sequence)
        sequence.rewrite(prompt, spans)
        if held and self.homes is None:
            match = self.table.match(sequence)
            if self.table.takes(match) < self.table.available("device"):
                self._due += self.table.attach([(sequence, match)])
                return computed_rows(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            self.add(sequence)
        return computed_rows(sequence)

    def step(self, tokens: int | None = None, *, now_s: float = 0.0) -> list[ScheduledRows]:
        """Plan the next step, of at most `tokens` rows if given, and apply the plan to pages and sequences.

        Returns the rows to compute; the copies of `loads` and `moves` must be made even if there are no rows.
        """
        self.table.tiers.now_s = now_s
        self.loads, self.moves, self._moving = self._due, [], []
        self._due = []
        for sequence in [each for each in self.running if each.outgrown]:
            self.outgrown += 1
            self._begin_again(sequence)
        for sequence in self.running:
            if sequence.rows > 1 and not sequence.recomputes:
                self.loads += self.table.catch_up(sequence)
        bounds = self.bounds if tokens is None else self.bounds._replace(tokens=tokens)
        idle = sum(bool(sequence.pages) for sequence in self.paused)
        bounds = bounds._replace(running=bounds.running - idle)
        homes = self.homes
        parts = self._on_device(bounds) if homes is None else self._at_homes(homes, bounds)
        if not (parts or self.loads or self.moves):
            self._make_room()
        rows = sum(len(part.positions) for part in parts)
        room = rows < bounds.tokens and len(self.running) < bounds.running
        self.short = room and bool(self.waiting)
        return parts

    def _on_device(self, bounds: StepLimits) -> list[ScheduledRows]:
        plan = schedule(self.running, self.waiting, self.table, bounds, self.paused)
        self._apply(plan)
        self.table.grow(plan.rows)
        return [
            ScheduledRows(sequence, positions, len(positions) == sequence.rows)
            for sequence, positions in plan.rows
        ]

    def _make_room(self) -> None:
        """Take the pages of paused sequences, since no step could be planned for the other sequences beside them."""
        now_s = self.table.tiers.now_s
        if self.running or any(sequence.hold_until_s <= now_s for sequence in self.waiting):
            for sequence in self.paused:
                if sequence.pages:
                    self._preempt(sequence)

    def _at_homes(self, homes: HomePlanner, bounds: StepLimits) -> list[ScheduledRows]:
        """Plan by homes and apply the plan, which ignores pages being copied: a sequence without room waits a step."""
        plan = homes.plan(self.running, self.waiting, self.table, bounds.tokens, bounds.running)
        for sequence in plan.preempt:
            self._preempt(sequence)
        self.table.tiers.ended()  # no step is under way
        fresh = [placed for placed in plan.rows if not placed.sequence.pages]
        # Sequences with loads take pages before the moves free any: the copier does not wait for the step's moves.
        for placed in fresh:
            if placed.home == "device" and self._admit_to_device(placed):
                homes.admitted(placed)
        self._move(plan)
        for placed in fresh:
            if placed.home == "host" and self._admit_to_host(placed):
                homes.admitted(placed)
        parts = [part for placed in plan.rows if (part := self._part(placed)) is not None]
        served = {part.sequence for part in parts}
        for sequence in self.running:
            sequence.settled += 1
            waits = sequence.decodes and sequence not in served
            sequence.skipped = sequence.skipped + 1 if waits else 0
        return parts

    def _move(self, plan: HomePlan) -> None:
        for sequence, to, front in plan.moves:
            moves = self.table.move(sequence, to, front)
            if moves is not None:
                self.moves += moves
                self._moving.append(sequence)
                sequence.settled = sequence.skipped = 0

    def _admit_to_device(self, placed: PlacedRows) -> bool:
        """Admit a sequence with pages for its first rows, if there is room; return whether it was admitted."""
        sequence, anew = placed.sequence, placed.resume == "recompute"
        match = self.table.match(sequence, host=not anew)
        # Pages of the host may have been given away since the plan was made.
        front = min(placed.front, front_on_host(self.table, sequence, match)) if placed.front else 0
        if self.table.takes(match, front) >= self.table.available("device"):
            return False
        if front:
            self.loads += self.table.attach_with_front(sequence, match, front)
        else:
            self.loads += self.table.attach([(sequence, match)])
        sequence.recomputes = anew
        self._runs(sequence)
        return True

    def _admit_to_host(self, placed: PlacedRows) -> bool:
        """Admit a sequence with pages for all its rows, if there is room and one step may compute all of them."""
        sequence = placed.sequence
        match = self.table.match(sequence)
        if sequence.at_once(self.table.tiers.now_s) < sequence.rows:
            return False
        moves = self.table.attach_to_host(sequence, match)
        if moves is None:
            return False
        self.table.grow([(sequence, sequence.next_rows(sequence.rows))])
        self.moves += moves
        self._moving.append(sequence)
        self._runs(sequence)
        return True

    def _part(self, placed: PlacedRows) -> ScheduledRows | None:
        """Return a sequence's rows, with allocated pages; None if its home is not the planned one, or without room."""
        sequence, table = placed.sequence, self.table
        if not sequence.pages or sequence.home != placed.home:
            return None
        count = sequence.rows if sequence.home == "host" else placed.rows
        positions = sequence.next_rows(min(count, sequence.at_once(table.tiers.now_s)))
        positions = _affordable(table, sequence, positions, table.available(sequence.home))
        if not positions:
            return None
        table.grow([(sequence, positions)])
        whole = len(positions) == sequence.rows
        return ScheduledRows(sequence, positions, whole, attended=placed.attended, part=placed.part)

    def ended(self) -> None:
        """Record that the last planned step has ended, and its parts are committed."""
        for sequence in self._moving:
            if sequence.pages:
                self.table.arrived(sequence)
        self._moving = []
        self.table.tiers.ended()

    def guess(self, part: ScheduledRows, guesses: Sequence[int]) -> ScheduledRows:
        """Return a decoding sequence's part with rows for guessed tokens; unchanged if pages are lacking."""
        first = part.positions[-1] + 1
        guesses = guesses[: max(0, part.sequence.until - first)]
        positions = [*part.positions, *range(first, first + len(guesses))]
        if self.table.wants(part.sequence, positions) > self.table.available("device"):
            return part
        self.table.grow([(part.sequence, positions)])
        return part._replace(positions=positions, guesses=guesses)

    def extend(self, parts: list[ScheduledRows], count: int) -> list[ScheduledRows]:
        """Return decoding parts with rows for `count` more tokens; unchanged if pages are lacking.

        Unchanged also if a sequence waits, or if pages are loaded for the step's rows.
        """
        count = min((count, *(part.sequence.until - part.positions[-1] - 1 for part in parts)))
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
        return extended if self._grow(extended) else parts

    def _grow(self, parts: Sequence[ScheduledRows]) -> bool:
        """Allocate the pages of all parts on the device; return False, without any change, if too few are available."""
        rows = [(part.sequence, part.positions) for part in parts]
        if sum(self.table.wants(*each) for each in rows) > self.table.available("device"):
            return False
        self.table.grow(rows)
        return True

    def follow(
        self,
        parts: Sequence[ScheduledRows],
        ending: Container[TokenSequence],
        *,
        now_s: float = 0.0,
    ) -> list[ScheduledRows]:
        """Plan the step after the running step of `parts`: one row for each sequence that draws in `parts`.

        Sequences in `ending` have no row. Empty if `step` would plan anything else: unless no sequence waits, no page
        is copied, every running sequence draws, none begins again, and there are pages for all rows.
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
        if any(part.positions[0] >= part.sequence.until for part in following):
            return []
        self.table.tiers.now_s = now_s
        return following if self._grow(following) else []

    def _apply(self, plan: StepPlan) -> None:
        for sequence in plan.preempt:
            self._preempt(sequence)
        self.loads += self.table.attach(plan.admit)
        for sequence, _ in plan.admit:
            self._runs(sequence)

    def _preempt(self, sequence: TokenSequence) -> None:
        sequence.preempted += 1
        self.preemptions += 1
        self._begin_again(sequence)

    def _begin_again(self, sequence: TokenSequence) -> None:
        """Take the pages of a sequence; unless it is paused, it then waits for admission."""
        self.table.release(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            self.add(sequence)

    def _runs(self, sequence: TokenSequence) -> None:
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda item: item.urgency)

    def moved(self, move: PageMove, *, sound: bool) -> None:
        """Record that a page copy ended; if the page is not `sound`, sequences that hold it begin again."""
        self.table.tiers.moved(move, sound=sound)
        if sound or move.kind == "save":
            return
        for sequence in (*self.running, *self.paused):
            if not sequence.pages:
                continue
            held = sequence.pages[move.group]
            front = len(held) if sequence.home == "host" else sequence.front
            if move.source in held[:front] or move.target in held[front:]:
                self._begin_again(sequence)

    def hold(self, sequence: TokenSequence, until_s: float) -> None:
        """Do not admit a sequence before `until_s`, since pages that save computing may arrive until then."""
        sequence.hold_until_s = until_s

    def slow(self, sequence: TokenSequence, until_s: float, rows: int) -> None:
        """Compute at most `rows` rows of a sequence in a step until `until_s`, while its pages arrive."""
        sequence.cap_until_s, sequence.cap = until_s, rows

    def resume(self, sequence: TokenSequence) -> None:
        """End `hold` and `slow` for a sequence."""
        sequence.hold_until_s = sequence.cap_until_s = 0.0

    def held_until_s(self) -> float:
        """Return when the first waiting sequence may be admitted; 0.0 if any may be admitted now."""
        return min((sequence.hold_until_s for sequence in self.waiting), default=0.0)

    def commit(self, part: ScheduledRows, token: int | None) -> None:
        """Record that rows were computed and yielded `token` (None: no token); ignored for a sequence without pages."""
        sequence = part.sequence
        if not sequence.pages:
            return
        sequence.computed(len(part.positions))
        self.table.settle(sequence, part.positions)
        if token is not None:
            sequence.append(token)

    def check(self, parts: Sequence[ScheduledRows] = ()) -> None:
        """Raise AssertionError if a page leaks or is owned twice, or a sequence has two parts in a step (for tests)."""
        tiers = self.table.tiers
        held: dict[LocalTier, list[Counter[int]]] = {
            tier: [Counter() for _ in self.table.pools] for tier in ("device", "host")
        }
        for sequence in (*self.running, *self.paused):
            for group, pages in enumerate(sequence.pages):
                for at, page in enumerate(pages):
                    held[sequence.tier(at)][group][page] += page >= 0
        for move in tiers.moving:
            ends: tuple[LocalTier, LocalTier] = ("host", "device")
            for tier, page in zip(
                ends if move.kind == "load" else ends[::-1], (move.source, move.target), strict=True
            ):
                held[tier][move.group][page] += 1
        for (tier, group, page), count in tiers.read.items():
            held[tier][group][page] += count
        for group, page in tiers.left:
            held["host"][group][page] += 1
        for pool, counts in zip(tiers.device, held["device"], strict=True):
            assert pool.used == len(+counts)
            assert all(pool.references(page) == count for page, count in (+counts).items())
        for pool, counts in zip(tiers.host, held["host"], strict=True):
            # Pages that are being fetched from lower tiers have references, too.
            assert all(pool.references(page) >= count for page, count in (+counts).items())
        tiers.check()
        assert all(not sequence.pages for sequence in self.waiting)
        assert len(parts) == len({part.sequence.order for part in parts})


class _Ledger:
    """The count of available pages in each group during planning; the pools themselves do not change."""

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
        """Return per group the number of cached pages that a match would take into use."""
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
    paused: Sequence[TokenSequence] = (),
) -> StepPlan:
    """Plan the next step; `running` and `waiting` are in order of urgency.

    `paused` sequences lose their pages first. Without paused sequences the plan is empty only if `running` and
    `waiting` are. A sequence that does not fit the pools alone (`PageTable.most`) may never be scheduled.
    """
    counts, left = _share(running, bounds.tokens, table.tiers.now_s)
    ledger = _Ledger(table)
    active, preempt, rows = [*running, *(each for each in paused if each.pages)], [], []
    at = 0
    while at < len(active) and active[at].order in counts:
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
    active = [each for each in active if each.order in counts]
    admit = [] if preempt else _admit(active, rows, waiting, table, ledger, bounds, left)
    return StepPlan(preempt, admit, rows)


def _share(
    running: Sequence[TokenSequence], tokens: int, now_s: float
) -> tuple[dict[int, int], int]:
    """Return each sequence's rows, by `order`, and the rest of the budget: decoding sequences first, then prompts."""
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
    """Drop positions from the end until the rest needs at most `pages` new pages."""
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
    """Return sequences to admit, from the front of `waiting`, and append their rows to `rows`."""
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
        if computed_soon(sequence, match, prefilling):
            break  # after the next step these pages are computed
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
            break  # only copies to the host hold pages, until the next step
        most = tokens if table.tiers.now_s >= sequence.cap_until_s else min(tokens, sequence.cap)
        positions = _first_rows(match, most, min(ledger.left))
        taken = sum(1 for _ in touched(positions))
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
    """Return the number of pages that running prompts need after this step.

    These pages are reserved: a later prompt must not be admitted only to be preempted.
    """
    scheduled = {sequence.order: positions for sequence, positions in rows}
    promised = 0
    for sequence, _ in prefilling:
        promised += table.wants(sequence, sequence.next_rows(sequence.rows))
        promised -= table.wants(sequence, scheduled.get(sequence.order, []))
    return promised


def _first_rows(match: PrefixMatch, most: int, pages: int) -> list[int]:
    """Return a new sequence's first positions to compute: at most `most`, on at most `pages` new pages."""
    positions = [p for start, end in match.todo for p in range(start, min(end, start + most))]
    del positions[most:]
    return positions[: bisect_left(positions, pages, key=partial(_place, match))]


def _place(match: PrefixMatch, position: int) -> int:
    """Return the number of pages to compute before the page of `position`."""
    count = 0
    for start, end in match.todo:
        if position < end:
            return count + position // PAGE - start // PAGE
        count += (end - 1) // PAGE - start // PAGE + 1
    return count
