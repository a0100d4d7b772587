"""The k nearest of many candidates: exact, or by an approximate hierarchical priority queue (Chameleon, 4.4.2.2).

A candidate's number is its column; of equal distances the lower number is nearer. A distance of +inf or NaN is no
candidate. Each shard returns its own k nearest: nothing is cut across shards, where it would save few bytes.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

from common.native.finder import open_first
from services.vector_search.index.native.sources import SELECTION
from services.vector_search.index.rows import Floats, Ints

IDENTICAL = 0.99  # of the queries, whose answer the queues do not change
MOST_QUEUES = 64
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p
ExactWay = Literal["reservoir", "heap"]


class Selected(NamedTuple):
    """Numbers (int64) and distances (float32), (queries, k) each, nearest first; -1 and +inf where none is left."""

    numbers: Ints
    distances: Floats


def queue_length(k: int, queues: int, identical: float = IDENTICAL) -> int:
    """Return the least length of each queue with which the k nearest pass whole in this share of queries.

    Each of the k nearest is in any queue alike, so a queue holds a binomial number of them. The union bound over all
    queues says how often one of them overflows, and falls short of the truth by little.
    """
    if k < 1 or queues < 1 or not 0 <= identical < 1:
        raise ValueError(
            f"k {k}, queues {queues}, identical {identical}: expected k and queues from 1, and a share below 1"
        )
    if queues == 1:
        return k
    here, elsewhere, held = -math.log(queues), math.log1p(-1 / queues), 0.0
    for length in range(k):
        ways = math.lgamma(k + 1) - math.lgamma(length + 1) - math.lgamma(k - length + 1)
        held += math.exp(ways + length * here + (k - length) * elsewhere)
        if length and 1 - queues * (1 - held) >= identical:
            return length
    return k


def select(distances: Floats, k: int, way: ExactWay = "reservoir") -> Selected:
    """Return the k nearest of each row of distances (queries, candidates), exactly.

    Both ways give the same: a reservoir of 2 k candidates that is thinned whenever it is full, or a heap of k.
    """
    library = kernel()
    if library is None:
        return _plain(distances, k)
    return _call(library, distances, k, int(way == "reservoir"), 0)


def select_by_queues(distances: Floats, k: int, queues: int, length: int) -> Selected:
    """Return the k nearest of the `length` nearest of each queue; candidate i is in queue i mod `queues`.

    `queues` is a power of two, at most 64; ValueError if not. With a length of k the answer is exact.
    """
    if not 1 <= queues <= MOST_QUEUES or queues & (queues - 1) or length < 1:
        raise ValueError(
            f"{queues} queues of {length}: expected a power of two up to {MOST_QUEUES}, and a length from 1"
        )
    library = kernel()
    if library is not None:
        return _call(library, distances, k, queues, length)
    kept = np.full_like(distances, np.inf)
    for queue in range(queues):
        part = distances[:, queue::queues]
        first = np.argsort(part, axis=1, kind="stable")[:, :length]  # NaN comes last
        nearest = np.take_along_axis(part, first, axis=1)
        np.put_along_axis(kept[:, queue::queues], first, nearest, axis=1)
    return _plain(kept, k)


def _plain(distances: Floats, k: int) -> Selected:
    """Select by sorting, where the kernel cannot run."""
    allowed = np.where(distances < np.inf, distances, np.float32(np.inf))
    short = max(k - allowed.shape[1], 0)
    padded = np.pad(allowed, ((0, 0), (0, short)), constant_values=np.inf)
    numbers = np.argsort(padded, axis=1, kind="stable")[:, :k].astype(np.int64)
    nearest = np.take_along_axis(padded, numbers, axis=1)
    return Selected(np.where(nearest < np.inf, numbers, -1), nearest)


def _call(library: Any, distances: Floats, k: int, queues: int, length: int) -> Selected:
    rows = np.ascontiguousarray(distances, np.float32)
    numbers = np.empty((len(rows), k), np.int64)
    nearest = np.empty((len(rows), k), np.float32)
    library.spillway_select(
        rows.ctypes.data, *rows.shape, k, queues, length, numbers.ctypes.data, nearest.ctypes.data
    )
    return Selected(numbers, nearest)


@cache
def kernel() -> Any:
    """Return the kernel, or None where it is not built or this processor cannot run it."""
    library = open_first([SELECTION])
    if library is None:
        return None
    library.spillway_select.argtypes = [_POINTER, *[_INT] * 5, _POINTER, _POINTER]
    library.spillway_select.restype = None
    return library
