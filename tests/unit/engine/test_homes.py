"""An engine whose sequences are at home on the device or on the host gives the tokens of the device alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engine import home_runs
from bench.engine.home_runs import HomeCounts, HomeSides
from common.pages.identity import CHUNK, PAGE, root_id
from engine.decoder.executor.interface import LocalTier, ModelShape, PageMove
from engine.decoder.kv.host_matches import front_on_host
from engine.decoder.kv.page_table import PageTable
from engine.decoder.kv.tiers import PLAIN
from engine.decoder.offload.plan import OffloadMode
from engine.decoder.sequence import TokenSequence
from tests.conftest import PROFILE, SEED

USES_HOST = [mode for mode in OffloadMode if mode not in {OffloadMode.DEVICE, OffloadMode.SWAP}]
SOAK = 20_000 // (len(home_runs.KINDS) * len(USES_HOST))
RUNS = SOAK if PROFILE == "soak" else 3
TRIES = 10 * RUNS


@pytest.fixture(scope="module", params=home_runs.KINDS)
def sides(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HomeSides]:
    found = home_runs.sides(request.param, tmp_path_factory.mktemp("model"))
    yield found
    found.executor.close()


@pytest.mark.sampled(14)
@pytest.mark.parametrize("mode", OffloadMode)
async def test_answers_are_those_of_the_device_alone(sides: HomeSides, mode: OffloadMode) -> None:
    """Random arrivals, aborts, extensions, pages forgotten in mid-step, shared prompts, several choices, few pages.

    A run counts only if both sides attended, in modes in which both can.
    """
    uses_host, counted = mode in USES_HOST, list[HomeCounts]()
    wanted = RUNS if uses_host else min(RUNS, 50)
    for seed in range(SEED, SEED + 10 * wanted):
        counts = await home_runs.compare(sides, seed, mode)
        assert (seed, counts.wrong) == (seed, [])
        if not uses_host or (counts.device and counts.host):
            counted.append(counts)
        if len(counted) == wanted:
            break

    assert len(counted) == wanted
    if RUNS == SOAK:
        assert sum(each.aborted for each in counted) > 0
        assert sum(each.shared for each in counted) > 0
        assert sum(each.extended for each in counted) > 0
        assert not uses_host or sum(each.pages["shared"] for each in counted) > 0
        windowed = None not in sides.executor.shape.windows  # its pages hardly ever run out
        assert windowed or sum(each.preempted for each in counted) > 0


@pytest.fixture(scope="module", params=home_runs.UNWINDOWED)
def long_sides(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HomeSides]:
    directory = tmp_path_factory.mktemp("long")
    found = home_runs.sides(request.param, directory, sizes=home_runs.LONG)
    yield found
    found.executor.close()


async def test_answers_over_both_tiers_are_those_of_the_device_alone(long_sides: HomeSides) -> None:
    """The same with texts whose first pages are on the host and whose later pages are on the device.

    A run counts only if rows were attended over both tiers. Over all of them sequences left their fronts to the host,
    and prompts began with a front that they found there.
    """
    counted: list[HomeCounts] = []
    for seed in range(SEED, SEED + TRIES):
        counts = await home_runs.compare(
            long_sides, seed, OffloadMode.ASYMMETRIC, home_runs.LONG, split=True
        )
        assert (seed, counts.wrong) == (seed, [])
        if counts.both:
            counted.append(counts)
        if len(counted) == RUNS:
            break

    assert len(counted) == RUNS
    if RUNS == SOAK:
        assert sum(each.left for each in counted) > 0
        assert sum(each.resumed["split"] for each in counted) > 0
        assert sum(each.preempted for each in counted) > 0


class Longest(random.Random):
    """Draws the largest number of a range."""

    def randint(self, a: int, b: int) -> int:
        return b


class SharedPages:
    """Sequences on a page table whose pages hold their tokens; any page that is wrong, lost or leaked shows.

    They have a common head of so many pages; with `fronts` some have their first pages on the host.
    """

    def __init__(self, seed: int, head: int = 4, *, fronts: bool = False) -> None:
        self.draw = random.Random(seed)
        self.table = PageTable(ModelShape([None], [64], 60, 4096, 50, host_pages=80), PLAIN)
        self.memory: dict[LocalTier, list[list[int]]] = {
            "device": [[-1] * PAGE for _ in range(60)],
            "host": [[-1] * PAGE for _ in range(80)],
        }
        self.head = [self.draw.randrange(50) for _ in range(head * PAGE)]
        self.sequences: list[TokenSequence] = []
        self.fronts = fronts
        self.saved = self.begun = self.split = 0

    def begin(self, home: LocalTier) -> None:
        """Admit a sequence that begins as others do, and compute its prompt."""
        length = self.draw.randint(0, len(self.head))
        tail = [self.draw.randrange(50) for _ in range(self.draw.randint(1, 50))]
        prompt = self.head[:length] + tail
        sequence = TokenSequence("", 0, self.begun, prompt, root=root_id("0f", ""), most=400)
        self.begun += 1
        match = self.table.match(sequence)
        if home == "host":
            copied = self.table.attach_to_host(sequence, match)
            if copied is None:
                return
            self.copy(copied)
        else:
            if self.table.available("device") < 24:
                return
            front = front_on_host(self.table, sequence, match) if self.fronts else 0
            if front and self.draw.random() < 0.7:
                assert front % CHUNK == 0
                loads = self.table.attach_with_front(sequence, match, front)
                assert sequence.front == front
                assert all(self.table.tiers.host[0].holds(each) for each in sequence.ids[:front])
                self.split += 1
            else:
                loads = self.table.attach([(sequence, match)])
            self.copy(loads)
            for move in loads:
                self.table.tiers.moved(move, sound=True)
        self.sequences.append(sequence)
        self.compute(sequence)
        self.table.arrived(sequence)

    def compute(self, sequence: TokenSequence) -> None:
        """Write the rows that are missing, where no other sequence reads, and draw a token."""
        positions = sequence.next_rows(sequence.rows)
        if self.table.wants(sequence, positions) > self.table.available(sequence.home):
            return
        self.table.grow([(sequence, positions)])
        tokens, pool = sequence.tokens(), self.table.tiers.pools(sequence.home)[0]
        for position in positions:
            page = sequence.pages[0][position // PAGE]
            assert position // PAGE >= sequence.front
            assert pool.references(page) == 1
            self.memory[sequence.home][page][position % PAGE] = tokens[position]
        sequence.computed(len(positions))
        self.table.settle(sequence, positions)
        sequence.append(self.draw.randrange(2))

    def move(self, movers: list[TokenSequence]) -> None:
        """Change the homes of some sequences in one step; each full page is copied once at most, others' stay."""
        stays = {each.order: [list(held) for held in each.pages] for each in self.sequences}
        copied: list[PageMove] = []
        for sequence in movers:
            to, front = self._other(sequence)
            moves = self.table.move(sequence, to, front)
            if moves is not None:
                assert (sequence.home, sequence.front) == (to, front)
                self.split += front > 0
                del stays[sequence.order]
                copied += moves
        full = Counter((move.kind, move.page_id) for move in copied if move.page_id)
        assert max(full.values(), default=1) == 1
        self.copy(copied)
        for sequence in movers:
            self.table.arrived(sequence)
        assert all(each.pages == stays.get(each.order, each.pages) for each in self.sequences)

    def _other(self, sequence: TokenSequence) -> tuple[LocalTier, int]:
        """Return another home of a sequence, or another front at home on the device."""
        most = (sequence.length - 1) // PAGE // CHUNK if self.fronts else 0
        others: list[tuple[LocalTier, int]] = [("host", 0)]
        others += [("device", CHUNK * chunks) for chunks in range(most + 1)]
        return self.draw.choice(
            [each for each in others if each != (sequence.home, sequence.front)]
        )

    def copy(self, moves: list[PageMove]) -> None:
        """Copy pages as a step does: all are read before any is written."""
        ends: dict[str, tuple[LocalTier, LocalTier]] = {
            "load": ("host", "device"),
            "save": ("device", "host"),
        }
        read = [list(self.memory[ends[move.kind][0]][move.source]) for move in moves]
        for move, page in zip(moves, read, strict=True):
            self.memory[ends[move.kind][1]][move.target] = page
        self.saved += sum(move.kind == "save" for move in moves)

    def check(self) -> None:
        """Every sequence sees its tokens, and a page has as many references as sequences that hold it."""
        tiers = self.table.tiers
        held: dict[LocalTier, Counter[int]] = {"device": Counter(), "host": Counter()}
        for sequence in self.sequences:
            tokens, pages = sequence.tokens(), sequence.pages[0]
            for at, number in enumerate(pages):
                held[sequence.tier(at)].update([number] if number >= 0 else [])
            for position in range(sequence.length - 1):
                there = sequence.tier(position // PAGE)
                page = self.memory[there][pages[position // PAGE]]
                assert page[position % PAGE] == tokens[position]
        for tier, counts in held.items():
            pool = tiers.pools(tier)[0]
            assert pool.used == len(counts)
            assert all(pool.references(page) == count for page, count in counts.items())
        tiers.check()


@given(st.integers(0, 1 << 30), st.booleans())
def test_a_prefix_is_shared_in_either_home(seed: int, fronts: bool) -> None:
    """Sequences with a common prefix come, grow, move together and alone, and leave; no page of another changes.

    So it is if they leave their fronts to the host, take them back, or find them there.
    """
    pages = SharedPages(seed, head=9 if fronts else 4, fronts=fronts)
    for _ in range(30):
        action = pages.draw.random()
        if action < 0.3:
            pages.begin(pages.draw.choice(("device", "host")))
        elif action < 0.6 and pages.sequences:
            pages.move(
                pages.draw.sample(pages.sequences, pages.draw.randint(1, len(pages.sequences)))
            )
        elif action < 0.7 and pages.sequences:
            leaver = pages.draw.choice(pages.sequences)
            pages.table.release(leaver)
            pages.sequences.remove(leaver)
        else:
            for sequence in pages.sequences:
                pages.compute(sequence)
        pages.table.tiers.ended()
        pages.check()


def test_a_prefix_that_moves_is_copied_once() -> None:
    """Two of three sequences move to the host in one step: one copy of what they share, and the third's pages stay."""
    pages = SharedPages(1)
    pages.head = [at % 50 for at in range(4 * PAGE)]
    pages.draw = Longest(1)  # the whole head, and 50 tokens more
    for _ in range(3):
        pages.begin("device")
    first, second, third = pages.sequences
    stays, device = list(third.pages[0]), pages.table.tiers.device[0]
    assert first.pages[0][:4] == second.pages[0][:4] == stays[:4]

    pages.move([first, second])
    pages.table.tiers.ended()

    pages.check()
    assert first.pages[0][:4] == second.pages[0][:4]
    assert pages.saved == 4 + 2 + 2
    assert pages.table.tiers.homes.counts == {"copied": 8, "shared": 4}
    assert third.pages[0] == stays
    assert all(device.references(page) == 1 for page in stays)
