"""Requests of collections: bodies parsed into documents to store and queries to search for; run in the pool."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from common.errors import InvalidRequest, TooLarge
from common.wire.search import Diversity, Effort, Mode, document_hash, effort_of
from common.wire.workflows import SearchRequest, StoreItem
from services.router.text.bodies import (
    DocumentBody,
    DocumentsBody,
    RequestLimits,
    SearchBody,
    check_id,
    check_json,
    check_metadata,
    decode,
    pack_vector,
)
from services.router.text.requests import check_count, check_total, encode_all
from services.router.text.tokens import Spec, load

MAX_TEXT_BYTES = 1024 * 1024
MAX_HITS = 100_000
MAX_COMPARED = 500_000
MAX_QUERY_CHARACTERS = 8192
MAX_DEPTH_HITS = 10_000
FUSED = 50  # the number of hits of each search that are fused; twice k if that is more


def _store_item(
    body: DocumentBody, where: str, dimension: int, metric: str, *, embeds: bool
) -> StoreItem:
    if body.text is None and body.vector is None:
        raise InvalidRequest(f"{where}: expected text or vector", code="invalid_value", param=where)
    if body.text is not None:
        size = len(body.text.encode())
        if size > MAX_TEXT_BYTES:
            raise TooLarge(
                f"{where}.text is {size} bytes: at most {MAX_TEXT_BYTES} are allowed; split the document",
                param=f"{where}.text",
            )
        if body.vector is None and not body.text.strip():
            raise InvalidRequest(
                f"{where}.text is empty: expected some text",
                code="empty_input",
                param=f"{where}.text",
            )
        if body.vector is None and not embeds:
            raise InvalidRequest(
                f"{where} has no vector, and this collection has no encoder (model is null)",
                code="vectors_only",
                param=where,
            )
    packed = None
    if body.vector is not None:
        packed = pack_vector(body.vector, dimension, metric, f"{where}.vector")
    metadata = body.metadata or {}
    check_metadata(metadata, f"{where}.metadata")
    digest = document_hash(text=body.text, vector=body.vector, metadata=metadata)
    name = digest if body.id is None else check_id(body.id, f"{where}.id")
    return StoreItem(name, digest, body.text, packed, metadata)


def documents(
    raw: bytes, dimension: int, metric: str, limits: RequestLimits, *, embeds: bool
) -> tuple[bytes, int, int]:
    """Parse the body of POST …/documents; return encoded [StoreItem], the number of texts, and their characters."""
    body = decode(raw, DocumentsBody)
    check_count(len(body.documents), limits, "documents")
    items = [
        _store_item(item, f"documents[{index}]", dimension, metric, embeds=embeds)
        for index, item in enumerate(body.documents)
    ]
    seen: set[str] = set()
    for index, item in enumerate(items):
        if item.id in seen and body.documents[index].id is not None:
            raise InvalidRequest(
                f"documents[{index}].id {item.id!r} appears twice",
                code="duplicate_id",
                param="documents",
            )
        seen.add(item.id)
    unique = list({item.id: item for item in items}.values())
    texts = [item.text or "" for item in unique if item.vector is None]
    return msgspec.msgpack.encode(unique), len(texts), sum(map(len, texts))


def search(
    raw: bytes,
    dimension: int,
    metric: str,
    limits: RequestLimits,
    *,
    spec: Spec | None,
    prompt: str,
) -> SearchRequest:
    """Parse and tokenize the body of POST …/search; `spec` is None for a collection without an encoder."""
    body = decode(raw, SearchBody)
    mode = _mode(body)
    texts = [body.text] if body.text is not None else body.texts
    rows = [body.vector] if body.vector is not None else body.vectors
    many = body.texts is not None or body.vectors is not None
    count = len(texts or rows or [])
    param = "texts" if texts is not None else "vectors"
    check_count(count, limits, param)
    _check_mmr(body, count)
    if count * body.k > MAX_HITS:
        raise InvalidRequest(
            f"k x queries is {count * body.k}: at most {MAX_HITS} hits fit one reply",
            code="invalid_value",
            param="k",
        )
    if body.filter is not None:
        check_json(body.filter, "filter")
    embedded = texts is not None and rows is None and mode != "text"
    lists = _query_tokens(texts or [], spec, prompt) if embedded else []
    words = [] if mode == "vector" else query_words(texts or (), "texts")
    check_total(sum(map(len, lists)), limits, param)
    vectors = b"".join(
        pack_vector(row, dimension, metric, f"vectors[{index}]")
        for index, row in enumerate(rows or ())
    )
    return SearchRequest(
        many, count, lists, vectors, body.k, body.filter, body.min_score, body.include_text,
        body.include_metadata, after=body.after, effort=_effort(body), budget_ms=body.time_budget_ms,
        mode=mode, texts=words, depth=_depth(body, mode), mmr=body.mmr, with_scores=body.include_scores,
        partial=body.partial, with_lists=body.include_lists,
    )  # fmt: skip


def _depth(body: SearchBody, mode: Mode) -> int:
    depth = depth_of(mode, body.k, body.mmr, scores=body.include_scores)
    if body.time_budget_ms is not None and (depth or mode != "vector"):
        raise InvalidRequest(
            "time_budget_ms: expected only in mode vector, without mmr and include_scores",
            code="invalid_value",
            param="time_budget_ms",
        )
    return depth


def _effort(body: SearchBody) -> Effort | None:
    """Return the effort that a search names; InvalidRequest for two efforts, or an effort with a time budget."""
    older = effort_of(None, body.ef, exact=body.exact)
    given = {
        "effort": body.effort is not None,
        "time_budget_ms": body.time_budget_ms is not None,
        "exact" if body.exact else "ef": older is not None,
    }
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise InvalidRequest(
            f"{' and '.join(names)} are given: expected at most one of effort, time_budget_ms, and ef or exact",
            code="invalid_value",
            param=names[-1],
        )
    return older if body.effort is None else body.effort


def depth_of(mode: Mode, k: int, mmr: Diversity | None, *, scores: bool = False) -> int:
    """Return the number of each search's best hits that are ranked again; 0 if the search's own order is the result."""
    if mode != "hybrid" and mmr is None and not scores:
        return 0
    fused = max(2 * k, FUSED) if mode == "hybrid" else k
    return min(max(k, fused, mmr.candidates if mmr else 0), MAX_DEPTH_HITS)


def _mode(body: SearchBody) -> Mode:
    """Return a body's search mode; InvalidRequest unless it has exactly the texts and vectors of that mode."""
    texts = [name for name in ("text", "texts") if getattr(body, name) is not None]
    vectors = [name for name in ("vector", "vectors") if getattr(body, name) is not None]
    if body.mode == "text" and vectors:
        raise InvalidRequest(
            f"mode text searches by words: expected text or texts, got {vectors[0]}",
            code="invalid_value",
            param=vectors[0],
        )
    if body.mode == "hybrid" and not texts:
        raise InvalidRequest(
            "mode hybrid searches by words, too: expected text or texts, with vector or vectors beside them where the "
            "embedding is yours",
            code="invalid_value",
            param="text",
        )
    both = body.mode == "hybrid" and [*texts, *vectors] in (
        ["text", "vector"],
        ["texts", "vectors"],
    )
    if len(texts) + len(vectors) != 1 and not both:
        raise InvalidRequest(
            "expected exactly one of text, vector, texts and vectors (in mode hybrid also text and vector, or texts "
            "and vectors)",
            code="invalid_value",
        )
    if both and body.texts is not None and len(body.texts) != len(body.vectors or ()):
        raise InvalidRequest(
            f"{len(body.texts)} texts and {len(body.vectors or ())} vectors: expected one vector for each text",
            code="invalid_value",
            param="vectors",
        )
    return body.mode or "vector"


def _check_mmr(body: SearchBody, count: int) -> None:
    if body.mmr is None:
        return
    compared = count * body.mmr.candidates * min(body.k, body.mmr.candidates)
    if compared > MAX_COMPARED:
        raise InvalidRequest(
            f"queries x mmr.candidates x k is {compared}: at most {MAX_COMPARED} vectors are compared for one reply",
            code="invalid_value",
            param="mmr",
        )


def query_words(texts: Sequence[str], param: str) -> list[str]:
    """Return texts for a search by words, cut to MAX_QUERY_CHARACTERS; InvalidRequest for an empty text."""
    for index, text in enumerate(texts):
        if not text.strip():
            raise InvalidRequest(
                f"{param}[{index}] is empty: expected some text", code="empty_input", param=param
            )
    return [text[:MAX_QUERY_CHARACTERS] for text in texts]


def _query_tokens(texts: Sequence[str], spec: Spec | None, prompt: str) -> list[list[int]]:
    """Return the token ids of the queries, each after the collection's query prompt."""
    if spec is None:
        raise InvalidRequest(
            "this collection has no encoder (model is null): search it by vector, or by words with mode text",
            code="vectors_only",
            param="text",
        )
    prompted = [prompt + text if text.strip() else text for text in texts]
    return encode_all(load(spec.path), prompted, spec.max_tokens, truncate=True, param="texts")


def chunked(
    texts: Sequence[str], spec: Spec, max_tokens: int, overlap: int, prompt: str
) -> list[list[tuple[int, int, list[int]]]]:
    """Split each text; return for each text its pieces as (start, end, token ids)."""
    encoder = load(spec.path)
    limit = min(max_tokens, spec.max_tokens)
    return [
        [
            (piece.start, piece.end, ids)
            for piece, ids in encoder.chunks(text, limit, overlap, prompt)
        ]
        for text in texts
    ]
