"""The recall of every effort of a graph's ladder, measured on recent queries, so that what an effort gives is known."""

from __future__ import annotations

import numpy as np

from services.vector_search.index import exact, search_path
from services.vector_search.index.allowed_rows import AllowedRows
from services.vector_search.index.native_graph import SearchGraph
from services.vector_search.index.rows import Floats, Metric
from services.vector_search.index.state import IndexView

_QUERIES = 64
_K = 10
_AT_ONCE = 8  # hnswlib's graph is held alone where ef is less than its own
_GROWTH = 1.5  # so much may a graph grow before it is measured again


class RecallLadder:
    """The recall of each ef of one graph, as it was last measured; one thread measures."""

    def __init__(self) -> None:
        self._graph: SearchGraph | None = None
        self._rows = 0
        self._recall: dict[int, float] = {}

    def of(self, graph: SearchGraph | None) -> dict[int, float]:
        """Return the recall of each ef that was measured of this graph."""
        return dict(self._recall) if graph is self._graph else {}

    def measure(self, view: IndexView, queries: Floats, metric: Metric) -> None:
        """Measure each ef by some queries, unless that was done when the graph was about as large as it is."""
        rows = view.rows.view
        searched, covered = view.graph, view.indexed
        same = view.graph is self._graph and covered <= _GROWTH * self._rows
        if searched is None or view.graph is None or same or len(queries) < _QUERIES:
            return
        queries = queries[-_QUERIES:]
        live = AllowedRows(rows.live[:covered].copy())
        truth, _ = exact.top_k(queries, rows.matrix[:covered], _K, metric, live)
        recall: dict[int, float] = {}
        for ef in search_path.EF_LADDER:
            near = 0
            for begin in range(0, len(queries), _AT_ONCE):
                found, _ = searched.query(queries[begin : begin + _AT_ONCE], _K, ef)
                right = truth[begin : begin + _AT_ONCE]
                near += int(np.count_nonzero((right[:, :, None] == found[:, None, :]).any(axis=2)))
            recall[ef] = near / max(truth.size, 1)
        self._graph, self._rows, self._recall = view.graph, covered, recall
