"""The candidates that searches by vector and by text found for a query, and their ranking: fused, or for diversity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from common import ranking
from common.ranking import Ranked
from common.wire.search import HitScores, SearchResult, SearchWork, scored
from services.vector_search.hit_cache import HitJson
from services.vector_search.index import exact
from services.vector_search.index.rows import Floats, Metric, RowsView, normalise
from services.vector_search.text_index import TextMatches


class Candidates(NamedTuple):
    """Candidates of one query: labels, scores, and vectors of length 1 in `rows` if they are compared for diversity.

    The scores by vector or by text are empty if that search was not made.
    """

    labels: list[int]
    vector_scores: list[float]
    text_scores: list[float | None]
    rows: Floats
    complete: bool  # False if a chunk that was found is gone


def candidates(
    query: Floats | None,
    found: tuple[list[int], list[float]] | None,
    matches: TextMatches | None,
    view: RowsView,
    metric: Metric,
    work: SearchWork,
) -> Candidates:
    """Return the chunks that a query's vector and its text found, without chunks that the view lacks.

    A chunk found only by text gets its vector's score, too. `min_score` bounds the scores by vector, or, in a search of
    texts alone, by text.
    """
    labels, near = found or ([], [])
    texts: dict[int, float] = {}
    if matches is not None:
        texts = dict(zip(matches.labels.tolist(), matches.scores.tolist(), strict=True))
        known = set(labels)
        labels = labels + [label for label in texts if label not in known]
    rows = view.find(np.array(labels, np.int64))
    if query is not None and len(near) < len(labels):
        others = view.matrix[rows[len(near) :].clip(min=0)]
        near = near + exact.score(query[None], others[None], metric)[0].tolist()
    bounded = near if query is not None else [texts[label] for label in labels]
    least = -np.inf if work.min_score is None else work.min_score
    kept = [at for at, score in enumerate(bounded) if rows[at] >= 0 and score >= least]
    return Candidates(
        [labels[at] for at in kept],
        [near[at] for at in kept] if query is not None else [],
        [texts.get(labels[at]) for at in kept] if matches is not None else [],
        normalise(view.matrix[rows[kept if work.mmr is not None else []]]),
        bool((rows >= 0).all()),
    )


def ranked(found: Candidates, query: Floats | None, work: SearchWork) -> list[Ranked]:
    """Return the best k candidates of one query."""
    best = ranking.ranked([found.vector_scores, found.text_scores], work.depth)
    if work.mmr is None:
        return best[: work.k]
    rows = found.rows[[place for place, _ in best[: work.mmr.candidates]]]
    near = None
    if query is not None and not found.text_scores:
        near = (rows @ normalise(query[None])[0]).tolist()

    def similarity(place: int) -> Sequence[float]:
        column: list[float] = (rows @ rows[place]).tolist()
        return column

    mmr = work.mmr
    return ranking.diverse(best, near, similarity, mmr.relevance, mmr.candidates, work.k)


def result(
    found: Sequence[Candidates],
    queries: Sequence[Floats | None],
    hits: Mapping[int, HitJson],
    work: SearchWork,
) -> SearchResult:
    """Return the candidates that still exist: the best, ranked, if the work is `alone`, else all of them, unranked."""
    result = SearchResult(shown=[], scores=[], applied="", path="text", mode=work.mode)
    for one, query in zip(found, queries, strict=True):
        if work.alone:
            best = [pair for pair in ranked(one, query, work) if one.labels[pair.place] in hits]
            result.shown.append(
                [
                    scored(_unscored(hits[one.labels[place]]), score, _scores(one, place, work))
                    for place, score in best
                ]
            )
            result.scores.append([score for _, score in best])
            continue
        here = [place for place, label in enumerate(one.labels) if label in hits]
        result.shown.append([_unscored(hits[one.labels[place]]) for place in here])
        result.vector_scores.append([one.vector_scores[at] for at in here if one.vector_scores])
        result.text_scores.append([one.text_scores[at] for at in here if one.text_scores])
        result.rows.append(one.rows[here].tobytes() if work.mmr is not None else b"")
    return result


def _scores(found: Candidates, place: int, work: SearchWork) -> HitScores | None:
    if not work.with_scores:
        return None
    return HitScores(
        vector=found.vector_scores[place] if found.vector_scores else None,
        text=found.text_scores[place] if found.text_scores else None,
    )


def _unscored(hit: HitJson) -> bytes:
    return hit.whole(b"null")
