"""JSON bodies of requests and their decoding: every fault of a body is an InvalidRequest that names the fault."""

from __future__ import annotations

import binascii
import re
from array import array
from math import isfinite
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from common.errors import InvalidRequest, TooLarge
from common.wire.search import Diversity, Mode

MAX_DEPTH = 16
MAX_METADATA_BYTES = 65_536
MAX_ID_BYTES = 512
_PATH = re.compile(r" - at `\$\.?(.*)`$")
T = TypeVar("T")
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}\Z")]
ModelName = Annotated[str, Meta(min_length=1, max_length=200)]
SearchEffort = Annotated[int, Meta(ge=1, le=10_000)] | Literal["exact"]
TtlSeconds = Annotated[int, Meta(ge=1, le=10 * 366 * 24 * 3600)]


class EmbeddingsBody(Struct, frozen=True):
    """POST /v1/embeddings."""

    input: str | list[str | int | list[int]]
    model: ModelName | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    truncate: bool | None = None
    prompt_name: Annotated[str, Meta(max_length=200)] | None = None
    all_or_nothing: bool = False
    user: str | None = None


class TeiEmbedBody(Struct, frozen=True):
    """POST /embed, in TEI's shape."""

    inputs: str | list[str | int | list[int]]
    model: ModelName | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right", "left", "Left"] | None = None
    prompt_name: Annotated[str, Meta(max_length=200)] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None


class TextDocument(Struct, frozen=True):
    """A document of a rerank request given as an object."""

    text: str


class RerankBody(Struct, frozen=True):
    """POST /v1/rerank in Cohere's and Jina's shape (`documents`) or TEI's (`texts`)."""

    query: str
    documents: list[str | TextDocument] | None = None
    texts: list[str] | None = None
    model: ModelName | None = None
    top_n: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    return_documents: bool = False
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = None


class RerankV2Body(Struct, frozen=True):
    """POST /v2/rerank, in Cohere's shape; only the first `max_tokens_per_doc` tokens of a document are scored."""

    query: str
    documents: list[str | TextDocument]
    model: ModelName | None = None
    top_n: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None


class ChunkingBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes of the chunks that a collection's documents are split into."""

    max_tokens: Annotated[int, Meta(ge=8, le=100_000)] = 200
    overlap_tokens: Annotated[int, Meta(ge=0, le=50_000)] = 32


class CollectionBody(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/collections; `model` absent means the default encoder, null means vectors only."""

    name: Name
    dimension: Annotated[int, Meta(ge=1, le=8192)] | None = None
    metric: Literal["cosine", "dot", "l2"] = "cosine"
    model: ModelName | msgspec.UnsetType | None = msgspec.UNSET
    chunking: ChunkingBody | None = None
    query_prompt: Annotated[str, Meta(max_length=1000)] | None = None
    document_prompt: Annotated[str, Meta(max_length=1000)] | None = None
    shards: Annotated[int, Meta(ge=1, le=64)] | None = None
    replicas: Annotated[int, Meta(ge=1, le=16)] | None = None


class DocumentBody(Struct, frozen=True, forbid_unknown_fields=True):
    """One document to store: a text or a vector (or a vector with the text it stands for), and metadata."""

    id: str | None = None
    text: str | None = None
    vector: list[float] | None = None
    metadata: dict[str, Any] | None = None


class DocumentsBody(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/collections/{name}/documents."""

    documents: Annotated[list[DocumentBody], Meta(min_length=1)]


class DeleteBody(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/collections/{name}/documents/delete."""

    ids: Annotated[list[str], Meta(min_length=1, max_length=10_000)]


class SearchBody(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/collections/{name}/search: exactly one of text, vector, texts and vectors; mode hybrid allows two.

    At most one of `effort` and `time_budget_ms`; `ef` and `exact` are older spellings of an effort.
    """

    text: str | None = None
    vector: list[float] | str | None = None
    texts: list[str] | None = None
    vectors: list[list[float] | str] | None = None
    k: Annotated[int, Meta(ge=1, le=10_000)] = 10
    filter: dict[str, Any] | None = None
    min_score: float | None = None
    include_text: bool = True
    include_metadata: bool = True
    effort: SearchEffort | None = None
    time_budget_ms: Annotated[float, Meta(gt=0, le=600_000)] | None = None
    ef: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    exact: bool = False
    after: str | None = None
    partial: bool = False
    mode: Mode | None = None
    mmr: Diversity | None = None
    include_scores: bool = False
    include_lists: bool = False


class MoveShardBody(
    Struct, frozen=True, forbid_unknown_fields=True, rename={"source": "from", "target": "to"}
):
    """POST /v1/collections/{name}/shards/{shard}/move; no `from` adds a replica, no `to` lets the router choose."""

    source: ModelName | None = None
    target: ModelName | None = None


class DropReplicaBody(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/collections/{name}/shards/{shard}/drop: the replica to remove."""

    replica: ModelName


class TuneBody(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/collections/{name}/tune: the share of true neighbours to find, and bounds on one shard."""

    recall: Annotated[float, Meta(gt=0, le=1)] = 0.95
    p99_ms: Annotated[float, Meta(gt=0, le=600_000)] | None = None
    memory_bytes: Annotated[int, Meta(ge=1, le=1 << 50)] | None = None
    plan_only: bool = False


class ReplicasBody(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/collections/{name}/replicas: the number of replicas of each shard."""

    replicas: Annotated[int, Meta(ge=1, le=16)]


class MapHitBody(Struct, frozen=True):
    """A chunk to place on a map; the hits of a search have this form, too."""

    id: str
    chunk: Annotated[int, Meta(ge=0, le=1 << 31)] = 0


class MapBody(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/collections/{name}/map: exactly one of ids, hits and vector; `basis` is the plane of the map."""

    ids: Annotated[list[str], Meta(min_length=1, max_length=1000)] | None = None
    hits: Annotated[list[MapHitBody], Meta(min_length=1, max_length=1000)] | None = None
    vector: list[float] | str | None = None
    basis: str | None = None


class ReembedBody(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/collections/{name}/reembed."""

    model: ModelName | None = None


class SessionBody(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/sessions; `model` absent means the default chat model."""

    model: ModelName | None = None
    ttl_s: TtlSeconds | None = None
    metadata: dict[str, Any] | None = None


class SessionChangeBody(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/sessions/{id}: only given fields are set; `metadata` replaces the whole metadata."""

    ttl_s: TtlSeconds | None = None
    metadata: dict[str, Any] | None = None
    pin: bool | None = None


class SessionImportBody(Struct, frozen=True):
    """POST /v1/sessions/import: the fields of an exported document that the router reads; kv_store checks the rest."""

    format: Literal["spillway.session/1"]
    model: ModelName
    ttl_s: TtlSeconds | None = None
    metadata: dict[str, Any] = {}


class RequestLimits(NamedTuple):
    """The largest numbers of texts and tokens in a request, and of items and tokens in a parcel.

    With `truncate`, texts that are too long for the model are cut unless the request says otherwise.
    """

    max_texts: int
    max_tokens: int
    parcel_items: int
    parcel_tokens: int
    truncate: bool = False


def _invalid(error: msgspec.ValidationError) -> InvalidRequest:
    sentence = str(error)
    found = _PATH.search(sentence)
    param = found[1] or None if found else None
    sentence = _PATH.sub("", sentence)
    where = f"{param}: " if param else ""
    if "unknown field" in sentence:
        return InvalidRequest(f"{where}{sentence}", code="unknown_field", param=param)
    return InvalidRequest(f"{where}{sentence}", code="invalid_value", param=param)


def decode(raw: bytes, kind: type[T]) -> T:
    """Decode a JSON body; InvalidRequest names the fault and its place."""
    if not raw.strip():
        raise InvalidRequest("the body is empty: expected a JSON object", code="invalid_json")
    try:
        if not raw.isascii():
            raw.decode("utf-8")
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not UTF-8: byte {error.start}", code="invalid_utf8"
        ) from None
    except RecursionError:
        raise InvalidRequest(
            f"the body is nested too deeply: at most {MAX_DEPTH} levels are allowed",
            code="too_deep",
        ) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from None


def check_json(value: Any, param: str) -> None:
    """Refuse JSON that is nested deeper than MAX_DEPTH or holds integers beyond 64 bits."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise InvalidRequest(
                    f"{param}: {item} does not fit in 64 bits", code="invalid_value", param=param
                )
        level = below
    if level:
        raise InvalidRequest(
            f"{param} is nested too deeply: at most {MAX_DEPTH} levels are allowed",
            code="too_deep",
            param=param,
        )


def check_metadata(metadata: dict[str, Any], param: str) -> None:
    """Refuse metadata too deep, too large or with integers beyond 64 bits."""
    check_json(metadata, param)
    size = len(msgspec.json.encode(metadata))
    if size > MAX_METADATA_BYTES:
        raise TooLarge(
            f"{param} is {size} bytes: at most {MAX_METADATA_BYTES} are allowed", param=param
        )


def check_id(value: str, param: str) -> str:
    """Return a document's id; InvalidRequest if it is empty, too long, or holds control characters."""
    if not value or len(value.encode()) > MAX_ID_BYTES or not value.isprintable():
        raise InvalidRequest(
            f"{param} is {value[:80]!r}: expected 1 to {MAX_ID_BYTES} bytes without control characters",
            code="invalid_id",
            param=param,
        )
    return value


def pack_vector(values: list[float] | str, dimension: int, metric: str, param: str) -> bytes:
    """Return a vector's float32 bytes from numbers or base64; InvalidRequest for a wrong size or number."""
    packed = _bytes(values, param) if isinstance(values, str) else array("f", values).tobytes()
    if len(packed) != 4 * dimension:
        raise InvalidRequest(
            f"{param} has {len(packed) / 4:g} numbers: the collection's dimension is {dimension}",
            code="dimension_mismatch",
            param=param,
        )
    # A float32 is infinite or NaN only if its highest byte is 0x7f or 0xff.
    highest = packed[3::4]
    if (b"\x7f" in highest or b"\xff" in highest) and not all(map(isfinite, array("f", packed))):
        raise InvalidRequest(
            f"{param} holds a number that is no finite float32", code="invalid_value", param=param
        )
    if metric == "cosine" and not packed.strip(b"\x00\x80") and not any(array("f", packed)):
        raise InvalidRequest(
            f"{param} is zero: cosine is undefined for it", code="zero_vector", param=param
        )
    return packed


def _bytes(encoded: str, param: str) -> bytes:
    try:
        return binascii.a2b_base64(encoded, strict_mode=True)
    except ValueError as error:
        raise InvalidRequest(
            f"{param} is not base64 of float32 numbers: {error}", code="invalid_value", param=param
        ) from None
