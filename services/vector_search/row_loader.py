"""How a shard's rows come back at start: the graph's rows in their old places, newer ones behind them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from common.wire.registry import CollectionRecord
from services.vector_search import metrics
from services.vector_search.chunks import StoredChunks
from services.vector_search.documents import Documents
from services.vector_search.index.graph import Graph
from services.vector_search.index.rows import Floats, Ints, VectorRows, prepare
from services.vector_search.snapshot import Loaded


def load_rows(
    documents: Documents, record: CollectionRecord, saved: Loaded | None
) -> tuple[VectorRows, Graph | None, int]:
    """Return the rows, the graph if it still fits them, and how many rows it covers.

    A chunk whose vector is damaged is left out of searches and counted.
    """
    stored = documents.labels()
    if saved is not None and _fits(saved, stored):
        rows = _beside(documents.chunks(), record, saved.labels)
        return rows, saved.graph, len(saved.labels)
    rows = VectorRows(record.dimension, max(1024, len(stored)))
    for part in documents.chunks():
        vectors, sound = _vectors(part, record)
        rows.append(vectors, part.labels[sound], part.numbers[sound])
    return rows, None, 0


def _fits(saved: Loaded, stored: Ints) -> bool:
    """Every stored label up to the graph's last must be one of the graph's."""
    if not len(saved.labels):
        return False
    old = stored[stored <= saved.labels[-1]]
    return bool(np.isin(old, saved.labels).all())


def _vectors(part: StoredChunks, record: CollectionRecord) -> tuple[Floats, Ints]:
    size = record.dimension * 4
    sound = [i for i, good in enumerate(part.sound) if good and len(part.vectors[i]) == size]
    damaged = len(part.vectors) - len(sound)
    if damaged:
        metrics.DAMAGED.labels(what="vector").inc(damaged)
    joined = b"".join(part.vectors[i] for i in sound)
    vectors = np.frombuffer(joined, "<f4").reshape(-1, record.dimension)
    return prepare(vectors, record.metric), np.array(sound, np.int64)


def _beside(chunks: Iterator[StoredChunks], record: CollectionRecord, labels: Ints) -> VectorRows:
    """Place chunks at the graph's rows; rows whose chunk is gone stay empty and dead."""
    rows = VectorRows(record.dimension, int(len(labels) * 1.1) + 1024)
    rows.append(
        np.zeros((len(labels), record.dimension), np.float32), labels, np.zeros_like(labels)
    )
    view = rows.view
    view.live[: view.size] = False
    rows.dead = view.size
    for part in chunks:
        vectors, sound = _vectors(part, record)
        names, numbers = part.labels[sound], part.numbers[sound]
        old = names <= labels[-1]
        at = np.searchsorted(labels, names[old])
        view.matrix[at] = vectors[old]
        view.numbers[at] = numbers[old]
        view.live[at] = True
        rows.dead -= len(at)
        if not old.all():
            rows.append(vectors[~old], names[~old], numbers[~old])
            view = rows.view
    return rows
