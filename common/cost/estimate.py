"""WindVE's queue depth estimator (section IV.B of the paper): a line fitted to a few closed-loop probes, then tuning.

A probe sends a number of queries at once and measures the seconds until the last answer; so the depth found is the
closed-loop depth.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from common.cost.linear import LinearCost, Probe, fit
from common.cost.online import Explained

# Queries of the first probes; another probe is at _FAR of the depth expected from these, near where the line is used.
_POINTS = (1, 8, 16, 32)
_FAR = 0.7
_REPEATS = 3
_ROUNDS = 5
# Successful probes in a row that confirm a depth found with _ROUNDS probes.
_CONFIRM = 20
# A device is not probed with queries that would take more than this many times the objective.
_LONGEST = 4.0
MOST = 100_000

ProbeOf = Callable[[int], Awaitable[float]]
Holds = Callable[[int], Awaitable[bool]]


class Estimate(NamedTuple):
    """The line "seconds of n queries at once = beta_s + alpha_s * n", its probes, and the variance that it explains.

    `depth` is the most queries at once whose last answer comes within `slo_s`; 0 if a single query misses it.
    """

    alpha_s: float
    beta_s: float
    r2: float
    slo_s: float
    depth: int
    points: tuple[tuple[int, float], ...]


async def estimate(probe: ProbeOf, slo_s: float, *, most: int = MOST) -> Estimate:
    """Probe a device and return its line and depth (equations 7 to 12), at most `most`."""
    await probe(1)  # warms the device
    found = [(1, await probe(1)) for _ in range(_REPEATS)]
    one_s = statistics.median(seconds for _, seconds in found)
    if one_s > slo_s:
        return Estimate(one_s, 0.0, 0.0, slo_s, 0, tuple(found))
    for queries in _POINTS[1:]:
        if queries > most or _line(found).seconds(queries, 0) > _LONGEST * slo_s:
            break
        found += [(queries, await probe(queries)) for _ in range(_REPEATS)]
    expected = min(_line(found).queries_of(slo_s), most)
    far = round(_FAR * expected)
    if far > found[-1][0]:
        found += [(far, await probe(far)) for _ in range(_REPEATS)]
    line, explained = _line(found), Explained()
    for queries, seconds in found:
        explained.add(line.seconds(queries, 0), seconds)
    depth = min(line.queries_of(slo_s), most)
    return Estimate(line.alpha_items_s, line.beta_s, explained.value, slo_s, depth, tuple(found))


def _line(found: list[tuple[int, float]]) -> LinearCost:
    """Fit a line to the medians of repeated probes, so that a probe delayed by other work has no effect."""
    counts = sorted({queries for queries, _ in found})
    medians = {n: statistics.median(s for queries, s in found if queries == n) for n in counts}
    return fit([Probe(queries, 0, seconds) for queries, seconds in medians.items()])


async def tune(probe: ProbeOf, slo_s: float, start: int, *, most: int = MOST) -> int:
    """Return the depth at which no answer of several rounds is late, found by probing near `start`."""

    async def holds(queries: int) -> bool:
        return await probe(queries) <= slo_s

    return await _deepest(holds, start, most)


async def tune_beside(
    probe: Callable[[int, int], Awaitable[tuple[float, float]]],
    slo_s: float,
    accelerator: int,
    start: int,
    *,
    most: int = MOST,
) -> int:
    """Return the CPU's depth when both devices run at once.

    `probe(a, c)` sends `a` queries to the accelerator and `c` to the CPU at once, and returns the seconds of each. The
    accelerator keeps its depth: if the CPU's work would make the accelerator late, the CPU's depth is lower.
    """

    async def holds(queries: int) -> bool:
        return max(await probe(accelerator, queries)) <= slo_s

    return await _deepest(holds, start, most)


async def _deepest(holds: Holds, start: int, most: int) -> int:
    """Return the depth that holds for a few rounds, lowered until it holds for many rounds."""

    async def often(queries: int, rounds: int) -> bool:
        for _ in range(rounds):
            if not await holds(queries):
                return False
        return True

    async def few(queries: int) -> bool:
        return await often(queries, _ROUNDS)

    depth = await largest(few, start, most=most)
    while depth and not await often(depth, _CONFIRM):
        depth -= 1
    return depth


async def largest(holds: Holds, start: int, *, most: int = MOST) -> int:
    """Return the largest n in 0..`most` that `holds`, searched from `start`, given that all smaller n hold, too."""
    low, high = 0, most + 1  # `low` holds, `high` does not
    at, step = min(max(start, 1), most), 1
    while high - low > 1:
        if await holds(at):
            low = at
            at = low + step
        else:
            high = at
            at = high - step
        step *= 2
        if not low < at < high:
            at = (low + high) // 2
            step = 1
    return low
