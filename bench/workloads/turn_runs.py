"""Turns against one server after another, stored as they end, so that an interrupted run continues."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import msgspec

from bench.document import BenchOptions
from bench.mesh.probe import MeshError
from bench.partial import Partial
from bench.workloads.conversations import Scale, conversations, under_way
from bench.workloads.turns import Asked, Point, System, TurnLoad, point

Server = contextlib.AbstractAsyncContextManager[System]
WARM = 0.4  # of a run: what was under way before is computed in it, by every system


class Kept(msgspec.Struct):
    """What was measured: points by what they are of, every turn asked, counters of page tiers, what was not."""

    points: dict[str, list[Point]] = {}
    asked: dict[str, list[Asked]] = {}
    tiers: dict[str, dict[str, int]] = {}
    absent: dict[str, str] = {}


class TurnRuns:
    """Measures one thing after another; what `partial` holds is not measured again, what has no time is left."""

    def __init__(self, options: BenchOptions, seconds: float) -> None:
        self._options, self._seconds = options, seconds
        self._partial = Partial(options, Kept)
        self.kept = self._partial.kept

    @property
    def left(self) -> int:
        """Return how many things there was no time for."""
        return self._partial.left

    async def measure(
        self,
        key: str,
        start: Callable[[], Server],
        rates: Sequence[float],
        scale: Scale,
        *,
        limit_s: float = 0.0,
        part: float = 1.0,
    ) -> None:
        """Begin conversations at rate after rate, each for `part` of the time, until latency passes the limit.

        Then at one between the last two rates, which the limit is between.
        """
        if key in self.kept.points or key in self.kept.absent:
            return
        if not self._partial.begins():
            return
        seconds = part * self._seconds
        points: list[Point] = []
        try:
            async with start() as system:
                left = list(rates)
                while left:
                    rate = left.pop(0)
                    # What one rate said, the next must not find.
                    seed = 100 * self._options.seed + len(points)
                    some = conversations(scale, system.vocabulary, seed)
                    begun = under_way(scale, system.vocabulary, seed, rate)
                    asked = await TurnLoad(system, some, seed, begun).run(rate, seconds)
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
        self._partial.save()
