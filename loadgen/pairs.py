"""A/B pairs: the same work done by both sides, in alternating order, in blocks between re-measured peaks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from loadgen import stats
from loadgen.peak import Peak

BLOCK = 20


@dataclass(slots=True)
class Blocks:
    """Seconds of each pair in the blocks that count; all pairs, peaks and the dropped blocks beside them."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    dropped: int = 0
    all_pairs: list[tuple[float, float]] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def samples(self) -> dict[str, Any]:
        """Return everything measured, as it is stored."""
        return {"pairs_s": self.all_pairs, "peaks_gflops": self.peaks, "block": BLOCK}


def measure_pairs(
    ours: Callable[[int], None], theirs: Callable[[int], None], *, pairs: int, block: int = BLOCK
) -> Blocks:
    """Call both with the same numbers `pairs` times, timing each; every other pair begins with the rival."""

    async def a(number: int) -> None:
        ours(number)

    async def b(number: int) -> None:
        theirs(number)

    coroutine = measure_pairs_async(a, b, pairs=pairs, block=block)
    try:
        coroutine.send(None)
    except StopIteration as done:
        found: Blocks = done.value
        return found
    raise RuntimeError("a synchronous pair waited for an event loop")


async def measure_pairs_async(
    ours: Callable[[int], Awaitable[None]],
    theirs: Callable[[int], Awaitable[None]],
    *,
    pairs: int,
    block: int = BLOCK,
) -> Blocks:
    """Do as `measure_pairs` for coroutines, one at a time."""
    peak, found = Peak(), Blocks()
    for warm in range(2):
        await ours(warm)
        await theirs(warm)
    found.peaks.append(peak.now())
    for number in range(pairs):
        times = {}
        order = ((0, ours), (1, theirs)) if number % 2 == 0 else ((1, theirs), (0, ours))
        for side, once in order:
            began = time.perf_counter()
            await once(number)
            times[side] = time.perf_counter() - began
        found.all_pairs.append((times[0], times[1]))
        if (number + 1) % block == 0 or number + 1 == pairs:
            found.peaks.append(peak.now())
    return _kept(found, block)


def _kept(found: Blocks, block: int) -> Blocks:
    still = stats.keep_still(found.peaks)
    if not any(still):  # nothing counts then; show all and say that every block moved
        still = [True] * len(still)
        found.dropped = -len(still)
    for number, pair in enumerate(found.all_pairs):
        if still[number // block]:
            found.ours.append(pair[0])
            found.theirs.append(pair[1])
    found.dropped = found.dropped or still.count(False)
    return found
