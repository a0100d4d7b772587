"""Completions: a body is parsed into prompts, as token ids, and options."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from common.errors import InvalidRequest
from common.wire.workflows import GenerationOptions
from services.router.text.bodies import decode
from services.router.text.generation_bodies import (
    MAX_PROMPTS,
    CompletionBody,
    check_completion,
)
from services.router.text.generations import GenerationSpec, generation_of, options_of
from services.router.text.overflow import CHARACTERS_PER_TOKEN, overflow
from services.router.text.requests import choose
from services.router.text.tokens import Spec, load

_DEFAULT_NEW = 16  # OpenAI's default


class CompletionRequest(Struct, frozen=True):
    """A validated completion; `echo` holds the prompts' texts if they are to be repeated."""

    model: str
    scope: str
    prompts: list[list[int]]
    options: GenerationOptions
    stream: bool = False
    include_usage: bool = False
    echo: list[str] = []


def completion(
    raw: bytes,
    specs: dict[str, Spec],
    default: str,
    scope: str,
    most_tokens: int,
    *,
    low: bool = False,
) -> tuple[CompletionRequest, GenerationSpec]:
    """Parse and tokenize the body of POST /v1/completions; at most `most_tokens` tokens in all its prompts."""
    body = decode(raw, CompletionBody)
    check_completion(body)
    spec = choose(specs, body.model, default, ("generate",))
    prompts = _prompts(body, spec, most_tokens)
    echo = []
    if body.echo:
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        decoded = [load(spec.path).decode(ids) for ids in prompts]
        echo = [
            item if isinstance(item, str) else text
            for item, text in zip(
                given if len(given) == len(decoded) else decoded, decoded, strict=True
            )
        ]
    ask = CompletionRequest(
        model=spec.name,
        scope=scope,
        prompts=prompts,
        options=options_of(
            body,
            spec,
            max_new=body.max_tokens or _DEFAULT_NEW,
            logprobs=-1 if body.logprobs is None else body.logprobs,
            low=low,
        ),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        echo=echo,
    )
    return ask, generation_of(ask.options, spec, scope, prompts, param="prompt")


def _prompts(body: CompletionBody, spec: Spec, most_tokens: int) -> list[list[int]]:
    given: Sequence[object] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if given and all(isinstance(item, int) for item in given):
        given = [given]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt holds {len(given)} items: expected 1 to {MAX_PROMPTS}",
            code="empty_input" if not given else "too_many_items",
            param="prompt",
        )
    encoder, prompts = load(spec.path), []
    for index, item in enumerate(given):
        if isinstance(item, str):
            if len(item) > spec.max_tokens * CHARACTERS_PER_TOKEN:
                raise overflow(
                    spec.max_tokens,
                    f"prompt[{index}] is far longer",
                    "reduce the length of the prompt",
                    "prompt",
                )
            ids = encoder.tokenizer.encode(item).ids
        elif isinstance(item, list):
            ids = item
        else:
            raise InvalidRequest(
                "prompt mixes kinds: expected a string, strings, token ids, or lists of token ids",
                code="invalid_value",
                param="prompt",
            )
        encoder.check_ids(ids, index, "prompt", spec.vocabulary)
        prompts.append(ids)
    total = sum(map(len, prompts))
    if total > most_tokens:
        raise InvalidRequest(
            f"prompt holds {total} tokens: at most {most_tokens} are allowed in one request",
            code="too_many_tokens",
            param="prompt",
        )
    return prompts
