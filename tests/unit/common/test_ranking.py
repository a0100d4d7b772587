"""Reciprocal rank fusion and maximal marginal relevance against their definitions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import ranking
from common.ranking import Ranked

scores = st.none() | st.integers(0, 12).map(float)  # few values, so many are equal
columns = st.integers(0, 25).flatmap(
    lambda size: st.lists(st.lists(scores, min_size=size, max_size=size), min_size=1, max_size=3)
)


def oracle_ranks(column: Sequence[float | None], depth: int) -> dict[int, int]:
    """The rank of a place is one more than the number of places before it."""
    ranks = {}
    for place, score in enumerate(column):
        if score is None:
            continue
        before = sum(
            other is not None and (other > score or (other == score and at < place))
            for at, other in enumerate(column)
        )
        if before < depth:
            ranks[place] = before + 1
    return ranks


@given(columns=columns, depth=st.integers(1, 30))
def test_fusion_is_the_sum_of_reciprocal_ranks(
    columns: list[list[float | None]], depth: int
) -> None:
    """Every place that a search found within the depth, and no other, has the sum of 1 / (60 + rank), best first."""
    expected: dict[int, float] = {}
    for column in columns:
        for place, rank in oracle_ranks(column, depth).items():
            expected[place] = expected.get(place, 0.0) + 1 / (60 + rank)
    found = ranking.fused(columns, depth)
    assert {one.place: one.score for one in found} == pytest.approx(expected)
    assert all(one.score >= other.score for one, other in itertools.pairwise(found))


@given(column=st.lists(scores, max_size=20), depth=st.integers(1, 30))
def test_one_search_keeps_its_scores(column: list[float | None], depth: int) -> None:
    """What only one search found is ordered by its score; a column of a search that was not made changes nothing."""
    found = ranking.ranked([[], column], depth)
    ranks = oracle_ranks(column, depth)
    assert [one.place for one in found] == sorted(ranks, key=ranks.__getitem__)
    assert [one.score for one in found] == [column[one.place] for one in found]


def oracle_diverse(
    relevance: Sequence[float], near: Sequence[Sequence[float]], weight: float, k: int
) -> list[int]:
    """The definition of Carbonell and Goldstein, 1998, word for word."""
    chosen: list[int] = []
    while len(chosen) < min(k, len(relevance)):
        left = [place for place in range(len(relevance)) if place not in chosen]
        gains = [
            weight * relevance[place]
            - (1 - weight) * max((near[place][other] for other in chosen), default=0.0)
            for place in left
        ]
        chosen.append(left[gains.index(max(gains))])
    return chosen


@given(data=st.data(), count=st.integers(0, 9), weight=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_diversity_is_maximal_marginal_relevance(
    data: st.DataObject, count: int, weight: float
) -> None:
    """The choice equals the definition's, with similarities of either sign and ties."""
    eighths = st.integers(-8, 8).map(lambda number: number / 8)
    row = st.lists(eighths, min_size=count, max_size=count)
    relevance = data.draw(row)
    half = data.draw(st.lists(row, min_size=count, max_size=count))
    near = [[half[min(i, j)][max(i, j)] for j in range(count)] for i in range(count)]
    k = data.draw(st.integers(1, 12))
    found = ranking.diversified(relevance, near.__getitem__, weight, k)
    assert found == oracle_diverse(relevance, near, weight, k)


@given(count=st.integers(0, 12), candidates=st.integers(1, 12), k=st.integers(1, 15))
def test_diversity_returns_as_many_as_there_are(count: int, candidates: int, k: int) -> None:
    """Beyond the candidates the others follow in their order, each once."""
    best = [Ranked(place, 1.0 / (1 + place)) for place in range(count)]
    found = ranking.diverse(best, None, lambda _: [0.5] * count, 0.5, candidates, k)
    assert len(found) == min(k, count)
    assert len(set(found)) == len(found)
    assert set(found[:candidates]) <= set(best[:candidates])
    assert found[candidates:] == best[candidates:][: max(0, k - candidates)]


def test_at_full_relevance_the_order_stays() -> None:
    """A weight of 1 leaves the order; one of 0 takes the least similar after the first."""
    best = [Ranked(place, 1.0 - place / 10) for place in range(3)]
    near = [[1.0, 0.9, 0.1], [0.9, 1.0, 0.2], [0.1, 0.2, 1.0]]
    assert ranking.diverse(best, None, near.__getitem__, 1.0, 3, 3) == best
    found = ranking.diverse(best, None, near.__getitem__, 0.0, 3, 3)
    assert [one.place for one in found] == [0, 2, 1]
