"""Generate jobs of grounded chats: the passages found are cut to the model's context and put into the last message."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from common.errors import InvalidRequest
from common.wire.control import ExtensionRule
from common.wire.jobs import GenerateWork, decode_work
from common.wire.retrievals import RetrievalRecord
from common.wire.search import Hit
from common.wire.workflows import ChatRequest, SearchRequest
from services.router.text.chats import SessionHistory, generation
from services.router.text.collections import query_words
from services.router.text.generations import GenerationSpec
from services.router.text.passage_spans import PassageSpan, passage_spans
from services.router.text.passages import (
    Passage,
    budget,
    interleaved,
    merged,
    nothing_found,
    passages_of,
    queries,
    render,
    shown,
)
from services.router.text.quotes import Sentence, compared, quotes, sentences
from services.router.text.requests import encode_all
from services.router.text.rewrites import carried, rewriting
from services.router.text.tokens import Spec, load

# The tokens that passages leave for an answer without max_tokens, but at most a quarter of the context.
RESERVE_TOKENS = 512


class PassageSlot(NamedTuple):
    """The replaceable passages in the prompt of a generate job; a changed prompt may have at most `room` tokens."""

    prompt: list[int]
    passages: list[Passage]
    room: int
    max_new: int


class GroundedSpec(NamedTuple):
    """A generate job, the response's `retrieval` object, and a `slot` if passages are replaced during the answer."""

    generation: GenerationSpec
    retrieval: dict[str, Any]
    slot: PassageSlot | None = None


class GroundedQuestion(NamedTuple):
    """A grounded chat before its search: the queries as tokens and as texts, and the generate job without passages.

    `rewriting` is the job in which a model rewrites the question, None if no model does.
    """

    tokens: list[list[int]]
    texts: list[str]
    generation: GenerationSpec
    rewriting: GenerationSpec | None = None


def question_of(
    ask: ChatRequest,
    spec: Spec,
    history: SessionHistory | None,
    encoder: Spec,
    prompt: str,
    earlier: Sequence[dict[str, str]],
    rewriter: Spec | None = None,
) -> GroundedQuestion:
    """Return a grounded chat before its search; InvalidRequest if it does not fit the model even without passages.

    `encoder` is the collection's encoder, `prompt` the collection's prompt of queries, `earlier` the session's messages
    as clients see them. `rewriter` is the model that rewrites a follow-up question; if that model was trained to read
    one kind of text, a rule rewrites instead.
    """
    conversation = [*earlier, *ask.messages]
    options = ask.retrieval.rewrite if ask.retrieval is not None else None
    questions = [m["content"] for m in conversation if m["role"] == "user" and m["content"].strip()]
    if not ask.messages[-1]["content"].strip():
        questions.append("")  # refused below, as any empty text
    answers = [m["content"] for m in conversation if m["role"] == "assistant"]
    asked = carried(conversation) if options else queries(questions, (answers or [""])[-1])
    better = None
    if options and options.by == "model" and rewriter is not None and not rewriter.reads:
        better = rewriting(ask, rewriter, options, conversation)
    texts = query_words(asked, "messages")
    tokens = _query_tokens(asked, encoder, prompt)
    made = _build(ask, spec, history, (), forced=False)
    return GroundedQuestion(tokens, texts, made, better)


def searching(
    search: SearchRequest, asked: Sequence[str], encoder: Spec, prompt: str
) -> SearchRequest:
    """Return a search for the texts `asked` instead of its own, in the same mode; see `question_of` for `prompt`."""
    return msgspec.structs.replace(
        search,
        count=len(asked),
        tokens=[] if search.mode == "text" else _query_tokens(asked, encoder, prompt),
        texts=[] if search.mode == "vector" else query_words(asked, "messages"),
    )


def _query_tokens(asked: Sequence[str], encoder: Spec, prompt: str) -> list[list[int]]:
    return encode_all(
        load(encoder.path),
        [prompt + text for text in asked],
        encoder.max_tokens,
        truncate=True,
        param="messages",
    )


class Unread(NamedTuple):
    """Passages that a model cannot read: their sentences, and the tokens of the question and of each sentence."""

    passages: list[Passage]
    sentences: list[Sentence]
    tokens: list[list[int]]


def unread(
    ask: ChatRequest,
    spec: Spec,
    encoder: Spec,
    question: Sequence[int],
    prompts: tuple[str, str],
    found: Sequence[Sequence[Hit]],
) -> Unread | None:
    """Return the sentences for an extractive answer; None if the model can read the passages, or there are none.

    A model that was trained on one kind of text splits other texts almost into letters: the model cannot read passages
    whose tokens have, on average, fewer characters than its card says. The model still writes an answer that is bound
    to a format or may call tools. `question` are the token ids of the question in the search, empty if the search had
    none; `prompts` are the collection's prompts of queries and of documents.
    """
    passages = _passages(ask, found)
    if not passages or ask.options.grammar is not None or ask.tools or readable(spec, passages):
        return None
    every = sentences(passages)
    texts = [prompts[0] + ask.messages[-1]["content"]]
    texts += [prompts[1] + compared(sentence, passages) for sentence in every]
    tokens = encode_all(
        load(encoder.path), texts, encoder.max_tokens, truncate=True, param="messages"
    )
    return Unread(passages, every, [list(question) or tokens[0], *tokens[1:]])


def readable(spec: Spec, passages: Sequence[Passage]) -> bool:
    """Return whether a model can read passages: their tokens have, on average, as many characters as its card says."""
    text = "\n".join(passage.text for passage in passages)
    return not spec.reads or len(text) >= spec.reads * len(load(spec.path).written(text))


def quoted(
    ask: ChatRequest, spec: Spec, history: SessionHistory | None, unread: Unread, rows: bytes
) -> GroundedSpec:
    """Return the job that gives an extractive answer; `rows` are the vectors of `unread.tokens`."""
    retrieval = ask.retrieval
    assert retrieval is not None, "a chat without retrieval is not grounded"
    made = quotes(ask.messages[-1]["content"], unread.passages, unread.sentences, rows)
    told = shown(
        retrieval.collection,
        len(unread.passages),
        made.passages,
        include_text=retrieval.include_passages,
        extractive=True,
    )
    return GroundedSpec(_given(ask, spec, history, made.text, told), told)


def grounded(
    ask: ChatRequest, spec: Spec, history: SessionHistory | None, found: Sequence[Sequence[Hit]]
) -> GroundedSpec:
    """Return the job that answers from the hits of each query, or that says that no passage was found.

    Passages join the prompt, best first, as far as they fit together with question, history and answer. InvalidRequest
    `context_length_exceeded` if not even a sentence of the best passage fits.
    """
    retrieval = ask.retrieval
    assert retrieval is not None, "a chat without retrieval is not grounded"
    passages = _passages(ask, found)
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
    told = shown(
        retrieval.collection,
        len(passages),
        kept,
        include_text=retrieval.include_passages,
        approximate=retrieval.precomputed and bool(kept),
    )
    if kept and retrieval.interval:
        numbers = [passage.index for passage in kept]
        first = RetrievalRecord(0, 0, len(passages), numbers, replaced=[], late=False)
        told |= {"retrievals": [msgspec.to_builtins(first)]}
    made = build(kept, retrieval=told, spans=spans_of(ask, spec, history, kept))
    return GroundedSpec(
        made, told, _slot(made, spec, kept) if kept and retrieval.interval else None
    )


def _slot(made: GenerationSpec, spec: Spec, kept: list[Passage]) -> PassageSlot | None:
    """Return the slot of a job; None if the answer ends before passages could be replaced."""
    work = decode_work(made.parcel.payload)
    assert isinstance(work, GenerateWork)
    if work.extensions is None:
        return None
    return PassageSlot(work.prompts[0], kept, spec.max_tokens - work.max_new, work.max_new)


def best(ask: ChatRequest, found: Sequence[Sequence[Hit]], count: int) -> list[Hit]:
    """Return the best `count` hits over all queries, each once, without the hits that have no text."""
    assert ask.retrieval is not None
    scored = ask.retrieval.mode == "vector" and ask.retrieval.mmr is None
    return [hit for hit in (merged if scored else interleaved)(found, count) if hit.text]


def _passages(ask: ChatRequest, found: Sequence[Sequence[Hit]]) -> list[Passage]:
    assert ask.retrieval is not None
    return passages_of(best(ask, found, ask.retrieval.k))


def _build(
    ask: ChatRequest,
    spec: Spec,
    history: SessionHistory | None,
    passages: Sequence[Passage],
    *,
    forced: bool = True,
    retrieval: dict[str, Any] | None = None,
    spans: Sequence[PassageSpan] = (),
) -> GenerationSpec:
    assert ask.retrieval is not None
    if passages or not forced:
        extended = _extended(ask) if passages else ask
        messages = grounded_messages(ask, spec, passages)
        return generation(
            extended, spec, history, messages=messages, retrieval=retrieval, spans=spans
        )
    return _given(ask, spec, history, nothing_found(ask.retrieval.collection), retrieval)


def spans_of(
    ask: ChatRequest, spec: Spec, history: SessionHistory | None, passages: Sequence[Passage]
) -> list[PassageSpan]:
    """Return the spans of the passages in a chat's prompt, if the chat asks for passages that are computed alone."""
    if ask.retrieval is None or not ask.retrieval.precomputed or not passages:
        return []
    messages_of = partial(grounded_messages, ask, spec)
    return passage_spans(spec, messages_of, passages, history, ask.tools)


def grounded_messages(
    ask: ChatRequest, spec: Spec, passages: Sequence[Passage]
) -> list[dict[str, Any]]:
    """Return a chat's messages with passages in the last one."""
    assert ask.retrieval is not None
    *before, last = ask.messages
    place = ask.retrieval.place
    return [
        *before,
        {**last, "content": render(spec.grounding_template, passages, last["content"], place)},
    ]


def _extended(ask: ChatRequest) -> ChatRequest:
    """Return a chat whose passages may be replaced as its answer is written, if it asks for that."""
    retrieval = ask.retrieval
    if retrieval is None or not isinstance(retrieval.interval, int) or not retrieval.interval:
        return ask
    rule = ExtensionRule(retrieval.interval, most=0, late=retrieval.late)  # the job sets `most`
    options = msgspec.structs.replace(ask.options, extensions=rule)
    return msgspec.structs.replace(ask, options=options)


def _given(
    ask: ChatRequest,
    spec: Spec,
    history: SessionHistory | None,
    answer: str,
    retrieval: dict[str, Any] | None,
) -> GenerationSpec:
    """Return the job of an answer that no model computes; its prompt is the question without passages."""
    messages = grounded_messages(ask, spec, ())
    # The answer is given whole: the client's limits are meant for computed answers.
    tokens = len(load(spec.path).written(answer))
    options = msgspec.structs.replace(
        ask.options, max_new=max(ask.options.max_new, tokens), min_new=0, stop=[]
    )
    plain = msgspec.structs.replace(ask, options=options)
    return generation(plain, spec, history, messages=messages, forced=answer, retrieval=retrieval)
