"""Passages of grounded answers: the queries that find them, their place in the prompt, and their citations."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from common import ranking
from common.errors import InvalidRequest, Unavailable
from common.wire.search import Hit
from services.router.text.templates import bounded_time

_MARKER = re.compile(r"\[([0-9, ]{1,62})\]")
_OPEN = re.compile(r"\[[0-9, ]{0,62}\Z")
_DIGITS = 5
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
# Words anywhere in a question, and words at its start, that refer to the conversation before the question.
_LEANS = re.compile(
    r"\b(?:it|its|they|them|their|theirs|he|him|his|she|her|hers|that|this|these|those|there|one|same|former|latter)\b"
    r"|^\W*(?:and|also|or|but|so|now|then|what about|how about)\b",
    re.IGNORECASE,
)
_SHORT_WORDS = 4
_ANSWER_CHARS = 200

DEFAULT_TEMPLATE = """\
Answer the question from the passages below and from nothing else. After each statement cite the passages that say it, \
by their numbers in square brackets: [1] or [1, 2]. If the passages do not say, answer only: The passages do not say.

{% for passage in passages %}[{{ passage.index }}] {{ passage.text }}

{% else %}(No passages.)

{% endfor %}Question: {{ question }}"""
# The default template with the question first: replacing passages then leaves the question's tokens as computed.
_QUESTION_FIRST = """\
Answer the question from the passages below it and from nothing else. After each statement cite the passages that say \
it, by their numbers in square brackets: [1] or [1, 2]. If the passages do not say, answer only: The passages do not \
say.

Question: {{ question }}
{% for passage in passages %}

[{{ passage.index }}] {{ passage.text }}
{% else %}

(No passages.)
{% endfor %}"""


class Passage(Struct, frozen=True, omit_defaults=True):
    """One passage in the prompt: `index` counts from 1; `start` and `end` are characters of its document.

    For a document with pages, `page` is the number of the page on which the passage begins (0: no pages), and
    `page_starts` are the characters of the document at which the passage's further pages begin.
    """

    index: int
    document_id: str
    chunk: int
    start: int
    end: int
    score: float
    text: str = ""
    page: int = 0
    page_starts: list[int] = []

    def page_at(self, character: int) -> int:
        """Return the page of a character of the document, 0 for a document without pages."""
        return self.page + bisect_right(self.page_starts, character) if self.page else 0

    def cut(self, start: int, end: int) -> Passage:
        """Return the part at the characters [start, end) of the document, as a passage with the same index."""
        text = self.text[start - self.start : end - self.start]
        return msgspec.structs.replace(
            self,
            start=start,
            end=end,
            text=text,
            page=self.page_at(start),
            page_starts=[at for at in self.page_starts if start < at < end],
        )


class Citation(Struct, frozen=True, omit_defaults=True):
    """A marker at the characters [at[0], at[1]) of an answer, and the passage that the marker names.

    For a document with pages, `page` and `last_page` are the first and the last page of the passage.
    """

    index: int
    document_id: str
    start: int
    end: int
    at: tuple[int, int]
    page: int = 0
    last_page: int = 0


# -- queries ---------------------------------------------------------------------------------------------


def leans(question: str) -> bool:
    """Return whether a question may refer to the conversation before it: it is short, or a word in it refers."""
    return len(question.split()) <= _SHORT_WORDS or _LEANS.search(question) is not None


def queries(questions: Sequence[str], answer: str = "") -> list[str]:
    """Return the queries of a search for the last of a conversation's `questions`; `answer` is the last answer.

    The first query is the last question. If that `leans` on the conversation, a second query joins it with the
    beginning of the last answer and the earlier questions, newest first, back to one that does not lean. Over the pages
    of the sample `handbook` the queries find the page of a follow-up ("And its mayor?") among the first five in 100 %
    of second and 98 % of third turns, where 30 % of the answers were refusals; the last question alone finds the page
    in 3 to 7 %.
    """
    last = questions[-1].strip()
    if len(questions) == 1 or not leans(last):
        return [last]
    first = len(questions) - 1
    while first > 0 and leans(questions[first]):
        first -= 1
    before = [question.strip() for question in reversed(questions[first:-1])]
    together = " ".join(part for part in (last, answer[:_ANSWER_CHARS].strip(), *before) if part)
    return [last, together]


def merged(rows: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
    """Return the k best chunks over the hits of all queries, each once with its best score, best first."""
    best: dict[tuple[str, int], Hit] = {}
    for row in rows:
        for hit in row:
            known = best.get((hit.id, hit.chunk))
            if known is None or hit.score > known.score:
                best[hit.id, hit.chunk] = hit
    return sorted(best.values(), key=lambda hit: (-hit.score, hit.id, hit.chunk))[:k]


def interleaved(rows: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
    """Return the k best chunks over the hits of all queries by reciprocal rank fusion, each chunk once; see `merged`.

    For searches whose scores cannot be compared between queries.
    """
    if len(rows) == 1:
        return list(rows[0][:k])
    hits = {(hit.id, hit.chunk): hit for row in rows for hit in row}
    places = [{(hit.id, hit.chunk): -rank for rank, hit in enumerate(row)} for row in rows]
    columns = [[ranks.get(key) for key in hits] for ranks in places]
    every = list(hits.values())
    return [every[place] for place, _ in ranking.fused(columns, len(every))[:k]]


def passages_of(hits: Iterable[Hit]) -> list[Passage]:
    """Return hits as passages numbered from 1, without the hits that have no text."""
    readable = [hit for hit in hits if hit.text]
    return [
        Passage(
            index, hit.id, hit.chunk, hit.start, hit.end, hit.score, hit.text or "", *_pages(hit)
        )
        for index, hit in enumerate(readable, 1)
    ]


def _pages(hit: Hit) -> tuple[int, list[int]]:
    """Return the page on which a hit begins and where its further pages begin, from the document's metadata.

    `pages` lists the characters at which pages start and `first_page` numbers the first of them, as `spillway ingest`
    stores them; clients choose metadata freely, so anything else means no pages.
    """
    starts, first = (hit.metadata or {}).get("pages"), (hit.metadata or {}).get("first_page", 1)
    if not isinstance(starts, list) or not starts or not isinstance(first, int) or first < 1:
        return 0, []
    if not all(isinstance(start, int) for start in starts):
        return 0, []
    place = max(0, bisect_right(starts, hit.start) - 1)
    return first + place, [start for start in starts[place + 1 :] if hit.start < start < hit.end]


# -- the prompt ------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _template(source: str) -> jinja2.Template:
    # The block options of chat templates, so that both kinds of template are written in one dialect.
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)


def render(
    template: str,
    passages: Sequence[Passage],
    question: str,
    place: Literal["before", "after"] = "before",
) -> str:
    """Return a grounded user message; an empty `template` means the router's, with passages at `place`.

    Unavailable `template_broken` if the model's template cannot be used; see `bounded_time`.
    """
    shown = [
        {"index": passage.index, "document_id": passage.document_id, "text": passage.text}
        for passage in passages
    ]
    try:
        with bounded_time():
            own = DEFAULT_TEMPLATE if place == "before" else _QUESTION_FIRST
            return _template(template or own).render(passages=shown, question=question)
    except Exception as error:
        raise Unavailable(
            f"the model's grounding template cannot be used: {type(error).__name__}: {error}",
            code="template_broken",
        ) from error


def sentence_ends(text: str) -> list[int]:
    """Return, in rising order, the lengths at which `text` may be cut after a whole sentence or line."""
    ends = {match.start() for match in _SENTENCE.finditer(text)} | {len(text.rstrip())}
    return sorted(end for end in ends if text[:end].strip())


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """Return the largest n in 0..count for which fits(n), provided that every smaller n fits, too."""
    if fits(count):
        return count
    low, high = 0, count - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def budget(passages: Sequence[Passage], fits: Callable[[Sequence[Passage]], bool]) -> list[Passage]:
    """Return the whole passages that fit, best first; if not even the first fits, its first sentences that fit.

    InvalidRequest `context_length_exceeded` if not even one sentence fits.
    """
    kept = _most(len(passages), lambda n: n == 0 or fits(passages[:n]))
    if kept or not passages:
        return list(passages[:kept])
    ends = sentence_ends(passages[0].text)

    def cut(n: int) -> Passage:
        return passages[0].cut(passages[0].start, passages[0].start + ends[n - 1])

    kept = _most(len(ends), lambda n: n == 0 or fits([cut(n)]))
    if not kept:
        raise InvalidRequest(
            "question, history and answer leave no room in the model's context for a single sentence of the best "
            "passage; shorten the conversation, or ask for fewer max_tokens",
            code="context_length_exceeded",
            param="messages",
        )
    return [cut(kept)]


def nothing_found(collection: str) -> str:
    """Return the text of the answer if no passage was found."""
    return f"No passage was found in collection '{collection}' for this question."


# -- the answer ------------------------------------------------------------------------------------------


class Citations:
    """Finds `[1]` and `[1, 2]` in an answer that arrives in pieces; a marker may be split across pieces.

    Numbers that no passage has are ignored; `found` holds the rest in the order of the answer.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = {passage.index: passage for passage in passages}
        self._tail, self._tail_at = "", 0
        self.found: list[Citation] = []

    def feed(self, text: str) -> None:
        """Take the answer's next characters."""
        held, at = self._tail + text, self._tail_at
        for match in _MARKER.finditer(held):
            self._note(match[1], (at + match.start(), at + match.end()))
        opened = _OPEN.search(held)
        cut = opened.start() if opened else len(held)
        self._tail, self._tail_at = held[cut:], at + cut

    def _note(self, inside: str, at: tuple[int, int]) -> None:
        numbers = [part.strip() for part in inside.split(",")]
        if not all(number.isdigit() and len(number) <= _DIGITS for number in numbers):
            return
        for number in dict.fromkeys(map(int, numbers)):
            passage = self._passages.get(number)
            if passage is not None:
                where = (number, passage.document_id, passage.start, passage.end, at)
                last = passage.page_at(max(passage.start, passage.end - 1))
                self.found.append(Citation(*where, passage.page, last))


def cited(answer: str, passages: Sequence[Passage]) -> list[Citation]:
    """Return the citations of a whole answer."""
    citations = Citations(passages)
    citations.feed(answer)
    return citations.found


def with_citations(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a session's messages; an answer with passages gets the citations that its response had."""
    for message in messages:
        if "retrieval" in message:
            passages = msgspec.convert(message["retrieval"]["passages"], list[Passage])
            found = cited(message["content"], passages)
            message["citations"] = [msgspec.to_builtins(one) for one in found]
    return messages


def passage_rows(passages: Sequence[Passage], *, include_text: bool) -> list[dict[str, Any]]:
    """Return passages as a response shows them; their texts only if asked for."""
    made: list[dict[str, Any]] = [msgspec.to_builtins(passage) for passage in passages]
    if not include_text:
        for row in made:
            row.pop("text", None)
    return made


def shown(
    collection: str,
    found: int,
    passages: Sequence[Passage],
    *,
    include_text: bool,
    extractive: bool = False,
    approximate: bool = False,
) -> dict[str, Any]:
    """Return the `retrieval` object of a response; passages' texts only if asked for.

    `extractive` marks an answer that quotes the passages and was written by no model, `approximate` one whose passages
    were computed alone.
    """
    told = {
        "collection": collection,
        "found": found,
        "passages": passage_rows(passages, include_text=include_text),
    }
    marks = {"extractive": extractive, "approximate": approximate}
    return told | {name: True for name, marked in marks.items() if marked}
