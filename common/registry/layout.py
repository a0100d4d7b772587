"""The layout of a collection: which shard holds a document, and what a client's token says about each shard.

A token is the applied ids of shards, separated by commas: the id of shard n stands at the n-th place. As a shard's
number is never used again, a token of an older layout says which shards it speaks of.
"""

from __future__ import annotations

import bisect
import itertools
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import xxhash

from common.bus.writes import id_pair
from common.errors import Conflict
from common.wire.registry import CollectionPlacement, CollectionRecord, PlacedShard

SPACE = 1 << 32  # of the hashes of documents


def hash_of_document(document: str) -> int:
    """Return the hash of a document's id, by which a placed collection's shards divide the documents."""
    return int(xxhash.xxh3_64_intdigest(document.encode())) >> 32


def even_ranges(count: int) -> list[tuple[int, int]]:
    """Return ranges of hashes of equal size that cover all hashes."""
    bounds = [SPACE * part // count for part in range(count + 1)]
    return list(itertools.pairwise(bounds))


class ShardLayout(NamedTuple):
    """The shards of a collection as one version of its placement has them; without one as its record has them."""

    version: int
    numbers: tuple[int, ...]
    shards: tuple[PlacedShard, ...] = ()  # none: every process holds every shard

    @classmethod
    def of(cls, record: CollectionRecord, placement: CollectionPlacement | None) -> ShardLayout:
        """Return the layout of a collection."""
        if placement is None:
            return cls(0, tuple(range(record.shards)))
        shards = tuple(sorted(placement.shards, key=_low))
        return cls(placement.layout, tuple(shard.number for shard in shards), shards)

    def shard_of(self, document: str) -> int:
        """Return the number of the shard that a document lives on."""
        if not self.shards:
            return zlib.crc32(document.encode()) % len(self.numbers)
        at = bisect.bisect_right(self.shards, hash_of_document(document), key=_low) - 1
        return self.shards[at].number

    def grouped(self, documents: Iterable[str]) -> dict[int, list[str]]:
        """Return the documents that live on each shard, in the order given."""
        found: dict[int, list[str]] = {}
        for document in documents:
            found.setdefault(self.shard_of(document), []).append(document)
        return found

    def holders(self) -> list[frozenset[str] | None]:
        """Return the names of the replicas that serve each shard, in the order of `numbers`; None: all do."""
        if not self.shards:
            return [None] * len(self.numbers)
        return [
            frozenset(each.name for each in shard.replicas if each.state == "serving")
            for shard in self.shards
        ]

    def after(self, token: str | None) -> dict[int, str]:
        """Return the write that each shard must have applied, for the shards that a token speaks of.

        What a token says of a shard that was split holds for its children, whose ids go on rising. Conflict
        (`layout_changed`) if the token speaks of a shard that has no successor here.
        """
        ids = {place: part for place, part in enumerate((token or "").split(",")) if part}
        if not self.shards:
            return {number: ids[number] for number in self.numbers if number in ids}
        lines = {shard.number: [*shard.ancestors, shard.number] for shard in self.shards}
        if ids.keys() - {number for line in lines.values() for number in line}:
            raise Conflict(
                "after: the token is of a layout of the collection that is no more; ask without it",
                code="layout_changed",
                param="after",
            )
        told = {number: [ids[n] for n in line if n in ids] for number, line in lines.items()}
        return {number: max(every, key=_order) for number, every in told.items() if every}

    @staticmethod
    def token(applied: Mapping[int, str]) -> str:
        """Return the token of applied ids by the number of the shard."""
        return ",".join(applied.get(n, "") for n in range(max(applied, default=-1) + 1))


def _low(shard: PlacedShard) -> int:
    return shard.low


def _order(entry: str) -> tuple[int, int]:
    """Return an id as numbers; what is no id goes first everywhere, and the shard refuses it by name."""
    try:
        return id_pair(entry)
    except ValueError:
        return (1 << 63, 0)
