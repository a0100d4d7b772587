"""Warm a model and measure what its batches cost, before it takes work."""

from __future__ import annotations

import time

from common.cost.linear import Probe
from engine.encoder.capacity import EncoderCapacity
from engine.encoder.model import EncoderModel

_SHAPES = ((1, 8), (1, 64), (8, 32), (8, 128), (32, 64))
_REPEATS = 4
_SLOW_S = 0.5


def calibrate(model: EncoderModel, slo_s: float, *, takes_all: bool = False) -> EncoderCapacity:
    """Probe a few batch shapes (this also warms the model); a model whose cost is known is not probed."""
    known = model.known_cost
    probes = [] if known is not None else [p for shape in _SHAPES for p in _probe(model, *shape)]
    return EncoderCapacity(probes, slo_s=slo_s, known=known, takes_all=takes_all)


def _probe(model: EncoderModel, items: int, length: int) -> list[Probe]:
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
