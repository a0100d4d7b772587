"""Exact search: every allowed row is compared. Right by construction, and the yardstick of the graph."""

from __future__ import annotations

import numpy as np

from services.vector_search.index.allowed_rows import AllowedRows
from services.vector_search.index.rows import Floats, Ints, Metric

# Rows compared at once: so many, but no more than make so many scores, or so many bytes where they are gathered.
_BLOCK = 16_384
_SCORES = 1 << 20
_GATHERED_BYTES = 16 << 20
# A few more than k survive the fast pass, whose rounding may swap near neighbours, and are then scored directly.
_SPARE = 8
# Above this share of allowed rows, reading all in order is cheaper than gathering some.
_GATHER_BELOW = 0.3


def score(queries: Floats, vectors: Floats, metric: Metric) -> Floats:
    """Score vectors (queries, n, dimension) against their query: higher is nearer; l2 is the negative distance."""
    if metric == "l2":
        distances: Floats = -np.linalg.norm(vectors - queries[:, None, :], axis=2)
        return distances
    products: Floats = np.einsum("qd,qnd->qn", queries, vectors)
    return products


def _rough(queries: Floats, block: Floats, metric: Metric) -> Floats:
    products: Floats = queries @ block.T
    if metric == "l2":
        products *= 2.0
        products -= np.einsum("nd,nd->n", block, block)
    return products


def _rows_at_once(queries: int, dimension: int) -> int:
    """Return how many rows are compared at once with so many queries."""
    most = min(_SCORES // max(queries, 1), _GATHERED_BYTES // (4 * dimension))
    return min(_BLOCK, max(most, 256))


def _scored(queries: Floats, matrix: Floats, rows: Ints, metric: Metric) -> Floats:
    """Score each query's own rows, some queries at a time."""
    some = max(1, _GATHERED_BYTES // max(1, 4 * matrix.shape[1] * rows.shape[1]))
    parts = [
        score(queries[at : at + some], matrix[rows[at : at + some]], metric)
        for at in range(0, len(queries), some)
    ]
    return np.concatenate(parts) if parts else np.zeros(rows.shape, np.float32)


def _best(rows: Ints, scores: Floats, keep: int) -> tuple[Ints, Floats]:
    if scores.shape[1] <= keep:
        return rows, scores
    best = np.argpartition(scores, scores.shape[1] - keep, axis=1)[:, -keep:]
    return np.take_along_axis(rows, best, axis=1), np.take_along_axis(scores, best, axis=1)


def _improved(
    rows: Ints, scores: Floats, more: Ints, its_scores: Floats, keep: int
) -> tuple[Ints, Floats]:
    """Return the best `keep` of each query's (queries, n) and of the rows `more` (m,), scored (queries, m)."""
    if scores.shape[1] < keep:
        more, its_scores = _best(np.broadcast_to(more, its_scores.shape), its_scores, keep)
        if not scores.shape[1]:
            return more, its_scores
        return _best(np.hstack([rows, more]), np.hstack([scores, its_scores]), keep)
    # Few rows of a block beat the worst that is kept: finding them takes less than ordering the block.
    better = np.flatnonzero(its_scores > scores.min(axis=1, keepdims=True))
    query, column = np.divmod(better, its_scores.shape[1])
    counts = np.bincount(query, minlength=len(scores))
    place = np.arange(len(better)) - np.repeat(np.cumsum(counts) - counts, counts)
    width = int(counts.max(initial=0))
    found = np.zeros((len(scores), width), np.int64)
    near = np.full((len(scores), width), -np.inf, np.float32)
    found[query, place], near[query, place] = more[column], its_scores.ravel()[better]
    return _best(np.hstack([rows, found]), np.hstack([scores, near]), keep)


def rows_read(total: int, allowed: int) -> int:
    """Return how many of `total` rows a search reads of which so many are allowed."""
    return allowed if allowed < _GATHER_BELOW * total else total


def top_k(
    queries: Floats,
    matrix: Floats,
    k: int,
    metric: Metric,
    allowed: AllowedRows | None = None,
) -> tuple[Ints, Floats]:
    """Return (rows, scores), shape (queries, min(k, allowed rows)), best first; None allows every row.

    Memory is bounded by blocks of rows, not by the matrix.
    """
    count = len(matrix) if allowed is None else allowed.count
    total = rows_read(len(matrix), count)
    names = allowed.numbers if allowed is not None and total < len(matrix) else None
    flags = allowed.flags if allowed is not None and names is None else None
    keep = min(k + _SPARE, total)
    rows = np.zeros((len(queries), 0), np.int64)
    rough = np.zeros((len(queries), 0), np.float32)
    block_rows = _rows_at_once(*queries.shape)
    for begin in range(0, total, block_rows):
        end = min(begin + block_rows, total)
        part = np.arange(begin, end) if names is None else names[begin:end]
        block = matrix[begin:end] if names is None else matrix[part]
        scores = _rough(queries, block, metric)
        if flags is not None:
            scores[:, ~flags[begin:end]] = -np.inf
        rows, rough = _improved(rows, rough, part, scores, keep)
    scores = _scored(queries, matrix, rows, metric)
    if flags is not None:
        scores[~flags[rows]] = -np.inf
    return rank(rows, scores, min(k, count))


def rank(rows: Ints, scores: Floats, k: int) -> tuple[Ints, Floats]:
    """Return the best k candidates of each query, best first."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1)
