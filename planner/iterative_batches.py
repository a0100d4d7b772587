"""Batches of retrievals that running sequences wait for (RAGO's iterative retrieval, section 3.5.3 of the thesis).

A sequence that comes to a retrieval point stops until so many sequences wait that their retrievals, and the prompts
that these lead to, run as one batch. That batch has its own size, apart from the one of first retrievals: a larger one
costs the retrieval system less and lets more of the decode batch stand idle.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)


class RetrievalBatches(Generic[T]):
    """Sequences that wait for a retrieval, given out in batches in the order in which they came.

    A batch goes once `size` wait, or once the first of them has waited for `longest`, in whatever unit `now` is.
    """

    def __init__(self, size: int, longest: float = math.inf) -> None:
        if size < 1 or longest < 0:
            raise ValueError(f"size {size}, longest {longest}: expected at least 1, and at least 0")
        self.size, self._longest = size, longest
        self._since: dict[T, float] = {}  # in the order in which they came

    def __len__(self) -> int:
        return len(self._since)

    def add(self, sequence: T, now: float) -> None:
        """Let a sequence wait that does not wait yet."""
        if sequence in self._since:
            raise ValueError(f"{sequence!r} waits already")
        self._since[sequence] = now

    def drop(self, sequence: T) -> None:
        """Forget a sequence that was cancelled; nothing if it does not wait."""
        self._since.pop(sequence, None)

    def due(self) -> float:
        """Return when the next batch goes if no further sequence comes; infinite if none will."""
        return next(iter(self._since.values()), math.inf) + self._longest

    def take(self, now: float) -> list[T]:
        """Return the next batch, of at most `size`; empty if there is none yet."""
        if len(self._since) < self.size and now < self.due():
            return []
        batch = list(self._since)[: self.size]
        for each in batch:
            del self._since[each]
        return batch


@dataclass(frozen=True, slots=True)
class IterativeLoad:
    """So many sequences of `tokens` tokens at once, each with `retrievals` points after its first one.

    Their retrievals go in batches of `batch`, at the latest after `longest` steps, and take `latency` steps.
    """

    sequences: int
    batch: int
    retrievals: int = 3
    tokens: int = 256
    longest: float = math.inf
    latency: int = 0

    def drawn(self, seed: str) -> Callable[[], list[int]]:
        """Return draws of the points of one sequence after the other, the same ones for the same seed.

        A sequence stops after so many tokens: random distinct numbers in order, its end last.
        """
        draw = random.Random(seed)
        places = range(1, self.tokens)
        return lambda: [*sorted(draw.sample(places, self.retrievals)), self.tokens]


class Idleness(NamedTuple):
    """Steps from a sequence's first token to its last, by its tokens; sequences a batch of retrievals, on average."""

    steps_a_token: float
    mean_batch: float


def simulate(
    load: IterativeLoad, finished: int, points: Callable[[], list[int]], warm: int = 0
) -> Idleness:
    """Return the idleness of so many finished sequences, after `warm` others.

    A step gives every sequence that does not wait one token. A finished sequence is replaced at once by one that stops
    after `points()` tokens, as those of `IterativeLoad.drawn`. ValueError if all would wait for ever.
    """
    if load.batch > load.sequences and math.isinf(load.longest):
        raise ValueError(f"batches of {load.batch}: expected at most {load.sequences}, or a limit")
    waiting = RetrievalBatches[int](load.batch, load.longest)
    left: list[deque[int]] = []  # the gaps of each sequence, from now to its end
    began, heap = [0.0] * load.sequences, list[tuple[float, int]]()
    ended, taken, batches = list[float](), 0, 0

    def run(slot: int, at: float) -> None:
        """Let a sequence run on to its next stop."""
        heapq.heappush(heap, (at + left[slot].popleft(), slot))

    for slot in range(load.sequences):
        left.append(deque(gaps(points())))
        run(slot, 0.0)
    while len(ended) < warm + finished:
        now = min(heap[0][0] if heap else math.inf, waiting.due())
        while heap and heap[0][0] == now:
            _, slot = heapq.heappop(heap)
            if left[slot]:
                waiting.add(slot, now)
                continue
            ended.append(now - began[slot])
            left[slot], began[slot] = deque(gaps(points())), now
            run(slot, now)
        while batch := waiting.take(now):
            taken, batches = taken + len(batch), batches + 1
            for slot in batch:
                run(slot, now + load.latency)
    mean = sum(ended[warm : warm + finished]) / finished
    return Idleness(mean / load.tokens, taken / batches if batches else 0.0)


def gaps(points: Sequence[int]) -> list[int]:
    """Return how many tokens a sequence writes before each of these points, after the point before."""
    return [end - start for start, end in pairwise([0, *points])]
