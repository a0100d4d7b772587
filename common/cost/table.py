"""The cost table: seconds by one size, interpolated between measured points, where a line does not fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from statistics import median

_MEMORY = 0.9  # a point's weight for its former value, after a measurement at the point
_FARTHEST = 4.0  # one measurement counts as at most this, and at least 1 / this, times predicted


class CostTable:
    """Seconds at rising sizes, never falling: linear between two points, and beyond the last point by the last line.

    Sizes below the first point have the first point's seconds; a size of 0 takes 0 seconds.
    """

    __slots__ = ("_seconds", "_sizes", "_slopes", "points")

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        """Take each size's median, but at least that of smaller sizes; ValueError without points above 0."""
        by_size: dict[float, list[float]] = {}
        for size, seconds in points:
            by_size.setdefault(size, []).append(seconds)
        if (
            not by_size
            or min(by_size) <= 0
            or not all(s > 0 for each in by_size.values() for s in each)
        ):
            raise ValueError("a cost table needs points of sizes and seconds above 0")
        self._sizes = sorted(by_size)
        self._seconds: list[float] = []
        for size in self._sizes:
            before = self._seconds[-1] if self._seconds else 0.0
            self._seconds.append(max(before, median(by_size[size])))
        pairs = zip(self._sizes[1:], self._sizes, self._seconds[1:], self._seconds, strict=False)
        self._slopes = [(s - t) / (b - a) for b, a, s, t in pairs] or [0.0]
        self.points = tuple(zip(self._sizes, self._seconds, strict=True))

    def seconds(self, size: float) -> float:
        """Predict the seconds of a size."""
        if size <= self._sizes[0]:
            return self._seconds[0] if size > 0 else 0.0
        place = min(bisect_left(self._sizes, size), len(self._slopes)) - 1
        place = max(place, 0)
        return self._seconds[place] + self._slopes[place] * (size - self._sizes[place])


class OnlineTable:
    """A cost table that learns: a measurement moves its two neighbouring points, the nearer one more."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        """Begin with the points measured at the start."""
        self.table = CostTable(points)

    def observe(self, size: float, seconds: float) -> float:
        """Learn from one measurement, with size and seconds above 0; return measured / predicted seconds."""
        ratio = seconds / self.table.seconds(size)
        limited = min(max(ratio, 1 / _FARTHEST), _FARTHEST)
        points = list(self.table.points)
        sizes = [each for each, _ in points]
        above = min(bisect_left(sizes, size), len(points) - 1)
        below = above - 1 if above and size < sizes[above] else above
        span = sizes[above] - sizes[below]
        share = (size - sizes[below]) / span if span else 1.0
        for place, near in {below: 1 - share, above: share}.items():
            at, was = points[place]
            points[place] = at, was * (1 + (1 - _MEMORY) * near * (limited - 1))
        self.table = CostTable(points)
        return ratio
