"""A/B pairs: the same work done by both sides, in alternating order, in blocks between re-measured peaks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.peak import Peak, Speed, as_samples, counting, still_blocks

BLOCK = 20
LEAST = 4  # pairs or rounds in any case


class Measured(NamedTuple):
    """What one side needed: seconds, and CPU seconds of the load generator."""

    seconds: float
    loadgen_cpu_s: float = 0.0


Side = Callable[[int], Awaitable[Measured]]


@dataclass(slots=True)
class PairBlocks:
    """Seconds of each pair in the blocks that count; all pairs, the machine's speeds, how many blocks were dropped."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    dropped: int = 0
    loadgen_cpu_s: float = 0.0
    block: int = BLOCK
    all_pairs: list[tuple[float, float]] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)

    def samples(self) -> dict[str, Any]:
        """Return everything measured, as it is stored."""
        return {
            "pairs_s": self.all_pairs,
            **as_samples(self.speeds),
            "block": self.block,
            "loadgen_cpu_s": self.loadgen_cpu_s,
        }

    def sift(self) -> None:
        """Take over the pairs of the blocks during which neither speed moved; if one always did, of all."""
        still = still_blocks(self.speeds)
        self.dropped, counts = still.count(False), counting(still)
        for number, (ours, theirs) in enumerate(self.all_pairs):
            if counts[number // self.block]:
                self.ours.append(ours)
                self.theirs.append(theirs)


async def measure_sides(ours: Side, theirs: Side, *, pairs: int, block: int = BLOCK) -> PairBlocks:
    """Call both with the same numbers `pairs` times; every other pair begins with the rival.

    Both work once, unmeasured, after the speed of the machine was measured: that has left the caches full of its own.
    """
    peak, found = Peak(), PairBlocks(block=block)
    await ours(0)
    await theirs(0)
    for number in range(pairs):
        if number % block == 0:
            found.speeds.append(peak.now())
            await ours(number)
            await theirs(number)
        if number % 2 == 0:
            mine = await ours(number)
            other = await theirs(number)
        else:
            other = await theirs(number)
            mine = await ours(number)
        found.all_pairs.append((mine.seconds, other.seconds))
        found.loadgen_cpu_s += mine.loadgen_cpu_s
    found.speeds.append(peak.now())
    found.sift()
    return found


def timed(work: Callable[[int], Awaitable[None]]) -> Side:
    """Return a side that times `work` from outside."""

    async def side(number: int) -> Measured:
        began = time.perf_counter()
        await work(number)
        return Measured(time.perf_counter() - began)

    return side


def measure_pairs(
    ours: Callable[[int], None], theirs: Callable[[int], None], *, pairs: int, block: int = BLOCK
) -> PairBlocks:
    """Do as `measure_sides` for plain functions, without an event loop."""

    def side(work: Callable[[int], None]) -> Side:
        async def call(number: int) -> None:
            work(number)

        return timed(call)

    coroutine = measure_sides(side(ours), side(theirs), pairs=pairs, block=block)
    try:
        coroutine.send(None)
    except StopIteration as done:
        found: PairBlocks = done.value
        return found
    raise RuntimeError("a synchronous pair waited for an event loop")


def rounds_within(seconds: float, round_s: float, most: int) -> int:
    """Return how many rounds of this length fit, at most `most`, and a few in any case."""
    return min(most, max(LEAST, int(seconds / round_s)))
