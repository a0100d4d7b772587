"""Intervals of an answer, and the retrieval for each: queries, shifts, splices and time budgets (PipeRAG).

Chapter 5 of the thesis: an answer is written in chunks of m' tokens, and the passages of each chunk are found by the
last tokens before it. A stale query is asked when the previous chunk begins, so the search runs during the generation
(5.3.1), and its passages are moved on by as many tokens as the query is old. The search takes as long as an interval
(5.3.3). The functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.cost.online import Lateness

WINDOW = 64  # tokens of a query, for every interval (5.3.2)
INTERVALS = (8, 16, 32, 64)
LEAST, MOST = INTERVALS[0], INTERVALS[-1]
# At most one retrieval in twenty may be late; while few are measured, a part of _FIRST_S is the least margin.
_QUANTILE, _FIRST_S = 0.95, 0.02
_REMEMBERED = 400


class Schedule(NamedTuple):
    """The places, in tokens of an answer, where retrievals are asked for and take effect; retrievals count from 1."""

    interval: int
    stale: bool
    most: int  # the number of retrievals

    @classmethod
    def of(cls, interval: int, max_new: int, *, stale: bool) -> Schedule:
        """Return the schedule of an answer of at most `max_new` tokens; no retrieval takes effect after the last."""
        return cls(interval, stale, retrievals(interval, max_new))

    def boundary(self, number: int) -> int:
        """Return the number of the answer's tokens after which a retrieval's passages take effect."""
        return number * self.interval

    def asked(self, number: int) -> int:
        """Return the number of tokens before a retrieval's query: at its boundary, or one chunk earlier if stale."""
        return (number - 1 if self.stale else number) * self.interval

    def current(self, tokens: int) -> int:
        """Return the number of the retrieval that, if stale, is asked for during the chunk after `tokens` tokens."""
        return tokens // self.interval + 1


def retrievals(interval: int, max_new: int) -> int:
    """Return the number of boundaries before the last token of an answer of `max_new` tokens."""
    return max(0, max_new - 1) // interval


def window(question: Sequence[int], answer: Sequence[int], at: int) -> list[int]:
    """Return the tokens of a query: the last WINDOW of the question and the answer's first `at` tokens."""
    said = list(answer[:at])
    missing = WINDOW - len(said)
    return [*question[-missing:], *said] if missing > 0 else said[-WINDOW:]


def shifted(spans: Sequence[tuple[int, int]], length: int, shift: int) -> tuple[int, int] | None:
    """Return the characters of a neighbour without its first `shift` tokens, refilled to `length`; None if empty.

    `spans` are the characters of the document's tokens from the neighbour's begin. At the document's end the result is
    shorter.
    """
    kept = spans[shift : shift + length]
    return (kept[0][0], kept[-1][1]) if kept else None


class Splice(NamedTuple):
    """A change of a prompt: `tokens` replace `removed` tokens from `start` on."""

    start: int
    removed: int
    tokens: list[int]

    def applied(self, prompt: Sequence[int]) -> list[int]:
        """Return the prompt after the change."""
        return [*prompt[: self.start], *self.tokens, *prompt[self.start + self.removed :]]


NO_CHANGE = Splice(0, 0, [])


def splice(old: Sequence[int], new: Sequence[int]) -> Splice:
    """Return the smallest change that makes `new` of `old`; if they are equal, it replaces the last token by itself.

    So the change never equals NO_CHANGE, which leaves the prompt as an earlier change made it.
    """
    shortest = min(len(old), len(new))
    start = next((at for at in range(shortest) if old[at] != new[at]), shortest)
    if start == len(old) == len(new):
        return Splice(start - 1, 1, list(new[start - 1 :])) if start else NO_CHANGE
    room = shortest - start
    end = next((at for at in range(room) if old[-1 - at] != new[-1 - at]), room)
    return Splice(start, len(old) - end - start, list(new[start : len(new) - end]))


# -- time ------------------------------------------------------------------------------------------------


class Pace:
    """The seconds per token of one answer, measured as tokens arrive; until then `token_s` is the given value.

    Only times within one chunk are compared, so that neither waiting for a retrieval nor reading its passages counts.
    """

    def __init__(self, interval: int, token_s: float) -> None:
        self.token_s = token_s
        self._interval = interval
        self._first: tuple[int, float] | None = None

    def note(self, tokens: int, at_s: float) -> None:
        """Record that the answer had `tokens` tokens at `at_s`; calls come in rising order."""
        chunk = (tokens - 1) // self._interval
        if self._first is None or (self._first[0] - 1) // self._interval != chunk:
            self._first = tokens, at_s
            return
        came = tokens - self._first[0]
        if 2 * came >= self._interval - 1 and at_s > self._first[1]:
            self.token_s = (at_s - self._first[1]) / came

    @property
    def interval_s(self) -> float:
        """The predicted seconds of the next interval."""
        return self._interval * self.token_s


class RetrievalMargin:
    """The seconds that retrievals take besides embedding and the predicted search, learned from past retrievals.

    A search gets the time of an interval less this margin, so that at most one retrieval in twenty is late.
    """

    def __init__(self) -> None:
        self._late = Lateness(_QUANTILE, window=_REMEMBERED, prior=_FIRST_S)

    @property
    def value_s(self) -> float:
        """The margin in seconds, never negative."""
        return self._late.value

    def learn(self, took_s: float, predicted_s: float) -> None:
        """Learn from a retrieval that took `took_s` in all, of which `predicted_s` were predicted."""
        self._late.add(took_s - predicted_s)


def budget_s(interval_s: float, margin_s: float) -> float:
    """Return the seconds for a search with its embedding: an interval's seconds less the margin, never negative."""
    return max(0.0, interval_s - margin_s)


def smallest_interval(retrieval_s: float, token_s: float) -> int:
    """Return the smallest of INTERVALS that takes as long to write as a retrieval takes, else the largest (5.3.2)."""
    fits = (each for each in INTERVALS if each * token_s >= retrieval_s)
    return next(fits, MOST)
