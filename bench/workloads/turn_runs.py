"""Turns against one server after another, stored as they end, so that an interrupted run continues."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from bench.document import BenchOptions
from bench.mesh.probe import MeshError
from bench.partial import PartialResults
from bench.peak import Peak, still_blocks
from bench.rivals.sweep import Swept
from bench.workloads.conversations import Scale, conversations, under_way
from bench.workloads.turns import AskedTurn, Point, System, TurnLoad, point

Server = contextlib.AbstractAsyncContextManager[System]
STEP = 1.5  # from a rate to the next
MOST = 9  # rates of one curve
NEAR = 0.5  # of a step, between the rates next to the limit that is judged
FAR = 4.0  # times the greatest limit: the next rate is two steps lower
TRIES = 2  # of a rate during which the machine's speed moves
WARM = 0.4  # of a run: what was under way before is computed in it, by every system


class Kept(msgspec.Struct):
    """What was measured: points by what they are of, every turn asked, counters of page tiers, what was not, sweeps."""

    points: dict[str, list[Point]] = {}
    asked: dict[str, list[AskedTurn]] = {}
    tiers: dict[str, dict[str, int]] = {}
    absent: dict[str, str] = {}
    swept: dict[str, list[Swept]] = {}


def next_step(
    latencies_s: Mapping[float, float], limits_s: Sequence[float], judged_s: float, most: int
) -> float | None:
    """Return the rate that a curve needs next, as steps from its first; None if it needs no other.

    A curve goes up until a rate's latency passes the greatest limit and down until one keeps the least; then the rates
    next to the judged limit are brought within half a step. It has at most so many rates.
    """
    if not latencies_s:
        return 0
    steps = sorted(latencies_s)
    if len(steps) >= most:
        return None
    if latencies_s[steps[-1]] <= max(limits_s):
        return steps[-1] + 1
    if (latency_s := latencies_s[steps[0]]) > min(limits_s):
        return steps[0] - (2 if latency_s > FAR * max(limits_s) else 1)
    above = next(at for at, step in enumerate(steps) if latencies_s[step] > judged_s)
    if above == 0 or steps[above] - steps[above - 1] <= NEAR:
        return None
    return (steps[above] + steps[above - 1]) / 2


def last_within(latencies_s: Mapping[float, float], limit_s: float) -> float:
    """Return the highest step up to which every latency keeps a limit; the lowest step if it does not."""
    steps = sorted(latencies_s)
    within = itertools.takewhile(lambda step: latencies_s[step] <= limit_s, steps)
    return max(within, default=steps[0])


class TurnRuns:
    """Measures one thing after another; what `partial` holds is not measured again, what has no time is left."""

    def __init__(self, options: BenchOptions, seconds: float) -> None:
        self._options, self._seconds = options, seconds
        self._partial = PartialResults(options, Kept, ("swept",))
        self.kept = self._partial.kept
        self._peak, self._runs = Peak(), 0

    @property
    def left(self) -> int:
        """Return how many things there was no time for."""
        return self._partial.left

    @property
    def in_time(self) -> bool:
        """Return whether there is time to begin something."""
        return self._partial.begins(0)

    def wants(self, key: str) -> bool:
        """Return whether something whose name holds `options.only` was neither measured nor found not to be there."""
        known = key in self.kept.points or key in self.kept.absent
        return self._options.only in key and not known

    def save(self) -> None:
        """Write down what was measured."""
        self._partial.save()

    async def point(
        self, start: Callable[[], Server], rate: float, scale: Scale, seconds: float
    ) -> Point:
        """Measure one rate at a fresh server, for so long."""
        async with start() as system:
            asked = await self._ask(system, rate, scale, seconds)
        return point(asked, rate, WARM * seconds, seconds)

    async def _ask(
        self,
        system: System,
        rate: float,
        scale: Scale,
        seconds: float,
        repeat: int = 0,
        words: int = 0,
    ) -> list[AskedTurn]:
        seed = 1000 * self._options.seed + repeat
        some = conversations(scale, system.vocabulary, seed, words)
        begun = under_way(scale, system.vocabulary, seed, rate, words)
        return await TurnLoad(system, some, seed, begun).run(rate, seconds)

    async def measure(
        self,
        key: str,
        start: Callable[[], Server],
        rates: Sequence[float],
        scale: Scale,
        part: float,
    ) -> None:
        """Begin conversations at rate after rate, each for `part` of the time."""
        async with self._measured(key, start) as system:
            if system is not None:
                for rate in rates:
                    await self._rate(key, system, rate, scale, part, 0)

    async def curve(
        self,
        key: str,
        start: Callable[[], Server],
        first: float,
        scale: Scale,
        *,
        limits_s: Sequence[float],
        judged_s: float,
        repeat: int,
        most: int,
    ) -> None:
        """Begin conversations at the rates, from `first` on, that the curve up to the greatest limit needs.

        Every repeat has conversations of its own, the same for every system and rate but for their words.
        """
        async with self._measured(key, start) as system:
            found: dict[float, float] = {}
            while (
                system is not None
                and (step := next_step(found, limits_s, judged_s, most)) is not None
            ):
                rate = first * STEP**step
                found[step] = await self._rate(key, system, rate, scale, 1.0, repeat)

    @contextlib.asynccontextmanager
    async def _measured(
        self, key: str, start: Callable[[], Server]
    ) -> AsyncIterator[System | None]:
        """Run the server of something that is to be measured, and write down what was found; None if it is not to be.

        What failed half-way has no points.
        """
        if not self.wants(key) or not self._partial.begins():
            yield None
            return
        try:
            async with start() as system:
                yield system
                if system.counted is not None:
                    self.kept.tiers[key] = await system.counted()
        except (FileNotFoundError, MeshError) as error:
            self.kept.points.pop(key, None)
            self.kept.absent[key] = str(error)[-300:]
        self.save()

    async def _rate(
        self, key: str, system: System, rate: float, scale: Scale, part: float, repeat: int
    ) -> float:
        """Measure one rate at a running server, again if the machine's speed moved; return its latency in seconds.

        Every turn asked is written down, and the point. What one run said no other finds in the server's cache.
        """
        seconds = part * self._seconds
        for _ in range(TRIES):
            self._runs += 1
            before = self._peak.now()
            asked = await self._ask(system, rate, scale, seconds, repeat, self._runs)
            still = all(still_blocks([before, self._peak.now()]))
            if still:
                break
        measured = replace(point(asked, rate, WARM * seconds, seconds), still=still)
        self.kept.points.setdefault(key, []).append(measured)
        self.kept.asked[f"{key}, {rate:.3g}/s"] = asked
        return measured.normalized_s
