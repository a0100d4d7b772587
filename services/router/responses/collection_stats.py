"""The statistics of a collection, joined from the statistics of its shards by a pure function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

_SUMMED = ("documents", "chunks", "bytes", "log_bytes", "torn_tails", "newer", "compared")

# An index built by some shards is reported rather than the exact comparison of the other shards.
_BUILT = ("graph", "ivfpq")


def collection_stats(shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the statistics of all shards as one: the sum of each value or, where sums mean nothing, the worst value.

    The recall is the least, `audited_at` the oldest, `ef` the largest; the ratio of deleted rows is that of all rows.
    """
    stats = dict(shards[0])
    if len(shards) == 1:
        return stats
    for name in _SUMMED:
        if any(name in shard for shard in shards):
            stats[name] = sum(shard.get(name, 0) for shard in shards)
    if "searches" in stats:
        stats["searches"] = dict(sum((Counter(s.get("searches", {})) for s in shards), Counter()))
    for name, worst in (("recall", min), ("ef", max)):
        known = [shard[name] for shard in shards if name in shard]
        if known:
            stats[name] = worst(known)
    if "audited_at" in stats:
        times = [at for shard in shards if (at := shard.get("audited_at")) is not None]
        stats["audited_at"] = min(times) if len(times) == len(shards) else None
    if "deleted_ratio" in stats:
        stats["deleted_ratio"] = _deleted_ratio(shards)
    if "index" in stats:
        paths = {shard.get("index") for shard in shards}
        stats["index"] = next((path for path in _BUILT if path in paths), stats["index"])
    return stats


def _deleted_ratio(shards: Sequence[dict[str, Any]]) -> float:
    live = sum(shard.get("chunks", 0) for shard in shards)
    rows = sum(s.get("chunks", 0) / max(1.0 - s.get("deleted_ratio", 0.0), 1e-9) for s in shards)
    return round(1.0 - live / rows, 4) if rows else 0.0
