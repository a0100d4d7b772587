"""Turns against one server after another, kept as they come, so that an interrupted run goes on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec

from loadgen.conversations import Scale, conversations
from loadgen.document import Options
from loadgen.probe import MeshError
from loadgen.turns import Asked, Point, System, TurnLoad, point

Server = contextlib.AbstractAsyncContextManager[System]
WARM = 0.5  # of a run: conversations must have turns behind them


class Kept(msgspec.Struct):
    """What was measured: points by what they are of, every turn asked, counters of page tiers, what was not."""

    points: dict[str, list[Point]] = {}
    asked: dict[str, list[Asked]] = {}
    tiers: dict[str, dict[str, int]] = {}
    absent: dict[str, str] = {}


class TurnRuns:
    """Measures one thing after another; what `partial` holds is not measured again, what has no time is left."""

    def __init__(self, options: Options, seconds: float) -> None:
        self._options, self._seconds = options, seconds
        self._end_s = time.monotonic() + 60 * (options.minutes or 1e6)
        self.left = 0
        self.kept = Kept()
        if options.partial is not None and options.partial.exists():
            self.kept = msgspec.msgpack.decode(options.partial.read_bytes(), type=Kept)

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
        """Begin conversations at rate after rate, each for `part` of the time, until latency passes the limit."""
        if key in self.kept.points or key in self.kept.absent:
            return
        if time.monotonic() > self._end_s:
            self.left += 1
            return
        seconds = part * self._seconds
        points: list[Point] = []
        try:
            async with start() as system:
                for number, rate in enumerate(rates):
                    # What one rate said, the next must not find.
                    seed = 100 * self._options.seed + number
                    load = TurnLoad(system, conversations(scale, system.vocabulary, seed), seed)
                    asked = await load.run(rate, seconds)
                    points.append(point(asked, rate, WARM * seconds, seconds))
                    self.kept.asked[f"{key}, {rate:.3g}/s"] = asked
                    if points[-1].normalized_s > limit_s > 0:
                        break
                if system.counted is not None:
                    self.kept.tiers[key] = await system.counted()
        except (FileNotFoundError, MeshError) as error:
            self.kept.absent[key] = str(error)[-300:]
        else:
            self.kept.points[key] = points
        if self._options.partial is not None:
            self._options.partial.write_bytes(msgspec.msgpack.encode(self.kept))
