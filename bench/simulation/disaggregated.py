"""A disaggregated RAG system, event by event: what `planner.disaggregation` predicts is compared with this.

Every inference unit computes its steps, waits in one line for a retrieval unit, has its queries answered, and begins
anew. Times are drawn: a gamma distribution of the load's mean and of a spread, its standard deviation by its mean.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from planner.disaggregation import RetrievalLoad, UnitSplit

WARM_SHARE = 0.25  # of the cycles, before anything counts


@dataclass(slots=True)
class SimulatedSplit:
    """What a split did: tokens/s of all units, and shares of the time of each kind of unit."""

    tokens_per_s: float = 0.0
    computes: float = 0.0
    is_answered: float = 0.0
    queues: float = 0.0
    retrieval_works: float = 0.0


def simulate(
    load: RetrievalLoad, split: UnitSplit, *, cycles: int = 100, spread: float = 0.0, seed: int = 1
) -> SimulatedSplit:
    """Run so many cycles of generation and retrieval a unit, and return what happened after the first of them."""
    rng = random.Random(seed)

    def drawn(mean_s: float, parts: int) -> float:
        """Return the sum of so many times with this mean in all."""
        if not spread:
            return mean_s
        shape = parts / spread**2
        return rng.gammavariate(shape, mean_s / shape)

    cycle_s = load.generation_s + load.retrieval_s
    # Units that would begin at once would stay in step.
    asking = [rng.uniform(0, cycle_s) for _ in range(split.inference)]
    heapq.heapify(asking)
    free = [0.0] * split.retrieval
    warm, whole = int(WARM_SHARE * cycles * split.inference), cycles * split.inference
    began_s, generated_s, queued_s, retrieved_s = 0.0, 0.0, 0.0, 0.0
    for number in range(whole):
        now_s = heapq.heappop(asking)
        if number == warm:
            began_s, generated_s, queued_s, retrieved_s = now_s, 0.0, 0.0, 0.0
        starts_s = max(now_s, free[0])
        takes_s = drawn(load.retrieval_s, 1)
        heapq.heapreplace(free, starts_s + takes_s)
        computes_s = drawn(load.generation_s, load.interval)
        heapq.heappush(asking, starts_s + takes_s + computes_s)
        generated_s += computes_s
        queued_s += starts_s - now_s
        retrieved_s += takes_s
    spent_s = generated_s + queued_s + retrieved_s
    return SimulatedSplit(
        tokens_per_s=load.tokens * (whole - warm) / (now_s - began_s),
        computes=generated_s / spent_s,
        is_answered=retrieved_s / spent_s,
        queues=queued_s / spent_s,
        retrieval_works=retrieved_s / (split.retrieval * (now_s - began_s)),
    )
