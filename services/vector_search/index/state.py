"""The state of an index: rows, and the graph or the lists over the older ones, swapped as one."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from services.vector_search.index.followed_plan import FollowedPlan
from services.vector_search.index.inverted_lists import InvertedLists
from services.vector_search.index.native_graph import SearchGraph
from services.vector_search.index.rows import Floats, Ints, RowsView, VectorRows


class IndexView(NamedTuple):
    """One moment of an index: rows, and the graph over the first `indexed` of them, or lists, or neither.

    Both are there while one takes the place of the other.
    """

    rows: VectorRows
    graph: SearchGraph | None
    indexed: int
    lists: InvertedLists | None = None


class IndexState:
    """The newest view of an index; searches read `view`, one writer publishes, one thread maintains.

    `lock` is held where two of them meet. `unmarked` are deleted rows that the graph does not know yet,
    `followed` is the plan of a tuning, if there is one.
    """

    def __init__(self, dimension: int) -> None:
        self.view = IndexView(VectorRows(dimension), None, 0)
        self.lock = threading.Lock()
        self.unmarked: list[int] = []
        self.followed = FollowedPlan()

    def publish(self, vectors: Floats, labels: Ints, numbers: Ints, removed: Ints) -> None:
        """Add prepared rows (labels rising), then delete labels; visible to searches that begin afterwards."""
        with self.lock:
            view = self.view
            if len(labels):
                view.rows.append(vectors, labels, numbers)
            if len(removed):
                gone = view.rows.kill(removed)
                self.unmarked += gone[gone < view.indexed].tolist()

    def drop_graph(self) -> None:
        """Forget the graph."""
        with self.lock:
            self.view, self.unmarked = self.view._replace(graph=None, indexed=0), []

    def take_lists(self, lists: InvertedLists | None) -> None:
        """Put lists over the rows there are in the place of the old ones, or none."""
        with self.lock:
            self.view = self.view._replace(lists=lists)

    def take_unmarked(self, most: int) -> Ints:
        """Return up to `most` rows that are to be marked deleted in the graph; they are forgotten here."""
        with self.lock:
            taken, self.unmarked = self.unmarked[:most], self.unmarked[most:]
        return np.array(taken, np.int64)

    def swap(
        self,
        rows: VectorRows,
        graph: SearchGraph | None,
        before: RowsView,
        kept: Ints,
        lists: InvertedLists | None = None,
    ) -> int:
        """Put rebuilt rows in the place of the old ones, with what was written meanwhile; return how many are indexed.

        `kept` are the rows of `before`, a moment of the old ones, that were copied, in order; the graph covers them, or
        lists the first of them.
        """
        indexed = len(kept) if graph else 0
        with self.lock:
            now = self.view.rows.view
            late = np.arange(before.size, now.size)
            late = late[now.live[late]]
            rows.append(now.matrix[late], now.labels[late], now.numbers[late])
            gone = rows.kill(now.labels[kept[~now.live[kept]]])
            self.unmarked = gone[gone < indexed].tolist()
            self.view = IndexView(rows, graph, indexed, lists)
        return indexed

    def take_graph(self, graph: SearchGraph | None, before: RowsView, kept: Ints) -> int:
        """Put a graph in the place of the old one; it covers the rows of `before` by `kept`. Returns how many."""
        with self.lock:
            rows = self.view.rows
            self.unmarked = kept[~rows.view.live[kept]].tolist()
            self.view = self.view._replace(graph=graph, indexed=before.size)
        return before.size
