"""Rounds: the same load on several sides, in an order that turns, in blocks between re-measured peaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from bench.pairs import BLOCK
from bench.peak import Peak, Speed, counting, still_blocks
from loadgen import stats

FEWEST = 3  # rounds that decide a level: fewer have no interval to speak of
Name = TypeVar("Name", bound=str)
Rate = Callable[[], Awaitable[float]]


@dataclass(slots=True)
class Rounds:
    """How much each side did a second in each round, and the machine's speeds between blocks of rounds."""

    rates: dict[str, list[float]]
    block: int = BLOCK
    speeds: list[Speed] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        """Return how many blocks do not count, since the machine's speed moved; where it always did, all count."""
        return self._counted().count(False)

    def of(self, side: str) -> list[float]:
        """Return a side's rates in the rounds that count."""
        counts = self._counted()
        return [
            rate for number, rate in enumerate(self.rates[side]) if counts[number // self.block]
        ]

    def _counted(self) -> list[bool]:
        return counting(still_blocks(self.speeds))

    def median(self, side: str) -> float:
        """Return a side's median rate."""
        return float(np.median(self.of(side)))

    def ratio(self, ours: str, theirs: str) -> dict[str, float]:
        """Return the median over rounds of one side's rate by another's, with its bootstrap 95 % interval."""
        return stats.paired_ratio(self.of(ours), self.of(theirs))


def order(names: list[Name], number: int) -> list[Name]:
    """Return who comes when in a round: everybody is first equally often, and comes before and after everybody."""
    turned = number % len(names)
    found = names[turned:] + names[:turned]
    return found[::-1] if number // len(names) % 2 else found


async def measure_rounds(sides: Mapping[str, Rate], *, rounds: int, block: int = BLOCK) -> Rounds:
    """Have every side work once a round; each works once unmeasured after the machine's speed was measured."""
    peak, found = Peak(), Rounds({name: [] for name in sides}, block)
    names = list(sides)
    for number in range(rounds):
        if number % block == 0:
            found.speeds.append(peak.now())
            for name in names:
                await sides[name]()
        for name in order(names, number):
            found.rates[name].append(await sides[name]())
    found.speeds.append(peak.now())
    return found
