"""What the tests of vector_search share: records, documents, a brute-force oracle."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common.config import SearchConfig
from common.wire.registry import CollectionRecord
from common.wire.search import Chunk, Document, SearchWork, Write
from services.vector_search.shard import Shard

DIMENSION = 16


def record(metric: Any = "cosine", dimension: int = DIMENSION) -> CollectionRecord:
    return CollectionRecord(
        id="c1", tenant="default", name="docs", dimension=dimension, metric=metric
    )


def config(**fields: Any) -> SearchConfig:
    return SearchConfig(**{"exact_below": 10_000, **fields})


def shard(
    directory: Path, metric: Any = "cosine", dimension: int = DIMENSION, **fields: Any
) -> Shard:
    return Shard(directory / "0", record(metric, dimension), config(**fields))


def document(identity: str, vectors: Any, text: str | None = None, **metadata: Any) -> Document:
    rows = np.atleast_2d(np.asarray(vectors, "<f4"))
    size = len(text) // len(rows) if text else 0
    chunks = [
        Chunk(start=i * size, end=(i + 1) * size, vector=row.tobytes())
        for i, row in enumerate(rows)
    ]
    return Document(id=identity, hash=f"h-{identity}", chunks=chunks, text=text, metadata=metadata)


def write(index: int, upserts: Any = (), deletes: Any = (), request: str = "r") -> Write:
    return Write(
        request=request,
        index=index,
        router="router-1",
        upserts=list(upserts),
        deletes=list(deletes),
    )


def ask(vectors: Any, k: int = 10, **fields: Any) -> SearchWork:
    rows = np.atleast_2d(np.asarray(vectors, "<f4"))
    return SearchWork(collection="c1", vectors=rows.tobytes(), k=k, **fields)


def settle(one: Shard) -> None:
    """Finish all background work."""
    while one.maintain():
        pass


def nearness(query: Any, vectors: Any, metric: str) -> Any:
    """Scores by the definition, in float64."""
    q, x = np.asarray(query, np.float64), np.asarray(vectors, np.float64)
    if metric == "l2":
        return -np.linalg.norm(x - q, axis=1)
    if metric == "cosine":
        return (x @ q) / np.maximum(np.linalg.norm(x, axis=1) * np.linalg.norm(q), 1e-30)
    return x @ q


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file may grow beyond `limit` bytes: what writing to a full disk does, without filling one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
