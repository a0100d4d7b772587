"""The plan of placements and the layouts that come of it: pure functions, against what must always hold."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.errors import Conflict, SpillwayError, Unprocessable
from common.registry import placement_plan as plan
from common.registry.layout import SPACE, ShardLayout, even_ranges, hash_of_document
from common.registry.placement_plan import ProcessLoad, ShardNeed
from common.wire.registry import CollectionPlacement, CollectionRecord

RECORD = CollectionRecord(
    id="c1", tenant="t", name="c", dimension=4, metric="cosine", placed=True, shards=1
)
names = st.sampled_from(["p0", "p1", "p2", "p3", "p4"])
processes = st.lists(
    st.builds(ProcessLoad, names, st.integers(0, 1 << 40), st.integers(0, 1 << 36)),
    unique_by=lambda process: process.name,
)
sizes = st.integers(0, 1 << 36)


@given(
    processes, st.lists(st.tuples(sizes, st.sets(names, max_size=3)), max_size=8), st.integers(1, 4)
)
def test_an_assignment_keeps_what_is_held_and_adds_no_more_than_is_wanted(
    living: list[ProcessLoad], needs: list[tuple[int, set[str]]], replicas: int
) -> None:
    """Each shard gets as many as are wanted or live, none twice, and keeps all it has; the order given is no matter."""
    shards = [
        ShardNeed(number, size, tuple(sorted(held))) for number, (size, held) in enumerate(needs)
    ]
    added = plan.assign(living, shards, replicas)
    for shard in shards:
        chosen = added[shard.number]
        free = {process.name for process in living} - set(shard.holders)
        assert set(chosen) <= free
        assert len(chosen) == len(set(chosen))
        assert len(chosen) == max(0, min(replicas - len(shard.holders), len(free)))
    assert added == plan.assign(list(reversed(living)), list(reversed(shards)), replicas)


@given(st.integers(1, 5), st.integers(1, 40))
def test_equal_shards_are_spread_evenly(count: int, shards: int) -> None:
    """Processes of equal memory get the same number of new shards, but for one."""
    living = [ProcessLoad(f"p{n}", 1 << 30, 0) for n in range(count)]
    added = plan.assign(living, [ShardNeed(n, 0) for n in range(shards)], 1)
    held = [sum(p.name in names for names in added.values()) for p in living]
    assert max(held) - min(held) <= 1


@given(st.integers(1, 64), st.text())
def test_every_document_has_one_shard(shards: int, document: str) -> None:
    """Ranges cover all hashes once."""
    ranges = even_ranges(shards)
    assert [low for low, _ in ranges[1:]] == [high for _, high in ranges[:-1]]
    assert (ranges[0][0], ranges[-1][1]) == (0, SPACE)
    value = hash_of_document(document)
    assert sum(low <= value < high for low, high in ranges) == 1


def test_too_few_processes_are_named() -> None:
    """More replicas than processes: the error says how many there are."""
    with pytest.raises(Unprocessable, match="replicas is 3: 2 vector_search") as caught:
        plan.created("c", 2, 3, [ProcessLoad("a", 0, 0), ProcessLoad("b", 0, 0)])
    assert caught.value.code == "too_few_processes"


def test_a_token_outlives_splits_and_not_a_lost_shard() -> None:
    """What a token says of a split shard holds for its children; one of a shard that was begun anew is refused."""
    placement = plan.created("c", 2, 1, [ProcessLoad("a", 0, 0)])
    placement = _settled(placement)
    placement = plan.split_begun(placement, 0)
    done = plan.split_done(placement, 0, "9-0", {"a"})
    assert done is not None
    layout = ShardLayout.of(RECORD, done)
    assert layout.numbers == (2, 3, 1)
    assert layout.after("5-0,7-1") == {2: "5-0", 3: "5-0", 1: "7-1"}
    assert layout.after("5-0,,11-0") == {2: "11-0", 3: "5-0"}
    assert layout.after(None) == {}
    assert layout.token({2: "11-0", 1: "7-1"}) == ",7-1,11-0"
    lost = ShardLayout.of(RECORD, plan.anew(done, 1, "b"))
    with pytest.raises(Conflict) as caught:
        lost.after("5-0,7-1")
    assert caught.value.code == "layout_changed"
    assert lost.after("5-0") == {2: "5-0", 3: "5-0"}
    with pytest.raises(Conflict):
        layout.after(",,,,,,1-0")


def _settled(placement: CollectionPlacement) -> CollectionPlacement:
    for one in placement.shards:
        for each in one.replicas:
            placement = plan.opened(placement, one.number, each.name) or placement
    return placement


class PlacementMachine(RuleBasedStateMachine):
    """A placement under operators' verbs and what processes report, in any order."""

    @initialize(shards=st.integers(1, 4), replicas=st.integers(1, 3))
    def create(self, shards: int, replicas: int) -> None:
        self.living = [ProcessLoad(f"p{n}", 0, 0) for n in range(4)]
        self.placement = plan.created("c", shards, replicas, self.living)
        self.used: set[int] = set(range(shards))
        self.begun_anew = False

    def _number(self, draw: int) -> int:
        return self.placement.shards[draw % len(self.placement.shards)].number

    def _try(self, change: Any, *args: Any) -> None:
        try:
            made = change(self.placement, *args)
        except SpillwayError:
            return
        if made is not None:
            self.placement = made

    @rule(draw=st.integers(0, 99), name=names)
    def open(self, draw: int, name: str) -> None:
        self._try(plan.opened, self._number(draw), name)

    @rule(draw=st.integers(0, 99), name=names)
    def lose_disk(self, draw: int, name: str) -> None:
        self._try(plan.emptied, self._number(draw), name)

    @rule(draw=st.integers(0, 99), gone=names, added=names)
    def move(self, draw: int, gone: str, added: str) -> None:
        self._try(plan.moved, self._number(draw), gone, added)

    @rule(draw=st.integers(0, 99), name=names)
    def remove(self, draw: int, name: str) -> None:
        self._try(plan.removed, self._number(draw), name)

    @rule(replicas=st.integers(1, 4))
    def complete(self, replicas: int) -> None:
        self._try(plan.completed, replicas, self.living, {})

    @rule(draw=st.integers(0, 99))
    def split(self, draw: int) -> None:
        self._try(plan.split_begun, self._number(draw))

    @rule(draw=st.integers(0, 99), name=names)
    def ready(self, draw: int, name: str) -> None:
        self._try(plan.children_ready, self._number(draw), name)

    @rule(draw=st.integers(0, 99), living=st.sets(names))
    def finish_split(self, draw: int, living: set[str]) -> None:
        one = plan.shard(self.placement, self._number(draw))
        if plan.may_seal(one, living) and one.split is not None:
            self._try(plan.split_done, one.number, "1-0", set(one.split.ready) & living)

    @rule(draw=st.integers(0, 99), name=names)
    def begin_anew(self, draw: int, name: str) -> None:
        one = plan.shard(self.placement, self._number(draw))
        if not any(each.state == "serving" for each in one.replicas):
            self._try(plan.anew, one.number, name)

    @invariant()
    def ranges_cover_all_hashes_once(self) -> None:
        if not hasattr(self, "placement"):
            return
        shards = sorted(self.placement.shards, key=lambda one: one.low)
        assert (shards[0].low, shards[-1].high) == (0, SPACE)
        assert all(a.high == b.low for a, b in itertools.pairwise(shards))

    @invariant()
    def no_process_holds_a_shard_twice_and_none_is_left_alone(self) -> None:
        if not hasattr(self, "placement"):
            return
        for one in self.placement.shards:
            held = [each.name for each in one.replicas]
            assert held
            assert len(held) == len(set(held))
            assert one.number not in one.ancestors
            assert one.number < self.placement.next_number


TestPlacementMachine = PlacementMachine.TestCase
