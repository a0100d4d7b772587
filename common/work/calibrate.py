"""Warm a model and measure what its batches cost, before it takes work."""

from __future__ import annotations

import time
from typing import NamedTuple

from common.cost.linear import Depth, LinearCost, Probe, fit
from common.work.batches import Limits
from common.work.model import Model

_SHAPES = ((1, 8), (1, 64), (8, 32), (8, 128), (32, 64))
_BATCH_ITEMS = 256
_REPEATS = 4
_SLOW_S = 0.5


class Calibration(NamedTuple):
    """What one model's batches cost on this device, the largest batch, and the depth that follows."""

    cost: LinearCost
    limits: Limits
    depth: Depth


def calibrate(model: Model, slo_s: float) -> Calibration:
    """Probe a few batch shapes (this also warms the model) and derive limits and depth for a deadline."""
    cost = model.known_cost or fit([probe for shape in _SHAPES for probe in _probe(model, *shape)])
    limits = Limits(_BATCH_ITEMS, cost.batch_tokens())
    return Calibration(cost, limits, depth_for(cost, limits, slo_s))


def depth_for(cost: LinearCost, limits: Limits, slo_s: float) -> Depth:
    """Return the depth that keeps the deadline if batches are as large as `limits`."""
    return cost.depth(slo_s, batch_items=limits.items, batch_tokens=limits.tokens)


def _probe(model: Model, items: int, length: int) -> list[Probe]:
    length = min(length, model.max_tokens)
    # Ids every vocabulary has; which ones does not matter to the time a dense model takes.
    rows = [[2 + (i * 31 + j * 7) % 97 for j in range(length)] for i in range(items)]
    seconds = []
    for turn in range(_REPEATS + 1):
        started = time.perf_counter()
        if model.reranks:
            model.score(rows, [])
        else:
            model.encode(rows)
        took = time.perf_counter() - started
        if turn or took > _SLOW_S:
            seconds.append(took)
        if took > _SLOW_S:
            break
    # The best of them: whatever else starts beside this worker is not the device's cost, and drift is followed later.
    return [Probe(items, items * length, min(seconds))]
