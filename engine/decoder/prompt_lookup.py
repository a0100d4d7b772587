"""Prompt lookup: the tokens that followed the last few tokens when they stood in the sequence before.

An answer that quotes its passages repeats what stands in the prompt. The tokens that came next there are computed
together with the last one, and those that the model would have drawn itself are kept: the answer is the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

WORD = 3  # tokens that must have stood before
MOST = 8  # tokens drafted at once
# A token's weight in the share of right guesses, and how much faster than without a draft one must be.
_WEIGHT, _GAIN = 0.15, 1.05
_SIZE = array("i").itemsize


class PromptLookup:
    """Guesses the next tokens of one sequence, and knows how often its guess of the next token was right."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = bytearray(array("i", tokens).tobytes())
        self._guess = self._next(1)
        self.right = 0.0  # share of the last tokens that were guessed; no guess is a wrong one

    def append(self, token: int) -> None:
        """Take the next token of the sequence."""
        self.right += _WEIGHT * ((self._guess == [token]) - self.right)
        self._tokens += array("i", [token]).tobytes()
        self._guess = self._next(1)

    def draft(self, most: int) -> list[int]:
        """Return the guess of the next tokens, at most so many."""
        return self._next(most) if self._guess else []

    def _next(self, count: int) -> list[int]:
        key = self._tokens[-WORD * _SIZE :]
        end = len(self._tokens) - 1
        while len(key) == WORD * _SIZE and (at := self._tokens.rfind(key, 0, end)) >= 0:
            if at % _SIZE == 0:
                begin = at + len(key)
                return array("i", bytes(self._tokens[begin : begin + count * _SIZE])).tolist()
            end = at + len(key) - 1  # the bytes of two neighbours, not a token
        return []


def draft_length(right: float, most: int, seconds: Callable[[int], float]) -> int:
    """Return how many tokens to draft, so that tokens come fastest; 0 if no draft is worth its rows.

    `right` is the chance of each drafted token to be the model's own if those before it are; `seconds(n)` what the step
    takes with n rows more.
    """
    if right <= 0.0:
        return 0
    alone_s = max(seconds(0), 1e-9)
    best, length, expected, chance = _GAIN, 0, 1.0, 1.0
    for count in range(1, most + 1):
        chance *= right
        expected += chance
        gain = expected * alone_s / max(seconds(count), 1e-9)
        if gain > best:
            best, length = gain, count
    return length
