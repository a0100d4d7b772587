"""Turns against one server after another, stored as they end, so that an interrupted run continues."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import msgspec

from bench.document import BenchOptions
from bench.mesh.probe import MeshError
from bench.partial import PartialResults
from bench.rivals.sweep import Swept
from bench.workloads.conversations import Scale, conversations, under_way
from bench.workloads.turns import AskedTurn, Point, System, TurnLoad, point

Server = contextlib.AbstractAsyncContextManager[System]
BETWEEN = 50  # the number of the rate between two others, which other systems may not have
WARM = 0.4  # of a run: what was under way before is computed in it, by every system


class Kept(msgspec.Struct):
    """What was measured: points by what they are of, every turn asked, counters of page tiers, what was not, sweeps."""

    points: dict[str, list[Point]] = {}
    asked: dict[str, list[AskedTurn]] = {}
    tiers: dict[str, dict[str, int]] = {}
    absent: dict[str, str] = {}
    swept: dict[str, list[Swept]] = {}


class TurnRuns:
    """Measures one thing after another; what `partial` holds is not measured again, what has no time is left."""

    def __init__(self, options: BenchOptions, seconds: float) -> None:
        self._options, self._seconds = options, seconds
        self._partial = PartialResults(options, Kept)
        self.kept = self._partial.kept

    @property
    def left(self) -> int:
        """Return how many things there was no time for."""
        return self._partial.left

    def known(self, key: str) -> bool:
        """Return whether something was measured, or was found not to be there."""
        return key in self.kept.points or key in self.kept.absent

    def save(self) -> None:
        """Write down what was measured."""
        self._partial.save()

    async def point(
        self, start: Callable[[], Server], rate: float, scale: Scale, seconds: float
    ) -> Point:
        """Measure one rate at a fresh server, for so long."""
        async with start() as system:
            asked = await self._ask(system, rate, scale, seconds, 0)
        return point(asked, rate, WARM * seconds, seconds)

    async def _ask(
        self, system: System, rate: float, scale: Scale, seconds: float, number: int
    ) -> list[AskedTurn]:
        """Ask conversations at a rate; those of another number are others: what one rate said no other may find."""
        seed = 1000 * self._options.seed + number
        some = conversations(scale, system.vocabulary, seed)
        begun = under_way(scale, system.vocabulary, seed, rate)
        return await TurnLoad(system, some, seed, begun).run(rate, seconds)

    async def measure(
        self,
        key: str,
        start: Callable[[], Server],
        rates: Sequence[float],
        scale: Scale,
        *,
        limit_s: float = 0.0,
        part: float = 1.0,
        repeat: int = 0,
    ) -> None:
        """Begin conversations at rate after rate, each for `part` of the time, until latency passes the limit.

        Then at one between the last two rates, which the limit is between. Every repeat has conversations of its own,
        the same for every system.
        """
        if self.known(key) or not self._partial.begins():
            return
        seconds = part * self._seconds
        points: list[Point] = []
        try:
            async with start() as system:
                left = list(rates)
                while left:
                    rate = left.pop(0)
                    number = 100 * repeat + (len(points) if rate in rates else BETWEEN)
                    asked = await self._ask(system, rate, scale, seconds, number)
                    points.append(point(asked, rate, WARM * seconds, seconds))
                    self.kept.asked[f"{key}, {rate:.3g}/s"] = asked
                    if points[-1].normalized_s > limit_s > 0:
                        left = [math.sqrt(rate * points[-2].rate)] if len(points) > 1 else []
                        limit_s = math.inf
                if system.counted is not None:
                    self.kept.tiers[key] = await system.counted()
        except (FileNotFoundError, MeshError) as error:
            self.kept.absent[key] = str(error)[-300:]
        else:
            self.kept.points[key] = points
        self.save()
