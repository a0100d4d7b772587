"""A grounded turn's job: passages found, chosen to fit the model's context, and put into the last message."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from common.errors import InvalidRequest
from common.wire.search import Hit
from common.wire.workflows import ChatRequest
from services.router.text.chats import SessionHistory, generation
from services.router.text.generations import GenerationSpec
from services.router.text.passages import (
    Passage,
    budget,
    merged,
    nothing_found,
    passages_of,
    queries,
    render,
    shown,
)
from services.router.text.requests import encode_all
from services.router.text.tokens import Spec, load

# What an answer may need where its client does not say: passages leave this much of the context, at most a quarter.
RESERVE_TOKENS = 512


class GroundedSpec(NamedTuple):
    """A generate job with what it rests on; `retrieval` is the response's object of that name."""

    generation: GenerationSpec
    retrieval: dict[str, Any]


class GroundedQuestion(NamedTuple):
    """A grounded chat before anything was found: what to search with, and its job if no passage joined it."""

    tokens: list[list[int]]
    generation: GenerationSpec


def question_of(
    ask: ChatRequest,
    spec: Spec,
    history: SessionHistory | None,
    encoder: Spec,
    prompt: str,
    earlier: Sequence[dict[str, str]],
) -> GroundedQuestion:
    """Return a grounded chat as it can be understood at the door; it is refused here if it does not fit the model.

    `encoder` is the collection's, `prompt` its prefix of queries, `earlier` the session's messages as shown.
    """
    conversation = [*earlier, *ask.messages]
    questions = [m["content"] for m in conversation if m["role"] == "user" and m["content"].strip()]
    if not ask.messages[-1]["content"].strip():
        questions.append("")  # refused below, as any empty text
    answers = [m["content"] for m in conversation if m["role"] == "assistant"]
    texts = [prompt + text if text else text for text in queries(questions, (answers or [""])[-1])]
    tokens = encode_all(
        load(encoder.path), texts, encoder.max_tokens, truncate=True, param="messages"
    )
    return GroundedQuestion(tokens, _build(ask, spec, history, (), forced=False))


def grounded(
    ask: ChatRequest, spec: Spec, history: SessionHistory | None, found: Sequence[Sequence[Hit]]
) -> GroundedSpec:
    """Return the job that answers from what was found (hits by query), or says that nothing was.

    Passages join the prompt best first as far as they fit beside question, history and answer. InvalidRequest
    `context_length_exceeded` if nothing of the best one does.
    """
    retrieval = ask.retrieval
    assert retrieval is not None, "a chat without retrieval is not grounded"
    passages = passages_of(merged(found, retrieval.k))
    build = partial(_build, ask, spec, history)
    room = spec.max_tokens - (ask.options.max_new or min(RESERVE_TOKENS, spec.max_tokens // 4))

    def fits(some: Sequence[Passage]) -> bool:
        try:
            return build(some).prompt_tokens <= room
        except InvalidRequest as error:
            if error.code != "context_length_exceeded":
                raise
            return False

    kept = budget(passages, fits)
    told = shown(retrieval.collection, len(passages), kept, include_text=retrieval.include_passages)
    return GroundedSpec(build(kept, retrieval=told), told)


def _build(
    ask: ChatRequest,
    spec: Spec,
    history: SessionHistory | None,
    passages: Sequence[Passage],
    *,
    forced: bool = True,
    retrieval: dict[str, Any] | None = None,
) -> GenerationSpec:
    assert ask.retrieval is not None
    *before, last = ask.messages
    content = render(spec.grounding_template, passages, last["content"])
    messages = [*before, {**last, "content": content}]
    if passages or not forced:
        return generation(ask, spec, history, messages=messages, retrieval=retrieval)
    answer = nothing_found(ask.retrieval.collection)
    # It is said whole, whatever the client's limits: they are meant for what a model computes.
    tokens = len(load(spec.path).written(answer))
    options = msgspec.structs.replace(
        ask.options, max_new=max(ask.options.max_new, tokens), min_new=0, stop=[]
    )
    plain = msgspec.structs.replace(ask, options=options)
    return generation(plain, spec, history, messages=messages, forced=answer, retrieval=retrieval)
