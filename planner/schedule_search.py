"""The search for schedules (RAGO, section 3.6): placement, allocation and batching, and the front of what they give.

A schedule puts consecutive stages into groups, gives each group, the decode stage and the search a power of two of
units, and each stage a power of two of requests a batch. `every_schedule` tries all. `best_schedules` keeps, of what
some chips give, only what no other of theirs betters in both latency and rate, and joins the groups' fronts one after
another: a rate is the least of the groups', a latency their sum, so nothing that it drops is part of a better whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from planner.inventory import Inventory
from planner.rag_schema import RAGSchema
from planner.stage_profile import Profile, StageProfile

MOST_BATCH = {"decode": 1024}
USUAL_MOST_BATCH = 128
SAME_MODEL = {"rewrite_decode": "rewrite_prefix", "decode": "prefix"}


class ScheduledGroup(NamedTuple):
    """Stages that share so many units, with the batch of each."""

    stages: tuple[str, ...]
    units: int
    batches: tuple[int, ...]


class RagSchedule(NamedTuple):
    """A schedule and what it gives: seconds to the first token and from one to the next, requests/s, chips charged.

    `groups` are those of chips, that of `decode` last where it has its own; `again` is the batch of the retrievals
    during generation (0: there are none).
    """

    ttft_s: float
    tpot_s: float
    qps: float
    chips: int
    hosts: int
    groups: tuple[ScheduledGroup, ...]
    search_batch: int = 0
    again: int = 0

    @property
    def qps_per_chip(self) -> float:
        """Requests/s by the chips that are charged."""
        return self.qps / self.chips

    @property
    def rank(self) -> tuple[float, float, float]:
        """What schedules are compared by, the lower the better: first token, rate of a chip, later tokens."""
        return self.ttft_s, -self.qps_per_chip, self.tpot_s


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What may vary: the batches of each stage (powers of two up to `most_batch`), and the placements.

    `placements` holds the groups that may be, each a tuple of stages (None: all consecutive ones); `decode_ratio` fixes
    the chips of the decode stage to a multiple of the prefix' (0: free).
    """

    schema: RAGSchema
    inventory: Inventory
    profile: Profile
    most_batch: tuple[tuple[str, int], ...] = ()
    placements: frozenset[tuple[str, ...]] | None = None
    decode_ratio: int = 0

    def batches(self, stage: str) -> list[int]:
        """Return the batches that a stage may have."""
        usual = MOST_BATCH.get(stage, USUAL_MOST_BATCH)
        return powers(dict(self.most_batch).get(stage, usual))

    def waits(self, group: tuple[str, ...]) -> bool:
        """True if a group does nothing while a search between two of its stages runs."""
        return self.inventory.pauses and self.schema.spans(group)

    def may_share(self, group: tuple[str, ...]) -> bool:
        """True if these stages may be a group."""
        return self.placements is None or group in self.placements


class _Search(NamedTuple):
    """One way to search: hosts, batch, again, and what this gives."""

    hosts: int
    batch: int
    again: int
    latency_s: float
    qps: float
    pause_s: float
    again_s: float


class _Point(NamedTuple):
    """What some groups give together; `groups` says which."""

    latency_s: float
    qps: float
    tpot_s: float
    groups: tuple[ScheduledGroup, ...]


def powers(most: int) -> list[int]:
    """Return the powers of two from 1 to `most`."""
    return [1 << place for place in range(most.bit_length())]


def idleness(waiting: int, slots: int) -> float:
    """Return how much longer sequences take that wait until so many of `slots` want to retrieve; 1: not at all.

    Retrievals at random places are reached one after another: (D/I)(H(D) - H(D-I)), with H the harmonic numbers. Within
    0.02 of figure 3.8b for batches of up to half the slots; larger ones are not planned.
    """
    return slots / waiting * sum(1 / left for left in range(slots - waiting + 1, slots + 1))


# -- the parts of a schedule ----------------------------------------------------------------------


def searches(space: SearchSpace) -> list[_Search]:
    """Return the ways to search that fit; one that takes nothing if the pipeline has no search."""
    if space.schema.retrieval is None:
        return [_search(space, 0, 0, 0)]
    again = powers(space.batches("decode")[-1] // 2) if space.schema.iterations else [0]
    ways = itertools.product(powers(space.inventory.hosts), space.batches("retrieval"), again)
    found = (_search(space, *way) for way in ways)
    return [each for each in found if each.qps]


def _search(space: SearchSpace, hosts: int, batch: int, again: int) -> _Search:
    """Return what so many hosts give with these batches; a rate of 0 where they do not hold the vectors."""
    if not hosts:
        return _Search(0, 0, 0, 0.0, math.inf, 0.0, 0.0)
    first = space.profile("retrieval", hosts, batch)
    later = space.profile("retrieval", hosts, again) if again else first
    fits = first.fits and later.fits and first.qps and later.qps
    qps = 1 / (1 / first.qps + space.schema.iterations / later.qps) if fits else 0.0
    pause = first.latency_s / batch
    return _Search(hosts, batch, again, first.latency_s, qps, pause, later.latency_s)


def of_group(
    space: SearchSpace,
    stages: tuple[str, ...],
    units: int,
    batches: tuple[int, ...],
    search: _Search,
) -> _Point | None:
    """Return what one group gives, or None if it does not fit.

    Its stages take turns, so a request occupies it for the sum of their shares of a batch; a search between two of them
    is waited for. With retrievals during generation `prefix` also reads what each of them brings.
    """
    found = [
        space.profile(*each) for each in zip(stages, itertools.repeat(units), batches, strict=False)
    ]
    busy = sum(1 / each.qps if each.qps else math.inf for each in found)
    memory = _held(stages, found)
    if stages[-1] == "prefix" and search.again:
        later = space.profile("prefix", units, search.again)
        busy += space.schema.iterations / later.qps if later.fits else math.inf
    if space.waits(stages):
        busy += search.pause_s
    if memory > 1 or not busy < math.inf:
        return None
    latency = sum(each.latency_s for each in found)
    return _Point(latency, 1 / busy, 0.0, (ScheduledGroup(stages, units, batches),))


def _held(stages: Sequence[str], found: Sequence[StageProfile]) -> float:
    """Return the share of the memory that stages take together; two of the same model hold its weights once."""
    twice = (
        each.weights
        for name, each in zip(stages, found, strict=True)
        if SAME_MODEL.get(name) in stages
    )
    return sum(each.memory for each in found) - sum(twice)


def of_decode(
    space: SearchSpace, units: int, batch: int, search: _Search, prefix_units: int
) -> StageProfile | None:
    """Return the decode stage's profile, with the waits of retrievals during generation; None if it does not fit."""
    found = space.profile("decode", units, batch)
    if not found.fits or found.latency_s <= 0:
        return None
    if search.again:
        if search.again > batch // 2:
            return None
        tokens = space.schema.inference("decode").tokens
        reads = space.profile("prefix", prefix_units, search.again).latency_s
        waits = space.schema.iterations * (search.again_s + reads)
        whole = batch / found.qps * idleness(search.again, batch) + waits
        found = found._replace(latency_s=whole / tokens, qps=batch / whole)
    return found


def of_answers(space: SearchSpace, head: _Point, decode: StageProfile, batch: int) -> _Point | None:
    """Return what a last group gives that also decodes, on the same chips."""
    (group,) = head.groups
    own = [
        space.profile(name, group.units, each)
        for name, each in zip(group.stages, group.batches, strict=True)
    ]
    if _held((*group.stages, "decode"), [*own, decode]) > 1:
        return None
    qps = 1 / (1 / head.qps + 1 / decode.qps)
    both = ScheduledGroup((*group.stages, "decode"), group.units, (*group.batches, batch))
    return _Point(head.latency_s, qps, decode.latency_s, (both,))


# -- brute force ----------------------------------------------------------------------------------


def every_schedule(space: SearchSpace) -> Iterator[RagSchedule]:
    """Yield every schedule that fits: what `best_schedules` is compared with."""
    inventory, placed = space.inventory, space.schema.placed
    apart = inventory.decode == "separate"
    for search in searches(space):
        for groups in _partitions(placed):
            if not all(space.may_share(group) for group in groups):
                continue
            for units in itertools.product(powers(inventory.chips), repeat=len(groups) + apart):
                if sum(units) + search.hosts * inventory.host_takes > inventory.chips:
                    continue
                yield from _with_batches(space, search, groups, units)


def _with_batches(
    space: SearchSpace,
    search: _Search,
    groups: Sequence[tuple[str, ...]],
    units: tuple[int, ...],
) -> Iterator[RagSchedule]:
    """Yield the schedules of a placement and an allocation."""
    each_batches = [[*itertools.product(*map(space.batches, group))] for group in groups]
    for batches in itertools.product(*each_batches):
        parts = [
            of_group(space, *each, search) for each in zip(groups, units, batches, strict=False)
        ]
        if None in parts:
            continue
        heads = [part for part in parts if part is not None]
        for batch in space.batches("decode"):
            decode = of_decode(space, units[-1], batch, search, units[len(groups) - 1])
            if decode is not None:
                yield from _whole(space, search, heads, decode, units[len(groups) :], batch)


def _whole(
    space: SearchSpace,
    search: _Search,
    heads: Sequence[_Point],
    decode: StageProfile,
    own: Sequence[int],
    batch: int,
) -> Iterator[RagSchedule]:
    """Yield the schedule of these groups and this decode stage, on its `own` units or on the last group's."""
    if own:
        group = ScheduledGroup(("decode",), own[0], (batch,))
        if space.decode_ratio and own[0] != space.decode_ratio * heads[-1].groups[0].units:
            return
        parts = [*heads, _Point(0.0, decode.qps, decode.latency_s, (group,))]
    else:
        last = of_answers(space, heads[-1], decode, batch)
        if last is None:
            return
        parts = [*heads[:-1], last]
    yield _schedule(space, search, _sum(parts))


def _sum(parts: Iterable[_Point]) -> _Point:
    whole = _Point(0.0, math.inf, 0.0, ())
    for part in parts:
        whole = _joined(whole, part)
    return whole


def _joined(one: _Point, other: _Point) -> _Point:
    return _Point(
        one.latency_s + other.latency_s,
        min(one.qps, other.qps),
        one.tpot_s + other.tpot_s,
        one.groups + other.groups,
    )


def _schedule(space: SearchSpace, search: _Search, whole: _Point) -> RagSchedule:
    chips = space.inventory.charged(sum(group.units for group in whole.groups), search.hosts)
    return RagSchedule(
        whole.latency_s + search.latency_s, whole.tpot_s, min(whole.qps, search.qps), chips,
        search.hosts, whole.groups, search.batch, search.again,
    )  # fmt: skip


def _partitions(stages: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield every division into consecutive groups."""
    if not stages:
        yield ()
    for size in range(1, len(stages) + 1):
        for rest in _partitions(stages[size:]):
            yield (stages[:size], *rest)


# -- by fronts ------------------------------------------------------------------------------------

_Front = list[_Point]  # rising in latency and in rate


def best_schedules(space: SearchSpace) -> list[RagSchedule]:
    """Return the schedules that none betters in first token, requests/s, chips and later tokens at once.

    The front is among them (`front`), and for every goal the cheapest schedule that reaches it.
    """
    found: list[RagSchedule] = []
    groups = _GroupFronts(space)
    for search in _undominated(searches(space)):
        found += _of_search(space, search, groups)
    return found


class _GroupFronts:
    """What single groups give, each computed once."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._points = cache(self._compute)
        self._fronts = cache(lambda *of: _front(self._points(*of)))

    def at(self, stages: tuple[str, ...], units: int, search: _Search) -> _Front:
        """Return the front of a group."""
        return self._fronts(stages, units, self._relevant(stages, search))

    def every(self, stages: tuple[str, ...], units: int, search: _Search) -> list[_Point]:
        """Return all that a group may give, for what it holds of the memory decides beside decode."""
        return self._points(stages, units, self._relevant(stages, search))

    def _relevant(self, stages: tuple[str, ...], search: _Search) -> _Search:
        """Return a search with only that in it which a group depends on."""
        waits = search.pause_s if self._space.waits(stages) else 0.0
        again = search.again if stages[-1] == "prefix" else 0
        return _Search(0, 0, again, 0.0, 0.0, waits, 0.0)

    def _compute(self, stages: tuple[str, ...], units: int, search: _Search) -> list[_Point]:
        space = self._space
        found = (
            of_group(space, stages, units, batches, search)
            for batches in itertools.product(*(self._useful(name, units) for name in stages))
        )
        return [each for each in found if each is not None]

    def _useful(self, stage: str, units: int) -> list[int]:
        """Return a stage's batches without those that a batch as fast, as good and as small stands in for."""
        kept: dict[int, StageProfile] = {}
        for batch in self._space.batches(stage):
            new = self._space.profile(stage, units, batch)
            if new.fits and not any(
                old.latency_s <= new.latency_s and old.qps >= new.qps and old.memory <= new.memory
                for old in kept.values()
            ):
                kept[batch] = new
        return [*kept]


def _undominated(found: Sequence[_Search]) -> list[_Search]:
    """Return the searches that no other of as few hosts betters in all that matters."""
    kept: list[_Search] = []
    for new in found:
        if not any(
            old.hosts <= new.hosts and old.again == new.again and old.latency_s <= new.latency_s
            and old.qps >= new.qps and old.pause_s <= new.pause_s and old.again_s <= new.again_s
            for old in kept
        ):  # fmt: skip
            kept.append(new)
    return kept


def _of_search(space: SearchSpace, search: _Search, groups: _GroupFronts) -> Iterator[RagSchedule]:
    """Yield the best schedules with one way to search."""
    inventory, placed = space.inventory, space.schema.placed
    chips = inventory.chips - search.hosts * inventory.host_takes
    heads = _heads(space, search, groups, chips)
    for start in range(len(placed)):
        last = placed[start:]
        if not space.may_share(last):
            continue
        for units in powers(chips):
            ends = _ends(space, search, groups, last, units, chips)
            for before, front in heads[start].items():
                for more, end in ends:
                    if before + units + more <= chips:
                        for point in _join(front, end):
                            yield _schedule(space, search, point)


def _heads(
    space: SearchSpace, search: _Search, groups: _GroupFronts, chips: int
) -> list[dict[int, _Front]]:
    """Return the fronts of the first 0, 1, … stages by the chips that they take together."""
    placed = space.schema.placed
    heads: list[dict[int, _Front]] = [{0: [_Point(0.0, math.inf, 0.0, ())]}]
    for stop in range(1, len(placed)):
        found: dict[int, list[_Point]] = {}
        for start in range(stop):
            group = placed[start:stop]
            if not space.may_share(group):
                continue
            for (before, front), units in itertools.product(heads[start].items(), powers(chips)):
                if before + units < chips:
                    more = _join(front, groups.at(group, units, search))
                    found.setdefault(before + units, []).extend(more)
        heads.append(_rising(found))
    return heads


def _rising(found: dict[int, list[_Point]]) -> dict[int, _Front]:
    """Return the front of each number of chips, without what fewer chips do as well."""
    kept: dict[int, _Front] = {}
    so_far: _Front = []
    for chips in sorted(found):
        old = set(map(id, so_far))
        so_far = _front([*so_far, *found[chips]])
        if fresh := [point for point in so_far if id(point) not in old]:
            kept[chips] = fresh
    return kept


def _ends(
    space: SearchSpace,
    search: _Search,
    groups: _GroupFronts,
    last: tuple[str, ...],
    units: int,
    chips: int,
) -> list[tuple[int, _Front]]:
    """Return the fronts of the last group with the decode stage, each with the chips that decode adds."""
    front = groups.at(last, units, search)
    found: list[tuple[int, _Front]] = []
    if space.inventory.decode == "with_prefix":
        for batch in space.batches("decode"):
            decode = of_decode(space, units, batch, search, units)
            if decode is not None:
                every = groups.every(last, units, search)
                both = (of_answers(space, head, decode, batch) for head in every)
                found.append((0, _front([each for each in both if each is not None])))
        return found
    for own in [space.decode_ratio * units] if space.decode_ratio else powers(chips):
        steps = [(b, of_decode(space, own, b, search, units)) for b in space.batches("decode")]
        ways = [
            _Point(0.0, each.qps, each.latency_s, (ScheduledGroup(("decode",), own, (batch,)),))
            for batch, each in steps
            if each is not None
        ]
        found.append((own, _join(front, _decode_front(ways))))
    return found


def _front(points: list[_Point]) -> _Front:
    """Return the points that none betters in both latency and rate, by rising latency; of equal ones the first."""
    kept: _Front = []
    for point in sorted(points, key=lambda each: (each.latency_s, -each.qps)):
        if not kept or point.qps > kept[-1].qps:
            kept.append(point)
    return kept


def _decode_front(points: list[_Point]) -> _Front:
    """Return the ways to decode that none betters in both the time of a step and the rate, by rising time."""
    kept: _Front = []
    for point in sorted(points, key=lambda each: (each.tpot_s, -each.qps)):
        if not kept or point.qps > kept[-1].qps:
            kept.append(point)
    return kept


def _join(one: _Front, other: _Front) -> _Front:
    """Return what two fronts give together: of each rate the least latencies. Only the slower one must rise."""
    found: _Front = []
    i = j = 0
    while i < len(one) and j < len(other):
        found.append(_joined(one[i], other[j]))
        slow, fast = one[i].qps, other[j].qps
        i, j = i + (slow <= fast), j + (fast <= slow)
    return found


# -- what is chosen -------------------------------------------------------------------------------


def front(schedules: Iterable[RagSchedule]) -> list[RagSchedule]:
    """Return the schedules that none betters in both the first token and the requests/s of a chip, by rising latency.

    Of those that are equal in both, the one with the fastest later tokens.
    """
    kept: list[RagSchedule] = []
    for each in sorted(schedules, key=lambda each: each.rank):
        if not kept or each.qps_per_chip > kept[-1].qps_per_chip:
            kept.append(each)
    return kept


class SchedulePart(NamedTuple):
    """A part of a schedule that can bind: its stages, its units, its requests/s, and its seconds of the first token."""

    stages: tuple[str, ...]
    units: int
    qps: float
    latency_s: float


def parts(space: SearchSpace, schedule: RagSchedule) -> list[SchedulePart]:
    """Return the groups and the search of a schedule, the one that binds first."""
    search = _search(space, schedule.hosts, schedule.search_batch, schedule.again)
    found = []
    if schedule.hosts:
        found.append(SchedulePart(("retrieval",), schedule.hosts, search.qps, search.latency_s))
    prefix_units = next(each.units for each in schedule.groups if "prefix" in each.stages)
    for group in schedule.groups:
        point = _group_point(space, group, search, prefix_units)
        found.append(SchedulePart(group.stages, group.units, point.qps, point.latency_s))
    return sorted(found, key=lambda each: each.qps)


def _group_point(
    space: SearchSpace, group: ScheduledGroup, search: _Search, prefix_units: int
) -> _Point:
    """Return what a group of a schedule gives; ValueError if it does not fit."""
    decodes = group.stages[-1] == "decode"
    before = len(group.stages) - decodes
    head = (
        of_group(space, group.stages[:before], group.units, group.batches[:before], search)
        if before
        else None
    )
    found = head
    if decodes:
        decode = of_decode(space, group.units, group.batches[-1], search, prefix_units)
        if decode is not None and head is not None:
            found = of_answers(space, head, decode, group.batches[-1])
        elif decode is not None and not before:
            found = _Point(0.0, decode.qps, decode.latency_s, (group,))
    if found is None:
        raise ValueError(f"{', '.join(group.stages)} on {group.units}: does not fit")
    return found
