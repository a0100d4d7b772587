"""Retrievals of a grounded answer: the first passages, and those that replaced them while the answer was written.

A router notes each retrieval in the extension of the prompt that it sends; the job's log has the note at the token
after which the extension counts. So all readers, at any router, and the session see the same retrievals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from common.wire.control import Applied
from common.wire.search import Effort


class RetrievalRecord(Struct, frozen=True, omit_defaults=True):
    """A retrieval as responses show it: after `at_token` tokens of the answer the prompt holds `passages`.

    `passages` are numbers of passages, and `replaced` those that left the prompt. The query was the last `query_tokens`
    tokens of question and answer, after `query_at` tokens of the answer. `kept` is the reason why the passages stayed.
    The generation waited for a `late` retrieval, or it counts from a later interval. `budget_ms` is the time budget of
    its search, `ms` its whole duration; `stages` are its stages in the timeline of the request.
    """

    at_token: int
    query_at: int
    found: int
    passages: list[int]
    replaced: list[int]
    late: bool
    query_tokens: int = 0
    kept: str | None = None
    effort: Effort | None = None
    budget_ms: float | None = None
    ms: float = 0.0
    stages: list[dict[str, Any]] = []


class RetrievalNote(Struct, frozen=True):
    """A router's note with an extension: the `passages` that it puts into the prompt, as the API shows them.

    The extension was due after `due_at` tokens. `record` has the places and passages that the sender knew.
    """

    due_at: int
    passages: list[dict[str, Any]]
    record: RetrievalRecord


class RetrievalHistory:
    """The `retrieval` object of an answer, `shown`, as it grows with the extensions of its prompt."""

    def __init__(self, first: Mapping[str, Any]) -> None:
        """Begin with `first`, the `retrieval` object before the answer."""
        self.shown = dict(first)
        self._taken = 0

    @property
    def in_force(self) -> list[int]:
        """The numbers of the passages that the prompt holds now, in its order."""
        records = self.shown.get("retrievals")
        return list(records[-1]["passages"]) if records else []

    def take(self, applied: Applied) -> dict[str, Any] | None:
        """Add a retrieval and return it with its new passages as a `retrieval` object; None if it was taken before."""
        extension = applied.extension
        if extension.number <= self._taken or not extension.note:
            return None
        self._taken = extension.number
        note = msgspec.json.decode(extension.note, type=RetrievalNote)
        before = self.in_force
        now = [row["index"] for row in note.passages] if extension.changes else before
        record = msgspec.structs.replace(
            note.record,
            at_token=applied.tokens,
            passages=now,
            replaced=[index for index in before if index not in now],
            late=note.record.late or applied.tokens > note.due_at,
        )
        told = [msgspec.to_builtins(record)]
        known = {row["index"] for row in self.shown["passages"]}
        fresh = [row for row in note.passages if row["index"] in now and row["index"] not in known]
        self.shown |= {
            "passages": sorted([*self.shown["passages"], *fresh], key=_index),
            "retrievals": [*self.shown.get("retrievals", ()), *told],
        }
        marked = {"approximate": True} if self.shown.get("approximate") else {}
        return {
            "collection": self.shown["collection"],
            "found": record.found,
            "passages": fresh,
            "retrievals": told,
            **marked,
        }


def retrieval_of(first: bytes, extensions: Iterable[Applied]) -> bytes:
    """Return the JSON of a whole answer's `retrieval` object; `first` is the one before the answer. b"" stays b""."""
    if not first:
        return first
    history = RetrievalHistory(msgspec.json.decode(first))
    for applied in extensions:
        history.take(applied)
    return msgspec.json.encode(history.shown)


def _index(row: Mapping[str, Any]) -> int:
    return int(row["index"])
