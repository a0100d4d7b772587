"""A batch of writes that are checked and stored, and not yet durable."""

from __future__ import annotations

import numpy as np

from common.wire.message import encode
from common.wire.registry import CollectionRecord
from common.wire.search import Write
from services.vector_search.documents import Documents
from services.vector_search.filters import Attributes
from services.vector_search.index.rows import Floats, prepare
from services.vector_search.write_log import EntryId


def encoded(write: Write) -> bytes | None:
    """Return a write as the log's bytes; None if the write cannot be encoded."""
    try:
        return encode(write)
    except (ValueError, TypeError, OverflowError):
        return None


def vectors_of(write: Write, record: CollectionRecord) -> Floats | None:
    """Return the vectors of all chunks as rows to index; None if a vector does not fit the collection."""
    size = record.dimension * 4
    for document in write.upserts:
        end = len(document.text) if document.text is not None else None
        for chunk in document.chunks:
            fits = 0 <= chunk.start <= chunk.end and (end is None or chunk.end <= end)
            if len(chunk.vector) != size or not fits:
                return None
    joined = b"".join(c.vector for document in write.upserts for c in document.chunks)
    vectors = np.frombuffer(joined, "<f4").reshape(-1, record.dimension)
    return prepare(vectors, record.metric) if np.isfinite(vectors).all() else None


class WriteBatch:
    """The rows and labels staged since the last sync; `mark` is where the log ended before them."""

    def __init__(self, applied: EntryId, mark: int) -> None:
        self.applied = applied
        self.mark = mark
        self.vectors: list[Floats] = []
        self.labels: list[int] = []
        self.numbers: list[int] = []
        self.removed: list[int] = []
        self.attributes: list[tuple[int, Attributes]] = []

    def stage(self, write: Write, vectors: Floats, documents: Documents) -> bool:
        """Store a write's documents in the open transaction; False, and nothing changed, if it cannot be."""
        documents.savepoint()
        labels: list[int] = []
        numbers: list[int] = []
        removed: list[int] = []
        judged: list[tuple[int, Attributes]] = []
        try:
            for identity in write.deletes:
                removed += documents.delete(identity)
            for document in write.upserts:
                added = documents.put(document)
                labels += added.labels
                numbers += [added.number] * len(added.labels)
                removed += added.replaced
                judged.append((added.number, added.attributes))
        except (ValueError, TypeError, OverflowError, RecursionError, KeyError):
            documents.undo()
            return False
        self.vectors.append(vectors)
        self.labels += labels
        self.numbers += numbers
        self.removed += removed
        self.attributes += judged
        return True
