"""Spans of passages in a prompt: the ranges of tokens that hold each passage's text, whatever the templates do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from common.errors import InvalidRequest
from services.router.text.chats import SessionHistory, prompt_segments
from services.router.text.passages import Passage
from services.router.text.templates import Messages, PromptSegment, Tools
from services.router.text.tokens import Spec, load

PassageSpan = tuple[int, int]
# Private characters, of which the first two that the prompt does not have mark a passage's ends.
_MARKS = [chr(0xF100 + at) for at in range(64)]


def passage_spans(
    spec: Spec,
    messages_of: Callable[[Sequence[Passage]], Messages],
    passages: Sequence[Passage],
    history: SessionHistory | None = None,
    tools: Tools = (),
) -> list[PassageSpan]:
    """Return the tokens [begin, end) of each passage in the prompt that `chat_prompt` makes of `messages_of(passages)`.

    A token on the edge of a passage belongs to it. The prompt's first and last token belong to none, and a passage
    without a token is left out. InvalidRequest `unsupported` if the templates do not show the passages' texts as they
    are, once and in this order, so that their places cannot be told.
    """
    held, plain = prompt_segments(spec, messages_of(passages), history, tools)
    ends = _free_marks(spec, plain)
    _, marked = prompt_segments(
        spec, messages_of([_between(passage, ends) for passage in passages]), history, tools
    )
    texts, places = _unmarked(marked, ends)
    if texts != [segment.text for segment in plain] or len(places) != len(passages):
        raise _untold(spec, "a template changes their texts")
    return _tokens(spec, held, plain, places)


def _free_marks(spec: Spec, segments: Sequence[PromptSegment]) -> tuple[str, str]:
    used = set().union(*(segment.text for segment in segments))
    free = [mark for mark in _MARKS if mark not in used]
    if len(free) < 2:
        raise _untold(spec, "they hold too many private characters")
    return free[0], free[1]


def _between(passage: Passage, ends: tuple[str, str]) -> Passage:
    """Return a passage with a mark at both ends of its text; space at the ends stays outside, where it may be cut."""
    text = passage.text
    core = text.strip()
    at = text.index(core)
    marked = f"{text[:at]}{ends[0]}{core}{ends[1]}{text[at + len(core) :]}"
    return msgspec.structs.replace(passage, text=marked)


def _unmarked(
    segments: Sequence[PromptSegment], ends: tuple[str, str]
) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Return the segments' texts without marks, and each passage's segment and characters; no places if marks lack."""
    texts, places = [], []
    for number, segment in enumerate(segments):
        text, rest = "", segment.text
        while ends[0] in rest:
            before, _, rest = rest.partition(ends[0])
            core, closed, rest = rest.partition(ends[1])
            if not closed or ends[0] in core:
                return [], []
            text += before
            places.append((number, len(text), len(text) + len(core)))
            text += core
        if ends[1] in rest:
            return [], []
        texts.append(text + rest)
    return texts, places


def _tokens(
    spec: Spec,
    held: Sequence[int],
    segments: Sequence[PromptSegment],
    places: Sequence[tuple[int, int, int]],
) -> list[PassageSpan]:
    """Return the tokens of the characters at `places`; they rise, and leave out the first token and the last."""
    encoder, first = load(spec.path), len(held)
    found: list[PassageSpan] = []
    for number, (text, written) in enumerate(segments):
        ids, offsets = encoder.located(text, written=written)
        for begin, end in (place[1:] for place in places if place[0] == number):
            within = [at for at, (a, b) in enumerate(offsets) if a < end and begin < b]
            if within:
                found.append((first + within[0], first + within[-1] + 1))
        first += len(ids)
    spans: list[PassageSpan] = []
    least = 1
    for found_begin, found_end in found:
        begin, end = max(found_begin, least), min(found_end, first - 1)
        if begin < end:
            spans.append((begin, end))
            least = end
    return spans


def _untold(spec: Spec, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"retrieval.precomputed: where passages lie in this prompt of {spec.name} cannot be told: {why}; leave it out",
        code="unsupported",
        param="retrieval.precomputed",
    )
