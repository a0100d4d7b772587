"""Replacing passages while an answer is written: the query, the new passages, and the change of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from common.errors import InvalidRequest
from common.wire.search import Hit
from common.wire.workflows import ChatRequest
from services.router.text.chats import SessionHistory, chat_prompt
from services.router.text.collections import query_words
from services.router.text.grounded import PassageSlot, grounded_messages, readable, spans_of
from services.router.text.intervals import NO_CHANGE, Splice, shifted, splice, window
from services.router.text.passage_spans import PassageSpan
from services.router.text.passages import Passage, budget, passages_of
from services.router.text.requests import encode_all
from services.router.text.tokens import Spec, load

# The reasons for keeping the former passages: no hits, hits that the model cannot read, or no room for a sentence.
Kept = Literal["nothing_found", "unreadable", "no_room"]


class WindowQuery(NamedTuple):
    """A query of the latest tokens: the encoder's token ids, the text, and the number of the generator's tokens."""

    tokens: list[int]
    text: str
    window: int


class Replacement(NamedTuple):
    """The prompt's new passages and the change that inserts them, or the reason for keeping the former passages.

    `spans` are those of the new prompt, if passages are computed alone.
    """

    passages: list[Passage]
    splice: Splice = NO_CHANGE
    kept: Kept | None = None
    spans: Sequence[PassageSpan] = ()


def window_query(
    ask: ChatRequest, spec: Spec, encoder: Spec, prompt: str, answer: Sequence[int]
) -> WindowQuery:
    """Return the query of the last tokens of question and `answer`, with the encoder's `prompt` before it."""
    generator, question = load(spec.path), ask.messages[-1]["content"]
    tokens = window(generator.written(question), answer, len(answer))
    text = generator.said(tokens)
    (text,) = query_words([text if text.strip() else question], "messages")
    (encoded,) = encode_all(
        load(encoder.path), [prompt + text], encoder.max_tokens, truncate=True, param="messages"
    )
    return WindowQuery(encoded, text, len(tokens))


def replacement(
    ask: ChatRequest,
    spec: Spec,
    history: SessionHistory | None,
    slot: PassageSlot,
    hits: Sequence[Hit],
    shift: int,
    known: Sequence[Passage],
    first: int,
) -> Replacement:
    """Return the replacement of a slot's passages: the hits, moved on by `shift` tokens, as far as they fit.

    Passages among the `known` keep their numbers, others are numbered from `first` on.
    """
    found = passages_of(_moved(hit, spec, shift) for hit in hits)
    if not found:
        return Replacement([], kept="nothing_found")
    if not readable(spec, found):
        return Replacement([], kept="unreadable")
    found = numbered(found, known, first)

    def prompt(some: Sequence[Passage]) -> list[int]:
        return chat_prompt(spec, grounded_messages(ask, spec, some), history, ask.tools)[0]

    def fits(some: Sequence[Passage]) -> bool:
        return len(prompt(some)) <= slot.room

    try:
        kept = budget(found, fits)
    except InvalidRequest as error:
        if error.code != "context_length_exceeded":
            raise
        return Replacement([], kept="no_room")
    spans = spans_of(ask, spec, history, kept)
    return Replacement(kept, splice(slot.prompt, prompt(kept)), spans=spans)


def numbered(found: Sequence[Passage], known: Sequence[Passage], first: int) -> list[Passage]:
    """Return passages with numbers: a known part of a document keeps its number, others count from `first`."""
    numbers = {_place(passage): passage.index for passage in known}
    made = []
    for passage in found:
        index = numbers.setdefault(_place(passage), first)
        first += index == first
        made.append(msgspec.structs.replace(passage, index=index))
    return made


def _place(passage: Passage) -> tuple[str, int, int]:
    return passage.document_id, passage.start, passage.end


def _moved(hit: Hit, spec: Spec, shift: int) -> Hit:
    """Return a hit without its first `shift` tokens, refilled from the text after it; unchanged if no text is left."""
    if not shift or not hit.text:
        return hit
    whole, generator = hit.text + (hit.following or ""), load(spec.path)
    places = shifted(generator.spans(whole), len(generator.spans(hit.text)), shift)
    if places is None:
        return hit
    start = places[0] + len(whole[places[0] : places[1]]) - len(whole[slice(*places)].lstrip())
    if start >= places[1]:
        return hit
    return msgspec.structs.replace(
        hit, start=hit.start + start, end=hit.start + places[1], text=whole[start : places[1]]
    )
