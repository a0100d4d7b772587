"""A frozen copy of the graph, made for searching: rows of 8 bits, walked by a kernel that scores the best exactly.

The walk reads a quarter of the bytes, and the rows themselves rank its results, so an answer is as good as the graph's
own at the same ef. Nothing in the copy changes but the live marks, so searches take no lock.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from common import log
from common.native.finder import find
from services.vector_search.index.graph import Graph
from services.vector_search.index.native.sources import TRAVERSE
from services.vector_search.index.rows import Floats, Ints, Metric, RowsView

# More than k of what the walk found are scored exactly: rounding may swap near neighbours.
_SPARE = 10
_LANE = 64
_MARGIN = 128
# hnswlib hands out its graph as one copy: larger ones are searched where they are.
_MOST_BYTES = 4 << 30
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p
_ref, _first = ctypes.byref, ctypes.c_char.from_buffer
_log = log.get("vector_search")


class _Layout(ctypes.Structure):
    """`Graph` of traverse.cpp."""

    _fields_ = (
        *((name, _INT) for name in ("nodes", "dimension", "width", "links", "upper_links")),
        *((name, _INT) for name in ("entry", "levels")),
        *((name, _POINTER) for name in ("near", "upper", "upper_at", "codes", "weights")),
        *((name, _POINTER) for name in ("rows", "matrix", "live")),
        ("l2", _INT),
    )


@cache
def _kernel() -> Any:
    """Return the kernel, or None where it is not built or this processor cannot run it."""
    path: Path | None = find(TRAVERSE)
    if path is None:
        return None
    try:
        function = ctypes.CDLL(str(path)).spillway_search
    except OSError as error:
        _log.warning("kernels_not_loaded", library=str(path), why=str(error))
        return None
    function.argtypes = [_POINTER, _POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER, _POINTER]
    function.restype = _INT
    return function


def _address(array: Any) -> Any:
    """Return an array's address; the way for arrays that may be written to is quicker, which single queries feel."""
    return _ref(_first(array)) if array.flags.writeable else array.ctypes.data


def _codes(vectors: Floats) -> tuple[Any, Floats]:
    """Return rows as bytes around 128, padded to whole lanes, and the factor of each."""
    count, dimension = vectors.shape
    codes = np.full((count, -(-dimension // _LANE) * _LANE), _MARGIN, np.uint8)
    scales = np.zeros(count, np.float32)
    for begin in range(0, count, 4096):
        part = vectors[begin : begin + 4096]
        scale = np.abs(part).max(axis=1) / 127.0
        scale[scale == 0.0] = 1.0
        # Clipped, because the scale of a row of denormal numbers is itself rounded.
        rounded = np.clip(np.rint(part / scale[:, None]), -127, 127)
        codes[begin : begin + 4096, :dimension] = rounded + _MARGIN
        scales[begin : begin + 4096] = scale
    return codes, scales


class FrozenGraph:
    """A copy of a graph over the first `covered` rows, as the graph was then; searched like a `Graph`."""

    def __init__(
        self, kernel: Any, graph: Graph, metric: Metric, view: RowsView, covered: int
    ) -> None:
        self.covered = covered
        self._kernel = kernel
        self._graph = graph
        self._threads = graph.threads
        self.live = view.live
        layers = graph.layers()
        vectors = view.matrix[layers.rows]
        codes, scales = _codes(vectors)
        weights = np.zeros((len(codes), 2), np.float32)
        weights[:, 0] = scales
        if metric == "l2":
            weights[:, 1] = -0.5 * np.einsum("nd,nd->n", vectors, vectors)
        arrays = [layers.near, layers.upper, layers.upper_at, codes, weights, layers.rows]
        arrays += [view.matrix, view.live]
        self._kept = arrays  # what the layout points to
        self._layout = _Layout(
            len(codes), vectors.shape[1], codes.shape[1], layers.near.shape[1] - 1,
            layers.upper_links, layers.entry, layers.levels,
            *(array.ctypes.data for array in arrays), metric == "l2",
        )  # fmt: skip
        self._at = ctypes.addressof(self._layout)

    @classmethod
    def of(cls, graph: Graph, metric: Metric, view: RowsView, covered: int) -> FrozenGraph | None:
        """Return a copy of a graph that nobody writes to now; None without a kernel, or if the graph is too large."""
        kernel = _kernel()
        if kernel is None or not len(graph) or graph.copied_bytes > _MOST_BYTES:
            return None
        return cls(kernel, graph, metric, view, covered)

    @property
    def ef(self) -> int:
        """The candidates that a search keeps: as many as the graph's."""
        return self._graph.ef

    def __len__(self) -> int:
        """Rows that a search can return."""
        return int(np.count_nonzero(self.live[: self.covered]))

    def query(self, queries: Floats, k: int, ef: int | None = None) -> tuple[Ints, Floats]:
        """Return (rows, scores) of shape (queries, k'), best first, with k' <= k what every query found."""
        count = len(queries)
        k = min(k, self.covered)
        rows = np.empty((count, k), np.int64)
        scores = np.empty((count, k), np.float32)
        if not rows.size:
            return rows, scores
        found = self._kernel(
            self._at, _address(np.ascontiguousarray(queries, np.float32)), count, k,
            ef or self._graph.ef, _SPARE, self._threads, _ref(_first(rows)), _ref(_first(scores)),  # type: ignore[arg-type]
        )  # fmt: skip
        return (rows, scores) if found == k else (rows[:, :found], scores[:, :found])
