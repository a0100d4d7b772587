"""Requests for encoders: bodies of embeddings and rerank in, parcels of encoded jobs out; run in the process pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.errors import InvalidRequest, NotFound
from common.wire.jobs import EmbedWork, ScoreWork
from common.wire.message import encode
from services.router.text.bodies import (
    EmbeddingsBody,
    RequestLimits,
    RerankBody,
    RerankV2Body,
    TeiEmbedBody,
    TextDocument,
    decode,
)
from services.router.text.generation_bodies import unsupported
from services.router.text.overflow import CHARACTERS_PER_TOKEN, overflow
from services.router.text.tokens import Spec, TextEncoder, load

Inputs = str | list[str | int | list[int]]


class Parcel(NamedTuple):
    """One job's encoded work, and its size in items and tokens."""

    payload: bytes
    items: int
    tokens: int


class EmbedRequest(NamedTuple):
    """A validated request for embeddings; with `whole` its parcels are admitted together or not at all.

    With `tei` the answer has TEI's shape, a list of vectors.
    """

    spec: Spec
    parcels: list[Parcel]
    tokens: int
    base64: bool
    dimensions: int | None
    whole: bool
    tei: bool = False


class RerankRequest(NamedTuple):
    """A validated rerank request; `texts` only if the response repeats them.

    With `tei` the answer has TEI's shape, with `v2` the shape of Cohere's second version.
    """

    spec: Spec
    parcels: list[Parcel]
    tokens: int
    tei: bool = False
    v2: bool = False
    raw: bool = False
    top_n: int | None = None
    texts: list[str] | None = None


def choose(specs: dict[str, Spec], name: str | None, default: str, kinds: Sequence[str]) -> Spec:
    """Return the spec of the model asked for; NotFound `model_not_found` lists the models that are served."""
    wanted = name or default
    spec = specs.get(wanted)
    if spec is None or spec.kind not in kinds:
        there = ", ".join(sorted({s.name for s in specs.values() if s.kind in kinds})) or "none"
        raise NotFound(
            f"model {wanted!r} is not served here; expected one of: {there}",
            code="model_not_found",
            param="model",
        )
    return spec


def _fit(texts: Sequence[str], limit: int, *, truncate: bool, param: str) -> list[str]:
    """Refuse texts that cannot fit by their length, before tokenizing; with `truncate` cut them."""
    most = limit * CHARACTERS_PER_TOKEN
    out = []
    for index, text in enumerate(texts):
        if len(text) > most:
            if not truncate:
                raise overflow(
                    limit,
                    f"{param}[{index}] has {len(text)} characters",
                    "shorten it, or send truncate=true",
                    param,
                )
            out.append(text[:most])
        else:
            out.append(text)
    return out


def parcels_of(
    spec: Spec, lists: Sequence[list[int]], limits: RequestLimits, *, question: bool = False
) -> list[Parcel]:
    """Cut token lists into jobs of at most `parcel_items` texts and `parcel_tokens` tokens, in order.

    With `question` the texts are questions of a search.
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
    """Return the token ids of texts, each after the prompt; InvalidRequest names an empty or too long text."""
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


def _embed_inputs(
    inputs: Inputs,
    spec: Spec,
    limits: RequestLimits,
    *,
    truncate: bool | None,
    param: str,
    prompt_name: str | None,
) -> tuple[list[list[int]], int]:
    """Return the token ids of texts, each after the named prompt or the model's default, and their total.

    Lists of token ids get no prompt.
    """
    prompt = _prompt(prompt_name, spec)
    lists = _embed_lists(inputs, spec, limits, truncate=truncate, param=param, prompt=prompt)
    tokens = sum(map(len, lists))
    check_total(tokens, limits, param)
    return lists, tokens


def _embed_lists(
    inputs: Inputs,
    spec: Spec,
    limits: RequestLimits,
    *,
    truncate: bool | None,
    param: str,
    prompt: str | None,
) -> list[list[int]]:
    cut = limits.truncate if truncate is None else truncate
    given: Sequence[object] = [inputs] if isinstance(inputs, str) else inputs
    encoder, most = load(spec.path), spec.max_tokens
    if given and all(isinstance(item, int) for item in given):
        given = [given]
    check_count(len(given), limits, param)
    texts = [item for item in given if isinstance(item, str)]
    if len(texts) == len(given):
        before = spec.default_prompt if prompt is None else prompt
        return encode_all(encoder, texts, most, truncate=cut, param=param, prompt=before)
    lists: list[list[int]] = []
    for index, item in enumerate(given):
        if not isinstance(item, list) or prompt is not None:
            raise InvalidRequest(
                f"{param} mixes kinds: expected a string, strings, token ids, or lists of token ids"
                + ("" if prompt is None else ", and texts where a prompt is named"),
                code="invalid_value",
                param=param,
            )
        encoder.check_ids(item, index, param, spec.vocabulary, None if cut else most)
        lists.append(encoder.shortened(item, most))
    return lists


def _check_dimensions(wanted: int | None, spec: Spec) -> None:
    if wanted is not None and wanted > spec.dimension:
        raise InvalidRequest(
            f"dimensions is {wanted}: {spec.name} has {spec.dimension}",
            code="invalid_dimensions",
            param="dimensions",
        )


def embeddings(
    raw: bytes, specs: dict[str, Spec], default: str, limits: RequestLimits
) -> EmbedRequest:
    """Parse and tokenize the body of POST /v1/embeddings."""
    body = decode(raw, EmbeddingsBody)
    spec = choose(specs, body.model, default, ("embed",))
    _check_dimensions(body.dimensions, spec)
    lists, tokens = _embed_inputs(
        body.input,
        spec,
        limits,
        truncate=body.truncate,
        param="input",
        prompt_name=body.prompt_name,
    )
    return EmbedRequest(
        spec,
        parcels_of(spec, lists, limits),
        tokens,
        body.encoding_format == "base64",
        None if body.dimensions == spec.dimension else body.dimensions,
        body.all_or_nothing,
    )


def tei_embeddings(
    raw: bytes, specs: dict[str, Spec], default: str, limits: RequestLimits
) -> EmbedRequest:
    """Parse and tokenize the body of POST /embed; vectors have length 1, and texts are cut at their ends only."""
    body = decode(raw, TeiEmbedBody)
    spec = choose(specs, body.model, default, ("embed",))
    _check_dimensions(body.dimensions, spec)
    if body.normalize is False:
        raise unsupported("normalize", "vectors have length 1 here; expected true")
    if (body.truncation_direction or "right").lower() != "right":
        raise unsupported("truncation_direction", "expected right")
    lists, tokens = _embed_inputs(
        body.inputs,
        spec,
        limits,
        truncate=body.truncate,
        param="inputs",
        prompt_name=body.prompt_name,
    )
    shorter = None if body.dimensions == spec.dimension else body.dimensions
    parcels = parcels_of(spec, lists, limits)
    return EmbedRequest(spec, parcels, tokens, False, shorter, False, tei=True)  # noqa: FBT003


def _prompt(name: str | None, spec: Spec) -> str | None:
    """Return the model's prompt of a name; None without a name; InvalidRequest for a name that the model lacks."""
    if name is not None and name not in spec.prompts:
        known = ", ".join(spec.prompts) or "none"
        raise InvalidRequest(
            f"prompt_name is {name[:40]!r}: the prompts of model {spec.name} are {known}",
            code="invalid_value",
            param="prompt_name",
        )
    return None if name is None else spec.prompts[name]


def rerank(
    raw: bytes, specs: dict[str, Spec], default: str, limits: RequestLimits
) -> RerankRequest:
    """Parse and tokenize the body of POST /v1/rerank: long texts are cut in Cohere's shape, in TEI's by `truncate`."""
    body = decode(raw, RerankBody)
    spec = choose(specs, body.model, default, ("rerank", "embed"))
    tei = body.texts is not None
    if tei == (body.documents is not None):
        raise InvalidRequest(
            "expected either documents (Cohere, Jina) or texts (TEI)",
            code="invalid_value",
            param="documents",
        )
    texts = _texts((body.texts if tei else body.documents) or ())
    param = "texts" if tei else "documents"
    cut = limits.truncate if body.truncate is None else body.truncate
    parcels = _rerank_parcels(
        spec, body.query, texts, limits, truncate=cut if tei else True, param=param
    )
    keep = body.return_text if tei else body.return_documents
    return RerankRequest(
        spec,
        parcels,
        sum(parcel.tokens for parcel in parcels),
        tei=tei,
        raw=body.raw_scores,
        top_n=body.top_n,
        texts=texts if keep else None,
    )


def rerank_v2(
    raw: bytes, specs: dict[str, Spec], default: str, limits: RequestLimits
) -> RerankRequest:
    """Parse and tokenize the body of POST /v2/rerank; documents too long for the model are cut."""
    body = decode(raw, RerankV2Body)
    spec = choose(specs, body.model, default, ("rerank", "embed"))
    texts = _texts(body.documents)
    if body.max_tokens_per_doc is not None:
        encoder, most = load(spec.path), body.max_tokens_per_doc
        texts = [encoder.beginning(text, most) for text in texts]
    parcels = _rerank_parcels(spec, body.query, texts, limits, truncate=True, param="documents")
    tokens = sum(parcel.tokens for parcel in parcels)
    return RerankRequest(spec, parcels, tokens, v2=True, top_n=body.top_n)


def _texts(documents: Sequence[str | TextDocument]) -> list[str]:
    return [item if isinstance(item, str) else item.text for item in documents]


def _rerank_parcels(
    spec: Spec, query: str, texts: list[str], limits: RequestLimits, *, truncate: bool, param: str
) -> list[Parcel]:
    """Return the jobs that score texts against a query; InvalidRequest for too many texts or tokens."""
    check_count(len(texts), limits, param)
    if not query.strip():
        raise InvalidRequest(
            "query is empty: expected some text", code="empty_input", param="query"
        )
    parcels = score_parcels(spec, query, texts, limits, truncate=truncate, param=param)
    check_total(sum(parcel.tokens for parcel in parcels), limits, param)
    return parcels


def score_parcels(
    spec: Spec,
    query: str,
    texts: Sequence[str],
    limits: RequestLimits,
    *,
    truncate: bool,
    param: str,
) -> list[Parcel]:
    """Return, in order, the jobs in which a cross-encoder or an encoder scores texts against a query."""
    encoder, cross, head = load(spec.path), spec.kind == "rerank", list[int]()
    fitting = _fit(texts, spec.max_tokens, truncate=truncate, param=param)
    if cross:
        ids, types = encoder.pairs(query, fitting, spec.max_tokens, truncate=truncate)
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
