"""Ranking of candidates after they were found: reciprocal rank fusion, and maximal marginal relevance.

Pure functions of lists of numbers, since the router, which loads no numpy, ranks what several shards found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

RANK_OFFSET = 60  # the k of Cormack, Clarke and Buettcher, 2009


class Ranked(NamedTuple):
    """A candidate by its place in the lists given, and its score; higher is better."""

    place: int
    score: float


def best_first(scores: Sequence[float | None], depth: int) -> list[Ranked]:
    """Return the best `depth` places that have a score; of equal ones the earlier place."""
    known = [Ranked(place, score) for place, score in enumerate(scores) if score is not None]
    return sorted(known, key=_cost)[:depth]


def fused(columns: Sequence[Sequence[float | None]], depth: int) -> list[Ranked]:
    """Return the candidates by reciprocal rank fusion, best first.

    Each column holds one search's scores, None where it did not find a candidate. A candidate's score is the sum of
    1 / (RANK_OFFSET + rank) over the columns in whose best `depth` it is; of equal ones the earlier column's better.
    """
    total: dict[int, float] = {}
    for column in columns:
        for rank, (place, _) in enumerate(best_first(column, depth), 1):
            total[place] = total.get(place, 0.0) + 1.0 / (RANK_OFFSET + rank)
    return sorted((Ranked(place, score) for place, score in total.items()), key=_cost)


def ranked(columns: Sequence[Sequence[float | None]], depth: int) -> list[Ranked]:
    """Return the candidates by the scores of one search, or by those of several fused; an empty column was not made."""
    made = [column for column in columns if column]
    if len(made) > 1:
        return fused(made, depth)
    return best_first(made[0], depth) if made else []


def diversified(
    relevance: Sequence[float],
    similarity: Callable[[int], Sequence[float]],
    weight: float,
    k: int,
) -> list[int]:
    """Return up to k places in the order in which maximal marginal relevance chooses them.

    Each choice has the most weight * relevance - (1 - weight) * similarity to the most similar one chosen before; of
    equal ones the first. `similarity(place)` returns that of one place to every other.
    """
    left = list(range(len(relevance)))
    nearest: list[float] = []
    chosen: list[int] = []

    def gain(place: int) -> float:
        return weight * relevance[place] - (1.0 - weight) * (nearest[place] if nearest else 0.0)

    while left and len(chosen) < k:
        place = max(left, key=gain)
        left.remove(place)
        chosen.append(place)
        near = similarity(place)
        nearest = list(map(max, nearest, near)) if nearest else list(near)
    return chosen


def diverse(
    best: Sequence[Ranked],
    relevance: Sequence[float] | None,
    similarity: Callable[[int], Sequence[float]],
    weight: float,
    candidates: int,
    k: int,
) -> list[Ranked]:
    """Return the best k with the first `candidates` in the order of maximal marginal relevance, the others after them.

    `relevance` and `similarity` are those of the first candidates; without a relevance it is the score's share of the
    best one's.
    """
    few = best[:candidates]
    if relevance is None:
        relevance = [score / few[0].score for _, score in few]
    chosen = [few[at] for at in diversified(relevance, similarity, weight, k)]
    return chosen + list(best[len(few) :][: k - len(chosen)])


def _cost(one: Ranked) -> float:
    return -one.score
