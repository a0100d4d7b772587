"""Requests for encoders: bodies of embeddings and rerank in, parcels of encoded jobs out; run in the process pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.errors import InvalidRequest, NotFound
from common.wire.jobs import EmbedWork, ScoreWork
from common.wire.message import encode
from services.router.text.bodies import EmbeddingsBody, RequestLimits, RerankBody, decode
from services.router.text.tokens import Spec, TextEncoder, load

_BYTES_PER_TOKEN = 64


class Parcel(NamedTuple):
    """One job's encoded Work and its size."""

    payload: bytes
    items: int
    tokens: int


class EmbedRequest(NamedTuple):
    """A validated request for embeddings; with `whole` its parcels are admitted together or not at all."""

    spec: Spec
    parcels: list[Parcel]
    tokens: int
    base64: bool
    dimensions: int | None
    whole: bool


class RerankRequest(NamedTuple):
    """A validated rerank request; `texts` only if the response repeats them."""

    spec: Spec
    parcels: list[Parcel]
    tokens: int
    tei: bool
    raw: bool
    top_n: int | None
    texts: list[str] | None


def choose(specs: dict[str, Spec], name: str | None, default: str, kinds: Sequence[str]) -> Spec:
    """Return the spec of the model asked for; NotFound `model_not_found` lists the models that are served."""
    wanted = name or default
    spec = specs.get(wanted)
    if spec is None or spec.kind not in kinds:
        there = ", ".join(sorted(s.name for s in specs.values() if s.kind in kinds)) or "none"
        raise NotFound(
            f"model {wanted!r} is not served here; expected one of: {there}",
            code="model_not_found",
            param="model",
        )
    return spec


def _fit(texts: Sequence[str], limit: int, *, truncate: bool, param: str) -> list[str]:
    """Refuse texts that cannot fit by their length, before tokenizing; with `truncate` cut them."""
    most = limit * _BYTES_PER_TOKEN
    out = []
    for index, text in enumerate(texts):
        if len(text) > most:
            if not truncate:
                raise InvalidRequest(
                    f"{param}[{index}] has {len(text)} characters: far more than the {limit} tokens the model "
                    "takes; shorten it, or send truncate=true",
                    code="context_length_exceeded",
                    param=param,
                )
            out.append(text[:most])
        else:
            out.append(text)
    return out


def parcels_of(
    spec: Spec, lists: Sequence[list[int]], limits: RequestLimits, *, question: bool = False
) -> list[Parcel]:
    """Cut token lists into jobs of at most `parcel_items` texts and `parcel_tokens` tokens, in order.

    With `question` they are what a search looks for.
    """
    parcels: list[Parcel] = []
    group: list[list[int]] = []
    held = 0
    for ids in lists:
        if group and (len(group) >= limits.parcel_items or held + len(ids) > limits.parcel_tokens):
            parcels.append(_embed_parcel(spec, group, held, question=question))
            group, held = [], 0
        group.append(ids)
        held += len(ids)
    if group:
        parcels.append(_embed_parcel(spec, group, held, question=question))
    return parcels


def _embed_parcel(spec: Spec, group: list[list[int]], held: int, *, question: bool) -> Parcel:
    work = EmbedWork(fingerprint=spec.fingerprint, tokens=group, question=question)
    return Parcel(encode(work), len(group), held)


def check_total(tokens: int, limits: RequestLimits, param: str) -> None:
    """Refuse more tokens than one request may hold."""
    if tokens > limits.max_tokens:
        raise InvalidRequest(
            f"{param} holds {tokens} tokens: at most {limits.max_tokens} are allowed in one request",
            code="too_many_tokens",
            param=param,
        )


def check_count(count: int, limits: RequestLimits, param: str) -> None:
    """Refuse no items, or more than one request may hold."""
    if not 1 <= count <= limits.max_texts:
        raise InvalidRequest(
            f"{param} holds {count} items: expected 1 to {limits.max_texts}",
            code="empty_input" if count == 0 else "too_many_items",
            param=param,
        )


def encode_all(
    encoder: TextEncoder,
    texts: Sequence[str],
    limit: int,
    *,
    truncate: bool,
    param: str,
    prompt: str = "",
) -> list[list[int]]:
    """Return the token ids of texts, each after the prompt; InvalidRequest names one that is empty or too long."""
    for index, text in enumerate(texts):
        if not text.strip():
            raise InvalidRequest(
                f"{param}[{index}] is empty: expected some text", code="empty_input", param=param
            )
    prompted = [prompt + text for text in texts] if prompt else texts
    fitting = _fit(prompted, limit, truncate=truncate, param=param)
    return [
        encoding.ids for encoding in encoder.texts(fitting, limit, truncate=truncate, param=param)
    ]


def _embed_inputs(body: EmbeddingsBody, spec: Spec, limits: RequestLimits) -> list[list[int]]:
    given: Sequence[object] = [body.input] if isinstance(body.input, str) else body.input
    encoder = load(spec.path)
    if given and all(isinstance(item, int) for item in given):
        given = [given]
    check_count(len(given), limits, "input")
    texts = [item for item in given if isinstance(item, str)]
    if len(texts) == len(given):
        return encode_all(
            encoder,
            texts,
            spec.max_tokens,
            truncate=body.truncate,
            param="input",
            prompt=spec.default_prompt,
        )
    lists: list[list[int]] = []
    for index, item in enumerate(given):
        if not isinstance(item, list):
            raise InvalidRequest(
                "input mixes kinds: expected a string, strings, token ids, or lists of token ids",
                code="invalid_value",
                param="input",
            )
        encoder.check_ids(item, index, "input", spec.vocabulary, spec.max_tokens)
        lists.append(item)
    return lists


def embeddings(
    raw: bytes, specs: dict[str, Spec], default: str, limits: RequestLimits
) -> EmbedRequest:
    """Parse and tokenize the body of POST /v1/embeddings."""
    body = decode(raw, EmbeddingsBody)
    spec = choose(specs, body.model, default, ("embed",))
    if body.dimensions is not None and body.dimensions > spec.dimension:
        raise InvalidRequest(
            f"dimensions is {body.dimensions}: {spec.name} has {spec.dimension}",
            code="invalid_dimensions",
            param="dimensions",
        )
    lists = _embed_inputs(body, spec, limits)
    tokens = sum(map(len, lists))
    check_total(tokens, limits, "input")
    return EmbedRequest(
        spec,
        parcels_of(spec, lists, limits),
        tokens,
        body.encoding_format == "base64",
        None if body.dimensions == spec.dimension else body.dimensions,
        body.all_or_nothing,
    )


def rerank(
    raw: bytes, specs: dict[str, Spec], default: str, limits: RequestLimits
) -> RerankRequest:
    """Parse and tokenize the body of POST /v1/rerank: Cohere's shape truncates, TEI's says `truncate`."""
    body = decode(raw, RerankBody)
    spec = choose(specs, body.model, default, ("rerank", "embed"))
    tei = body.texts is not None
    if tei == (body.documents is not None):
        raise InvalidRequest(
            "expected either documents (Cohere, Jina) or texts (TEI)",
            code="invalid_value",
            param="documents",
        )
    given = body.texts if tei else body.documents
    texts = [item if isinstance(item, str) else item.text for item in given or ()]
    param = "texts" if tei else "documents"
    check_count(len(texts), limits, param)
    truncate = body.truncate if tei else True
    if not body.query.strip():
        raise InvalidRequest(
            "query is empty: expected some text", code="empty_input", param="query"
        )
    parcels = _rerank_parcels(spec, body.query, texts, limits, truncate=truncate, param=param)
    tokens = sum(parcel.tokens for parcel in parcels)
    check_total(tokens, limits, param)
    keep = body.return_text if tei else body.return_documents
    return RerankRequest(
        spec, parcels, tokens, tei, body.raw_scores, body.top_n, texts if keep else None
    )


def _rerank_parcels(
    spec: Spec, query: str, texts: list[str], limits: RequestLimits, *, truncate: bool, param: str
) -> list[Parcel]:
    encoder, cross = load(spec.path), spec.kind == "rerank"
    fitting = _fit(texts, spec.max_tokens, truncate=truncate, param=param)
    if cross:
        ids, types = encoder.pairs(query, fitting, spec.max_tokens, truncate=truncate)
        head: list[int] = []
    else:
        head = encoder.texts([query], spec.max_tokens, truncate=truncate, param="query")[0].ids
        ids = [
            e.ids for e in encoder.texts(fitting, spec.max_tokens, truncate=truncate, param=param)
        ]
        types = []
    parcels: list[Parcel] = []
    first = 0
    room = max(1, limits.parcel_items - (0 if cross else 1))
    while first < len(ids):
        last, held = first, len(head)
        while (
            last < len(ids)
            and last - first < room
            and (last == first or held + len(ids[last]) <= limits.parcel_tokens)
        ):
            held += len(ids[last])
            last += 1
        work = (
            ScoreWork(fingerprint=spec.fingerprint, pairs=ids[first:last], types=types[first:last])
            if cross
            else ScoreWork(fingerprint=spec.fingerprint, query=head, documents=ids[first:last])
        )
        parcels.append(Parcel(encode(work), last - first + (0 if cross else 1), held))
        first = last
    return parcels
