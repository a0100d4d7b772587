"""The layout of a collection: the shard of each document, and the write of each shard that a client's token names.

A token holds the applied ids of shards, separated by commas: the id of shard n is at the n-th place. As a shard's
number is never used again, a token of an older layout still names its shards.
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

SPACE = 1 << 32  # the number of hashes of documents


def hash_of_document(document: str) -> int:
    """Return the hash of a document's id, which determines its shard in a placed collection."""
    return int(xxhash.xxh3_64_intdigest(document.encode())) >> 32


def even_ranges(count: int) -> list[tuple[int, int]]:
    """Return `count` ranges of equal size that cover all hashes."""
    bounds = [SPACE * part // count for part in range(count + 1)]
    return list(itertools.pairwise(bounds))


class ShardLayout(NamedTuple):
    """The shards of a collection by one version of its placement, or, without a placement, by its record."""

    version: int
    numbers: tuple[int, ...]
    shards: tuple[PlacedShard, ...] = ()  # empty: every process holds every shard

    @classmethod
    def of(cls, record: CollectionRecord, placement: CollectionPlacement | None) -> ShardLayout:
        """Return the layout of a collection."""
        if placement is None:
            return cls(0, tuple(range(record.shards)))
        shards = tuple(sorted(placement.shards, key=_low))
        return cls(placement.layout, tuple(shard.number for shard in shards), shards)

    def shard_of(self, document: str) -> int:
        """Return the number of a document's shard."""
        if not self.shards:
            return zlib.crc32(document.encode()) % len(self.numbers)
        at = bisect.bisect_right(self.shards, hash_of_document(document), key=_low) - 1
        return self.shards[at].number

    def grouped(self, documents: Iterable[str]) -> dict[int, list[str]]:
        """Return the documents of each shard, in the given order."""
        found: dict[int, list[str]] = {}
        for document in documents:
            found.setdefault(self.shard_of(document), []).append(document)
        return found

    def holders(self) -> list[frozenset[str] | None]:
        """Return the names of the replicas that serve each shard, in the order of `numbers`; None: all replicas do."""
        if not self.shards:
            return [None] * len(self.numbers)
        return [
            frozenset(each.name for each in shard.replicas if each.state == "serving")
            for shard in self.shards
        ]

    def after(self, token: str | None) -> dict[int, str]:
        """Return, for each shard that a token names, the write that the shard must have applied.

        A token's write of a shard that was split counts for its children, whose ids go on rising. Conflict
        (`layout_changed`) if the token names a shard without a successor here.
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
        """Return the token of the shards' applied ids, given by number."""
        return ",".join(applied.get(n, "") for n in range(max(applied, default=-1) + 1))


def _low(shard: PlacedShard) -> int:
    return shard.low


def _order(entry: str) -> tuple[int, int]:
    """Return an id as numbers; text that is no id counts as the newest, so that the shard gets and refuses it."""
    try:
        return id_pair(entry)
    except ValueError:
        return (1 << 63, 0)
