"""The vectors of one shard as rows of a matrix, which exact search reads and graphs are built from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from common import log
from services.vector_search.index.memory import limit_bytes
from services.vector_search.index.rows_file import RowsFile

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Metric = Literal["cosine", "dot", "l2"]
# Rows that take more, or more than this share of what the process may have, lie in a file beside the shard's, if it has
# a directory.
IN_MEMORY_BYTES = 1 << 30
_IN_MEMORY_SHARE = 8
# Room that is made for more: memory is copied then, a file is not.
_GROWTH, _FILE_GROWTH = 2.0, 1.25
_log = log.get("vector_search")


def normalise(vectors: Floats) -> Floats:
    """Return rows of length 1; a row of zeros stays."""
    wide = vectors.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    norms[norms == 0.0] = 1.0
    unit: Floats = (wide / norms).astype(np.float32)
    return unit


def in_memory_bytes(limit: int) -> int:
    """Return the most bytes of a shard's rows that a process keeps in memory that may have `limit` (0: not known)."""
    return min(IN_MEMORY_BYTES, limit // _IN_MEMORY_SHARE) if limit else IN_MEMORY_BYTES


def prepare(vectors: Floats, metric: Metric) -> Floats:
    """Return vectors as the index compares them: of length 1 for cosine, else as they are."""
    return normalise(vectors) if metric == "cosine" else np.ascontiguousarray(vectors, np.float32)


class RowsView(NamedTuple):
    """A moment of the rows; arrays are longer than `count`, and only `live` may still change below it."""

    matrix: Floats
    labels: Ints
    numbers: Ints
    live: Flags
    size: int

    def find(self, labels: Ints) -> Ints:
        """Return the row of each label, -1 where it is not here or deleted."""
        known = self.labels[: self.size]
        if not len(known):
            return np.full(len(labels), -1, np.int64)
        rows = np.searchsorted(known, labels).clip(max=self.size - 1)
        rows[(known[rows] != labels) | ~self.live[rows]] = -1
        return rows


class VectorRows:
    """Append-only rows with a live mark each; one writer, any number of readers through `view`.

    Labels rise with the row, so a label is found by bisection and a rebuilt index keeps their order.
    """

    def __init__(self, dimension: int, capacity: int = 1024, directory: Path | None = None) -> None:
        self.dimension = dimension
        self.dead = 0
        self.changes = (
            0  # how often rows of a view have died or come to life: its arrays are the same ones
        )
        self._directory = directory
        self._file: RowsFile | None = None
        self.view = RowsView(
            self._matrix(capacity),
            np.zeros(capacity, np.int64),
            np.zeros(capacity, np.int64),
            np.zeros(capacity, np.bool_),
            0,
        )

    def empty(self, capacity: int) -> Self:
        """Return rows without any, kept where these are."""
        return type(self)(self.dimension, capacity, self._directory)

    def _matrix(self, capacity: int) -> Floats:
        """Return room for rows, in memory or in a file, which holds what an earlier room in it held."""
        size = capacity * self.dimension * 4
        if self._directory is not None and size > in_memory_bytes(limit_bytes()):
            try:
                self._file = self._file or RowsFile(self._directory)
                return self._file.mapped(capacity, self.dimension)
            except OSError as error:
                _log.warning("rows_kept_in_memory", directory=str(self._directory), why=str(error))
                self._file = None
        return np.zeros((capacity, self.dimension), np.float32)

    @property
    def live_count(self) -> int:
        """Rows that are not deleted."""
        return self.view.size - self.dead

    @property
    def deleted_ratio(self) -> float:
        """Deleted rows / all rows, 0.0 when empty."""
        return self.dead / self.view.size if self.view.size else 0.0

    def append(self, vectors: Floats, labels: Ints, numbers: Ints) -> None:
        """Add rows at the end; labels must be larger than all before."""
        view = self._room(self.view.size + len(labels))
        begin, end = view.size, view.size + len(labels)
        view.matrix[begin:end] = vectors
        view.labels[begin:end] = labels
        view.numbers[begin:end] = numbers
        view.live[begin:end] = True
        self.view = view._replace(size=end)

    def append_empty(self, labels: Ints) -> None:
        """Add rows at the end that are deleted, unless `fill` brings them to life."""
        view = self._room(self.view.size + len(labels))
        end = view.size + len(labels)
        view.labels[view.size : end] = labels
        self.dead += len(labels)
        self.view = view._replace(size=end)

    def fill(self, rows: Ints, vectors: Floats, numbers: Ints) -> None:
        """Give empty rows their vectors."""
        view = self.view
        view.matrix[rows], view.numbers[rows], view.live[rows] = vectors, numbers, True
        self.dead -= len(rows)
        self.changes += 1

    def _room(self, needed: int) -> RowsView:
        view = self.view
        capacity = len(view.labels)
        if needed <= capacity:
            return view
        before = self._file
        capacity = max(needed, int(capacity * (_FILE_GROWTH if before else _GROWTH)))
        matrix = self._matrix(capacity)
        if before is None or self._file is not before:
            matrix[: view.size] = view.matrix[: view.size]

        def grown(old: Any) -> Any:
            new = np.zeros(capacity, old.dtype)
            new[: view.size] = old[: view.size]
            return new

        return RowsView(
            matrix, grown(view.labels), grown(view.numbers), grown(view.live), view.size
        )

    def kill(self, labels: Ints) -> Ints:
        """Mark rows deleted; return the rows that were live until now."""
        view = self.view
        rows = np.searchsorted(view.labels[: view.size], labels)
        rows = rows[rows < view.size]
        rows = rows[np.isin(view.labels[rows], labels) & view.live[rows]]
        view.live[rows] = False
        self.dead += len(rows)
        self.changes += (
            1  # last: who reads it before may have missed the change, who reads it now has not
        )
        return rows
