"""The plan of placements: the processes that should hold each shard, and the steps by which a placement changes.

All functions are pure: their results depend on their arguments alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from common.errors import Conflict, NotFound, Unprocessable
from common.registry.layout import even_ranges
from common.wire.registry import (
    CollectionPlacement,
    Holding,
    PlacedReplica,
    PlacedShard,
    ShardSplit,
)

_LEAST_BYTES = 1 << 20  # the least size counted for a shard, so that empty ones are spread, too


class ProcessLoad(NamedTuple):
    """A process that can hold shards: its memory (0: not known) and the bytes of its shards."""

    name: str
    memory_bytes: int
    held_bytes: int


class ShardNeed(NamedTuple):
    """A shard to place: its size, and the processes that hold it already, which are not chosen again."""

    number: int
    bytes: int
    holders: tuple[str, ...] = ()


def loads(
    living: Sequence[str],
    holdings: Mapping[str, Holding],
    placements: Iterable[CollectionPlacement],
) -> list[ProcessLoad]:
    """Return the load of each living process: the last reported sizes of the shards placed on it."""
    sizes = {
        (name, each.collection, each.number): each.bytes
        for name, holding in holdings.items()
        for each in holding.shards
    }
    held = dict.fromkeys(sorted(set(living)), 0)
    for placement in placements:
        for one in placement.shards:
            for each in one.replicas:
                if each.name in held:
                    size = sizes.get((each.name, placement.collection, one.number), 0)
                    held[each.name] += max(size, _LEAST_BYTES)
    return [
        ProcessLoad(name, holdings[name].memory_bytes if name in holdings else 0, size)
        for name, size in held.items()
    ]


def assign(
    processes: Sequence[ProcessLoad], shards: Sequence[ShardNeed], replicas: int
) -> dict[int, list[str]]:
    """Return by shard the processes to add, so that it has `replicas`, or as many as there are processes.

    No shard leaves a process that holds it. The largest shards are placed first, each on the process that is then the
    least full; no process gets a shard twice.
    """
    held = {process.name: process.held_bytes for process in processes}
    known = [process.memory_bytes for process in processes if process.memory_bytes]
    memory = {p.name: p.memory_bytes or min(known, default=1) for p in processes}
    added: dict[int, list[str]] = {shard.number: [] for shard in shards}
    for shard in sorted(shards, key=lambda each: (-each.bytes, each.number)):
        size = max(shard.bytes, _LEAST_BYTES)
        free = [name for name in held if name not in shard.holders]
        for _ in range(min(replicas - len(shard.holders), len(free))):
            chosen = min(free, key=lambda name: ((held[name] + size) / memory[name], name))
            free.remove(chosen)
            held[chosen] += size
            added[shard.number].append(chosen)
    return added


def created(
    collection: str, shards: int, replicas: int, processes: Sequence[ProcessLoad]
) -> CollectionPlacement:
    """Return the placement of a new collection; Unprocessable (`too_few_processes`) if too few processes live."""
    if len(processes) < replicas:
        raise too_few(replicas, len(processes))
    chosen = assign(processes, [ShardNeed(number, 0) for number in range(shards)], replicas)
    placed = [
        PlacedShard(number, low, high, [PlacedReplica(name, "new") for name in chosen[number]])
        for number, (low, high) in enumerate(even_ranges(shards))
    ]
    return CollectionPlacement(
        collection=collection, shards=placed, replicas=replicas, next_number=shards
    )


def too_few(replicas: int, processes: int) -> Unprocessable:
    """Return the error of a wish for more replicas than there are living processes."""
    return Unprocessable(
        f"replicas is {replicas}: {processes} vector_search processes take calls, and each holds a shard once",
        code="too_few_processes",
        param="replicas",
    )


def shard(placement: CollectionPlacement, number: int) -> PlacedShard:
    """Return a shard of a placement by its number; NotFound (`shard_not_found`) without one."""
    found = next((each for each in placement.shards if each.number == number), None)
    if found is None:
        there = ", ".join(str(each.number) for each in placement.shards)
        raise NotFound(
            f"no shard {number}: the collection has the shards {there}", code="shard_not_found"
        )
    return found


def replica_of(one: PlacedShard, name: str) -> PlacedReplica | None:
    """Return a shard's replica by its name; None without one."""
    return next((each for each in one.replicas if each.name == name), None)


def with_shard(placement: CollectionPlacement, changed: PlacedShard) -> CollectionPlacement:
    """Return the placement with one shard replaced by `changed`, which has the same number."""
    every = [changed if each.number == changed.number else each for each in placement.shards]
    return replace(placement, shards=every)


# -- replicas ----------------------------------------------------------------------------------------------


def opened(placement: CollectionPlacement, number: int, name: str) -> CollectionPlacement | None:
    """Return the placement once a replica serves, without the replica that it replaces; None if nothing changes."""
    one = next((each for each in placement.shards if each.number == number), None)
    mine = replica_of(one, name) if one is not None else None
    if one is None or mine is None or mine.state == "serving":
        return None
    every = [
        PlacedReplica(name, "serving") if each is mine else each
        for each in one.replicas
        if each.name != mine.replaces
    ]
    return with_shard(placement, replace(one, replicas=every))


def emptied(placement: CollectionPlacement, number: int, name: str) -> CollectionPlacement | None:
    """Return the placement after a serving replica lost its files, and must be filled; None if nothing changes."""
    one = next((each for each in placement.shards if each.number == number), None)
    mine = replica_of(one, name) if one is not None else None
    if one is None or mine is None or mine.state != "serving":
        return None
    every = [replace(each, state="filling") if each is mine else each for each in one.replicas]
    split = one.split
    if split is not None:
        split = replace(split, ready=[each for each in split.ready if each != name])
    return with_shard(placement, replace(one, replicas=every, split=split))


def moved(
    placement: CollectionPlacement, number: int, source: str, target: str
) -> CollectionPlacement:
    """Return the placement at the begin of a move: once filled, `target` replaces `source` ("": is added)."""
    one = shard(placement, number)
    _check_settled(one)
    if source and replica_of(one, source) is None:
        names = ", ".join(each.name for each in one.replicas)
        raise NotFound(
            f"shard {number} has no replica {source!r}: it has {names}", code="shard_not_found"
        )
    if replica_of(one, target) is not None:
        raise Conflict(f"{target} holds shard {number} already", code="shard_busy")
    every = [*one.replicas, PlacedReplica(target, "filling", source)]
    return with_shard(placement, replace(one, replicas=every))


def removed(placement: CollectionPlacement, number: int, name: str) -> CollectionPlacement:
    """Return the placement without one replica; Conflict (`shard_busy`) if no other replica serves."""
    one = shard(placement, number)
    if replica_of(one, name) is None:
        raise NotFound(f"shard {number} has no replica {name!r}", code="shard_not_found")
    left = [each for each in one.replicas if each.name != name]
    if not any(each.state == "serving" for each in left):
        raise Conflict(
            f"{name} is the only replica of shard {number} that is complete; move it instead, or begin the shard "
            "anew if it is lost",
            code="shard_busy",
        )
    left = [replace(each, replaces="") if each.replaces == name else each for each in left]
    return with_shard(placement, replace(one, replicas=left))


def completed(
    placement: CollectionPlacement,
    replicas: int,
    processes: Sequence[ProcessLoad],
    sizes: Mapping[int, int],
) -> CollectionPlacement:
    """Return the placement for `replicas` of each shard: missing replicas begin to be filled, spare ones leave.

    Of the spare replicas those of dead processes leave first, then those that are being filled.
    """
    living = {process.name for process in processes}
    needs, every = [], []
    for one in placement.shards:
        keep = sorted(
            one.replicas, key=lambda each: (each.name not in living, each.state == "filling")
        )
        if one.split is None and not any(each.replaces for each in one.replicas):
            kept = keep[:replicas]
            if any(each.state == "serving" for each in kept) or len(keep) <= replicas:
                one = replace(one, replicas=kept)  # noqa: PLW2901
            names = tuple(each.name for each in one.replicas)
            needs.append(ShardNeed(one.number, sizes.get(one.number, 0), names))
        every.append(one)
    added = assign(processes, needs, replicas)
    every = [
        replace(
            one,
            replicas=[
                *one.replicas,
                *(PlacedReplica(name, "filling") for name in added.get(one.number, ())),
            ],
        )
        for one in every
    ]
    return replace(placement, shards=every, replicas=replicas)


def anew(placement: CollectionPlacement, number: int, name: str) -> CollectionPlacement:
    """Return the placement with a lost shard replaced by an empty one for the same hashes, on the replica `name`."""
    one = shard(placement, number)
    fresh = PlacedShard(placement.next_number, one.low, one.high, [PlacedReplica(name, "new")], [])
    every = [fresh if each.number == number else each for each in placement.shards]
    return replace(
        placement,
        shards=every,
        next_number=placement.next_number + 1,
        layout=placement.layout + 1,
    )


def _check_settled(one: PlacedShard) -> None:
    if one.split is not None:
        raise Conflict(f"shard {one.number} is being split", code="shard_busy")
    if any(each.replaces for each in one.replicas):
        raise Conflict(f"shard {one.number} is being moved", code="shard_busy")


# -- splits ------------------------------------------------------------------------------------------------


def split_begun(placement: CollectionPlacement, number: int) -> CollectionPlacement:
    """Return the placement at the begin of a split of a shard into halves of its hashes."""
    one = shard(placement, number)
    _check_settled(one)
    if one.high - one.low < 2:
        raise Unprocessable(f"shard {number} holds one hash only", code="unprocessable")
    if not any(each.state == "serving" for each in one.replicas):
        raise Conflict(f"no replica of shard {number} is complete", code="shard_busy")
    first = placement.next_number
    split = ShardSplit(at=(one.low + one.high) // 2, numbers=(first, first + 1))
    return replace(
        with_shard(placement, replace(one, split=split)), next_number=placement.next_number + 2
    )


def children_ready(
    placement: CollectionPlacement, number: int, name: str
) -> CollectionPlacement | None:
    """Return the placement once a replica has both children in step; None if that is known, or there is no split."""
    one = next((each for each in placement.shards if each.number == number), None)
    if one is None or one.split is None or name in one.split.ready:
        return None
    return with_shard(
        placement, replace(one, split=replace(one.split, ready=[*one.split.ready, name]))
    )


def may_seal(one: PlacedShard, living: set[str]) -> bool:
    """Return whether a shard's children can replace it: all living replicas that serve it, at least one, have them."""
    if one.split is None:
        return False
    serving = {each.name for each in one.replicas if each.state == "serving"} & living
    return bool(serving) and serving <= set(one.split.ready)


def split_done(
    placement: CollectionPlacement, number: int, seal: str, complete: set[str]
) -> CollectionPlacement | None:
    """Return the placement with the children in their parent's place; replicas not in `complete` are to be filled."""
    one = next((each for each in placement.shards if each.number == number), None)
    if one is None or one.split is None:
        return None
    replicas = [
        PlacedReplica(each.name, "serving" if each.name in complete else "filling")
        for each in one.replicas
    ]
    line = [*one.ancestors, number]
    low, high = one.split.numbers
    children = [
        PlacedShard(low, one.low, one.split.at, replicas, line, seal),
        PlacedShard(high, one.split.at, one.high, replicas, line, seal),
    ]
    every = [each for each in placement.shards if each.number != number]
    return replace(placement, shards=[*every, *children], layout=placement.layout + 1)
