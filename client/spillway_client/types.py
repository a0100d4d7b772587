"""Results of calls as frozen dataclasses: fields the server adds later are ignored, missing ones take defaults."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from .errors import SpillwayError

V = TypeVar("V", list[float], bytes)
T = TypeVar("T")
SearchMode = Literal["vector", "text", "hybrid"]


class UnexpectedResponseError(SpillwayError):
    """A successful answer that is not what this call returns (another server, or a proxy)."""


def build(cls: type[T], payload: Any, **extra: Any) -> T:
    """Build `cls` from a JSON object, keeping the fields it has; raises UnexpectedResponseError."""
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
    """Return the list under `key` of a JSON object; raises UnexpectedResponseError."""
    found = payload.get(key) if isinstance(payload, dict) else None
    if not isinstance(found, list):
        raise UnexpectedResponseError(
            f"expected a JSON object with a list {key!r}, got {payload!r:.200}"
        )
    return found


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a request was charged for."""

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
    """One document's relevance; `index` counts in the documents given."""

    index: int
    relevance_score: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Reranking:
    """Documents by relevance, best first."""

    model: str
    results: list[RerankResult]
    id: str = ""
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model the server offers; `details` holds everything it says about it."""

    id: str
    created: int = 0
    owned_by: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Collection:
    """A named set of documents; `stats` is present where one collection was asked for."""

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
    """A process' copy of a shard: new, filling, serving or leaving; `why` says what keeps it from being complete."""

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
    """The shards of a collection; `missing` are those that no living process serves."""

    data: list[Shard]
    placed: bool = False
    layout: int = 0
    replicas: int = 1
    missing: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tuning:
    """A tuning of a collection's index: its goal, its steps, the settings that none beats, and the plan chosen.

    `state` is asked, exploring, building, done, failed or cancelled, and `why` says what failed. `measured` is what the
    index that was built does; `in_force` is the plan that searches go by.
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
    """Where a chunk lies on a map; a free vector has no `id`."""

    x: float
    y: float
    id: str = ""
    chunk: int = 0
    title: str | None = None


@dataclass(frozen=True, slots=True)
class CollectionMap:
    """A sample of a collection's chunks in the plane in which they differ most, as it was at `computed_at`.

    `explained` is the share of the differences that the plane shows. `pending`: it is being drawn, or drawn anew.
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
    """Where documents lie on the map of `basis`; `pending` if there is no map yet."""

    data: list[MapPoint]
    basis: str | None = None
    pending: bool = False


@dataclass(frozen=True, slots=True)
class WrittenDocument:
    """What became of one document: `status` is "stored" or "unchanged"."""

    id: str
    status: str = "stored"
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """A write that is synced; pass `applied` as `after=` to a search to read it for certain."""

    data: list[WrittenDocument]
    applied: Any = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Deleted:
    """How many of the documents existed, and the write to read after."""

    deleted: int
    applied: Any = None


@dataclass(frozen=True, slots=True)
class Document:
    """A stored document; text, metadata and vectors only as far as they were asked for."""

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

    `scores` holds, where asked for, the scores of the searches that found it: `vector`, `text`.
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
        """The page of its document that it begins on, as `spillway ingest` stores pages; 0 where there are none."""
        told = self.metadata or {}
        starts, first = told.get("pages"), told.get("first_page", 1)
        if not isinstance(starts, list) or not starts or not isinstance(first, int):
            return 0
        before = sum(isinstance(start, int) and start <= self.start for start in starts)
        return first + max(0, before - 1)


@dataclass(frozen=True, slots=True)
class SearchReport:
    """How a search went: the kind of index, the effort used, the milliseconds it took, and how its time budget was met.

    `predicted_ms` is None where nothing was known; `fits` says whether an effort was predicted to end in time. `lists`
    inverted lists were read in all shards, made by the `quantizer` of this hash (several with commas); `scanned` names
    those of each query of the request, nearest first, where `include_lists` asked for them.
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

    `mode` says what was compared, `path` how vectors were searched, and `search` how that went. `missing` are the
    shards that did not answer a partial search, as {"shard", "why"}.
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
    """One effort: the recall measured of it, its way, and within what nearly every search of one query ends."""

    effort: int | str
    recall: float | None
    path: str
    predicted_ms: float | None


@dataclass(frozen=True, slots=True)
class FilterExplanation:
    """The way of a filter: how many vectors it allows, their share of all, and why it goes this way."""

    matching: int
    selectivity: float
    path: str
    effort: int | str
    predicted_ms: float | None
    why: str


@dataclass(frozen=True, slots=True)
class ShardExplanation:
    """How one shard searches: the kind of its index and why, what it uses, and what each effort finds and takes."""

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
    """How a collection searches for `k` hits, shard by shard."""

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
    """One event of a request's log; `index` resumes after it."""

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
    """The jobs of a request in every service, with the times of their events as the API tells them; see the API's docs.

    `stages` are those of a grounded answer; `now` is the bus' clock, in seconds since the epoch.
    """

    id: str
    now: float = 0.0
    jobs: list[dict[str, Any]] = field(default_factory=list)
    stages: list[StageRun] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A conversation the server keeps, `ttl_s` seconds from its last use.

    `running` is the request that is its turn now; `messages` only where asked for; `pinned`: what was computed for it
    stays; `details` is all that was said.
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
    """What became of the pages sent for a session.

    `exists` were there already, `refused` found no room, `damaged` and `foreign` ones were dropped; `bytes` stored.
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
    """The end of a session: how much of each kind was removed, and, store by store, what was searched afterwards."""

    id: str
    deleted: bool = True
    removed: dict[str, int] = field(default_factory=dict)
    proof: Any = None
    details: dict[str, Any] = field(default_factory=dict, repr=False)
