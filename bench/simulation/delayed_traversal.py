"""The rule of delayed-synchronization traversal in plain Python: what a walk finds, follows and visits, group by group.

Algorithm 2 of Jiang, "Vector-Centric Machine Learning Systems" (2025), with what its text leaves out: a candidate that
is launched leaves the queue, a group may be empty, the results are cut to `ef` at every synchronization.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

Near = tuple[
    float, int
]  # a node's distance, and the node: of two at the same distance the lower node is nearer


class VisitedNodes(Protocol):
    """The nodes that were visited; may say of others that they were."""

    def visit(self, node: int) -> bool:
        """Add a node; return whether it was new."""


class ExactVisited:
    """The nodes that were visited."""

    def __init__(self) -> None:
        self._nodes: set[int] = set()

    def visit(self, node: int) -> bool:
        """Add a node; return whether it was new."""
        new = node not in self._nodes
        self._nodes.add(node)
        return new


class BloomVisited:
    """A Bloom filter of `bits` (a power of two) with `hashes` Murmur2 hashes of a node's four bytes."""

    def __init__(self, bits: int, hashes: int) -> None:
        self._mask, self._hashes, self._set = bits - 1, hashes, bytearray(bits)

    def visit(self, node: int) -> bool:
        """Add a node; return whether it was surely new."""
        new = not self.holds(node)
        for place in self._places(node):
            self._set[place] = 1
        return new

    def holds(self, node: int) -> bool:
        """Return whether a node was visited; of one that was not it says so wrongly now and then."""
        return all(self._set[place] for place in self._places(node))

    def _places(self, node: int) -> list[int]:
        return [murmur2(node, seed) & self._mask for seed in range(self._hashes)]


def murmur2(key: int, seed: int) -> int:
    """Return MurmurHash2 of a number's four bytes."""
    word, mix = 0xFFFFFFFF, 0x5BD1E995
    key = key * mix & word
    key = (key ^ key >> 24) * mix & word
    state = (seed ^ 4) * mix & word ^ key
    state = (state ^ state >> 13) * mix & word
    return state ^ state >> 15


class Evaluation(NamedTuple):
    """A candidate that was launched: how many links it has, and how many led to nodes not visited before."""

    links: int
    fresh: int


@dataclass(slots=True)
class Traversal:
    """What a walk found, nearest first; `launched[i]` are the groups that were launched after i synchronizations."""

    found: list[Near] = field(default_factory=list)
    launched: list[list[list[Evaluation]]] = field(default_factory=list)
    visited: int = 1

    @property
    def hops(self) -> int:
        """Return how many candidates were followed."""
        return sum(len(group) for after in self.launched for group in after)

    @property
    def waits(self) -> int:
        """Return how many synchronizations there were: one a group."""
        return sum(len(after) for after in self.launched)


def traverse(
    links: Callable[[int], Sequence[int]],
    distances: Callable[[list[int]], Sequence[float]],
    entry: int,
    *,
    ef: int,
    groups: int,
    candidates: int,
    visited: VisitedNodes,
) -> Traversal:
    """Walk from `entry` with up to `groups` of up to `candidates` each in flight; keep the nearest `ef`.

    Only the oldest group is waited for. Whether a node was visited is asked, and noted, when its group is launched.
    """
    walk = Traversal()
    visited.visit(entry)
    begin = (float(distances([entry])[0]), entry)
    queue: list[Near] = []
    best = [(-begin[0], -begin[1])]  # the farthest first
    flying: deque[list[Near]] = deque()

    def launch(group: list[int]) -> list[Evaluation]:
        near: list[Near] = []
        seen = []
        for node in group:
            linked = links(node)
            fresh = [each for each in linked if visited.visit(each)]
            walk.visited += len(fresh)
            seen.append(Evaluation(len(linked), len(fresh)))
            near += zip(map(float, distances(fresh)), fresh, strict=True)
        flying.append(near)
        return seen

    walk.launched.append([launch([entry])])
    while flying:
        for distance, node in flying.popleft():
            heapq.heappush(queue, (distance, node))
            heapq.heappush(best, (-distance, -node))
        while len(best) > ef:
            heapq.heappop(best)
        after = []
        farthest = (-best[0][0], -best[0][1])
        while len(flying) < groups:
            group: list[int] = []
            while queue and len(group) < candidates and queue[0] <= farthest:
                group.append(heapq.heappop(queue)[1])
            if not group:
                break
            after.append(launch(group))
        walk.launched.append(after)
    walk.found = sorted((-distance, -node) for distance, node in best)
    return walk
