"""The vectors of one shard as rows of a matrix, which exact search reads and graphs are built from."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Metric = Literal["cosine", "dot", "l2"]


def normalise(vectors: Floats) -> Floats:
    """Return rows of length 1; a row of zeros stays."""
    wide = vectors.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    norms[norms == 0.0] = 1.0
    unit: Floats = (wide / norms).astype(np.float32)
    return unit


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

    def __init__(self, dimension: int, capacity: int = 1024) -> None:
        self.dimension = dimension
        self.dead = 0
        self.view = RowsView(
            np.zeros((capacity, dimension), np.float32),
            np.zeros(capacity, np.int64),
            np.zeros(capacity, np.int64),
            np.zeros(capacity, np.bool_),
            0,
        )

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

    def _room(self, needed: int) -> RowsView:
        view = self.view
        capacity = len(view.labels)
        if needed <= capacity:
            return view
        capacity = max(needed, capacity * 2)

        def grown(old: Any) -> Any:
            new = np.zeros((capacity, *old.shape[1:]), old.dtype)
            new[: view.size] = old[: view.size]
            return new

        return RowsView(
            grown(view.matrix),
            grown(view.labels),
            grown(view.numbers),
            grown(view.live),
            view.size,
        )

    def kill(self, labels: Ints) -> Ints:
        """Mark rows deleted; return the rows that were live until now."""
        view = self.view
        rows = np.searchsorted(view.labels[: view.size], labels)
        rows = rows[rows < view.size]
        rows = rows[np.isin(view.labels[rows], labels) & view.live[rows]]
        view.live[rows] = False
        self.dead += len(rows)
        return rows
