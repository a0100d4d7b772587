"""Jobs, results and writes of collections."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from common.wire.message import Message

_encoder = msgspec.json.Encoder(order="deterministic")


Effort = int | Literal["exact"]


class SearchWork(Message, frozen=True, tag="search"):
    """Search one shard with `len(vectors) / (4 * dimension)` queries at once.

    `filter` is the JSON filter of the API; `after` is an applied id the shard must have reached (read your writes).
    `trace` is the traceparent of a search that is no job, since a job's record holds its own.
    `effort` says how much of the index to look at; with `budget_ms` the shard takes the most that fits, less `spent_ms`
    that have passed since the request came. `ef` and `exact` are the effort as older routers write it.
    """

    collection: str
    vectors: bytes
    k: int
    filter: dict[str, Any] | None = None
    min_score: float | None = None
    with_text: bool = True
    with_metadata: bool = True
    ef: int | None = None
    exact: bool = False
    after: str | None = None
    shard: int = 0
    trace: str = ""
    effort: Effort | None = None
    budget_ms: float | None = None
    spent_ms: float = 0.0

    @property
    def asked_effort(self) -> Effort | None:
        """The effort that was asked for, None for the shard's own."""
        return effort_of(self.effort, self.ef, exact=self.exact)


def effort_of(effort: Effort | None, ef: int | None, *, exact: bool) -> Effort | None:
    """Return the effort that a search names in the present spelling or in the older one."""
    return "exact" if exact else ef if effort is None else effort


class DocumentsWork(Message, frozen=True, tag="documents"):
    """Read documents: by ids, a page after a cursor, the shard's statistics, or how it searches (`filter` and `k`)."""

    collection: str
    op: Literal["get", "list", "stats", "explain"]
    ids: list[str] = []
    cursor: str | None = None
    limit: int = 100
    filter: dict[str, Any] | None = None
    with_text: bool = True
    with_vectors: bool = False
    after: str | None = None
    shard: int = 0
    k: int = 10


class Hit(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chunk found: its document, where it stands in it (character offsets), and how near it is."""

    id: str
    score: float
    chunk: int = 0
    start: int = 0
    end: int = 0
    text: str | None = None
    metadata: dict[str, Any] | None = None


_hits = msgspec.json.Decoder(list[Hit])


class SearchReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a search went: the kind of index, the effort used, and the milliseconds it took.

    With a time budget: `predicted_ms` is what it was predicted to take at most, None where nothing was known, and
    `fits` whether that was within the budget.
    """

    kind: str
    effort: Effort
    took_ms: float
    budget_ms: float | None = None
    predicted_ms: float | None = None
    fits: bool | None = None


class SearchResult(Message, frozen=True, tag="search"):
    """Hits of each query, best first: `shown` holds each hit as the JSON object of the API, `scores` the score of each.

    `path` says how they were found; `applied` is the shard's applied id. Older shards send no `report`.
    """

    shown: list[list[bytes]]
    scores: list[list[float]]
    applied: str
    path: str
    report: SearchReport | None = None

    @property
    def hits(self) -> list[list[Hit]]:
        """The hits as values."""
        return [decode_hits(row) for row in self.shown]


def decode_hits(shown: Sequence[bytes]) -> list[Hit]:
    """Return the hits of one query from their JSON objects."""
    return _hits.decode(b"[%b]" % b",".join(shown))


class StoredDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document as stored; `vectors` (float32 rows, one per chunk) only when asked for."""

    id: str
    hash: str
    chunks: int
    text: str | None = None
    metadata: dict[str, Any] | None = None
    vectors: bytes | None = None


class DocumentsResult(Message, frozen=True, tag="documents"):
    """Documents found, the cursor of the next page (None at the end), and statistics or an explanation when asked."""

    documents: list[StoredDocument] = []
    cursor: str | None = None
    stats: dict[str, Any] | None = None
    applied: str = "0-0"


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a document: character offsets into its text, and its float32 vector."""

    start: int
    end: int
    vector: bytes


class Document(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document to store under its id; `hash` identifies the source (text, metadata, chunking)."""

    id: str
    hash: str
    chunks: list[Chunk]
    text: str | None = None
    metadata: dict[str, Any] = {}


class Write(Message, frozen=True):
    """One entry of `{search/<p>}:writes:<collection>/<shard>`.

    (request, index) identifies it: a repeated write, after a router died in between, is applied once. `router` is
    the journal to ring when it is synced. `drop` removes the whole collection.
    """

    request: str
    index: int
    router: str
    upserts: list[Document] = []
    deletes: list[str] = []
    drop: bool = False


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
