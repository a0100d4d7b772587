"""Chunks as the database keeps them: checksums, byte offsets, and runs of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import xxhash

from common.wire.search import Document, StoredDocument
from services.vector_search.filters import Attributes


def checksum(vector: bytes) -> int:
    """Return the signed xxh3-64 kept beside a vector, so that a damaged one is found at start."""
    value = int(xxhash.xxh3_64_intdigest(vector))
    return value - (1 << 64) if value >= 1 << 63 else value


def byte_offsets(document: Document) -> dict[int, int]:
    """Return where each chunk boundary (in characters) stands in the UTF-8 text, in one pass."""
    bounds = sorted({bound for chunk in document.chunks for bound in (chunk.start, chunk.end)})
    text = document.text or ""
    if text.isascii():
        return {bound: bound for bound in bounds}
    offsets, before, size = {}, 0, 0
    for bound in bounds:
        size += len(text[before:bound].encode())
        before = bound
        offsets[bound] = size
    return offsets


def size_of(document: StoredDocument) -> int:
    """Return about how many bytes a document takes in a message, metadata aside."""
    return 4 * len(document.text or "") + len(document.vectors or b"") + len(document.id)


class Added(NamedTuple):
    """What storing a document made, and the labels of the chunks it replaced."""

    number: int
    labels: list[int]
    replaced: list[int]
    attributes: Attributes


class StoredChunks(NamedTuple):
    """A run of chunks in label order; `sound` is False where a vector's checksum is wrong."""

    labels: np.ndarray[Any, np.dtype[np.int64]]
    numbers: np.ndarray[Any, np.dtype[np.int64]]
    vectors: list[bytes]
    sound: list[bool]
