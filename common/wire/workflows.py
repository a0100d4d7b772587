"""Requests of several jobs: the plan, from which any router can go on, the response options, and the result."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from common.types.generation import OutputGrammar, SamplingParams
from common.wire.control import ExtensionRule
from common.wire.message import Message
from common.wire.registry import CollectionRecord
from common.wire.search import Diversity, Effort, Mode


class RequestWork(Message, frozen=True, tag="request"):
    """A request of several jobs, run by the router that leases it: `kind` names the workflow; `body` holds its plan.

    An `attached` request ends with its client's connection, so nobody asks for its jobs long after its result.
    """

    kind: str
    tenant: str
    body: bytes
    attached: bool = False


class RequestResult(Message, frozen=True, tag="request"):
    """The result of a request of several jobs: a JSON body, or the jobs whose results make up the response."""

    body: bytes = b""
    jobs: list[str] = []
    info: dict[str, Any] = {}


# -- responses -----------------------------------------------------------------------------------------


ToolFormat = Literal["hermes", "llama", "mistral"]


class AnswerMarks(Struct, frozen=True, omit_defaults=True):
    """The marks in an answer's text besides content: calls of `names` in a `format`, and reasoning.

    `reasoning` is "marked" if an answer may begin with reasoning, "opened" if the prompt began it, else empty.
    """

    format: ToolFormat | None = None
    names: list[str] = []
    reasoning: Literal["", "marked", "opened"] = ""


class ResponseOptions(Struct, frozen=True, omit_defaults=True):
    """The format in which a client wants the result of a request; stored with requests that can be read later."""

    kind: str
    model: str = ""
    base64: bool = False
    dimensions: int | None = None
    tokens: int = 0
    tei: bool = False
    v2: bool = False
    raw: bool = False
    top_n: int | None = None
    texts: list[str] | None = None
    many: bool = False
    count: int = 0
    include: list[str] = []
    doc: str = ""
    cursor: str | None = None
    # of a generation:
    fingerprint: str = ""
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: int = -1
    echo: list[str] = []
    session: str = ""
    resume_s: float = 0.0
    marks: AnswerMarks | None = None
    asked: bytes = b""  # of a response: the JSON fields that repeat its request

    @property
    def shapes_vectors(self) -> bool:
        """True if the response to vectors or scores depends on these options, not on the result alone."""
        plain = ResponseOptions(kind=self.kind, model=self.model, tokens=self.tokens)
        return self.kind in {"embed", "rerank"} and self != plain


def encode_options(options: ResponseOptions) -> bytes:
    """Encode response options for a job record."""
    return msgspec.msgpack.encode(options)


def decode_options(raw: bytes) -> ResponseOptions:
    """Decode the response options of a job record; msgspec.MsgspecError for other bytes."""
    return msgspec.msgpack.decode(raw, type=ResponseOptions)


# -- requests as plans hold them -----------------------------------------------------------------------


class GenerationOptions(Struct, frozen=True, omit_defaults=True):
    """The fields of a GenerateWork without its prompts; `max_new` 0 means the rest of the context, up to a default.

    A generation with `low` priority waits for all others. A rule has at most as many extensions as fit before the last
    token.
    """

    sampling: SamplingParams
    max_new: int = 0
    min_new: int = 0
    n: int = 1
    stop: list[str] = []
    stop_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int = -1
    low: bool = False
    grammar: OutputGrammar | None = None
    shown: list[int] = []
    extensions: ExtensionRule | None = None


class RewriteOptions(Struct, frozen=True):
    """Rewrite a follow-up question to stand alone: by `model`, in at most `max_tokens` tokens, or by a rule."""

    model: str = ""
    max_tokens: int = 64
    by: Literal["model", "rule"] = "model"


class RerankOptions(Struct, frozen=True):
    """Order the best `candidates` of a search by the scores of the cross-encoder `model`."""

    model: str = ""
    candidates: int = 16


class RetrievalOptions(Struct, frozen=True):
    """Search `collection` for the last user message of a chat, and answer from the `k` best passages.

    With `rewrite` a follow-up question is rewritten before the search, with `rerank` the hits are scored once more.
    With an `interval` of tokens the search is repeated while the answer is written, see
    `services.router.text.intervals`; a plan has a number in place of "auto". A `stale` search runs beside the
    generation; its passages lose their first `shift` tokens (None: as many as an interval has). With `late` "wait" the
    generation waits for a late result, with "keep" the result takes effect an interval later. `place` puts the passages
    before or after the question. `precomputed` passages are computed alone and kept for other prompts, an
    approximation.
    """

    collection: str
    k: int = 5
    filter: dict[str, Any] | None = None
    min_score: float | None = None
    include_passages: bool = False
    mode: Mode = "vector"
    mmr: Diversity | None = None
    rewrite: RewriteOptions | None = None
    rerank: RerankOptions | None = None
    effort: Effort | None = None
    interval: int | Literal["auto"] = 0
    stale: bool = True
    late: Literal["wait", "keep"] = "wait"
    shift: int | None = None
    place: Literal["before", "after"] = "before"
    precomputed: bool = False


class ChatRequest(Struct, frozen=True):
    """A validated chat whose prompt is not yet rendered; `messages` are those of this turn.

    The chat template gets `tools`; `marks` describe how the answer is parsed.
    """

    model: str
    scope: str
    messages: list[dict[str, Any]]
    options: GenerationOptions
    stream: bool = False
    include_usage: bool = False
    session: str = ""
    keep_partial: bool = False
    retrieval: RetrievalOptions | None = None
    tools: list[dict[str, Any]] = []
    marks: AnswerMarks = AnswerMarks()


class SearchRequest(Struct, frozen=True):
    """A validated search: `count` queries as token lists to embed, or as float32 rows in `vectors`, and as `texts`.

    `ef` and `exact` are the effort as older routers write it. `depth` is the number of best hits of each search that
    are ranked once more; 0 keeps the search's order. The shards within reach answer a `partial` search. With
    `following` hits have the text after them in their document.
    """

    many: bool
    count: int
    tokens: list[list[int]]
    vectors: bytes
    k: int
    filter: dict[str, Any] | None
    min_score: float | None
    include_text: bool
    include_metadata: bool
    ef: int | None = None
    exact: bool = False
    after: str | None = None
    effort: Effort | None = None
    budget_ms: float | None = None
    spent_ms: float = 0.0
    mode: Mode = "vector"
    texts: list[str] = []
    depth: int = 0
    mmr: Diversity | None = None
    with_scores: bool = False
    partial: bool = False
    with_lists: bool = False
    following: bool = False


class StoreItem(Struct, frozen=True, array_like=True):
    """One document of a write: either the text still has to be split and embedded, or `vector` is ready."""

    id: str
    hash: str
    text: str | None
    vector: bytes | None
    metadata: dict[str, Any]


# -- plans ---------------------------------------------------------------------------------------------


class ParcelsPlan(Struct, frozen=True, tag="parcels"):
    """Embeddings or scores of many parcels: encoded Work, items and tokens of each.

    With `whole` all parcels are admitted at once, or the request is refused.
    """

    model: str
    options: ResponseOptions = field(name="view")
    parcels: list[tuple[bytes, int, int]]
    whole: bool = False


class SearchPlan(Struct, frozen=True, tag="search"):
    """Embed the queries, then search every shard."""

    collection: CollectionRecord
    ask: SearchRequest
    parcel: tuple[int, int]
    queries: int


class WritePlan(Struct, frozen=True, tag="write"):
    """Store documents: `items` is an encoded list of StoreItem; `parcel` fixes how texts are cut into jobs."""

    collection: CollectionRecord
    items: bytes
    parcel: tuple[int, int]


class DeletePlan(Struct, frozen=True, tag="delete"):
    """Delete documents by id."""

    collection: CollectionRecord
    ids: list[str]
    single: bool = False


class ReembedPlan(Struct, frozen=True, tag="reembed"):
    """Embed all texts of a collection with another encoder, then let the collection's name mean the new vectors."""

    collection: CollectionRecord
    target: CollectionRecord
    parcel: tuple[int, int]


class GroundPlan(Struct, frozen=True, tag="ground", omit_defaults=True):
    """Embed a chat's question, search, and answer from the passages found.

    `asked` are the queries of `search` as texts, the most specific one last. `rewriting` is the encoded generate job
    that rewrites the question, with its items and tokens; None without a model for it.
    """

    collection: CollectionRecord
    search: SearchRequest
    parcel: tuple[int, int]
    queries: int
    chat: ChatRequest
    options: ResponseOptions = field(name="view")
    asked: list[str] = []
    rewriting: tuple[bytes, int, int] | None = None


Plan = ParcelsPlan | SearchPlan | WritePlan | DeletePlan | ReembedPlan | GroundPlan
_decoder = msgspec.msgpack.Decoder(Plan)


def decode_plan(raw: bytes) -> Plan:
    """Decode a plan by its tag; msgspec.MsgspecError for an unknown tag or other bytes."""
    plan: Plan = _decoder.decode(raw)
    return plan


def encode_plan(plan: Plan) -> bytes:
    """Encode a plan for RequestWork.body."""
    return msgspec.msgpack.encode(plan)
