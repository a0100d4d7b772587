"""Jobs, results and writes of collections."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from common.wire.message import Message

MAX_DIVERSE = 200
FOLLOWING_BYTES = 1024  # bytes of text after a hit, if its search asks for them
_encoder = msgspec.json.Encoder(order="deterministic")


Effort = int | Literal["exact"]
Mode = Literal["vector", "text", "hybrid"]
UNSCORED = b'"score":null'
NO_TEXTS = "the collection's documents hold no texts whose words could be found; search by vector, in mode vector"


class Diversity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Maximal marginal relevance: orders the best `candidates` by relevance and by difference from earlier ones.

    `relevance` (in JSON `lambda`) is the weight of a chunk's own relevance; 1 keeps the order.
    """

    relevance: Annotated[float, msgspec.Meta(ge=0, le=1)] = msgspec.field(
        default=0.5, name="lambda"
    )
    candidates: Annotated[int, msgspec.Meta(ge=1, le=MAX_DIVERSE)] = 50


class SearchWork(Message, frozen=True, tag="search"):
    """Search one shard with many queries at once: by `len(vectors) / (4 * dimension)` vectors, by `texts`, or by both.

    `filter` is the JSON filter of the API; `after` is an applied id the shard must have reached (read your writes).
    `trace` is the traceparent of a search that is no job, since a job's record holds its own. `effort` sets how
    thoroughly the index is searched; with `budget_ms` the shard takes the largest effort that fits the budget less
    `spent_ms`, which have passed since the request came. `ef` and `exact` are the effort as older routers write it.
    With `depth` the best `depth` chunks of each search are candidates, each with its scores: the only shard (`alone`)
    ranks them itself, any other shard returns them. `with_lists` asks for the lists that were read. With `following`
    hits have the FOLLOWING_BYTES of text after them in their document.
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
        """The requested effort; None for the shard's own."""
        return effort_of(self.effort, self.ef, exact=self.exact)

    def queries(self, dimension: int) -> int:
        """The number of queries."""
        if self.mode == "text":
            return len(self.texts)
        return len(self.vectors) // (4 * dimension)

    def whole(self, dimension: int) -> bool:
        """Whether each query has the vector and the text that its mode needs."""
        count = self.queries(dimension)
        by_vector = self.mode == "text" or len(self.vectors) == 4 * dimension * count
        by_text = self.mode == "vector" or len(self.texts) == count
        return count > 0 and by_vector and by_text


def effort_of(effort: Effort | None, ef: int | None, *, exact: bool) -> Effort | None:
    """Return the effort of a search from its present or its older fields."""
    return "exact" if exact else ef if effort is None else effort


class DocumentsWork(Message, frozen=True, tag="documents"):
    """Read documents by ids, a page of them, statistics, an explanation of searches (`filter`, `k`), or a map.

    A map has at most `sample` points, or, with `ids`, the points of these documents; `chunks` then names one chunk of
    each. It is drawn in the plane `basis`, by default the shard's own.
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
    """The scores of a hit by each search; None for a search that was not made or did not find the hit."""

    vector: float | None = None
    text: float | None = None


class CopyWork(Message, frozen=True, tag="copy"):
    """Copy a shard to another process: `begin` a snapshot, `read` bytes of one of its files, or `end` it.

    Every copy has a name, which its receiver chooses. `quantizer` reads bytes of the collection's quantizer with the
    hash `name`, from `offset` on; none past its end.
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
    """The files of a snapshot that began, or the bytes that were read, with their xxh3-64."""

    files: list[CopyFile] = []
    data: bytes = b""
    sum: int = 0


class Hit(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chunk found: its document, its place in it (offsets in characters), and its score.

    `following` is the text of the document from `end` on, if the search asked for it.
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
    """The report of a search: the kind of index, the effort used, and the milliseconds it took.

    If inverted lists were read, `lists` is the number read for each query, in all shards together, and `quantizer` the
    hash of their quantizer: with several shards all hashes, separated by commas, and "exact" for a shard that read no
    lists. `scanned` names the lists that one shard read for each query, nearest first, if the search asked for them.

    With a time budget: `predicted_ms` is the longest predicted time, None if nothing was known, and `fits` tells
    whether it was within the budget.
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
    """Hits of each query, best first: `shown` holds each hit as a JSON object of the API, `scores` their scores.

    If the shard is the only one (`alone`), the objects of a query may be one piece of `shown`, joined by commas. `path`
    is the kind of search that found them; `applied` is the shard's applied id. Older shards send no `report`. Unranked
    candidates have UNSCORED hits, no `scores`, a column of scores for each search (empty for a search that was not
    made), and in `rows` the float32 vectors of length 1 that maximal marginal relevance compares. `text_indexed` is
    below 1.0 while the text index of an older shard is being built; `texts` counts the chunks with a text, -1 if texts
    were not searched or there is no chunk. In the merged result of a search that may be partial, `missing` names the
    shards that did not answer.
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
        """The hits of each query, decoded."""
        return [decode_hits(row) for row in self.shown]


def scored(hit: bytes, score: float, scores: HitScores | None = None) -> bytes:
    """Return an UNSCORED hit with its score, and, if given, with the scores of each search.

    The id before the score cannot contain the mark, since JSON escapes the mark's quotes.
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
    """The place of one chunk on a map; `title` is its document's title, if it has one."""

    id: str
    chunk: int
    x: float
    y: float
    title: str | None = None


class MapPart(msgspec.Struct, frozen=True):
    """A shard's part of a map: points, in a plane, of a sample of its `rows` live rows at `computed_ms`.

    `basis` is the plane as bytes, so that other shards can draw in it, b"" before the first drawing; `explained` is the
    share of the sample's variance that lies in it. `pending` is True while the requested map is not drawn yet, or is
    being drawn anew.
    """

    basis: bytes = b""
    rows: int = 0
    computed_ms: int = 0
    explained: float = 0.0
    pending: bool = False
    points: list[MapPoint] = []


class DocumentsResult(Message, frozen=True, tag="documents"):
    """The documents found, the next page's cursor (None at the end); statistics, explanation or map if requested."""

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

    (request, index) identifies it: a repeated write, after a router died in between, is applied once. The router whose
    journal is `router` is notified once the write is synced. `drop` removes the whole collection.
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
