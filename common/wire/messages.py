"""Every message on the wire, typed and versioned: what rides on lanes, in logs, in journals and in registries.

The codec is MessagePack, the schema msgspec; unknown fields are ignored, unknown versions refused. Vectors travel as
little-endian float32 bytes, row-major, so that the router can pass them on without numpy.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from common.errors import SpillwayError

VERSION = 1
MAX_MESSAGE_BYTES = 8 * 1024 * 1024


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base: `v` is the message's version."""

    v: int = VERSION


class BadMessage(ValueError):
    """Bytes that are not a message of this version; says which type was expected."""


# -- work: what a job asks of a worker ---------------------------------------------------------------------


class EmbedWork(Message, frozen=True, tag="embed"):
    """Embed token lists; `fingerprint` must be the worker's own."""

    fingerprint: str
    tokens: list[list[int]]


class ScoreWork(Message, frozen=True, tag="score"):
    """Score documents against one query.

    With a cross-encoder `pairs` holds the joined token lists and `types` their token types; with an encoder
    `query` and `documents` are embedded and compared by cosine.
    """

    fingerprint: str
    query: list[int] = []
    documents: list[list[int]] = []
    pairs: list[list[int]] = []
    types: list[list[int]] = []


class SearchWork(Message, frozen=True, tag="search"):
    """Search one shard with `len(vectors) / (4 * dimension)` queries at once.

    `filter` is the JSON filter of the API; `after` is an applied id the shard must have reached (read your writes).
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


class DocumentsWork(Message, frozen=True, tag="documents"):
    """Read documents: by ids, a page after a cursor, or the shard's statistics."""

    collection: str
    op: Literal["get", "list", "stats"]
    ids: list[str] = []
    cursor: str | None = None
    limit: int = 100
    filter: dict[str, Any] | None = None
    with_text: bool = True
    with_vectors: bool = False
    after: str | None = None
    shard: int = 0


class RequestWork(Message, frozen=True, tag="request"):
    """A request of several jobs, driven by the router that leases it (`kind` names the pipeline)."""

    kind: str
    tenant: str
    body: bytes


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn; `temperature` 0 is greedy, `top_k` 0 and `min_p` 0 are off; `seed` is fixed at admission.

    `presence` and `frequency` count generated tokens, `repetition` prompt and generated ones; `bias` adds to logits.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    seed: int = 0
    bias: dict[int, float] = {}


class SessionTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """The turn a generation is: `finish` appends it to its session, if that still stands at `version`.

    `history` counts the tokens at the head of the prompt that the session has already (0: the history is replaced);
    `messages` is the JSON list of this turn's messages as rendered, `shown` as the client sent them (empty: the same).
    `retrieval` is the JSON object of that name of a grounded answer's response (empty: not grounded).
    """

    session: str
    version: int
    history: int
    messages: bytes
    shown: bytes = b""
    retrieval: bytes = b""
    ttl_s: int = 0
    keep_partial: bool = False


class GenerateWork(Message, frozen=True, tag="generate"):
    """Generate `n` continuations of each prompt (token ids, history included); choice c belongs to prompt c // n.

    Generation of a choice ends at one of `stop_ids` (unless `ignore_eos`), before the text of one of `stop`, or after
    `max_new` tokens; not before `min_new`. `logprobs` is how many alternatives to report for each token, -1 for none.
    `forced` is an answer to give instead of computing one. `scope` keeps tenants' pages apart. A `low` one waits for
    those that are not.
    """

    fingerprint: str
    scope: str
    prompts: list[list[int]]
    max_new: int
    n: int = 1
    sampling: SamplingParams = SamplingParams()
    min_new: int = 0
    stop: list[str] = []
    stop_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int = -1
    low: bool = False
    forced: list[int] | None = None
    turn: SessionTurn | None = None


class SessionWork(Message, frozen=True, tag="session"):
    """A session's cold life, done by kv_store: list a tenant's; export, import, delete, pin or unpin one.

    `body` is the exported document of an import, `ttl_s` how long what it makes is kept after its last turn; `session`
    is the id (the new one's, for an import).
    """

    op: Literal["list", "export", "import", "delete", "pin", "unpin", "places"]
    tenant: str
    session: str = ""
    cursor: str | None = None
    limit: int = 100
    body: bytes = b""
    ttl_s: int = 0


Work = EmbedWork | ScoreWork | SearchWork | DocumentsWork | RequestWork | GenerateWork | SessionWork


# -- results: what a job's last event carries --------------------------------------------------------------


class EmbedResult(Message, frozen=True, tag="embed"):
    """`vectors` holds one float32 row of `dimension` per text, in the order asked."""

    dimension: int
    vectors: bytes
    tokens: int


class ScoreResult(Message, frozen=True, tag="score"):
    """One score per document, in the order asked; `raw` before the sigmoid, where there is one."""

    scores: list[float]
    raw: list[float]
    tokens: int


class Hit(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chunk found: its document, where it stands in it (character offsets), and how near it is."""

    id: str
    score: float
    chunk: int = 0
    start: int = 0
    end: int = 0
    text: str | None = None
    metadata: dict[str, Any] | None = None


class SearchResult(Message, frozen=True, tag="search"):
    """Hits of each query, best first; `path` says how they were found; `applied` is the shard's applied id."""

    hits: list[list[Hit]]
    applied: str
    path: Literal["exact", "graph", "filtered-exact", "filtered-graph", "scan"]


class StoredDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document as stored; `vectors` (float32 rows, one per chunk) only when asked for."""

    id: str
    hash: str
    chunks: int
    text: str | None = None
    metadata: dict[str, Any] | None = None
    vectors: bytes | None = None


class DocumentsResult(Message, frozen=True, tag="documents"):
    """Documents found, the cursor of the next page (None at the end), and statistics when asked."""

    documents: list[StoredDocument] = []
    cursor: str | None = None
    stats: dict[str, Any] | None = None
    applied: str = "0-0"


class RequestResult(Message, frozen=True, tag="request"):
    """What a request of several jobs ended with: a JSON body, or the jobs whose results make it up."""

    body: bytes = b""
    jobs: list[str] = []
    info: dict[str, Any] = {}


class Logprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One token's id, its bytes (`raw`) and log probability, and the likeliest alternatives where asked."""

    id: int
    raw: bytes
    logprob: float
    top: list[Logprob] = []


FinishReason = Literal["stop", "length"]


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one choice gained in one event: tokens, and the text that is certain by now.

    `at` is the index of the event it was first logged in, so that a folded log still tells what a client has.
    `finish` is set on a choice's last piece; `stopped_by` is the stop string or the text of the stop token.
    """

    at: int
    choice: int
    tokens: list[int] = []
    text: str = ""
    finish: FinishReason | None = None
    stopped_by: str | None = None
    logprobs: list[Logprob] = []


class Delta(Message, frozen=True, tag="delta"):
    """The data of a generation's progress event: pieces in rising order of (at, choice)."""

    pieces: list[Piece]


class GenerateResult(Message, frozen=True, tag="generate"):
    """A generation's outcome; its text is in the progress events before. `cached` prompt tokens were not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    version: int | None = None


class SessionResult(Message, frozen=True, tag="session"):
    """kv_store's answer as JSON: a page of sessions, an exported document, a session, or a proof of deletion."""

    body: bytes


Result = (
    EmbedResult
    | ScoreResult
    | SearchResult
    | DocumentsResult
    | RequestResult
    | GenerateResult
    | SessionResult
)


# -- events: the log of one job ----------------------------------------------------------------------------

Outcome = Literal["result", "error", "expired", "cancelled", "dead"]


class ErrorDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an error outcome is answered over HTTP: its status, the field at fault, and when coming back helps."""

    status: int
    param: str | None = None
    retry_after_s: float | None = None


class Event(Message, frozen=True):
    """One entry of a job's log; `index` counts from 0 without gaps.

    `kind` is "progress" or an outcome, which ends the job; `data` is an encoded Result or progress of the
    service; `code`, `message` and `error` describe an error outcome. Logs that earlier versions wrote have no
    `error`: there `data` may be JSON with `retry_after_s`.
    """

    index: int
    kind: Literal["progress", "result", "error", "expired", "cancelled", "dead"]
    data: bytes = b""
    code: str = ""
    message: str = ""
    error: ErrorDetails | None = None

    @property
    def ends(self) -> bool:
        """True if the job is over with this event."""
        return self.kind != "progress"


def error_event(index: int, kind: Outcome, error: SpillwayError) -> Event:
    """Return the event that ends a job with an error, and all that its client is to know of the error."""
    details = ErrorDetails(
        status=error.http_status, param=error.param, retry_after_s=error.retry_after_s
    )
    return Event(index=index, kind=kind, code=error.code, message=error.message, error=details)


# -- sessions: a conversation, in the family of its generations ---------------------------------------------


class Turn(Message, frozen=True):
    """One finished turn of a session: its messages, its answer, and their tokens.

    A session's tokens are those of all turns since the last one that replaced the history (`history` 0): each turn's
    `prompt` (without the history) and `output` (without the token that stopped it). `partial` is a turn that was
    cancelled or failed and kept. `retrieval` is as in SessionTurn.
    """

    job: str
    history: int
    messages: bytes
    answer: str
    prompt: list[int]
    output: list[int]
    finish: str
    at_ms: int
    shown: bytes = b""
    partial: bool = False
    retrieval: bytes = b""


class SessionRecord(Message, frozen=True):
    """A session as stored, without its turns; `busy` is the job that holds its turn lock.

    `pinned`: its pages are not evicted from Redis.
    """

    id: str
    tenant: str
    model: str
    fingerprint: str
    version: int
    tokens: int
    turns: int
    ttl_s: int
    created_ms: int
    updated_ms: int
    metadata: bytes = b"{}"
    busy: str = ""
    deleted: bool = False
    pinned: bool = False


# -- writes: a shard's state, applied by every replica in order ---------------------------------------------


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


# -- registries ---------------------------------------------------------------------------------------------


class WorkerRecord(Message, frozen=True):
    """What a worker publishes in `{f}:workers`; depth is what all its running and queued work may hold.

    Predicted seconds of a batch = beta_s + alpha_items_s * items + alpha_tokens_s * tokens, of which `r2` says how
    much they explain. `limit_items` and `limit_tokens` are its largest batch, by which the door plans (0: it plans
    none); predictions are off by `late_s` seconds or `late_share` of themselves, 99.9 % of them by less; without a
    deadline of its own a request should end within `slo_s` (0: by its deadline). `depth_queries` is the depth in
    queries of the count policies. A `closed` worker serves its own lane only. `batches` and `tokens` count what it
    ran since its start, the fields after them tell of the last batch; they are as old as the last heartbeat. `place`
    is where its process can be looked for.
    """

    worker: str
    classes: list[str]
    device: str
    depth_items: int
    depth_tokens: int
    alpha_items_s: float = 0.0
    alpha_tokens_s: float = 0.0
    beta_s: float = 0.0
    r2: float = 0.0
    limit_items: int = 0
    limit_tokens: int = 0
    late_s: float = 0.0
    late_share: float = 0.0
    slo_s: float = 0.0
    depth_queries: int = 0
    closed: bool = False
    fingerprint: str = ""
    draining: bool = False
    started_ms: int = 0
    pid: int = 0
    service: str = ""
    batches: int = 0
    tokens: int = 0
    batch_items: int = 0
    batch_tokens: int = 0
    batch_s: float = 0.0
    place: str = ""


class Held(Message, frozen=True):
    """What a worker has of a session: tokens on its device, tokens on its host only, and the last full page's id."""

    worker: str
    device_tokens: int
    host_tokens: int
    page: bytes
    at_ms: int


class Forgot(Message, frozen=True):
    """What a worker forgot of a deleted session: page ids it looked for, and how many its device and its host had."""

    worker: str
    looked: int
    device: int
    host: int


class DepthRecord(Message, frozen=True):
    """What probes of one device told: seconds of n queries at once = beta_s + alpha_s * n, explained by `r2`.

    `by_line` is the depth by that line, `depth` after tuning; `points` are (queries, seconds of the last answer).
    """

    alpha_s: float
    beta_s: float
    r2: float
    slo_s: float
    by_line: int
    depth: int
    points: list[tuple[int, float]]
    at_ms: int = 0


class ModelCard(Message, frozen=True):
    """What router and worker must agree on about a model; the tokenizer lies beside it (`Registry.publish_card`).

    A generator's `max_tokens` is its context; `sampling` is what it uses where a client says nothing; `stop_ids` end
    its turns; `grounding_template` renders passages and question into one user message (empty: the router's own).
    """

    name: str
    kind: Literal["embed", "rerank", "generate"]
    family: str
    fingerprint: str
    dimension: int
    max_tokens: int
    partitions: int = 1
    pair_separator: bool = False
    query_prompt: str = ""
    document_prompt: str = ""
    created_ms: int = 0
    chat_template: str = ""
    grounding_template: str = ""
    bos: str = ""
    eos: str = ""
    stop_ids: list[int] = []
    sampling: SamplingParams = SamplingParams()


class Chunking(msgspec.Struct, frozen=True):
    """How a collection's documents are split, in tokens of its encoder."""

    max_tokens: int = 200
    overlap_tokens: int = 32


class CollectionRecord(Message, frozen=True):
    """A collection as registered; `id` is new at every creation, so old writes never reach a new namesake."""

    id: str
    tenant: str
    name: str
    dimension: int
    metric: Literal["cosine", "dot", "l2"]
    model: str | None = None
    fingerprint: str = ""
    query_prompt: str = ""
    document_prompt: str = ""
    chunking: Chunking = Chunking()
    shards: int = 1
    created_ms: int = 0


class DeadLetter(Message, frozen=True):
    """A convicted job with what is needed to understand and to replay it."""

    job: str
    tenant: str
    payload: bytes
    items: int
    tokens: int
    code: str
    message: str
    trace: str
    attempts: int
    at_ms: int


_encoder = msgspec.msgpack.Encoder()
_work = msgspec.msgpack.Decoder(Work)
_result = msgspec.msgpack.Decoder(Result)
M = TypeVar("M", bound=Message)
_decoders: dict[type[Message], msgspec.msgpack.Decoder[Any]] = {}


def encode(message: Message) -> bytes:
    """Encode any message; ValueError if it exceeds MAX_MESSAGE_BYTES."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"{type(message).__name__} of {len(data)} bytes: at most {MAX_MESSAGE_BYTES} are allowed"
        )
    return data


def _checked(decoder: msgspec.msgpack.Decoder[Any], name: str, data: bytes) -> Any:
    try:
        message = decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise BadMessage(f"{name}: {error}") from error
    if message.v != VERSION:
        raise BadMessage(f"{name}: version {message.v}, expected {VERSION}")
    return message


def decode(data: bytes, cls: type[M]) -> M:
    """Decode one message of a known type; BadMessage if it is not one."""
    decoder = _decoders.get(cls)
    if decoder is None:
        decoder = _decoders[cls] = msgspec.msgpack.Decoder(cls)
    message: M = _checked(decoder, cls.__name__, data)
    return message


def decode_work(data: bytes) -> Work:
    """Decode a job's payload by its tag; BadMessage if it is none of ours."""
    work: Work = _checked(_work, "work", data)
    return work


def decode_delta(data: bytes) -> Delta:
    """Decode the data of a generation's progress event; BadMessage if it is none."""
    return decode(data, Delta)


def decode_result(data: bytes) -> Result:
    """Decode a result by its tag; BadMessage if it is none of ours."""
    result: Result = _checked(_result, "result", data)
    return result
