"""Groups of candidates in flight in a walk through a graph, and the size of its filter of visited nodes.

Delayed-synchronization traversal (Jiang, "Vector-Centric Machine Learning Systems", 2025, section 7.4).
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

from services.vector_search.index.rows import Floats, Ints

MOST_GROUPS, MOST_HASHES = 16, 8  # as delayed.h has room for
HASHES = 3
FALSE_POSITIVES = 1e-4  # wanted of a filter that is as full as it gets


def false_positive_rate(bits: int, hashes: int, held: int) -> float:
    """Return the chance that a Bloom filter of `bits` that holds so many nodes holds another (section 7.3.2.2)."""
    return (1 - math.exp(-hashes * held / bits)) ** hashes


def filter_bits(most: int, rate: float = FALSE_POSITIVES, hashes: int = HASHES) -> int:
    """Return the least power of two of bits with which `most` nodes have at most this rate of false positives."""
    needed = -hashes * most / math.log1p(-(rate ** (1 / hashes)))
    return 1 << max(math.ceil(math.log2(needed)), 6)


class Delay(NamedTuple):
    """Up to `groups` (1 to 16) of up to `candidates` each are evaluated at once; one of one is best-first search.

    What is visited is a bit a node, or a Bloom filter of `bits` (a power of two, at least 64) with `hashes`. Either
    `helpers` threads help each query, or a thread has `together` queries under way at once.
    """

    groups: int = 1
    candidates: int = 1
    bits: int = 0
    hashes: int = HASHES
    helpers: int = 0
    together: int = 1

    def filtered(self, ef: int, links: int) -> Self:
        """Return it with a filter for so many candidates kept, each with so many links at most."""
        return self._replace(bits=filter_bits(ef * links))

    def checked(self) -> Self:
        """Return it; ValueError if it cannot be."""
        if not 1 <= self.groups <= MOST_GROUPS or self.candidates < 1 or self.together < 1:
            raise ValueError(
                f"groups {self.groups}, candidates {self.candidates}, together {self.together}: "
                f"expected 1 to {MOST_GROUPS} groups, and at least 1 of the others"
            )
        if self.bits and (self.bits < 64 or self.bits & (self.bits - 1)):
            raise ValueError(f"bits {self.bits}: expected 0, or a power of two from 64 on")
        if not 1 <= self.hashes <= MOST_HASHES:
            raise ValueError(f"hashes {self.hashes}: expected 1 to {MOST_HASHES}")
        if self.helpers < 0 or (self.helpers and self.together > 1):
            raise ValueError(
                f"helpers {self.helpers}, together {self.together}: expected helpers, or queries together"
            )
        return self


class Walked(NamedTuple):
    """What queries found, (queries, k) best first, and of each how many candidates it followed (hops), how many nodes
    it visited, and how often it waited for a group."""

    rows: Ints
    scores: Floats
    hops: Ints
    visited: Ints
    waits: Ints

    @classmethod
    def of(cls, rows: Ints, scores: Floats, counts: Ints) -> Self:
        """Return it; `counts` has (hops, visited, waits) of each query."""
        return cls(rows, scores, counts[:, 0], counts[:, 1], counts[:, 2])
