"""The effort of inverted lists: how many lists to read, and how many rows to compare, to find what exact search finds.

Of each true neighbour it is asked how near its list is to the query, and how good its code is among all codes. So the
recall of every effort is known at once, and the cheapest that is good enough is taken.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from services.vector_search.index import exact, search_path
from services.vector_search.index.allowed_rows import AllowedRows
from services.vector_search.index.inverted_lists import MOST_DEPTH, InvertedLists, kernel
from services.vector_search.index.rows import Flags, Floats, Ints, RowsView
from services.vector_search.index.search_path import GATHERED_ROW_S

# Rows that are compared exactly for each that is returned.
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MOST_DEPTH)
_PROBES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # fmt: skip
_K = 10
# Scores of one row by two ways of adding up differ by less than this share.
_ROUNDING = 1e-5
# Seconds to look up one byte of one code, by the kernel or by numpy.
_BYTE_S, _SLOW_BYTE_S = 1e-10, 3e-9


def probes_ladder(lists: int) -> list[int]:
    """Return the numbers of lists that searches choose from; the largest is all of them."""
    return [*(probes for probes in _PROBES if probes < lists), lists]


def codes_s(lists: InvertedLists, codes: float) -> float:
    """Return about the seconds that scoring so many codes takes."""
    return codes * lists.quantizer.code_bytes * (_SLOW_BYTE_S if kernel() is None else _BYTE_S)


class Truth(NamedTuple):
    """The true neighbours of queries among the rows that lists cover, (queries, k), and their scores."""

    queries: Floats
    rows: Ints
    scores: Floats

    @classmethod
    def of(cls, lists: InvertedLists, view: RowsView, keep: Flags, queries: Floats) -> Self:
        """Find them among the rows that `keep` marks."""
        matrix, kept = view.matrix[: lists.covered], AllowedRows(keep[: lists.covered])
        return cls(queries, *exact.top_k(queries, matrix, _K, lists.quantizer.metric, kept))


class Places(NamedTuple):
    """Of each true neighbour (queries, k) the place of its list among the lists, and of its code among the codes."""

    lists: Ints
    codes: Ints

    @classmethod
    def of(cls, truth: Truth, lists: InvertedLists, keep: Flags, threads: int) -> Self:
        """Look for them in all lists, but no further than the largest depth."""
        order = np.argsort(lists.nearest_lists(truth.queries), axis=1)
        in_lists = np.take_along_axis(order, lists.list_of_rows()[truth.rows], axis=1)
        most = DEPTHS[-1] * _K
        found = lists.candidates(
            keep, truth.queries, most, probes=lists.quantizer.lists, threads=threads
        )
        same = found.rows[:, :, None] == truth.rows[:, None, :]
        return cls(in_lists, np.where(same.any(axis=1), same.argmax(axis=1), most))

    def shares(self, probes: int, depth: int) -> Floats:
        """Return the share of its true neighbours that each query finds so."""
        found: Floats = ((self.lists < probes) & (self.codes < depth * _K)).mean(axis=1)
        return found


def recall_of(
    truth: Truth, lists: InvertedLists, view: RowsView, keep: Flags, threads: int
) -> float:
    """Return the share of the true neighbours that a search finds; of rows that are as near any will do."""
    if not truth.scores.size:
        return 1.0
    k = truth.scores.shape[1]
    found = lists.query(
        view, keep, truth.queries, k, probes=lists.probes, compared=lists.depth * k, threads=threads
    )
    last = truth.scores[:, -1:]
    return float((found.scores >= last - _ROUNDING * (1.0 + np.abs(last))).mean())


def tune(
    lists: InvertedLists,
    places: Places,
    goal: float = search_path.RECALL_GOAL,
    *,
    least_probes: int = 1,
    least_depth: int = 1,
    margin: float = search_path.SURE,
) -> InvertedLists:
    """Return the lists with the cheapest effort, from the least on, whose recall lies `margin` standard errors above
    the goal.
    """
    ladder = probes_ladder(lists.quantizer.lists)
    tried = [each for each in ladder if each >= least_probes] or ladder[-1:]
    depths = [each for each in DEPTHS if each >= least_depth] or DEPTHS[-1:]
    chosen, least_s = (tried[-1], depths[-1]), np.inf
    for depth in depths:
        for probes in tried:
            if not _enough(places.shares(probes, depth), goal, margin):
                continue
            cost_s = codes_s(lists, lists.codes_read(probes)) + depth * _K * GATHERED_ROW_S
            if cost_s < least_s:
                chosen, least_s = (probes, depth), cost_s
            break
    return lists.tuned(*chosen)


def recall_by_probes(lists: InvertedLists, places: Places) -> dict[int, float]:
    """Return the recall of each number of lists that searches choose from."""
    ladder = probes_ladder(lists.quantizer.lists)
    return {each: _mean(places.shares(each, lists.depth_of(each))) for each in ladder}


def _enough(shares: Floats, goal: float, margin: float) -> bool:
    error = float(shares.std()) / len(shares) ** 0.5 if len(shares) else 0.0
    return _mean(shares) - margin * error >= goal


def _mean(shares: Floats) -> float:
    return float(shares.mean()) if shares.size else 1.0
