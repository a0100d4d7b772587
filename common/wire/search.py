"""Jobs, results and writes of collections."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from common.wire.message import Message

MAX_DIVERSE = 200
FOLLOWING_BYTES = 1024  # of a document, that come with a hit whose search asks for them
_encoder = msgspec.json.Encoder(order="deterministic")


Effort = int | Literal["exact"]
Mode = Literal["vector", "text", "hybrid"]
UNSCORED = b'"score":null'
NO_TEXTS = "the collection's documents hold no texts whose words could be found; search by vector, in mode vector"


class Diversity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Maximal marginal relevance: the best `candidates` are ordered by relevance and by what they add to those before.

    `relevance` (in JSON `lambda`) is the weight of a chunk's own relevance: at 1 the order stays.
    """

    relevance: Annotated[float, msgspec.Meta(ge=0, le=1)] = msgspec.field(
        default=0.5, name="lambda"
    )
    candidates: Annotated[int, msgspec.Meta(ge=1, le=MAX_DIVERSE)] = 50


class SearchWork(Message, frozen=True, tag="search"):
    """Search one shard with many queries at once: by `len(vectors) / (4 * dimension)` vectors, by `texts`, or by both.

    `filter` is the JSON filter of the API; `after` is an applied id the shard must have reached (read your writes).
    `trace` is the traceparent of a search that is no job, since a job's record holds its own.
    `effort` says how much of the index to look at; with `budget_ms` the shard takes the most that fits, less `spent_ms`
    that have passed since the request came. `ef` and `exact` are the effort as older routers write it.
    With `depth` the best so many of each search are candidates, each with its scores: the shard ranks them itself where
    it is the only one (`alone`), else they are the result. `with_lists` asks for the lists that were read. With
    `following` hits come with the FOLLOWING_BYTES of text that follow in their document.
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
    mode: Mode = "vector"
    texts: list[str] = []
    depth: int = 0
    mmr: Diversity | None = None
    with_scores: bool = False
    alone: bool = True
    with_lists: bool = False
    following: bool = False

    @property
    def asked_effort(self) -> Effort | None:
        """The effort that was asked for, None for the shard's own."""
        return effort_of(self.effort, self.ef, exact=self.exact)

    def queries(self, dimension: int) -> int:
        """How many queries these are."""
        if self.mode == "text":
            return len(self.texts)
        return len(self.vectors) // (4 * dimension)

    def whole(self, dimension: int) -> bool:
        """Whether each query has what its mode searches by."""
        count = self.queries(dimension)
        by_vector = self.mode == "text" or len(self.vectors) == 4 * dimension * count
        by_text = self.mode == "vector" or len(self.texts) == count
        return count > 0 and by_vector and by_text


def effort_of(effort: Effort | None, ef: int | None, *, exact: bool) -> Effort | None:
    """Return the effort that a search names in the present spelling or in the older one."""
    return "exact" if exact else ef if effort is None else effort


class DocumentsWork(Message, frozen=True, tag="documents"):
    """Read documents by ids or a page of them, the shard's statistics, how it searches (`filter` and `k`), or a map.

    A map is asked for with `sample` points at most, or, with `ids`, with the points of these documents; `chunks` then
    names one chunk of each. With a `basis` it is drawn in that one, else in the shard's own.
    """

    collection: str
    op: Literal["get", "list", "stats", "explain", "map"]
    ids: list[str] = []
    cursor: str | None = None
    limit: int = 100
    filter: dict[str, Any] | None = None
    with_text: bool = True
    with_vectors: bool = False
    after: str | None = None
    shard: int = 0
    k: int = 10
    sample: int = 0
    chunks: list[int] = []
    basis: bytes = b""


class HitScores(msgspec.Struct, frozen=True, omit_defaults=True):
    """What each search gave a hit; None where a search was not made or did not find it."""

    vector: float | None = None
    text: float | None = None


class CopyWork(Message, frozen=True, tag="copy"):
    """Copy a shard to another process: `begin` a snapshot, `read` bytes of one of its files, or `end` it.

    Every copy has a name, which its receiver chooses. `quantizer` reads bytes of the collection's quantizer of the hash
    `name`; there are none past its end.
    """

    collection: str
    shard: int
    op: Literal["begin", "read", "end", "quantizer"]
    name: str
    file: str = ""
    offset: int = 0


class CopyFile(msgspec.Struct, frozen=True):
    """A file of a snapshot: its size, and the xxh3-64 of its bytes in hexadecimal digits."""

    name: str
    size: int
    sum: str


class CopyResult(Message, frozen=True, tag="copy"):
    """The files of a snapshot that began, or the bytes that were read with their xxh3-64."""

    files: list[CopyFile] = []
    data: bytes = b""
    sum: int = 0


class Hit(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chunk found: its document, where it stands in it (character offsets), and how near it is.

    `following` is text of the document from `end` on, if it was asked for.
    """

    id: str
    score: float
    chunk: int = 0
    start: int = 0
    end: int = 0
    text: str | None = None
    metadata: dict[str, Any] | None = None
    scores: HitScores | None = None
    following: str | None = None


_hits = msgspec.json.Decoder(list[Hit])


class SearchReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a search went: the kind of index, the effort used, and the milliseconds it took.

    Where inverted lists were read, `lists` is how many of each query, in all shards together, and `quantizer` the hash
    of what they were made by: of several shards each that was used, and "exact" where one read none, with commas.
    `scanned` names the lists that one shard read for each query, nearest first, if that was asked for.

    With a time budget: `predicted_ms` is what it was predicted to take at most, None where nothing was known, and
    `fits` whether that was within the budget.
    """

    kind: str
    effort: Effort
    took_ms: float
    budget_ms: float | None = None
    predicted_ms: float | None = None
    fits: bool | None = None
    lists: int = 0
    quantizer: str = ""
    scanned: list[list[int]] = []


class MissingShard(msgspec.Struct, frozen=True):
    """A shard that did not answer a search, and why."""

    shard: int
    why: str


class SearchResult(Message, frozen=True, tag="search"):
    """Hits of each query, best first: `shown` holds each hit as the JSON object of the API, `scores` the score of each.

    Where the shard is the only one (`alone`), the objects of a query may be one piece of `shown`, joined by commas.
    `path` says how they were found; `applied` is the shard's applied id. Older shards send no `report`. Candidates that
    are not ranked yet have UNSCORED hits, no `scores`, the columns of their scores (a column of a search that was not
    made is empty), and in `rows` the float32 vectors of length 1 that maximal marginal relevance compares.
    `text_indexed` is below 1.0 while the text index of an older shard is being built; `texts` counts the chunks with a
    text, -1 where that says nothing: texts were not searched, or there is no chunk.
    In the merged result of a search that may be partial `missing` names the shards that did not answer.
    """

    shown: list[list[bytes]]
    scores: list[list[float]]
    applied: str
    path: str
    report: SearchReport | None = None
    mode: Mode = "vector"
    vector_scores: list[list[float]] = []
    text_scores: list[list[float | None]] = []
    rows: list[bytes] = []
    text_indexed: float = 1.0
    texts: int = -1
    missing: list[MissingShard] | None = None

    def part(self, begin: int, end: int) -> SearchResult:
        """Return the result of the queries [begin, end)."""
        return msgspec.structs.replace(
            self,
            shown=self.shown[begin:end],
            scores=self.scores[begin:end],
            vector_scores=self.vector_scores[begin:end],
            text_scores=self.text_scores[begin:end],
            rows=self.rows[begin:end],
        )

    @property
    def hits(self) -> list[list[Hit]]:
        """The hits as values."""
        return [decode_hits(row) for row in self.shown]


def scored(hit: bytes, score: float, scores: HitScores | None = None) -> bytes:
    """Return an UNSCORED hit with its score, and with those of each search where they are given.

    An id before the score cannot hold the mark, since JSON escapes the quotes in it.
    """
    shown = b'"score":%b' % repr(score).encode()
    if scores is not None:
        shown += b',"scores":%b' % msgspec.json.encode(scores)
    return hit.replace(UNSCORED, shown, 1)


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


class MapPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where one chunk lies on a map; `title` is its document's, if that has one."""

    id: str
    chunk: int
    x: float
    y: float
    title: str | None = None


class MapPart(msgspec.Struct, frozen=True):
    """A shard's part of a map: points of a sample of its `rows` live rows in a plane, as they were at `computed_ms`.

    `basis` is that plane as bytes that another shard can draw in, b"" while there is none; `explained` is the share of
    the sample's variance that lies in it. `pending`: what was asked for is not drawn yet, or is being drawn anew.
    """

    basis: bytes = b""
    rows: int = 0
    computed_ms: int = 0
    explained: float = 0.0
    pending: bool = False
    points: list[MapPoint] = []


class DocumentsResult(Message, frozen=True, tag="documents"):
    """Documents found, the cursor of the next page (None at the end); statistics, explanation or map when asked."""

    documents: list[StoredDocument] = []
    cursor: str | None = None
    stats: dict[str, Any] | None = None
    applied: str = "0-0"
    map: MapPart | None = None


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
