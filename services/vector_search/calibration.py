"""What a batch of searches costs on the largest shard of a family, and how many may queue by that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from common import log
from common.cost.linear import Probe, fit
from services.vector_search.shard import Shard

_PROBES = (1, 32)
_TIMES = 3
_DEPTH_ITEMS = (256, 10_000)
_log = log.get("vector_search")


class Costs(NamedTuple):
    """Seconds of a batch of n queries, `alpha_s` * n + `beta_s`, the lane's depth, and at how many chunks measured."""

    depth_items: int = _DEPTH_ITEMS[0]
    alpha_s: float = 0.0
    beta_s: float = 0.0
    chunks: int = 0


def largest(shards: Iterable[Shard]) -> Shard | None:
    """Return the shard whose searches cost most, None if there is none."""
    return max(shards, key=lambda shard: shard.chunks, default=None)


def outgrown(costs: Costs, shard: Shard | None) -> bool:
    """Return whether costs were measured on far less than the largest shard holds by now."""
    return shard is not None and shard.chunks > max(2 * costs.chunks, costs.chunks + 1000)


async def measure(
    shard: Shard | None,
    run: Callable[..., Awaitable[Any]],
    *,
    slo_s: float,
    batch_items: int,
) -> Costs:
    """Probe two batch sizes with `run` (which calls a function on a thread): a line, and what `slo_s` allows by it.

    A shard that cannot be probed gives the smallest depth and no costs.
    """
    if shard is None:
        return Costs()
    chunks = shard.chunks
    try:
        seconds = [await run(_probe, shard, queries) for queries in _PROBES]
    except Exception:  # noqa: BLE001 - a shard's fault must not stop the others from being served
        _log.exception("calibration_failed", collection=shard.record.id)
        return Costs()
    cost = fit([Probe(n, 0, s) for n, s in zip(_PROBES, seconds, strict=True)])
    possible = cost.depth(slo_s, batch_items=batch_items, batch_tokens=1)
    depth = min(max(possible.items, _DEPTH_ITEMS[0]), _DEPTH_ITEMS[1])
    return Costs(depth, cost.alpha_items_s, cost.beta_s, chunks)


def _probe(shard: Shard, queries: int) -> float:
    return sorted(shard.probe(queries) for _ in range(_TIMES))[_TIMES // 2]
