"""The timing of single searches, several sides by turns, in seconds of a machine of one speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from common.clock import Clock
from services.vector_search.index.rows import Floats

Seconds = np.ndarray[Any, np.dtype[np.float64]]

# Each side is asked all its queries so many times, never twice in a row.
ROUNDS = 7
# One in so many queries is asked unmeasured first: the caches hold what the side before left in them.
_WARMING = 4


class Side(NamedTuple):
    """A way to search, and the prepared queries (n, dimension) that it is asked one at a time."""

    search: Callable[[Floats], object]
    queries: Floats


class SearchTimes(NamedTuple):
    """Seconds of single searches: the mean of the best time of each query, and what one in a hundred takes."""

    mean_s: float
    p99_s: float

    @classmethod
    def of(cls, taken: Seconds) -> SearchTimes:
        """Return the times of searches whose seconds are `taken` (rounds, queries)."""
        tail_s = float(np.quantile(taken, 0.99, axis=1).min())
        return cls(float(taken.min(axis=0).mean()), tail_s)


def one_round(side: Side, clock: Clock) -> Seconds:
    """Return the seconds of a side's searches, one for each query."""
    queries = side.queries
    for i in range(0, len(queries), _WARMING):
        side.search(queries[i : i + 1])
    taken: Seconds = np.empty(len(queries))
    for i in range(len(queries)):
        began_s = clock.perf_s()
        side.search(queries[i : i + 1])
        taken[i] = clock.perf_s() - began_s
    return taken


def rounds_of(sides: Sequence[Side], clock: Clock, rounds: int = ROUNDS) -> list[Seconds]:
    """Return the seconds of each side's searches (rounds, queries).

    The sides take turns, so that what disturbs the machine for a while disturbs all and no side in all its rounds;
    every other round goes the other way.
    """
    taken: list[Seconds] = [np.empty((rounds, len(side.queries))) for side in sides]
    for number in range(rounds):
        order = range(len(sides))
        for at in reversed(order) if number % 2 else order:
            taken[at][number] = one_round(sides[at], clock)
    return taken


class SearchTimer:
    """Times searches beside one that never changes, and tells seconds of a machine that does that one in `base_s`.

    So times of different minutes compare, though the machine is not always as fast; without a `base_s` the first
    timing sets it.
    """

    def __init__(self, reference: Side, clock: Clock, base_s: float = 0.0) -> None:
        self._reference, self._clock, self.base_s = reference, clock, base_s

    def time(self, sides: Sequence[Side]) -> list[SearchTimes]:
        """Return the times of each side, measured by turns."""
        first, *others = rounds_of([self._reference, *sides], self._clock)
        now_s = SearchTimes.of(first).mean_s
        self.base_s = self.base_s or now_s
        pace = self.base_s / now_s
        return [SearchTimes.of(pace * taken) for taken in others]
