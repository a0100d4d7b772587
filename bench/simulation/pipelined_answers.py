"""Answers whose searches run beside their chunks: times vary, and rule S3 chooses the effort of each search."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.pipelined_retrieval import (
    LatenessMargin,
    SearchLine,
    SearchTimes,
    TokenTimes,
    beside_chunks,
    pipelined_s,
)


@dataclass(slots=True)
class SimulatedAnswers:
    """Seconds of answers and of the same answers without retrieval; the efforts of all searches, and who was late.

    The first search of an answer is waited for, and is neither late nor in time: `searches` counts the others.
    """

    seconds: float = 0.0
    alone_s: float = 0.0
    searches: int = 0
    late: int = 0
    efforts: list[int] = field(default_factory=list)

    @property
    def late_share(self) -> float:
        """Return which share of the searches took longer than the chunk beside them."""
        return self.late / max(1, self.searches)

    @property
    def overhead(self) -> float:
        """Return the seconds that retrieval adds, by those without it."""
        return self.seconds / self.alone_s - 1


@dataclass(frozen=True, slots=True)
class PipelinedSystem:
    """A generator, a search with its fitted line, lists to probe at most, and tokens of an answer and of a chunk."""

    generation: TokenTimes
    searches: SearchTimes
    tokens: int
    interval: int
    most: int = 1024

    @property
    def line(self) -> SearchLine:
        """Return the line by which efforts are chosen."""
        return self.searches.line()

    def run(
        self, answers: int, spread: float, rng: random.Random, margin: LatenessMargin
    ) -> SimulatedAnswers:
        """Simulate so many answers, one after the other; `margin` learns from each search.

        Search and chunk take their mean time by a draw of a gamma distribution with this standard deviation by its
        mean; chunks vary by a fifth of that.
        """
        found, line = SimulatedAnswers(), self.line
        chunks = self.generation.chunks(self.tokens, self.interval)
        long, short = varying(spread, rng), varying(spread / 5, rng)
        for _ in range(answers):
            chunks_s, searches_s = list[float](), list[float]()
            for number, chunk_s in enumerate(chunks):
                effort = margin.effort(line, chunks[max(number - 1, 0)], self.most)
                chunks_s.append(chunk_s * short())
                searches_s.append(self.searches.seconds(effort) * long())
                found.efforts.append(effort)
                if number:
                    late = searches_s[number] > chunks_s[number - 1]
                    margin.learn(late)
                    found.searches += 1
                    found.late += late
            found.alone_s += sum(chunks_s)
            found.seconds += pipelined_s(chunks_s, beside_chunks(searches_s), searches_s[0])
        return found


def varying(spread: float, rng: random.Random) -> Callable[[], float]:
    """Return draws of mean 1 and this standard deviation, all above 0."""
    if not spread:
        return lambda: 1.0
    shape = 1 / spread**2
    return lambda: rng.gammavariate(shape, 1 / shape)
