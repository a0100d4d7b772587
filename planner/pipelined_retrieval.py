"""Generation that retrieves at intervals: its latency with and without a pipeline, and the effort of its searches.

An answer is chunks of `interval` tokens. A sequential system searches, then generates a chunk; a pipelined one searches
for the next chunk while it generates this one (PipeRAG, sections 5.3.1 and 5.3.3 of the thesis). All times are in
seconds and above 0. The effort of a search is the number of lists that it probes (nprobe), or its candidates (ef).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Seconds of a token by its position: `seconds[i]` in the i-th segment of so many tokens, the last one's beyond."""

    seconds: tuple[float, ...]
    segment: int

    def between(self, begin: int, end: int) -> float:
        """Return the seconds of the tokens at positions `begin` to `end` - 1."""
        last = len(self.seconds) - 1
        return sum(self.seconds[min(at // self.segment, last)] for at in range(begin, end))

    def chunks(self, tokens: int, interval: int) -> list[float]:
        """Return the seconds of each chunk of an answer of so many tokens; the last chunk may be shorter."""
        starts = range(0, tokens, interval)
        return [self.between(start, min(start + interval, tokens)) for start in starts]

    def faster(self, factor: float) -> TokenTimes:
        """Return the times of a device that is so many times as fast."""
        return TokenTimes(tuple(each / factor for each in self.seconds), self.segment)


@dataclass(frozen=True, slots=True)
class SearchLine:
    """Seconds of a search as a line over its effort (the thesis' model of T_ret)."""

    base_s: float
    each_s: float

    def seconds(self, effort: float) -> float:
        """Return the predicted seconds of a search."""
        return self.base_s + self.each_s * effort

    def largest(self, budget_s: float, most: int) -> int:
        """Return the largest effort whose predicted seconds fit the budget: at least 1, at most `most` (rule S3)."""
        fits = int((budget_s - self.base_s) // self.each_s)
        return min(max(fits, 1), most)


@dataclass(frozen=True, slots=True)
class SearchTimes:
    """Measured seconds of searches: (effort, seconds) in rising order, two at least."""

    points: tuple[tuple[int, float], ...]

    def seconds(self, effort: float) -> float:
        """Return the seconds of a search between the nearest two measured efforts, or beyond them."""
        above = next((at for at, point in enumerate(self.points) if point[0] >= effort), -1)
        at = max(above, 1) if above >= 0 else len(self.points) - 1
        (low, low_s), (high, high_s) = self.points[at - 1], self.points[at]
        return low_s + (high_s - low_s) * (effort - low) / (high - low)

    def line(self) -> SearchLine:
        """Return the line of least squares through the points."""
        found = linear_regression(*zip(*self.points, strict=True))
        return SearchLine(found.intercept, found.slope)

    def faster(self, factor: float) -> SearchTimes:
        """Return the times of a system that searches so many times as fast."""
        return SearchTimes(tuple((effort, each / factor) for effort, each in self.points))


def sequential_s(chunks_s: Sequence[float], searches_s: Sequence[float]) -> float:
    """Return the seconds of an answer whose searches and chunks take turns."""
    return sum(chunks_s) + sum(searches_s)


def pipelined_s(
    chunks_s: Sequence[float], beside_s: Sequence[float], before_s: float = 0.0
) -> float:
    """Return the seconds of an answer whose chunks are generated beside searches.

    `beside_s` has one time a chunk, that of the search which runs meanwhile, 0 where none does; each pair takes the
    longer of both. `before_s` is the search that the first chunk waits for. In the thesis' model no search runs beside
    the first chunk, one beside every other, and none is waited for.
    """
    pairs = zip(chunks_s, beside_s, strict=True)
    return before_s + sum(max(chunk_s, search_s) for chunk_s, search_s in pairs)


def beside_chunks(searches_s: Sequence[float]) -> list[float]:
    """Return which search runs beside each chunk, where the first one's result is waited for.

    Chunk i is written from search i. Search i + 1 runs beside it, and none beside the last one.
    """
    return [*searches_s[1:], 0.0]


def choose_interval(
    intervals: Sequence[int], generation: TokenTimes, tokens: int, least_s: float
) -> int:
    """Return the smallest interval of which every whole chunk takes as long as the quickest search, `least_s`.

    The largest one if there is none: searches are then late, but least often.
    """
    for interval in sorted(intervals):
        whole = generation.chunks(tokens - tokens % interval, interval)
        if whole and min(whole) >= least_s:
            return interval
    return max(intervals)


@dataclass(slots=True)
class LatenessMargin:
    """The factor by which searches are taken to be longer than predicted, so that no more than a `share` is late.

    Each search moves it: up by `step` x (1 - share) if it was late, else down by `step` x share, between 1 and `most`.
    So whatever the times are, of n searches at most share x n + (most - the first factor) / step are late, unless the
    factor reached `most`: then even the least effort does not fit.
    """

    share: float = 0.025
    step: float = 0.08
    most: float = 4.0
    factor: float = 1.15

    def learn(self, late: bool) -> None:
        """Take note of one search."""
        moved = self.factor + self.step * (late - self.share)
        self.factor = min(max(moved, 1.0), self.most)

    def effort(self, line: SearchLine, budget_s: float, most: int) -> int:
        """Return the effort of the next search, which is to fit the budget."""
        return line.largest(budget_s / self.factor, most)
