"""Held-out chronicles as reports that a chat model is to write, with the passages found for each interval."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tokenizers import Tokenizer

from engine.models.retro.database import Neighbour
from models.retro.evaluate import HeldOut, HeldOutTexts
from models.retro.tokens import EncodedText

CHUNK = (
    64  # tokens of a query, and of the part of a report that is there before anything is retrieved
)
K, PASSAGE = 2, 128  # passages, and their tokens
Retrieval = Literal["none", "once", "sequential", "pipelined, not shifted", "pipelined"]
RETRIEVALS: tuple[Retrieval, ...] = (
    "none", "once", "sequential", "pipelined, not shifted", "pipelined"
)  # fmt: skip


class Report(NamedTuple):
    """A report: its question, its tokens, and where (from, to) values of facts stand behind its first chunk."""

    question: str
    tokens: list[int]
    values: list[tuple[int, int]]


class Reports:
    """Reports in one model's tokens, whose facts stand in a database alone, in other words and among others' facts."""

    def __init__(
        self, tokenizer: Tokenizer, texts: int, stored: int, tokens: int, seed: int
    ) -> None:
        """Make `texts` reports of at most `tokens` tokens; the database has the tellings of `stored` chronicles."""
        self._tokenizer = tokenizer
        self._held = HeldOutTexts(tokenizer, EncodedText(tokenizer), texts, stored, CHUNK, seed)
        self.reports = [_report(text, tokenizer, tokens) for text in self._held.texts]

    @property
    def chunks(self) -> int:
        """How many chunks the database has."""
        return len(self._held.database)

    def points(self, report: int, interval: int) -> list[int]:
        """Return after how many tokens of a report something is retrieved."""
        return list(range(CHUNK, len(self.reports[report].tokens), interval))

    def passages(self, report: int, interval: int, how: Retrieval) -> list[list[str]]:
        """Return the passages in the prompt from each point on; the first retrieval is fresh always.

        One that a shift would leave empty stays as it was found.
        """
        points = self.points(report, interval)
        if how == "none":
            return [[] for _ in points]
        stale = interval if how.startswith("pipelined") else 0
        shifted = how == "pipelined"
        found = self._held.neighbours(report, interval, stale, K, shifted=shifted)[: len(points)]
        texts = [
            [self._text(each, stale if shifted and n else 0) for each in some]
            for n, some in enumerate(found)
        ]
        return [texts[0] for _ in points] if how == "once" else texts

    def _text(self, neighbour: Neighbour, shift: int) -> str:
        begin = neighbour.begin
        if begin >= len(neighbour.document):
            begin -= shift
        text: str = self._tokenizer.decode(neighbour.document[begin : begin + PASSAGE].tolist())
        return text


def _report(text: HeldOut, tokenizer: Tokenizer, most: int) -> Report:
    told = text.chronicle.text
    offsets: Sequence[tuple[int, int]] = tokenizer.encode(told, add_special_tokens=False).offsets
    tokens = text.tokens[:most]
    named, values, place = dict[str, dict[str, str]](), list[tuple[int, int]](), 0
    for who, keys in text.chronicle.told:
        named[who.name] = {key: who.facts[key] for key in keys}
    for section in re.split(r"(?=^# )", told, flags=re.MULTILINE):
        name = section.removeprefix("# ").split("\n", 1)[0]
        begins = sum(end <= place for _, end in offsets)
        for value in named.get(name, {}).values():
            if begins < CHUNK:
                break
            found = re.search(rf"\b{re.escape(value)}\b", section[len(name) + 2 :], re.IGNORECASE)
            if found is not None:
                a, b = (place + len(name) + 2 + at for at in found.span())
                within = [at for at, (c, d) in enumerate(offsets) if c < b and a < d]
                if within[-1] < len(tokens):
                    values.append((within[0], within[-1] + 1))
        place += len(section)
    first = text.chronicle.told[0][0].name
    return Report(f"Write the report that begins with {first}.", tokens, values)
