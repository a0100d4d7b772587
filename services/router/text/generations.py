"""Generate jobs: options and prompts of a chat or a completion, encoded as one job."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from common.errors import InvalidRequest, TooLarge
from common.pages.identity import PageId, marks_of, text_pages
from common.types.generation import OutputGrammar, SamplingParams
from common.wire.control import ExtensionRule
from common.wire.jobs import GenerateWork
from common.wire.message import encode
from common.wire.sessions import SessionTurn
from common.wire.workflows import GenerationOptions
from services.router.text.generation_bodies import GenerateBody
from services.router.text.intervals import retrievals
from services.router.text.overflow import overflow
from services.router.text.requests import Parcel
from services.router.text.response_format import grammar_of
from services.router.text.tokens import Spec, TextEncoder, load

DEFAULT_NEW = 1024  # the most tokens of an answer whose request sets no limit


class GenerationSpec(NamedTuple):
    """One generate job: its parcel (items: choices; tokens: of the prompts and the longest answers), and its session.

    `marks` are page ids of the first prompt, by which the workers that hold its pages are found. `thinks` means that
    the prompt ends with the mark that opens the reasoning.
    """

    parcel: Parcel
    prompt_tokens: int
    choices: int
    session: str = ""
    version: int = 0
    marks: Sequence[PageId] = ()
    thinks: bool = False


def generation_of(
    options: GenerationOptions,
    spec: Spec,
    scope: str,
    prompts: list[list[int]],
    *,
    turn: SessionTurn | None = None,
    forced: list[int] | None = None,
    param: str,
    spans: Sequence[tuple[int, int]] = (),
) -> GenerationSpec:
    """Return the job; `spans` are those of passages in the only prompt that are computed alone.

    InvalidRequest `context_length_exceeded` if prompt and answer do not fit the model's context."""
    total, max_new = sum(map(len, prompts)), _max_new(options, spec, prompts, param)
    work = GenerateWork(
        fingerprint=spec.fingerprint,
        scope=scope,
        prompts=prompts,
        max_new=max_new,
        n=options.n,
        sampling=options.sampling,
        min_new=options.min_new,
        stop=options.stop,
        stop_ids=options.stop_ids,
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
        low=options.low,
        forced=forced,
        turn=turn,
        grammar=options.grammar,
        shown=options.shown,
        extensions=_extensions(options.extensions, max_new),
        spans=list(spans),
    )
    choices = len(prompts) * options.n
    try:
        parcel = Parcel(encode(work), choices, total + choices * max_new)
    except ValueError as error:
        raise TooLarge(f"the request is too large: {error}") from None
    session, version = (turn.session, turn.version) if turn else ("", 0)
    findable = prompts[0][: spans[0][0]] if spans else prompts[0]
    marks = marks_of(text_pages(spec.fingerprint, scope, findable))
    return GenerationSpec(parcel, total, choices, session, version, marks)


def _extensions(rule: ExtensionRule | None, max_new: int) -> ExtensionRule | None:
    """Return a rule for an answer of at most `max_new` tokens; None if the answer ends before the first boundary."""
    most = 0 if rule is None else retrievals(rule.every, max_new)
    return None if rule is None or not most else msgspec.structs.replace(rule, most=most)


def _max_new(
    options: GenerationOptions, spec: Spec, prompts: Sequence[Sequence[int]], param: str
) -> int:
    """Return the largest number of tokens to generate after each prompt; InvalidRequest if they exceed the context."""
    longest = max(map(len, prompts))
    room = spec.max_tokens - longest
    max_new = options.max_new or max(min(room, DEFAULT_NEW), options.min_new)
    if room < 1 or max_new > room:
        least = max_new if options.max_new else 1
        raise overflow(
            spec.max_tokens,
            f"you requested {longest + least} tokens ({longest} in the {param}, {least} in the completion)",
            f"reduce the length of the {param} or of the completion",
            param,
        )
    return max_new


# -- options -------------------------------------------------------------------------------------------


def _bias(given: dict[str, float] | None, encoder: TextEncoder) -> dict[int, float]:
    bias: dict[int, float] = {}
    for text, value in (given or {}).items():
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise InvalidRequest(
                f"logit_bias has a key {text[:40]!r}: expected token ids",
                code="invalid_value",
                param="logit_bias",
            )
        bias[int(text)] = value
    _known(bias, encoder, "logit_bias")
    return bias


def _known(ids: Sequence[int] | dict[int, float], encoder: TextEncoder, param: str) -> None:
    for index in ids:
        if not 0 <= index < encoder.vocabulary:
            raise InvalidRequest(
                f"{param} names token {index}: expected 0..{encoder.vocabulary - 1}",
                code="invalid_token",
                param=param,
            )


def _sampling(body: GenerateBody, spec: Spec) -> SamplingParams:
    wishes = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(body.top_k, 0),
        "min_p": body.min_p,
        "presence": body.presence_penalty,
        "frequency": body.frequency_penalty,
        "repetition": body.repetition_penalty,
    }
    said = {name: value for name, value in wishes.items() if value is not None}
    seed = secrets.randbits(62) if body.seed is None else body.seed % (1 << 63)
    bias = _bias(body.logit_bias, load(spec.path)) or spec.sampling.bias
    return msgspec.structs.replace(spec.sampling, **said, seed=seed, bias=bias)


def options_of(
    body: GenerateBody, spec: Spec, *, max_new: int, logprobs: int, low: bool
) -> GenerationOptions:
    """Return a body's options, with the model's defaults for missing fields, and a random seed if the body has none."""
    stop_ids = body.stop_token_ids or []
    if stop_ids:
        _known(stop_ids, load(spec.path), "stop_token_ids")
    min_new = body.min_tokens or 0
    if max_new and min_new > max_new:
        raise InvalidRequest(
            f"min_tokens is {min_new}: expected at most max_tokens, {max_new}",
            code="invalid_value",
            param="min_tokens",
        )
    return GenerationOptions(
        sampling=_sampling(body, spec),
        max_new=max_new,
        min_new=min_new,
        n=body.n or 1,
        stop=[body.stop] if isinstance(body.stop, str) else list(body.stop or ()),
        stop_ids=sorted({*spec.stop_ids, *stop_ids}),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        low=low,
        grammar=_grammar(body, spec),
    )


def _grammar(body: GenerateBody, spec: Spec) -> OutputGrammar | None:
    grammar = grammar_of(body.response_format)
    if grammar is not None and not spec.grammars:
        raise InvalidRequest(
            f"response_format: the workers of {spec.name} cannot bind an answer; expected type text",
            code="unsupported",
            param="response_format",
        )
    return grammar
