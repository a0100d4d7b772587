"""What a grounded answer rests on, as its readers are told it: the first passages, and those that replaced them.

The job's log holds one note for each retrieval that was made while the answer was written, at the token after which it
counts; so every reader, at any router, is told the same at the same place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from common.wire.control import Applied
from common.wire.search import Effort
from services.router.text.passages import Passage, cited


class StageTime(Struct, frozen=True):
    """When a stage of a retrieval began and ended, in seconds since the epoch."""

    stage: str
    start: float
    end: float


class RetrievalNote(Struct, frozen=True, omit_defaults=True):
    """What is noted with an extension: the `passages` in the prompt from there on, as the API shows them.

    Its query is of the last `query_tokens` tokens of question and answer as of `query_at` tokens of the answer; it was
    due after `due_at`. `kept` says why the passages are those from before. `budget_ms` is what the search was given.
    """

    due_at: int
    query_at: int
    query_tokens: int
    passages: list[dict[str, Any]]
    found: int = 0
    kept: str | None = None
    late: bool = False
    effort: Effort | None = None
    budget_ms: float | None = None
    ms: float = 0.0
    stages: list[StageTime] = []


def first_record(passages: Sequence[Passage]) -> dict[str, Any]:
    """Return the record of the retrieval before the answer."""
    return {"at_token": 0, "passages": [passage.index for passage in passages], "replaced": []}


class RetrievalHistory:
    """One reader's `retrieval` object, which grows with each retrieval that is noted in the job's log."""

    def __init__(self, first: Mapping[str, Any]) -> None:
        """Begin with what was told before the answer."""
        self.shown = dict(first)
        self._taken = 0

    @property
    def passages(self) -> list[Passage]:
        """All passages that the prompt held at some time, by their numbers."""
        return msgspec.convert(self.shown["passages"], list[Passage])

    @property
    def in_force(self) -> list[int]:
        """The numbers of the passages that the prompt holds now."""
        records = self.shown.get("retrievals")
        return list(records[-1]["passages"]) if records else []

    @property
    def passages_in_force(self) -> list[Passage]:
        """The passages that the prompt holds now, in its order."""
        known = {passage.index: passage for passage in self.passages}
        return [known[index] for index in self.in_force]

    def citations(self, answer: str) -> list[dict[str, Any]]:
        """Return the citations of a whole answer."""
        return [msgspec.to_builtins(one) for one in cited(answer, self.passages)]

    def take(self, applied: Applied) -> dict[str, Any] | None:
        """Add a retrieval and return what is new as a `retrieval` object; None for one that was taken before."""
        extension = applied.extension
        if extension.number <= self._taken or not extension.note:
            return None
        self._taken = extension.number
        note = msgspec.json.decode(extension.note, type=RetrievalNote)
        return self.noted(note, applied.tokens, changed=extension.changes)

    def noted(self, note: RetrievalNote, tokens: int, *, changed: bool) -> dict[str, Any]:
        """Add a retrieval that counts after `tokens` tokens; see `take`."""
        before = self.in_force
        kept = note.kept or (None if changed else "refused")
        numbers = [row["index"] for row in note.passages] if changed else before
        record: dict[str, Any] = {
            "at_token": tokens,
            "query_at": note.query_at,
            "query_tokens": note.query_tokens,
            "found": note.found,
            "passages": numbers,
            "replaced": [index for index in before if index not in numbers],
            "late": note.late or tokens > note.due_at,
            "kept": kept,
            "effort": note.effort,
            "budget_ms": note.budget_ms,
            "ms": note.ms,
            "stages": [msgspec.to_builtins(stage) for stage in note.stages],
        }
        known = {row["index"] for row in self.shown["passages"]}
        fresh = [row for row in note.passages if changed and row["index"] not in known]
        every = sorted([*self.shown["passages"], *fresh], key=_index)
        records = [*self.shown.get("retrievals", ()), record]
        self.shown |= {"passages": every, "retrievals": records}
        return {**self.shown, "found": note.found, "passages": fresh, "retrievals": [record]}


def _index(row: Mapping[str, Any]) -> int:
    return int(row["index"])
