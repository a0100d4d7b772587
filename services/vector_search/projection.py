"""The plane of a map of vectors: the two directions in which a sample of them varies most (PCA).

Subspace iteration from a fixed seed finds the plane, so the same sample gives the same plane. A plane that replaces
another one is turned so that points stay near their former places.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from services.vector_search.index.rows import Floats, Ints, RowsView

Wide = np.ndarray[Any, np.dtype[np.float64]]
_SEED = 94
_WIDTH = 10  # directions iterated to find two: more need fewer rounds
_ROUNDS = 40
_STILL = 1e-6  # the least gain of a round, as a share of the variance found
_AT_ONCE = 1000


class Basis(NamedTuple):
    """A plane among vectors: the point that is drawn at (0, 0), and two axes; rows of one matrix."""

    rows: Floats

    @classmethod
    def decode(cls, raw: bytes) -> Basis:
        """Return the basis of `encode`'s bytes; ValueError for other lengths."""
        if not raw or len(raw) % 12:
            raise ValueError(f"a basis of {len(raw)} bytes; expected three rows of float32")
        return cls(np.frombuffer(raw, "<f4").reshape(3, -1))

    def encode(self) -> bytes:
        """Return the three rows as float32 bytes."""
        return self.rows.astype("<f4").tobytes()

    def project(self, vectors: Floats) -> Wide:
        """Return the two coordinates of each vector."""
        mean, axes = self.rows[0].astype(np.float64), self.rows[1:].astype(np.float64)
        parts = [
            (vectors[first : first + _AT_ONCE].astype(np.float64) - mean) @ axes.T
            for first in range(0, len(vectors), _AT_ONCE)
        ]
        return np.concatenate([np.zeros((0, 2)), *parts])


def fit(sample: Floats, before: Basis | None = None) -> tuple[Basis, float]:
    """Return the plane in which a sample (at least one row) varies most, and the share of the variance in it.

    Its axes are turned towards those of `before`; without `before`, each axis' largest number is made positive.
    """
    largest = max(float(np.abs(sample).max()), 1e-30)  # sums of numbers up to 1 stay finite
    centred = sample / np.float32(largest)
    mean = centred.mean(axis=0, dtype=np.float64)
    centred -= mean.astype(np.float32)
    total = float(np.square(centred, dtype=np.float64).sum())
    axes, held = _widest(centred)
    if before is not None and before.rows.shape[1] == sample.shape[1]:
        left, _, right = np.linalg.svd(axes @ before.rows[1:].astype(np.float64).T)
        axes = (left @ right).T @ axes
    else:
        peaks = np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], axis=1)
        axes = axes * np.where(peaks < 0, -1.0, 1.0)
    basis = Basis(np.vstack([mean * largest, axes]).astype(np.float32))
    return basis, min(held / total, 1.0) if total > 0 else 1.0


def _widest(centred: Floats) -> tuple[Wide, float]:
    """Return the two orthonormal directions with the largest sums of squares, and their sum."""
    dimension = centred.shape[1]
    width = min(_WIDTH, dimension)
    start = np.random.default_rng(_SEED).standard_normal((dimension, width))
    along, before = centred @ start.astype(np.float32), 0.0
    for _ in range(_ROUNDS):
        found = np.linalg.qr((centred.T @ along).astype(np.float64))[0]
        along = centred @ found.astype(np.float32)
        values, turn = np.linalg.eigh(along.T.astype(np.float64) @ along)
        held = float(values[-2:].sum())
        if held - before <= _STILL * held:
            break
        before = held
    axes = np.zeros((2, dimension))
    axes[: min(2, width)] = (found @ turn[:, ::-1]).T[:2]
    return axes, max(held, 0.0)


def sampled(view: RowsView, most: int) -> Ints:
    """Return up to `most` live rows, ordered by the hashes of their labels, the least first.

    The first rows of a sample are a sample, too, and most rows are in the next sample again.
    """
    rows = np.flatnonzero(view.live[: view.size])
    hashes = _mixed(view.labels[rows])
    if len(rows) > most:
        least = np.argpartition(hashes, most)[:most]
        rows, hashes = rows[least], hashes[least]
    return rows[np.argsort(hashes, kind="stable")]


def _mixed(labels: Ints) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a hash of each label (splitmix64)."""
    mixed = labels.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
