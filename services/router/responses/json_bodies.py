"""JSON bodies of results: pure functions, run in the pool of text processes if the vectors are many."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from common.wire.results import ScoreResult
from common.wire.search import DocumentsResult, SearchResult, StoredDocument
from common.wire.workflows import ResponseOptions


def truncated(row: bytes, dimensions: int) -> array[float]:
    """Return the first `dimensions` numbers of a float32 row, at length 1 again."""
    values = array("f", row[: 4 * dimensions])
    norm = math.sqrt(math.fsum(value * value for value in values)) or 1.0
    return array("f", [value / norm for value in values])


def embeddings(options: ResponseOptions, dimension: int, blocks: Sequence[bytes]) -> bytes:
    """Return the JSON of an embeddings reply from blocks of float32 rows; in TEI's shape a list of vectors."""
    data: list[dict[str, Any]] = []
    size = 4 * dimension
    for block in blocks:
        for start in range(0, len(block), size):
            row: bytes | array[float] = block[start : start + size]
            if options.dimensions:
                row = truncated(bytes(row), options.dimensions)
            shown: Any = (
                base64.b64encode(bytes(row)).decode()
                if options.base64
                else (row if isinstance(row, array) else array("f", row)).tolist()
            )
            data.append({"object": "embedding", "index": len(data), "embedding": shown})
    if options.tei:
        return msgspec.json.encode([item["embedding"] for item in data])
    usage = {"prompt_tokens": options.tokens, "total_tokens": options.tokens}
    return msgspec.json.encode(
        {"object": "list", "data": data, "model": options.model, "usage": usage}
    )


def rerank(options: ResponseOptions, request: str, results: Sequence[ScoreResult]) -> bytes:
    """Return the JSON of a rerank reply in the shape the request asked for, best first."""
    scores = [score for result in results for score in result.scores]
    raws = [raw for result in results for raw in (result.raw or result.scores)]
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    texts = options.texts
    if options.tei:
        shown = raws if options.raw else scores
        return msgspec.json.encode(
            [
                {"index": i, "score": shown[i], **({"text": texts[i]} if texts else {})}
                for i in order
            ]
        )
    hits = [
        {
            "index": i,
            "relevance_score": scores[i],
            **({"document": {"text": texts[i]}} if texts else {}),
        }
        for i in order[: options.top_n]
    ]
    if options.v2:
        meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": options.tokens}}
        return msgspec.json.encode({"id": request, "results": hits, "meta": meta})
    usage = {"prompt_tokens": options.tokens, "total_tokens": options.tokens}
    return msgspec.json.encode(
        {"id": request, "model": options.model, "results": hits, "usage": usage}
    )


def search(
    options: ResponseOptions, request: str, found: SearchResult, applied: str | None = None
) -> bytes:
    """Return the JSON of a search reply: one list of hits, or one per query. Shards send hits as JSON.

    `applied`, if given, replaces the result's own applied ids.
    """
    rows = [b",".join(row) for row in found.shown]
    if options.many:
        data = b",".join(b'{"index":%d,"data":[%b]}' % pair for pair in enumerate(rows))
    else:
        data = rows[0] if rows else b""
    tail: dict[str, Any] = {
        "path": found.path,
        "mode": found.mode,
        "applied": found.applied if applied is None else applied,
        "request_id": request,
    }
    if found.text_indexed < 1.0:
        tail["text_indexed"] = round(found.text_indexed, 4)
    if found.report is not None:
        tail["search"] = found.report
    if found.missing is not None:
        tail["missing"] = found.missing
    return b'{"object":"list","data":[%b],%b' % (data, msgspec.json.encode(tail)[1:])


def document(doc: StoredDocument, include: Sequence[str], dimension: int) -> dict[str, Any]:
    """Return one stored document as JSON values with the parts asked for."""
    shown: dict[str, Any] = {"id": doc.id, "hash": doc.hash, "chunks": doc.chunks}
    if "text" in include:
        shown["text"] = doc.text
    if "metadata" in include:
        shown["metadata"] = doc.metadata or {}
    if "vectors" in include:
        raw, size = doc.vectors or b"", 4 * dimension
        shown["vectors"] = [
            array("f", raw[i : i + size]).tolist() for i in range(0, len(raw), size)
        ]
    return shown


def documents(options: ResponseOptions, result: DocumentsResult) -> bytes:
    """Return the JSON of a page of documents, or of one document."""
    shown = [document(doc, options.include, options.count) for doc in result.documents]
    if options.doc:
        return msgspec.json.encode({"object": "document", **shown[0], "applied": result.applied})
    cursor = options.cursor if options.cursor is not None else result.cursor
    return msgspec.json.encode(
        {"object": "list", "data": shown, "has_more": cursor is not None, "next": cursor}
    )
