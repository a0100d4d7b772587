"""The cost of a generator's step by its sequences, its rows, and the tokens that the rows attend to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.cost.online import OnlineFit

# The fit is solved again after this many steps, since a step may take less time than solving.
_SOLVE_EVERY = 16
# The rate at which predictions follow a machine that other processes slow down for a while.
_QUICK = 0.9


class Step(NamedTuple):
    """The size of a step: sequences, rows, and tokens attended to, summed over the rows."""

    sequences: int
    rows: int
    attended: float


class StepCost:
    """Seconds of a step = b + a1 * sequences + a2 * rows + a3 * attended, none negative, learned from every step."""

    def __init__(self, probes: Sequence[tuple[Step, float]], *, fixed: bool = False) -> None:
        """Begin with probes; a `fixed` device is not fitted again."""
        self._fit = OnlineFit(probes, factors=len(Step._fields), solve_every=_SOLVE_EVERY)
        self._fixed = fixed
        self._quick = 1.0

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """Fitted seconds per step, sequence, row and attended token."""
        b, sequence, row, attended = (self._quick * part for part in self._fit.parts)
        return b, sequence, row, attended

    def seconds(self, step: Step) -> float:
        """Predict the seconds of a step."""
        return self._quick * self._fit.seconds(step)

    def observe(self, step: Step, seconds: float) -> None:
        """Learn from a step that ran undisturbed."""
        ratio = self._fit.observe(step, seconds, learn=not self._fixed)
        if not self._fixed:
            self._quick += (1 - _QUICK) * (min(max(ratio, 0.2), 5.0) - self._quick)


def attended(first: int, last: int, rows: int, windows: Sequence[int | None]) -> float:
    """Return the number of tokens that rows between two positions attend to, in the mean over layer groups.

    Exact for rows without gaps that no window limits, which suffices for predictions.
    """
    total = 0.0
    for window in windows:
        low, high = first + 1, last + 1
        if window is not None:
            low, high = min(low, window), min(high, window)
        total += rows * (low + high) / 2
    return total / len(windows)
