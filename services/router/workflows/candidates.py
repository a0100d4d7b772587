"""Candidates of several shards, ranked together: the router has no numpy, so vectors are compared in plain Python."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from common import ranking
from common.ranking import Ranked
from common.wire.search import Diversity, HitScores, SearchResult, scored
from common.wire.workflows import SearchRequest

# Comparing two vectors of 384 numbers takes some ten microseconds; more comparisons than this run in the pool of text
# processes.
FEW_COMPARISONS = 300


class _Found(NamedTuple):
    """The candidates of all shards for one query: hits, vector scores, text scores, and vectors (`rows`)."""

    hits: list[bytes]
    vector_scores: list[float]
    text_scores: list[float | None]
    rows: bytes


def comparisons(ask: SearchRequest) -> int:
    """Return the number of vector comparisons that ranking the candidates of several shards takes."""
    if ask.mmr is None:
        return 0
    return ask.count * ask.mmr.candidates * min(ask.k, ask.mmr.candidates)


def ranked(
    shards: Sequence[Sequence[SearchResult]], ask: SearchRequest, vectors: bytes
) -> SearchResult:
    """Return the best k hits of each query among the candidates of all shards; `vectors` are the queries' vectors.

    The text scores are those that each shard computed from the words of its own texts.
    """
    size = len(vectors) // ask.count
    result = SearchResult(
        shown=[],
        scores=[],
        applied=",".join(parts[-1].applied for parts in shards),
        path=shards[0][0].path,
        mode=ask.mode,
        text_indexed=min(part.text_indexed for parts in shards for part in parts),
    )
    for number, found in enumerate(_per_query(shards)):
        order = ranking.ranked([found.vector_scores, found.text_scores], ask.depth)
        if ask.mmr is not None:
            query = vectors[number * size : (number + 1) * size]
            order = _diverse(found, order, query, ask.mmr, ask.k)
        best = order[: ask.k]
        result.shown.append(
            [
                scored(found.hits[place], score, _scores(found, place) if ask.with_scores else None)
                for place, score in best
            ]
        )
        result.scores.append([score for _, score in best])
    return result


def _per_query(shards: Sequence[Sequence[SearchResult]]) -> list[_Found]:
    """Return the candidates of all shards, by query."""
    columns = [
        (
            [row for part in parts for row in part.shown],
            [row for part in parts for row in part.vector_scores],
            [row for part in parts for row in part.text_scores],
            [row for part in parts for row in part.rows],
        )
        for parts in shards
    ]
    return [
        _Found(
            [hit for shown, _, _, _ in columns for hit in shown[query]],
            [score for _, near, _, _ in columns for score in near[query]],
            [score for _, _, texts, _ in columns for score in texts[query]],
            b"".join(rows[query] for _, _, _, rows in columns),
        )
        for query in range(len(columns[0][0]))
    ]


def _diverse(
    found: _Found, order: Sequence[Ranked], query: bytes, mmr: Diversity, k: int
) -> list[Ranked]:
    size = len(found.rows) // max(1, len(found.hits))
    rows = [
        array("f", found.rows[place * size : (place + 1) * size])
        for place, _ in order[: mmr.candidates]
    ]
    near = None
    if found.vector_scores and not found.text_scores:
        wanted = array("f", query)
        length = math.sqrt(_product(wanted, wanted)) or 1.0
        near = [_product(row, wanted) / length for row in rows]

    def similarity(place: int) -> list[float]:
        return [_product(row, rows[place]) for row in rows]

    return ranking.diverse(order, near, similarity, mmr.relevance, mmr.candidates, k)


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    product: float = sum(map(mul, one, other))
    return product


def _scores(found: _Found, place: int) -> HitScores:
    return HitScores(
        vector=found.vector_scores[place] if found.vector_scores else None,
        text=found.text_scores[place] if found.text_scores else None,
    )
