"""Statistics of figures: percentiles, bootstrap intervals, and the selection of undisturbed blocks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000
DRAWN_AT_ONCE = 1 << 18  # values, of as many resamples as have no more
MOVED = 0.20
# A level is met if the median reaches it, the interval's end reaches SLACK of it, and the interval is at most ± RATIO
# wide.
SLACK, RATIO, TAIL = 0.97, 0.05, 0.10


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p90, p99, max and mean; empty if there are no values."""
    if not len(values):
        return {}
    array = np.asarray(values, dtype=float)
    p50, p90, p99 = np.percentile(array, [50, 90, 99])
    return {
        "p50": float(p50), "p90": float(p90), "p99": float(p99),
        "max": float(array.max()), "mean": float(array.mean()),
    }  # fmt: skip


def interval(values: Sequence[float], quantile: float = 50.0, seed: int = 1) -> dict[str, float]:
    """Return a quantile of `values` with its bootstrap 95 % interval."""
    array = np.asarray(values, dtype=float)
    rng = np.random.default_rng(seed)
    at_once = max(1, DRAWN_AT_ONCE // max(1, array.size))
    draws = [
        np.percentile(rng.choice(array, (min(at_once, RESAMPLES - done), array.size)), quantile, 1)
        for done in range(0, RESAMPLES, at_once)
    ]
    low, high = np.percentile(np.concatenate(draws), [2.5, 97.5])
    return {
        "value": float(np.percentile(array, quantile)),
        "low": float(low), "high": float(high), "n": int(array.size),
    }  # fmt: skip


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 1) -> dict[str, float]:
    """Return the median over pairs of ours / theirs, with its bootstrap 95 % interval over pairs."""
    return interval(list(np.asarray(ours, float) / np.asarray(theirs, float)), 50.0, seed)


def ratio_of(
    ours: Sequence[float], theirs: Sequence[float], quantile: float, seed: int = 1
) -> dict[str, float]:
    """Return a quantile of `ours` / the same quantile of `theirs`, unpaired, with its bootstrap 95 % interval."""
    rng = np.random.default_rng(seed)
    sides = [np.asarray(side, dtype=float) for side in (ours, theirs)]
    drawn = [[rng.choice(side, side.size) for side in sides] for _ in range(RESAMPLES // 4)]
    draws = [np.percentile(a, quantile) / np.percentile(b, quantile) for a, b in drawn]
    low, high = np.percentile(draws, [2.5, 97.5])
    value = np.percentile(sides[0], quantile) / np.percentile(sides[1], quantile)
    return {"value": float(value), "low": float(low), "high": float(high), "n": len(ours)}


def quantile(counts: Mapping[int, int], share: float) -> int:
    """Return the smallest counted value that at least `share` of all values do not exceed; 0 without values."""
    left = share * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return 0


def keep_still(peaks: Sequence[float], moved: float = MOVED) -> list[bool]:
    """Return for each block whether it counts: `peaks` are measured before, between and after the blocks.

    A block is dropped if the peak before and after it differ by more than `moved`.
    """
    return [abs(after / before - 1.0) <= moved for before, after in itertools.pairwise(peaks)]


def verdict(
    found: dict[str, Any], goal: float, must: float, *, higher: bool = True, width: float = RATIO
) -> str:
    """Return the level that a figure meets: "goal", "must", "missed", or "undecided" if its interval is too wide.

    `width` is the widest interval that decides, ± a share of the figure: RATIO, or TAIL for a percentile near the end.
    """
    value, low, high = found["value"], found["low"], found["high"]
    if not higher:  # inverted, so that more is better
        value, low, high, goal, must = (
            1 / max(each, 1e-12) for each in (value, high, low, goal, must)
        )
    narrow = high - low <= 2 * width * value
    for word, level in (("goal", goal), ("must", must)):
        if narrow and value >= level and low >= SLACK * level:
            return word
    return "missed" if high < must or (narrow and value < must) else "undecided"
