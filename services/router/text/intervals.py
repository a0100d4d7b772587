"""Intervals of an answer, and what is retrieved for each: queries, shifts, splices and time budgets (PipeRAG).

Chapter 5 of the thesis: an answer is written in chunks of m' tokens, and the passages of each chunk are found by the
last tokens before it. A stale query is asked when the chunk before begins, so the search runs beside the generation
(5.3.1), and its passages are moved on by as many tokens as it is old. The search takes as long as an interval (5.3.3).
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.cost.online import Lateness

WINDOW = 64  # tokens of a query, whatever the interval (5.3.2)
INTERVALS = (8, 16, 32, 64)
LEAST, MOST = INTERVALS[0], INTERVALS[-1]
# Of retrievals no more than a twentieth may be late; before there were any, they are allowed this much besides.
_QUANTILE, _FIRST_S = 0.95, 0.02
_REMEMBERED = 400


class Schedule(NamedTuple):
    """When retrievals are asked for and take effect; they count from 1, and places are tokens of the answer."""

    interval: int
    stale: bool
    most: int  # retrievals

    @classmethod
    def of(cls, interval: int, max_new: int, *, stale: bool) -> Schedule:
        """Return the schedule of an answer of at most `max_new` tokens: nothing is retrieved for after its last one."""
        return cls(interval, stale, retrievals(interval, max_new))

    def boundary(self, number: int) -> int:
        """Return the tokens after which a retrieval's passages take effect."""
        return number * self.interval

    def asked(self, number: int) -> int:
        """Return the tokens that a retrieval's query knows: those before the chunk before, or all of them."""
        return (number - 1 if self.stale else number) * self.interval

    def current(self, tokens: int) -> int:
        """Return the retrieval that is to be asked for while the chunk after `tokens` tokens is written, if stale."""
        return tokens // self.interval + 1


def retrievals(interval: int, max_new: int) -> int:
    """Return how many boundaries lie before the last token of an answer."""
    return max(0, max_new - 1) // interval


def window(question: Sequence[int], answer: Sequence[int], at: int) -> list[int]:
    """Return the tokens of a query: the last WINDOW of the question and the answer's first `at` tokens."""
    said = list(answer[:at])
    missing = WINDOW - len(said)
    return [*question[-missing:], *said] if missing > 0 else said[-WINDOW:]


def shifted(spans: Sequence[tuple[int, int]], length: int, shift: int) -> tuple[int, int] | None:
    """Return the characters of a neighbour without its first `shift` tokens, refilled to `length`; None: none are left.

    `spans` are the characters of the tokens of its document from where it begins. At the document's end it is shorter.
    """
    kept = spans[shift : shift + length]
    return (kept[0][0], kept[-1][1]) if kept else None


class Splice(NamedTuple):
    """A change of a prompt: `removed` tokens from `start` on give way to `tokens`."""

    start: int
    removed: int
    tokens: list[int]

    def applied(self, prompt: Sequence[int]) -> list[int]:
        """Return the prompt after the change."""
        return [*prompt[: self.start], *self.tokens, *prompt[self.start + self.removed :]]


NO_CHANGE = Splice(0, 0, [])


def splice(old: Sequence[int], new: Sequence[int]) -> Splice:
    """Return the smallest change that makes `new` of `old`; it replaces the last token by itself where they are equal.

    So it never looks like NO_CHANGE, which leaves the prompt as an earlier change made it.
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
    """Seconds that a token takes, as one answer's tokens come: `token_s` is what is known before they do.

    Only tokens of one chunk are compared, so that neither waiting for a retrieval nor reading its passages counts.
    """

    def __init__(self, interval: int, token_s: float) -> None:
        self.token_s = token_s
        self._interval = interval
        self._first: tuple[int, float] | None = None

    def note(self, tokens: int, at_s: float) -> None:
        """Note that the answer had `tokens` tokens at `at_s`; called in order."""
        chunk = (tokens - 1) // self._interval
        if self._first is None or (self._first[0] - 1) // self._interval != chunk:
            self._first = tokens, at_s
            return
        came = tokens - self._first[0]
        if 2 * came >= self._interval - 1 and at_s > self._first[1]:
            self.token_s = (at_s - self._first[1]) / came

    @property
    def interval_s(self) -> float:
        """The seconds that the next interval is predicted to take."""
        return self._interval * self.token_s


class RetrievalMargin:
    """What retrievals take besides embedding and the predicted search, learned from how late they were.

    So much less than the interval is given to a search: then no more than one in twenty comes late.
    """

    def __init__(self) -> None:
        self._late = Lateness(_QUANTILE, window=_REMEMBERED, prior=_FIRST_S)

    @property
    def value_s(self) -> float:
        """The margin in seconds, never negative."""
        return self._late.value

    def learn(self, took_s: float, predicted_s: float) -> None:
        """Learn from a retrieval that took `took_s` in all, of which `predicted_s` were foreseen."""
        self._late.add(took_s - predicted_s)


def budget_s(interval_s: float, margin_s: float) -> float:
    """Return the time within which a search has to end, its embedding included, by the interval's and the margin."""
    return max(0.0, interval_s - margin_s)


def smallest_interval(retrieval_s: float, token_s: float) -> int:
    """Return the smallest of INTERVALS that takes as long to write as a retrieval, else the largest (5.3.2)."""
    fits = (each for each in INTERVALS if each * token_s >= retrieval_s)
    return next(fits, MOST)
