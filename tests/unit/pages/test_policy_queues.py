"""LRU and S3-FIFO against the reference they are named after, page by page; LRU by conversations."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from bench.simulation.kv_rule import clairvoyant, hit_rate, informed, price
from bench.simulation.kv_traces import TraceTurn
from common.pages.identity import PageId
from engine.decoder.kv.eviction.history import History
from engine.decoder.kv.eviction.policy import Policy, make_policy

TRACES = st.lists(
    st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), min_size=1, max_size=60
)


class ReferenceLru:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, None] = OrderedDict()

    @property
    def held(self) -> set[int]:
        return set(self.blocks)

    def touch(self, block: int) -> None:
        self.blocks[block] = None
        self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


class ReferenceS3Fifo:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.small_capacity = capacity, max(1, capacity // 10)
        self.small: OrderedDict[int, None] = OrderedDict()
        self.main: OrderedDict[int, None] = OrderedDict()
        self.ghost: OrderedDict[int, None] = OrderedDict()
        self.uses: dict[int, int] = {}

    @property
    def held(self) -> set[int]:
        return set(self.uses)

    def touch(self, block: int) -> None:
        if block in self.uses:
            self.uses[block] = min(3, self.uses[block] + 1)
            return
        known = block in self.ghost
        self.ghost.pop(block, None)
        (self.main if known else self.small)[block] = None
        self.uses[block] = 0
        while len(self.uses) > self.capacity:
            self._evict()

    def _evict(self) -> None:
        if len(self.small) > self.small_capacity or not self.main:
            block, _ = self.small.popitem(last=False)
            if self.uses[block]:
                self.main[block], self.uses[block] = None, 0
            else:
                del self.uses[block]
                self.ghost[block] = None
                if len(self.ghost) > self.capacity:
                    self.ghost.popitem(last=False)
            return
        block, _ = self.main.popitem(last=False)
        if self.uses[block]:
            self.uses[block] -= 1
            self.main[block] = None
        else:
            del self.uses[block]


class ReferenceKnowsHowOften:
    """Drops the block that will be used the fewest times; of equals the one used longest ago, of these the one behind.

    It knows how often each block will be used, not when: what the best learner of rates could come to know.
    """

    def __init__(self, capacity: int, requests: list[list[int]]) -> None:
        self.capacity = capacity
        self.left = Counter(block for blocks in requests for block in blocks)
        self.last: dict[int, tuple[int, int]] = {}

    @property
    def held(self) -> set[int]:
        return set(self.last)

    def touch(self, block: int, now: int, place: int) -> None:
        self.left[block] -= 1
        self.last[block] = now, -place
        while len(self.last) > self.capacity:
            del self.last[min(self.last, key=lambda each: (self.left[each], *self.last[each]))]


def by_the_rule(policy: ReferenceKnowsHowOften, requests: list[list[int]]) -> float:
    """Look up each request's blocks, of which those count that are held with all before them; then touch them all."""
    hits = total = 0
    for now, blocks in enumerate(requests):
        hits += next((n for n, block in enumerate(blocks) if block not in policy.held), len(blocks))
        total += len(blocks)
        for place, block in enumerate(blocks):
            policy.touch(block, now, place)
    return hits / total


def step(policy: Policy, held: set[int], block: int, capacity: int) -> None:
    """Touch or add one block, then shrink to the capacity."""
    page = bytes([block])
    if block in held:
        policy.used([page])
    else:
        held.add(block)
        policy.add(page)
    while len(held) > capacity:
        for victim in policy.victims(1, 0.0):
            policy.discard(victim)
            held.remove(victim[0])


@given(trace=TRACES, capacity=st.integers(1, 25))
def test_lru_and_s3_fifo_are_the_reference(trace: list[list[int]], capacity: int) -> None:
    """After every block they hold exactly what the reference holds."""
    for name, reference in (("lru", ReferenceLru(capacity)), ("s3fifo", ReferenceS3Fifo(capacity))):
        policy = make_policy(name, History(), price)
        held: set[int] = set()
        for blocks in trace:
            for block in blocks:
                step(policy, held, block, capacity)
                reference.touch(block)

                assert held == reference.held


@given(trace=TRACES, capacity=st.integers(1, 25))
def test_who_knows_how_often_is_the_reference(trace: list[list[int]], capacity: int) -> None:
    """What the default policy is measured against has the hit rate of its definition."""
    requests = [
        TraceTurn(float(now), [bytes([block]) for block in blocks], [])
        for now, blocks in enumerate(trace)
    ]

    assert informed(requests, capacity) == by_the_rule(
        ReferenceKnowsHowOften(capacity, trace), trace
    )


@given(trace=TRACES, capacity=st.integers(1, 25))
def test_nobody_holds_more_than_the_rule_allows(trace: list[list[int]], capacity: int) -> None:
    """By the rule a hit rate is a share, and with room for everything all policies are one."""
    # Ids name all that stands before them, as real ones do.
    requests = [
        TraceTurn(float(now), [bytes(blocks[: n + 1]) for n in range(len(blocks))], [])
        for now, blocks in enumerate(trace)
    ]
    names = ("lru", "s3fifo", "pensieve", "spillway")

    for rate in (
        *(hit_rate(name, requests, capacity) for name in names),
        clairvoyant(requests, capacity),
    ):
        assert 0 <= rate < 1
    roomy = {hit_rate(name, requests, 500) for name in names}
    assert roomy == {clairvoyant(requests, 500)} == {informed(requests, 500)}


def test_a_conversation_goes_as_a_whole() -> None:
    """Asked for one victim it offers all of the conversation idle for longest; what is shared stays with the last."""
    history = History()
    tier = make_policy("lru-conversation", history, price)
    chains: list[list[PageId]] = [[b"s", b"sa", b"sab"], [b"t"], [b"s", b"sb"]]
    for number, chain in enumerate(chains):
        history.end(chain, float(number))
        for page in chain:
            tier.add(page, math.inf)

    assert tier.victims(1, 9.0) == [b"sa", b"sab"]
    assert tier.victims(3, 9.0) == [b"sa", b"sab", b"t"]
    for page in (b"sa", b"sab", b"t"):
        tier.discard(page)
    assert tier.victims(1, 9.0) == [b"s", b"sb"]


def test_what_was_in_use_goes_on_in_the_main_queue() -> None:
    """S3-FIFO: a page that was taken for a turn and given back outlives those that came once."""
    tier = make_policy("s3fifo", History(), price)
    tier.add(b"used")
    tier.discard(b"used")
    tier.add(b"used")
    for number in range(20):
        tier.add(bytes([number]))

    assert b"used" not in tier.victims(15, 0.0)
