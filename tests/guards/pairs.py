"""Rows of the benchmarks, each measured by this checkout and another one in turns, and how they compare."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.guards.checkout import Checkout

LEAST = 0.98
RESAMPLES = 2000
HOUR_S = 3600.0
# What a figure costs: seconds or milliseconds, less is better.
Costs = dict[str, float]


def r1(samples: dict[str, Any]) -> Costs:
    """Return the median latency that the mesh adds, by what runs beside it."""
    return {
        key: statistics.median(values)
        for key, values in samples.items()
        if key.startswith("process/") and values
    }


def e2(samples: dict[str, Any]) -> Costs:
    """Return the median time of a block through the mesh by that of the engine alone, by shape."""
    return {
        key: statistics.median(mesh / alone for mesh, alone in found["pairs_s"])
        for key, found in samples.items()
        if found["pairs_s"]
    }


@dataclass(frozen=True)
class Row:
    """A row: how one side of a pair is asked for, and what its document says."""

    flags: tuple[str, ...]
    costs: Callable[[dict[str, Any]], Costs]


ROWS = {
    "R1": Row(("--count", "10"), r1),
    "E2": Row(("--count", "20"), e2),
}
QUICK = ("--quick",)


def measure(checkout: Checkout, name: str, flags: Sequence[str]) -> dict[str, Any]:
    """Run a row by a checkout's own command line and return its document; RuntimeError if there is none."""
    with tempfile.TemporaryDirectory(prefix="spillway-guard-") as folder:
        path = Path(folder) / "found.json"
        words = ("bench", name, *flags, "--json", str(path))
        done = checkout.run(*words, timeout_s=4 * HOUR_S)
        if not path.exists():
            said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
            raise RuntimeError(f"{checkout.root}: {name} was not measured: {said}")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def ratio(ours: Costs, theirs: Costs) -> float:
    """Return how fast we are against the other side, 1 is equal: the mean over the figures that both have.

    ValueError if they have none in common.
    """
    both = [name for name in ours if name in theirs]
    if not both:
        raise ValueError(f"nothing to compare in {sorted(ours)} and {sorted(theirs)}")
    return statistics.geometric_mean(theirs[name] / ours[name] for name in both)


def interval(ratios: Sequence[float], seed: int = 1) -> tuple[float, float]:
    """Return the bootstrap 95 % interval of the median."""
    draw = random.Random(seed)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def compare(
    name: str, ours: Checkout, theirs: Checkout, count: int, *, quick: bool
) -> Iterator[float]:
    """Measure a row in pairs, every other one beginning with the other side, and yield each pair's ratio."""
    row = ROWS[name]
    flags = QUICK if quick else row.flags
    for number in range(count):
        order = (ours, theirs) if number % 2 == 0 else (theirs, ours)
        found = {side: row.costs(measure(side, name, flags)["samples"]) for side in order}
        yield ratio(found[ours], found[theirs])


def passes(ratios: Sequence[float]) -> bool:
    """Return whether a row is as fast as it must be."""
    return statistics.median(ratios) >= LEAST


def missed(document: dict[str, Any]) -> list[str]:
    """Return what a row that is no comparison did not keep."""
    return [what for what, word in document["met"].items() if word == "missed"]
