"""Ranking of found candidates: reciprocal rank fusion, and maximal marginal relevance.

Pure functions of lists of numbers, since the router ranks the candidates of several shards and loads no numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

RANK_OFFSET = 60  # the k of Cormack, Clarke and Buettcher, 2009


class Ranked(NamedTuple):
    """A candidate by its place in the given lists, and its score; higher is better."""

    place: int
    score: float


def best_first(scores: Sequence[float | None], depth: int) -> list[Ranked]:
    """Return the best `depth` places that have a score; equal scores in the order of places."""
    known = [Ranked(place, score) for place, score in enumerate(scores) if score is not None]
    return sorted(known, key=_cost)[:depth]


def fused(columns: Sequence[Sequence[float | None]], depth: int) -> list[Ranked]:
    """Return the candidates by reciprocal rank fusion, best first.

    Each column holds one search's scores, None for candidates that the search did not find. A candidate's score is the
    sum of 1 / (RANK_OFFSET + rank) over the columns in whose best `depth` it is. Candidates with equal scores are in
    the order of the first column, then of the next.
    """
    total: dict[int, float] = {}
    for column in columns:
        for rank, (place, _) in enumerate(best_first(column, depth), 1):
            total[place] = total.get(place, 0.0) + 1.0 / (RANK_OFFSET + rank)
    return sorted((Ranked(place, score) for place, score in total.items()), key=_cost)


def ranked(columns: Sequence[Sequence[float | None]], depth: int) -> list[Ranked]:
    """Return the candidates by the scores of one search, or of several fused; a search not made has an empty column."""
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

    Each choice has the most weight * relevance - (1 - weight) * similarity to the most similar earlier choice; of equal
    places the first is chosen. `similarity(place)` returns the similarity of one place to every place.
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
    """Return the best k: the first `candidates` by maximal marginal relevance, then the others.

    `relevance` and `similarity` are those of the first `candidates`; without `relevance` it is a score divided by the
    best score.
    """
    few = best[:candidates]
    if relevance is None:
        relevance = [score / few[0].score for _, score in few]
    chosen = [few[at] for at in diversified(relevance, similarity, weight, k)]
    return chosen + list(best[len(few) :][: k - len(chosen)])


def _cost(one: Ranked) -> float:
    return -one.score
