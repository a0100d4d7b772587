"""Requests to turn texts into token ids or back, in vLLM's shapes or TEI's: only a model's tokenizer is needed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from common.errors import InvalidRequest
from services.router.text.bodies import ModelName, RequestLimits, decode
from services.router.text.chats import chat_prompt
from services.router.text.generation_bodies import MAX_MESSAGES, ChatMessage, plain, unsupported
from services.router.text.overflow import CHARACTERS_PER_TOKEN
from services.router.text.requests import check_count, check_total, choose
from services.router.text.tokens import Spec, TextEncoder, load

EVERY_KIND = ("generate", "embed", "rerank")


class TokenizeBody(Struct, frozen=True):
    """POST /tokenize: vLLM's with a `prompt` or `messages`, TEI's with `inputs`."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    inputs: str | list[str] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    tools: Any = None


class DetokenizeBody(Struct, frozen=True):
    """POST /detokenize: vLLM's with `tokens`, TEI's with `ids`."""

    model: ModelName | None = None
    tokens: list[int] | None = None
    ids: list[int | list[int]] | None = None
    skip_special_tokens: bool | None = None


class _Renders(Struct, frozen=True):
    messages: msgspec.Raw = msgspec.Raw(b"null")


def renders(raw: bytes) -> bool:
    """Return whether a body has messages, whose template needs a process of the pool; True for a faulty body."""
    try:
        return bytes(msgspec.json.decode(raw, type=_Renders).messages) != b"null"
    except (ValueError, RecursionError):
        return True


def _only(body: Struct, *names: str) -> str:
    """Return the name of the only one of these fields that a body has; InvalidRequest for none or several."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"expected one of {', '.join(names)}", code="invalid_value", param=names[0]
        )
    return given[0]


def tokenize(
    raw: bytes, specs: dict[str, Spec], generator: str, encoder: str, limits: RequestLimits
) -> bytes:
    """Return the JSON that answers POST /tokenize; without a model the default `generator` or `encoder` tokenizes.

    In vLLM's shape the answer is `{"count", "max_model_len", "tokens", "token_strs"}`; in TEI's, for each text, its
    tokens with their places in characters.
    """
    body = decode(raw, TokenizeBody)
    kind = _only(body, "prompt", "messages", "inputs")
    if body.tools:
        raise unsupported("tools", "not supported here; leave it out")
    if kind == "inputs":
        spec = choose(specs, body.model, encoder or generator, EVERY_KIND)
        return msgspec.json.encode(_tei_tokens(body, load(spec.path), limits))
    kinds = EVERY_KIND if kind == "prompt" else ("generate",)
    spec = choose(specs, body.model, generator or encoder, kinds)
    text = load(spec.path)
    if body.messages is not None:
        ids, _ = chat_prompt(spec, [plain(message, at) for at, message in enumerate(body.messages)])
    else:
        _check_size([body.prompt or ""], limits, "prompt")
        marked = body.add_special_tokens is not False
        ids = text.tokenizer.encode(body.prompt or "", add_special_tokens=marked).ids
    check_total(len(ids), limits, kind)
    names = [text.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": spec.max_tokens, "tokens": ids}
    return msgspec.json.encode({**answer, "token_strs": names})


def _check_size(texts: list[str], limits: RequestLimits, param: str) -> None:
    """Refuse texts that are too long to be tokenized at all."""
    most = limits.max_tokens * CHARACTERS_PER_TOKEN
    if sum(map(len, texts)) > most:
        raise InvalidRequest(
            f"{param} holds more than {most} characters: expected fewer in one request",
            code="too_many_tokens",
            param=param,
        )


def _tei_tokens(
    body: TokenizeBody, encoder: TextEncoder, limits: RequestLimits
) -> list[list[dict[str, Any]]]:
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs or []
    check_count(len(texts), limits, "inputs")
    _check_size(texts, limits, "inputs")
    marked = body.add_special_tokens is not False
    found = encoder.tokenizer.encode_batch(texts, add_special_tokens=marked)
    check_total(sum(len(encoding.ids) for encoding in found), limits, "inputs")
    return [
        [
            {
                "id": index,
                "text": token if special else text[start:stop],
                "special": bool(special),
                "start": None if special else start,
                "stop": None if special else stop,
            }
            for index, token, special, (start, stop) in zip(
                one.ids, one.tokens, one.special_tokens_mask, one.offsets, strict=True
            )
        ]
        for text, one in zip(texts, found, strict=True)
    ]


def detokenize(
    raw: bytes, specs: dict[str, Spec], generator: str, encoder: str, limits: RequestLimits
) -> bytes:
    """Return the JSON that answers POST /detokenize: vLLM's `{"prompt"}`, or TEI's list of texts.

    vLLM's shape shows special tokens by default, TEI's leaves them out; `skip_special_tokens` decides otherwise.
    """
    body = decode(raw, DetokenizeBody)
    tei = _only(body, "tokens", "ids") == "ids"
    default = (encoder or generator) if tei else (generator or encoder)
    spec = choose(specs, body.model, default, EVERY_KIND)
    text = load(spec.path)
    given: list[Any] = list(body.ids or ()) if tei else [body.tokens or []]
    if given and all(isinstance(item, int) for item in given):
        given = [given]
    check_count(len(given), limits, "ids" if tei else "tokens")
    for index, ids in enumerate(given):
        if not isinstance(ids, list):
            raise InvalidRequest(
                "ids mixes kinds: expected token ids, or lists of them",
                code="invalid_value",
                param="ids",
            )
        if ids or tei:
            text.check_ids(ids, index, "ids" if tei else "tokens", spec.vocabulary)
    check_total(sum(map(len, given)), limits, "ids" if tei else "tokens")
    skip = tei if body.skip_special_tokens is None else body.skip_special_tokens
    texts = [text.tokenizer.decode(ids, skip_special_tokens=skip) for ids in given]
    return msgspec.json.encode(texts if tei else {"prompt": texts[0]})
