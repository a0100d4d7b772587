"""Hash of a document's source, by which clients skip unchanged documents and replicas agree on a document."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder(order="deterministic")


def document_hash(
    *,
    text: str | None = None,
    vector: Sequence[float] | None = None,
    metadata: dict[str, Any] | None = None,
) -> str:
    """Return hex blake2b-128 of the canonical JSON of `{text|vector, metadata}` (keys sorted, UTF-8).

    Absent metadata and `{}` are the same document. Vectors are hashed as given, before any normalisation.
    """
    source: dict[str, Any] = {"metadata": metadata or {}}
    if text is not None:
        source["text"] = text
    if vector is not None:
        source["vector"] = [float(x) for x in vector]
    return hashlib.blake2b(_encoder.encode(source), digest_size=16).hexdigest()
