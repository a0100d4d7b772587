"""The page table: finds, allocates, shares and releases the pages of sequences, in every layer group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from common.pages.identity import PAGE, PageId
from engine.decoder.executor.interface import LocalTier, ModelShape, PageMove
from engine.decoder.kv.page_pool import PagePool
from engine.decoder.kv.tiers import PageTiers, TierPolicy
from engine.decoder.offload.plan import SharedPage
from engine.decoder.sequence import Range, TokenSequence, touched


class PrefixMatch(NamedTuple):
    """The resident pages that a sequence can use, and the remaining ranges `todo` to compute.

    Per group, `pages` are the pages on the device (-1: none), `loads` the logical pages to load from the host.
    """

    todo: list[Range]
    pages: list[list[int]]
    loads: list[list[int]]


class PageTable:
    """A list of pages for each sequence and layer group; groups have equally many pages.

    All pages are in the sequence's home, but those of its front are on the host.
    """

    def __init__(self, shape: ModelShape, keeping: TierPolicy) -> None:
        self.windows = list(shape.windows)
        self.windowed = any(window is not None for window in shape.windows)
        self.tiers = PageTiers(shape, keeping)
        self.pools = self.tiers.device

    # -- reading ---------------------------------------------------------------------------------------

    def match(self, sequence: TokenSequence, *, host: bool = True) -> PrefixMatch:
        """Find the resident pages for a sequence without pages, and the ranges to compute; change nothing.

        Without `host` pages that only the host has are to be computed, too. Missing pages may form any set of ranges.
        The page of the last token is always computed, since the step needs its last row. Under a window, computing
        starts at the nearest earlier position whose window is resident. A page is computed for all groups at once, into
        new pages: pages of other sequences are never written.
        """
        ids, groups = sequence.ids, range(len(self.pools))
        has = self.tiers.has if host else self._on_device
        last = (sequence.length - 1) // PAGE
        pages = [[-1] * (last + 1) for _ in groups]
        loads: list[list[int]] = [[] for _ in groups]
        seen = [self._sees(g, last * PAGE) for g in groups]  # the lowest position seen later
        computed = [last]
        for page in range(last - 1, -1, -1):
            needed = [g for g in groups if seen[g] < (page + 1) * PAGE]
            if not needed:
                break
            if page >= len(ids) or not all(has(g, ids[page]) for g in needed):
                computed.append(page)
                seen = [min(seen[g], self._sees(g, page * PAGE)) for g in groups]
                continue
            for g in needed:
                physical = self.pools[g].find(ids[page])
                pages[g][page] = -1 if physical is None else physical
                loads[g] += [page] if physical is None else []
        todo: list[Range] = []
        for page in reversed(computed):
            start, end = page * PAGE, min((page + 1) * PAGE, sequence.length)
            if todo and todo[-1][1] == start:
                start = todo.pop()[0]
            todo.append((start, end))
        return PrefixMatch(todo, pages, loads)

    def _on_device(self, group: int, page_id: PageId) -> bool:
        return self.pools[group].find(page_id) is not None

    def _sees(self, group: int, position: int) -> int:
        """Return the lowest position that a row at `position` attends to."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def resident(self, ids: Sequence[PageId]) -> tuple[int, int]:
        """Return the number of a chain's pages that its next turn would find on the device, and on the host only."""
        device = host = 0
        seen = [self._sees(group, len(ids) * PAGE) for group in range(len(self.pools))]
        for page, page_id in enumerate(ids):
            needed = [g for g, low in enumerate(seen) if low < (page + 1) * PAGE]
            if not needed or not all(self.tiers.has(g, page_id) for g in needed):
                continue
            above = all(self.pools[g].find(page_id) is not None for g in needed)
            device, host = device + above, host + (not above)
        return device, host

    def keeps(self, page_id: PageId) -> bool:
        """True if device or host have a page in every group without a window, or in all groups if all have windows."""
        unlimited = [g for g, window in enumerate(self.windows) if window is None]
        return all(self.tiers.has(g, page_id) for g in unlimited or range(len(self.windows)))

    def lacks(self, sequence: TokenSequence) -> list[tuple[int, int]]:
        """Return (logical page, group) of pages that the last row sees and neither device nor host has, last first."""
        last = (sequence.length - 1) // PAGE
        return [
            (page, group)
            for page in range(min(last, sequence.findable) - 1, -1, -1)
            for group in range(len(self.pools))
            if self._sees(group, last * PAGE) < (page + 1) * PAGE
            and not self.tiers.has(group, sequence.ids[page])
        ]

    def awaits(self, sequence: TokenSequence, page: int) -> bool:
        """True if the arrival of a full page now would save computing it."""
        if sequence.over or not sequence.pages:
            return not sequence.over
        todo = any(a <= page * PAGE and (page + 1) * PAGE <= b for a, b in sequence.todo)
        return todo and all(page >= len(held) or held[page] < 0 for held in sequence.pages)

    def wants(self, sequence: TokenSequence, positions: Sequence[int]) -> int:
        """Return the number of new pages for rows at `positions`, which is the same in each group."""
        held = sequence.pages[0] if sequence.pages else []
        # Pages of rows to compute are allocated in all groups at once, so the first group stands for all.
        if len(positions) == 1:
            page = positions[0] // PAGE
            return int(page >= len(held) or held[page] < 0)
        return sum(page >= len(held) or held[page] < 0 for page in touched(positions))

    def most(self, sequence: TokenSequence, chunk: int) -> list[int]:
        """Return per group the most pages that a sequence can hold, if a step computes at most `chunk` rows."""
        whole = -(-sequence.most // PAGE)
        return [
            whole if window is None else min(whole, (2 * window + chunk) // PAGE + 4)
            for window in self.windows
        ]

    def yields(self, sequence: TokenSequence) -> list[dict[int, int]]:
        """Return per group a sequence's pages with their references (1: its release makes the page available)."""
        return [
            {page: pool.references(page) for page in held if page >= 0}
            for pool, held in zip(self.pools, sequence.pages, strict=False)
        ]

    def available(self, tier: LocalTier) -> int:
        """Return the number of pages available in every group of a tier."""
        return min(pool.available for pool in self.tiers.pools(tier))

    def ties(self, sequence: TokenSequence) -> tuple[int, int, tuple[SharedPage, ...]]:
        """Return the pages that are not copied or not freed when a sequence leaves its home.

        The result is the number of pages that need no copy, since the other tier has a copy in use or windows have
        passed them; the number that windows have passed; and the pages with other holders. With several groups the
        least favourable counts.
        """
        copies: list[int] = []
        least: tuple[int, tuple[SharedPage, ...]] = (0, ())
        for group, held in enumerate(sequence.pages):
            own, there = self.tiers.pools(sequence.home)[group], self._other(sequence)[group]
            passed = sum(page < 0 for page in held)
            full = held[: (sequence.length - 1) // PAGE]
            used = [
                page >= 0 and there.holds(page_id)
                for page, page_id in zip(full, sequence.ids, strict=False)
            ]
            used[: sequence.front] = [True] * sequence.front  # on the host already
            shared = tuple(
                SharedPage(page, own.references(page), at < len(used) and used[at])
                for at, page in enumerate(held)
                if at >= sequence.front and page >= 0 and own.references(page) > 1
            )
            copies.append(passed + sum(used))
            least = max(least, (passed, shared), key=lambda each: each[0] + len(each[1]))
        return min(copies, default=0), *least

    def _other(self, sequence: TokenSequence) -> list[PagePool]:
        """Return the pools of the other tier than a sequence's home."""
        return self.tiers.device if sequence.home == "host" else self.tiers.host

    def takes(self, match: PrefixMatch, front: int = 0) -> int:
        """Return the most available device pages that any group gives up when a match is attached."""
        return max(
            sum(page >= front for page in loads)
            + sum(page >= 0 and not pool.references(page) for page in pages[front:])
            for pool, pages, loads in zip(self.pools, match.pages, match.loads, strict=True)
        )

    # -- changing --------------------------------------------------------------------------------------

    def attach_with_front(
        self, sequence: TokenSequence, match: PrefixMatch, front: int
    ) -> list[PageMove]:
        """Give a sequence the pages of a match just found, with a front on the host; return the loads to make.

        The front is used in place, also together with other sequences; it is at most `front_on_host`.
        """
        there: list[list[int]] = []
        for group in range(len(self.pools)):
            found = [self.tiers.find_in_place(group, page_id) for page_id in sequence.ids[:front]]
            there.append([-1 if page is None else page for page in found])
        rest = match._replace(
            pages=[[*([-1] * front), *held[front:]] for held in match.pages],
            loads=[[page for page in loads if page >= front] for loads in match.loads],
        )
        self._hold(sequence, rest)
        moves = self._load_all(sequence, rest)
        for held, pages in zip(sequence.pages, there, strict=True):
            held[:front] = pages
        sequence.front = front
        if sequence.cached < 0:
            loads = [[*range(front), *pages] for pages in rest.loads]
            self._first(sequence, rest._replace(loads=loads))
        return moves

    def attach(self, admitted: Sequence[tuple[TokenSequence, PrefixMatch]]) -> list[PageMove]:
        """Give sequences the pages of matches found since the last change; return the loads to make."""
        for sequence, match in admitted:
            self._hold(sequence, match)
        # Loads come after all holds, since a load may evict a page that no sequence holds yet.
        moves = []
        for sequence, match in admitted:
            moves += self._load_all(sequence, match)
            if sequence.cached < 0:
                self._first(sequence, match)
        return moves

    def _hold(self, sequence: TokenSequence, match: PrefixMatch) -> None:
        """Give a sequence the pages of a match that are on the device."""
        for pool, held in zip(self.pools, match.pages, strict=True):
            for page in held:
                if page >= 0:
                    pool.hold(page)
        sequence.pages = [list(held) for held in match.pages]
        sequence.todo = list(match.todo)
        sequence.low = [0] * len(self.pools)

    def _load_all(self, sequence: TokenSequence, match: PrefixMatch) -> list[PageMove]:
        """Give a sequence pages for those of a match that other tiers have; return the loads to make."""
        for pool, pages in zip(self.pools, match.loads, strict=True):
            pool.free_up(len(pages))
        moves = [
            self._load(sequence, group, page)
            for group, pages in enumerate(match.loads)
            for page in pages
        ]
        return [move for move in moves if move is not None]

    def attach_to_host(self, sequence: TokenSequence, match: PrefixMatch) -> list[PageMove] | None:
        """Give a sequence a home on the host, with the pages of a match; return the copies for its first step to make.

        Pages on the host are used in place, also together with other sequences. None, without any change, if the host
        has no room for the other pages.
        """
        if not self._fits_on_host(sequence, match):
            return None
        sequence.home = "host"
        sequence.pages = [[-1] * len(held) for held in match.pages]
        sequence.todo, sequence.low = list(match.todo), [0] * len(match.pages)
        for group, (held, loads) in enumerate(zip(match.pages, match.loads, strict=True)):
            for at in (*(at for at, page in enumerate(held) if page >= 0), *loads):
                page = self.tiers.find_in_place(group, sequence.ids[at])
                sequence.pages[group][at] = -1 if page is None else page
        if sequence.cached < 0:
            self._first(sequence, match)
        return self._copied(sequence, match.pages)

    def move(self, sequence: TokenSequence, to: LocalTier, front: int = 0) -> list[PageMove] | None:
        """Change the home of a sequence, or its front; return the copies for the step to make before it writes.

        A `front` is a number of full pages. None, without any change, if a tier has no room for the pages it gets.
        """
        before, full = sequence.pages, (sequence.length - 1) // PAGE
        was = sequence.home, sequence.front
        tiers = [sequence.tier(at) for at in range(max(map(len, before)))]
        sequence.home, sequence.front = to, front
        # A page that stays in its tier keeps its place and its reference.
        goes = [at for at, tier in enumerate(tiers) if sequence.tier(at) != tier]
        if any(
            self.tiers.pools(tier)[group].available < wanted
            for group in range(len(before))
            for tier, wanted in self._wanted(sequence, group, goes).items()
        ):
            sequence.home, sequence.front = was
            return None
        sequence.pages = [list(held) for held in before]
        for group, held in enumerate(before):
            for at in [at for at in goes if held[at] >= 0]:
                tier = sequence.tier(at)
                found = self.tiers.homes.find(tier, group, sequence.ids[at]) if at < full else None
                sequence.pages[group][at] = -1 if found is None else found
        moves = self._copied(sequence, before)
        for group, held in enumerate(before):
            for at in goes:
                if held[at] >= 0:
                    self.tiers.leave(tiers[at], group, held[at])
        return moves

    def _fits_on_host(self, sequence: TokenSequence, match: PrefixMatch) -> bool:
        """Return whether every group of the host has room for a match's other pages and for the rows to compute."""
        computed = sum((end - 1) // PAGE - start // PAGE + 1 for start, end in match.todo)
        for group, (held, loads) in enumerate(zip(match.pages, match.loads, strict=True)):
            used = [*(at for at, page in enumerate(held) if page >= 0), *loads]
            takes = sum(not self.tiers.homes.in_use("host", group, sequence.ids[at]) for at in used)
            if self.tiers.host[group].available < computed + takes:
                return False
        return True

    def _wanted(
        self, sequence: TokenSequence, group: int, goes: Sequence[int]
    ) -> Counter[LocalTier]:
        """Return the number of available pages that each tier gives to a sequence whose pages `goes` come there."""
        held, full = sequence.pages[group], (sequence.length - 1) // PAGE
        wanted = Counter[LocalTier]()
        for at in goes:
            tier = sequence.tier(at)
            in_use = at < full and self.tiers.homes.in_use(tier, group, sequence.ids[at])
            wanted[tier] += held[at] >= 0 and not in_use
        return wanted

    def _copied(self, sequence: TokenSequence, before: Sequence[Sequence[int]]) -> list[PageMove]:
        """Allocate a sequence's pages that their new tiers lacked; return the copies from the pages `before`.

        A full page that the step already copies for another sequence is shared with that sequence.
        """
        moves, full = [], (sequence.length - 1) // PAGE
        for group, held in enumerate(before):
            for at, source in enumerate(held):
                if source < 0 or sequence.pages[group][at] >= 0:
                    continue
                tier = sequence.tier(at)
                kind: Literal["load", "save"] = "save" if tier == "host" else "load"
                page_id = sequence.ids[at] if at < min(full, sequence.findable) else b""
                page, sent = self.tiers.homes.send(tier, group, page_id)
                sequence.pages[group][at] = page
                if not sent:
                    moves.append(PageMove(kind, group, page_id, source, page))
        return moves

    def arrived(self, sequence: TokenSequence) -> None:
        """Publish the full pages of a sequence in their tiers, after the step that copied them has ended."""
        for group, held in enumerate(sequence.pages):
            for at, page_id in enumerate(sequence.ids[: len(held)]):
                if held[at] >= 0 and not sequence.missing(at):
                    self.tiers.publish(sequence.tier(at), group, held[at], page_id)
                    self.tiers.backed(group, page_id)

    def _load(self, sequence: TokenSequence, group: int, page: int) -> PageMove | None:
        sequence.pages[group][page], move = self.tiers.load(group, sequence.ids[page])
        return move

    def _first(self, sequence: TokenSequence, match: PrefixMatch) -> None:
        """Count the pages found for a sequence at its first admission."""
        prompt = len(sequence.prompt)
        computed = sum(min(b, prompt) - min(a, prompt) for a, b in match.todo)
        sequence.cached = prompt - computed
        found = {
            page
            for held, loads in zip(match.pages, match.loads, strict=True)
            for page in (*(at for at, physical in enumerate(held) if physical >= 0), *loads)
        }
        held = sum(physical >= 0 for pages in match.pages for physical in pages)
        missing = sum((b - 1) // PAGE - a // PAGE + 1 for a, b in match.todo)
        self.tiers.note(sorted(found), held=held, computed=missing * len(self.pools))
        self.tiers.history.begin(sequence.ids[: prompt // PAGE], self.tiers.now_s)

    def catch_up(self, sequence: TokenSequence) -> list[PageMove]:
        """Give a running sequence its missing pages that have arrived meanwhile; return the loads to make.

        It gets them only while the device has pages available.
        """
        moves: list[PageMove] = []
        whole = [page for a, b in sequence.todo for page in range(-(-a // PAGE), b // PAGE)]
        for page in whole:
            if page >= min((sequence.length - 1) // PAGE, sequence.findable) or any(
                page < len(held) and held[page] >= 0 for held in sequence.pages
            ):
                continue  # the last page is always computed; an allocated page is in computation
            if not all(self.tiers.has(g, sequence.ids[page]) for g in range(len(self.pools))):
                continue
            if self.available("device") <= 0:
                break
            for group, held in enumerate(sequence.pages):
                held.extend([-1] * (page + 1 - len(held)))
                move = self._load(sequence, group, page)
                moves += [] if move is None else [move]
            sequence.skip(page)
            self.tiers.note([page], held=0, computed=-len(self.pools))
            sequence.cached += min(PAGE, max(0, len(sequence.prompt) - page * PAGE))
        return moves

    def grow(self, rows: Iterable[tuple[TokenSequence, Sequence[int]]]) -> None:
        """Allocate the pages for rows, sequences with positions; IndexError if a pool has too few.

        The pages of all rows are freed at once: a choice of many among the cached pages takes as long as one of one.
        """
        counts = [(each, at, self.wants(each, at)) for each, at in rows]
        growing = [(sequence, positions) for sequence, positions, count in counts if count]
        wanted = Counter[LocalTier]()
        for sequence, _, count in counts:
            wanted[sequence.home] += count
        for tier, count in (+wanted).items():
            for pool in self.tiers.pools(tier):
                pool.free_up(count)
        for sequence, positions in growing:
            pools = self.tiers.pools(sequence.home)
            for page in touched(positions):
                for pool, held in zip(pools, sequence.pages, strict=True):
                    held.extend([-1] * (page + 1 - len(held)))
                    if held[page] < 0:
                        held[page] = pool.allocate()

    def settle(self, sequence: TokenSequence, positions: Sequence[int]) -> None:
        """Publish pages that the just written rows at `positions` have filled; drop pages that no later row sees."""
        if len(positions) == 1 and (positions[0] + 1) % PAGE and not self.windowed:
            return  # a decoding sequence's usual step, which fills no page
        full = sequence.findable
        for page in touched(positions):
            if page < full and not sequence.missing(page):
                for group, held in enumerate(sequence.pages):
                    self.tiers.publish(sequence.home, group, held[page], sequence.ids[page])
        following = sequence.todo[0][0] if sequence.todo else sequence.length
        for group, held in enumerate(sequence.pages):
            if self.windows[group] is None:
                continue
            end = min(self._sees(group, following) // PAGE, len(held))
            for page in range(sequence.low[group], end):
                if held[page] >= 0:
                    self.tiers.leave(sequence.home, group, held[page], unseen=True)
                    held[page] = -1
            sequence.low[group] = max(end, sequence.low[group])

    def release(self, sequence: TokenSequence) -> None:
        """Release all pages of a sequence; full pages stay in the cache under their ids."""
        for group, held in enumerate(sequence.pages):
            for at, page in enumerate(held):
                if page >= 0:
                    self.tiers.leave(sequence.tier(at), group, page)
        sequence.begin_again()


def computed_soon(
    sequence: TokenSequence,
    match: PrefixMatch,
    prefilling: Sequence[tuple[TokenSequence, list[tuple[int, int]]]],
) -> bool:
    """Return whether an earlier sequence is going to compute the first page that `sequence` lacks."""
    page = match.todo[0][0] // PAGE
    if page >= min((sequence.length - 1) // PAGE, sequence.findable):
        return False  # each sequence computes its own last page, and those that no other finds
    start, end = page * PAGE, (page + 1) * PAGE
    return any(
        len(other.ids) > page
        and other.ids[page] == sequence.ids[page]
        and any(a < end and start < b for a, b in todo)
        for other, todo in prefilling
    )
