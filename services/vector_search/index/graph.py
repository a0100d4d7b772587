"""The graph over a shard's rows: hnswlib behind a lock, since searches may not meet insertions.

hnswlib may crash when a search meets an insertion or a resize, returns an error rather than fewer than k results,
and forgets ef when saved. Searches share a lock that the one writer takes alone, in short turns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import hnswlib
import numpy as np

from services.vector_search.index.rows import Floats, Ints, Metric, RowsView
from services.vector_search.index.search_path import FEW_LINKS

EF_CONSTRUCTION = 200


class TurnLock:
    """Many searches or one writer, by turns: a writer waits for running searches, then for those that waited for
    the last writer; so neither starves the other.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0
        self._readers_waiting = 0
        self._owed = 0  # searches that waited for the last writer and have not begun

    def __enter__(self) -> None:
        """Enter beside other searches."""
        with self._condition:
            if self._writing or (self._writers_waiting and not self._owed):
                self._readers_waiting += 1
                self._condition.wait_for(self._reader_may_enter)
                self._readers_waiting -= 1
            if self._owed:
                self._owed -= 1
            self._readers += 1

    def _reader_may_enter(self) -> bool:
        return not self._writing and (self._owed > 0 or not self._writers_waiting)

    def __exit__(self, *_error: object) -> None:
        """Leave, so that a writer may enter."""
        with self._condition:
            self._readers -= 1
            if self._writers_waiting and not self._readers:
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock as the writer."""
        with self._condition:
            self._writers_waiting += 1
            self._condition.wait_for(lambda: not (self._writing or self._readers or self._owed))
            self._writers_waiting -= 1
            self._writing = True
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._owed = self._readers_waiting
                self._condition.notify_all()


class Layers(NamedTuple):
    """A graph as hnswlib keeps it, by node: links are a count and then nodes, level 0 apart from those above it."""

    rows: Ints
    vectors: Floats
    near: np.ndarray[Any, np.dtype[np.uint32]]
    upper: np.ndarray[Any, np.dtype[np.uint32]]
    heights: Ints
    entry: int
    levels: int


class Graph:
    """An HNSW graph whose labels are row numbers; scores follow the metric (higher is nearer)."""

    turn_s = 0.003  # how long searches wait for rows that are added

    def __init__(
        self,
        dimension: int,
        metric: Metric,
        capacity: int,
        threads: int,
        *,
        links: int = FEW_LINKS,
        path: str = "",
    ) -> None:
        """Make an empty graph, or load a saved one from `path`; RuntimeError if that is none."""
        self.metric: Metric = metric
        self.threads = threads
        self.lock = TurnLock()
        self._index = hnswlib.Index("l2" if metric == "l2" else "ip", dimension)
        if path:
            self._index.load_index(path, max_elements=capacity)
        else:
            self._index.init_index(max(capacity, 1), ef_construction=EF_CONSTRUCTION, M=links)
        self._count = int(self._index.element_count)
        self._marked = 0
        self.set_ef(64)

    @property
    def links(self) -> int:
        """Links of a node on the levels above the lowest."""
        return int(self._index.M)

    @property
    def copied_bytes(self) -> int:
        """About how many bytes `layers` copies on its way."""
        return self._count * int(4 * self._index.dim + 8 * self.links + 16)

    def layers(self) -> Layers:
        """Return a copy of the rows and links."""
        with self.lock:
            (state,) = self._index.__getstate__()
        count, size = state["cur_element_count"], state["size_data_per_element"]
        nodes = state["data_level0"][: count * size].view(np.uint8).reshape(count, size)
        near, data, label = state["offset_level0"], state["offset_data"], state["label_offset"]
        words = state["size_links_per_element"] // 4
        return Layers(
            rows=np.ascontiguousarray(nodes[:, label : label + 8]).view(np.int64).ravel(),
            vectors=np.ascontiguousarray(nodes[:, data:label]).view(np.float32),
            near=np.ascontiguousarray(nodes[:, near:data]).view(np.uint32),
            upper=np.array(state["link_lists"]).view(np.uint32).reshape(-1, words),
            heights=state["element_levels"][:count].astype(np.int64),
            entry=state["enterpoint_node"],
            levels=state["max_level"],
        )

    def save(self, path: str) -> None:
        """Write the graph to a file; searches go on meanwhile."""
        with self.lock:
            self._index.save_index(path)

    def set_ef(self, ef: int) -> None:
        """Set how many candidates a search keeps."""
        self.ef = ef
        with self.lock.alone():
            self._index.set_ef(ef)

    def __len__(self) -> int:
        """Rows that a search can return."""
        return self._count - self._marked

    def add(self, view: RowsView, rows: Ints, threads: int | None = None) -> None:
        """Insert rows; call with few at a time once searches use the graph."""
        with self.lock.alone():
            needed = self._index.element_count + len(rows)
            if needed > self._index.max_elements:
                self._index.resize_index(max(needed, self._index.max_elements * 2))
            self._index.add_items(view.matrix[rows], rows, num_threads=threads or self.threads)
            self._count = int(self._index.element_count)

    def mark_deleted(self, rows: Ints) -> None:
        """Keep rows from results; rows not in the graph, or marked before, are passed over."""
        with self.lock.alone():
            for row in rows.tolist():
                try:
                    self._index.mark_deleted(row)
                except RuntimeError as error:
                    if "already" not in str(error):  # not there; else marked in the saved file
                        continue
                self._marked += 1

    def query(
        self, queries: Floats, k: int, ef: int | None = None, threads: int | None = None
    ) -> tuple[Ints, Floats]:
        """Return (rows, scores) of shape (queries, k'), best first, with k' <= k clamped to what can be found.

        `ef` below the set one is honoured alone (it is a global of the library), above it through k.
        """
        live = self._count - self._marked
        k = min(k, live)
        if k == 0:
            empty = np.zeros((len(queries), 0))
            return empty.astype(np.int64), empty.astype(np.float32)
        if ef is not None and ef < self.ef:
            labels, distances = self._with_ef(queries, k, max(ef, k), threads)
        else:
            with self.lock:
                labels, distances = self._search(queries, max(k, min(ef or 0, live)), threads)
        scores = -np.sqrt(distances) if self.metric == "l2" else 1.0 - distances
        rows: Ints = labels.view(np.int64)
        return (rows, scores) if rows.shape[1] <= k else (rows[:, :k], scores[:, :k])

    def _with_ef(
        self, queries: Floats, k: int, ef: int, threads: int | None
    ) -> tuple[Ints, Floats]:
        with self.lock.alone():
            self._index.set_ef(ef)
            try:
                return self._search(queries, k, threads)
            finally:
                self._index.set_ef(self.ef)

    def _search(self, queries: Floats, k: int, threads: int | None) -> tuple[Ints, Floats]:
        while True:
            try:
                found: tuple[Ints, Floats] = self._index.knn_query(
                    queries, k, num_threads=threads or self.threads
                )
                return found
            except RuntimeError:
                # Parts of the graph out of reach: "Cannot return the results in a contiguous 2D array".
                if k == 1:
                    raise
                k = max(1, k // 2)
