"""The speed of a simulated device over time, and the work it does while it is as slow as a real one was."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from common.cost.linear import LinearCost, Probe

STEP_S = 0.01
_BURDEN_S = 0.1


class SpeedTrace:
    """Factors by which work takes longer: one for each `step_s` seconds, repeated for ever.

    The speed belongs to the time, not to the batch, so that every policy meets the same device whatever it runs. Times
    are seconds from the start of a replay and not negative; factors are above 0.
    """

    def __init__(self, factors: Sequence[float] = (1.0,), step_s: float = STEP_S) -> None:
        if not factors or min(factors) <= 0:
            raise ValueError("SpeedTrace: expected at least one factor, each above 0")
        self.factors, self.step_s = tuple(factors), step_s
        self._done = [0.0, *accumulate(step_s / factor for factor in factors)]

    def work(self, until_s: float) -> float:
        """Return the seconds of undisturbed work that the device can do from the start until `until_s`."""
        cycles, step = divmod(int(until_s / self.step_s), len(self.factors))
        into_s = until_s - self.step_s * (cycles * len(self.factors) + step)
        return cycles * self._done[-1] + self._done[step] + into_s / self.factors[step]

    def end(self, start_s: float, work_s: float) -> float:
        """Return when work that begins at `start_s` and takes `work_s` undisturbed is over."""
        cycles, rest_s = divmod(self.work(start_s) + work_s, self._done[-1])
        step = min(bisect_right(self._done, rest_s), len(self.factors)) - 1
        whole = self.step_s * (cycles * len(self.factors) + step)
        return max(start_s, whole + (rest_s - self._done[step]) * self.factors[step])

    def rotated(self, by_s: float) -> SpeedTrace:
        """Return the same speeds, beginning `by_s` seconds later in the trace."""
        shift = round(by_s / self.step_s) % len(self.factors)
        return SpeedTrace((*self.factors[shift:], *self.factors[:shift]), self.step_s)

    def slowed(self, phases: Sequence[float], phase_s: float) -> SpeedTrace:
        """Return a trace as long as all `phases` of `phase_s` seconds, slowed by each one's factor in turn."""
        count, each = len(self.factors), max(1, round(phase_s / self.step_s))
        factors = (
            self.factors[step % count] * phases[step // each] for step in range(each * len(phases))
        )
        return SpeedTrace(tuple(factors), self.step_s)


FULL_SPEED = SpeedTrace()


def measured(cost: LinearCost, probes: Sequence[Probe]) -> SpeedTrace:
    """Return how much slower than its fitted `cost` a device was while it ran these batches, one after the other."""
    factors = list[float]()
    ends_s = 0.0
    for probe in probes:
        ends_s += probe.seconds
        steps = max(0, round(ends_s / STEP_S) - len(factors))
        factors += [probe.seconds / cost.seconds(probe.items, probe.tokens)] * steps
    return SpeedTrace(factors)


def burdened(speed: SpeedTrace, times_s: Sequence[float], rate: float, most: float) -> SpeedTrace:
    """Return a device's speed where the rest of the mesh takes its cores during bursts: up to `most` times slower.

    The burden grows with the arrivals within the last second, of rising `times_s`, up to twice the mean `rate`.
    """
    seconds = math.ceil(times_s[-1] if times_s else 0.0) + 2
    phases = []
    for step in range(1, round(seconds / _BURDEN_S) + 1):
        now_s = step * _BURDEN_S
        lately = bisect_left(times_s, now_s) - bisect_left(times_s, now_s - 1)
        phases.append(1 + (most - 1) * min(1.0, lately / (2 * rate)))
    return speed.slowed(phases, _BURDEN_S)
