"""Results of calls as frozen dataclasses: unknown fields of later servers are ignored, missing ones get defaults."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from .errors import SpillwayError

V = TypeVar("V", list[float], bytes)
T = TypeVar("T")
SearchMode = Literal["vector", "text", "hybrid"]


class UnexpectedResponseError(SpillwayError):
    """A successful answer of the wrong form for the call, from a proxy or another server."""


def build(cls: type[T], payload: Any, **extra: Any) -> T:
    """Build `cls` from a JSON object's known fields; UnexpectedResponseError for other values."""
    if not isinstance(payload, dict):
        raise UnexpectedResponseError(
            f"expected a JSON object for {cls.__name__}, got {payload!r:.200}"
        )
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    known = {name: value for name, value in payload.items() if name in names}
    try:
        return cls(**{**known, **extra})
    except TypeError as error:
        raise UnexpectedResponseError(f"{cls.__name__}: {error}; got {payload!r:.200}") from None


def items(payload: Any, key: str = "data") -> list[Any]:
    """Return the list under `key` of a JSON object; UnexpectedResponseError without one."""
    found = payload.get(key) if isinstance(payload, dict) else None
    if not isinstance(found, list):
        raise UnexpectedResponseError(
            f"expected a JSON object with a list {key!r}, got {payload!r:.200}"
        )
    return found


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens that a request was charged for."""

    prompt_tokens: int = 0
    total_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Embedding(Generic[V]):
    """One text's vector: floats, or little-endian float32 bytes if asked for with `as_="bytes"`."""

    index: int
    embedding: V


@dataclass(frozen=True, slots=True)
class Embeddings(Generic[V]):
    """Vectors in the order of the input."""

    model: str
    data: list[Embedding[V]]
    usage: Usage
    request_id: str | None = None

    @property
    def vectors(self) -> list[V]:
        """The bare vectors."""
        return [item.embedding for item in self.data]


@dataclass(frozen=True, slots=True)
class RerankResult:
    """One document's relevance; `index` is its place, from 0, among the given documents."""

    index: int
    relevance_score: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Reranking:
    """The documents of a rerank by relevance, best first."""

    model: str
    results: list[RerankResult]
    id: str = ""
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the server offers; `details` is the whole JSON object."""

    id: str
    created: int = 0
    owned_by: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Collection:
    """A named set of documents; `stats` is present if one collection was requested."""

    name: str
    id: str = ""
    dimension: int = 0
    metric: str = "cosine"
    model: str | None = None
    fingerprint: str = ""
    chunking: dict[str, Any] | None = None
    query_prompt: str = ""
    document_prompt: str = ""
    created: int = 0
    stats: dict[str, Any] | None = None
    placed: bool = False


@dataclass(frozen=True, slots=True)
class ShardReplica:
    """A process' copy of a shard: new, filling, serving or leaving; `why` is the reason why it is not complete."""

    name: str
    state: str
    alive: bool = False
    rows: int | None = None
    bytes: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a collection: the documents whose hashes are from `low` to below `high`."""

    shard: int
    low: int
    high: int
    replicas: list[ShardReplica]
    rows: int | None = None
    bytes: int | None = None
    served: bool = False
    split: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ShardList:
    """The shards of a collection; `missing` are the numbers of shards that no living process serves."""

    data: list[Shard]
    placed: bool = False
    layout: int = 0
    replicas: int = 1
    missing: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tuning:
    """A tuning of a collection's index: its goal, its steps, the settings that no other beats, and the chosen plan.

    `state` is asked, exploring, building, done, failed or cancelled, and `why` the reason of a failure. `measured`
    holds the measured figures of the built index; `in_force` is the plan of the index that searches use.
    """

    id: str
    state: str
    goal: dict[str, Any] = field(default_factory=dict)
    plan_only: bool = False
    steps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    explored: int = 0
    front: list[dict[str, Any]] = field(default_factory=list)
    chosen: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    in_force: dict[str, Any] | None = None
    why: str = ""
    began_ms: int = 0
    ended_ms: int = 0


@dataclass(frozen=True, slots=True)
class MapPoint:
    """The place of a chunk on a map; a free vector has no `id`."""

    x: float
    y: float
    id: str = ""
    chunk: int = 0
    title: str | None = None


@dataclass(frozen=True, slots=True)
class CollectionMap:
    """A sample, at `computed_at`, of a collection's chunks in the plane in which they differ most.

    `explained` is the share of the differences that the plane shows. `pending` is True while the map is being drawn.
    """

    collection: str
    points: list[MapPoint]
    basis: str | None = None
    computed_at: float | None = None
    pending: bool = False
    rows: int = 0
    explained: float | None = None
    ranges: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MapPositions:
    """The places of documents on the map of `basis`; `pending` if there is no map yet."""

    data: list[MapPoint]
    basis: str | None = None
    pending: bool = False


@dataclass(frozen=True, slots=True)
class WrittenDocument:
    """The result for one document: `status` is "stored" or "unchanged"."""

    id: str
    status: str = "stored"
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """A durable write; with its `applied` as `after=`, a search is certain to see it."""

    data: list[WrittenDocument]
    applied: Any = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Deleted:
    """The number of deleted documents; `applied` is the `after=` for searches without them."""

    deleted: int
    applied: Any = None


@dataclass(frozen=True, slots=True)
class Document:
    """A stored document; text, metadata and vectors are present only if requested."""

    id: str
    hash: str = ""
    chunks: int = 0
    text: str | None = None
    metadata: dict[str, Any] | None = None
    vectors: list[list[float]] | None = None


@dataclass(frozen=True, slots=True)
class DocumentPage:
    """One page of a listing; `next` is the `after=` of the following one."""

    data: list[Document]
    has_more: bool = False
    next: str | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk found: its document, its character offsets in it, and its score (higher is nearer).

    `scores` holds, if requested, the scores of the searches that found the hit: `vector`, `text`.
    """

    id: str
    score: float
    chunk: int = 0
    start: int = 0
    end: int = 0
    text: str | None = None
    metadata: dict[str, Any] | None = None
    scores: dict[str, float] | None = None

    @property
    def page(self) -> int:
        """The page of the document on which the hit begins, as stored by `spillway ingest`; 0 without pages."""
        told = self.metadata or {}
        starts, first = told.get("pages"), told.get("first_page", 1)
        if not isinstance(starts, list) or not starts or not isinstance(first, int):
            return 0
        before = sum(isinstance(start, int) and start <= self.start for start in starts)
        return first + max(0, before - 1)


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The report of a search: the kind of index, the effort used, the milliseconds it took, and its time budget.

    `predicted_ms` is None if nothing was known; `fits` tells whether the effort was predicted to end in time. `lists`
    is the number of inverted lists read in all shards, and `quantizer` the hash of their quantizer (several separated
    by commas); `scanned` names the lists of each query of the request, nearest first, if `include_lists` was set.
    """

    kind: str
    effort: int | str
    took_ms: float
    budget_ms: float | None = None
    predicted_ms: float | None = None
    fits: bool | None = None
    lists: int = 0
    quantizer: str = ""
    scanned: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Hits of one query, best first.

    `mode` is "vector", "text" or "hybrid", `path` the kind of search by vectors, and `search` its report. `missing` are
    the shards that did not answer a partial search, as {"shard", "why"}.
    """

    data: list[Hit]
    path: str = ""
    applied: Any = None
    request_id: str | None = None
    search: SearchReport | None = None
    mode: str = "vector"
    missing: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EffortExplanation:
    """One effort: its measured recall, its path, and the time within which nearly every search of one query ends."""

    effort: int | str
    recall: float | None
    path: str
    predicted_ms: float | None


@dataclass(frozen=True, slots=True)
class FilterExplanation:
    """The path of a filter: the number of vectors that match, their share of all, and the reason for the path."""

    matching: int
    selectivity: float
    path: str
    effort: int | str
    predicted_ms: float | None
    why: str


@dataclass(frozen=True, slots=True)
class ShardExplanation:
    """One shard's searches: its kind of index and why, its present effort, and the recall and time of each effort."""

    shard: int
    kind: str
    why: str
    live: int
    newer: int
    path: str
    effort: int | str
    recall: float
    recall_goal: float
    efforts: list[EffortExplanation]
    bytes: dict[str, int]
    deleted_ratio: float = 0.0
    filter: FilterExplanation | None = None
    plan: dict[str, Any] | None = None
    applied: str = ""
    quantizer: str = ""
    coding: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The searches of a collection for `k` hits, shard by shard."""

    collection: str
    k: int
    shards: list[ShardExplanation]


@dataclass(frozen=True, slots=True)
class Request:
    """A request's state: queued, running, or its outcome with `result` or `error`."""

    id: str
    state: str
    created: float = 0
    deadline: float = 0
    result: Any = None
    error: Any = None


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """One event of a request's log; `after=index` continues after it."""

    index: int
    event: str
    data: Any = None


@dataclass(frozen=True, slots=True)
class StageRun:
    """One run of a stage of a grounded answer, in milliseconds from the request's acceptance; runs may overlap."""

    name: str
    start_ms: float = 0.0
    end_ms: float = 0.0
    nth: int = 0


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """The jobs of a request in every service, with the times of their events in the API's form; see the API's docs.

    `stages` are the stages of a grounded answer; `now` is the bus' clock, in seconds since the epoch.
    """

    id: str
    now: float = 0.0
    jobs: list[dict[str, Any]] = field(default_factory=list)
    stages: list[StageRun] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A conversation that the server keeps for `ttl_s` seconds after its last use.

    `running` is the request of its running turn; `messages` are present only if requested; a `pinned` session's
    computed pages are kept; `details` is the whole JSON object.
    """

    id: str
    model: str = ""
    version: int = 0
    turns: int = 0
    tokens: int = 0
    ttl_s: int = 0
    pinned: bool = False
    created: float = 0
    updated: float = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    running: str | None = None
    messages: list[dict[str, Any]] | None = None
    details: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class LoadedPages:
    """The numbers of pages sent for a session, by result.

    `exists` were stored already, `refused` found no room, `damaged` and `foreign` ones were dropped; `bytes` is the
    size of the stored ones.
    """

    session: str = ""
    stored: int = 0
    exists: int = 0
    refused: int = 0
    damaged: int = 0
    foreign: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class SessionPage:
    """One page of a listing; `next` is the `after=` of the following one."""

    data: list[SessionInfo]
    has_more: bool = False
    next: str | None = None


@dataclass(frozen=True, slots=True)
class DeletedSession:
    """The proof of a session's deletion: the removed data by kind, and, for each store, the search afterwards."""

    id: str
    deleted: bool = True
    removed: dict[str, int] = field(default_factory=dict)
    proof: Any = None
    details: dict[str, Any] = field(default_factory=dict, repr=False)
