"""Quotes: sentences of passages that answer a question, for models that cannot read the passages.

The functions are pure: given the same texts and the same vectors of an encoder, they choose the same sentences.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from operator import mul
from typing import NamedTuple

import msgspec

from services.router.text.passages import Passage

MAX_SENTENCES = 96
_MOST_CHARACTERS = 600
_FEWEST_CHARACTERS = 12
# Beginnings of lines that continue no paragraph: items, table rows, headings, quotes, code, transcripts.
_BEGINS = re.compile(r"[ ]{0,3}(?:[-*+•]\s|\d{1,3}[.)]\s|\||#|>|\$\s)|[ ]{4}|\t")
_FENCE = re.compile(r"[ ]{0,3}(?:```|~~~)")
_EXAMPLE = re.compile(
    r"\s*(?:\$|>>>)\s"
)  # a transcript of typed input and its output, which is never quoted
_ENDS = re.compile(r"(?<=[.!?])[\"')\]`]*\s+(?=[\"'(\[`*]*[A-Z0-9])|(?<=[。\uff01\uff1f])")
_RULE = re.compile(r"[|:\s=~*_#-]*\Z")  # a line under a heading or between table rows
_MARKER = re.compile(r"\[([0-9, ]{1,62})\]")
_WORD = re.compile(r"\w+")
_SUFFIX = re.compile(r"(?:ing|ed|es|s|e)\Z")
_COMMON = frozenset(
    """
    a an the of in on at to for from by with and or not no is are was were be been do does did has have had can could
    will would shall should may might must i you he she it we they me my your his her its our their this that these
    those there here what which who whom whose when where why how if as than then so much many any some all
    """.split()  # noqa: SIM905 - read as the words they are
)


class Sentence(NamedTuple):
    """A sentence: characters [start, end) of the document of the passage at `place`, and the heading above them."""

    place: int
    start: int
    end: int
    heading: str


def sentences(passages: Sequence[Passage]) -> list[Sentence]:
    """Return the sentences, list items and table rows of passages in order, at most MAX_SENTENCES of them."""
    every = (
        Sentence(place, passage.start + begin, passage.start + end, heading)
        for place, passage in enumerate(passages)
        for begin, end, heading in _spans(passage.text)
    )
    return list(islice(every, MAX_SENTENCES))


def shown(sentence: Sentence, passages: Sequence[Passage]) -> str:
    """Return a sentence on one line; numbers in square brackets, which would be citations, get round brackets."""
    passage = passages[sentence.place]
    text = passage.text[sentence.start - passage.start : sentence.end - passage.start]
    return _MARKER.sub(r"(\1)", " ".join(text.split()))


def compared(sentence: Sentence, passages: Sequence[Passage]) -> str:
    """Return the text that is compared with the question: the sentence, after its heading if there is one."""
    text = shown(sentence, passages)
    return f"{sentence.heading}: {text}" if sentence.heading else text


def _spans(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, heading) of each sentence; the lines of a paragraph are read as one text."""
    heading, first, at = "", -1, 0
    for line in [*text.splitlines(keepends=True), "\n"]:
        bare = "" if _FENCE.match(line) else line.strip()
        if first >= 0 and (not bare or _BEGINS.match(line)):
            if not _EXAMPLE.match(text, first):
                for begin, end in _cut(text, first, at):
                    yield begin, end, heading
            first = -1
        if bare.startswith("#") or (bare and at == 0 and " " not in bare):
            heading = bare.lstrip("# ")
        elif bare and first < 0:
            first = at
        at += len(line)


def _cut(text: str, first: int, last: int) -> Iterator[tuple[int, int]]:
    cuts = [first, *(match.end() for match in _ENDS.finditer(text, first, last)), last]
    for begin, end in pairwise(cuts):
        said = text[begin:end]
        start = begin + len(said) - len(said.lstrip())
        stop = min(begin + len(said.rstrip()), start + _MOST_CHARACTERS)
        if stop - start >= _FEWEST_CHARACTERS and not _RULE.match(said):
            yield start, stop


# -- the choice --------------------------------------------------------------------------------------------

FEWEST_COSINE = 0.52
FEWEST_COVERED = 0.25
_MOST_QUOTES = 3
_NEAR = 0.08  # a further sentence is quoted if its cosine is at most this much below the best one's
_SHORT = 300  # characters: the next sentence is quoted, too, if both fit


class Quotes(NamedTuple):
    """An extractive answer: its text, and the quoted sentences as passages of their own, numbered from 1."""

    text: str
    passages: list[Passage]


LABEL = "Quoted from the passages, word for word:"
REFUSAL = "The passages do not say."


def quotes(
    question: str, passages: Sequence[Passage], found: Sequence[Sentence], rows: bytes
) -> Quotes:
    """Return the sentences that answer a question, or the refusal with all passages if no sentence does.

    `rows` holds float32 vectors of length 1: the question's, then one of each sentence's text as `compared` returns it.
    """
    scores = _cosines(rows, len(found))
    ranked = sorted(range(len(found)), key=lambda place: (-scores[place], place))
    if not ranked or not answers(
        question, scores[ranked[0]], [compared(found[at], passages) for at in ranked[:3]]
    ):
        return Quotes(REFUSAL, list(passages))
    best: dict[str, Sentence] = {}
    used: set[int] = set()
    for at in ranked:
        if len(best) < _MOST_QUOTES and scores[at] >= scores[ranked[0]] - _NEAR and at not in used:
            last = _last(at, found, passages)
            used.update(range(at, last + 1))
            quote = found[at]._replace(end=found[last].end)
            best.setdefault(shown(quote, passages), quote)
    lines = [f"{text} [{number}]" for number, text in enumerate(best, 1)]
    cut = [
        _numbered(passages[one.place].cut(one.start, one.end), number)
        for number, one in enumerate(best.values(), 1)
    ]
    return Quotes("\n\n".join([LABEL, *lines]), cut)


def _last(at: int, found: Sequence[Sentence], passages: Sequence[Passage]) -> int:
    """Return the place of a quote's last sentence: `at`, or the next in the paragraph if both together are short."""
    one, after = found[at], found[at + 1] if at + 1 < len(found) else None
    if after is None or after.place != one.place or after.end - one.start > _SHORT:
        return at
    passage = passages[one.place]
    between = passage.text[one.end - passage.start : after.start - passage.start]
    new = _BEGINS.match(passage.text, after.start - passage.start)
    return at if new or between.strip() or between.count("\n") > 1 else at + 1


def _numbered(passage: Passage, index: int) -> Passage:
    return msgspec.structs.replace(passage, index=index)


def _cosines(rows: bytes, count: int) -> list[float]:
    """Return the cosine of each sentence's vector with the question's, which is the first row."""
    values = array("f", rows)
    width = len(values) // (count + 1)
    asked = values[:width]
    return [
        math.fsum(map(mul, asked, values[width * place : width * (place + 1)]))
        for place in range(1, count + 1)
    ]


def answers(question: str, cosine: float, nearest: Sequence[str]) -> bool:
    """Return whether the `nearest` sentences answer a question: `cosine` is high, and they share words with it.

    `cosine` compares the vectors of the question and of the nearest sentence.
    """
    return cosine >= FEWEST_COSINE and covered(question, " ".join(nearest)) >= FEWEST_COVERED


def covered(question: str, text: str) -> float:
    """Return the share of a question's words that a text holds, 0 for a question of only common words."""
    asked, held = words(question), words(text)
    return len(asked & held) / len(asked) if asked else 0.0


def words(text: str) -> set[str]:
    """Return a text's words without common ones and endings."""
    found = (word for word in _WORD.findall(text.lower()) if word not in _COMMON)
    return {_SUFFIX.sub("", word) if len(word) > 3 else word for word in found}
