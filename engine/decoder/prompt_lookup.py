"""Prompt lookup: guesses the next tokens of a sequence from an earlier occurrence of its last few tokens.

An answer that quotes its passages repeats parts of the prompt. The tokens that followed there are computed as guesses
together with the last token, and the guesses that the model draws itself are kept: so the answer is the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

WORD = 3  # length of the repeated token sequence
MOST = 8  # the most tokens guessed at once
# The latest token's weight in the share of right guesses, and the least speed-up for which a draft is computed.
_WEIGHT, _GAIN = 0.15, 1.05
_SIZE = array("i").itemsize


class PromptLookup:
    """Guesses the next tokens of one sequence, and records how often its guess of the next token was right."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = bytearray(array("i", tokens).tobytes())
        self._guess = self._next(1)
        self.right = 0.0  # share of the latest tokens guessed right; no guess is a wrong one

    def append(self, token: int) -> None:
        """Add the next token of the sequence."""
        self.right += _WEIGHT * ((self._guess == [token]) - self.right)
        self._tokens += array("i", [token]).tobytes()
        self._guess = self._next(1)

    def draft(self, most: int) -> list[int]:
        """Return guesses of at most `most` next tokens."""
        return self._next(most) if self._guess else []

    def _next(self, count: int) -> list[int]:
        key = self._tokens[-WORD * _SIZE :]
        end = len(self._tokens) - 1
        while len(key) == WORD * _SIZE and (at := self._tokens.rfind(key, 0, end)) >= 0:
            if at % _SIZE == 0:
                begin = at + len(key)
                return array("i", bytes(self._tokens[begin : begin + count * _SIZE])).tolist()
            end = at + len(key) - 1  # a match that straddles two tokens' bytes
        return []


def draft_length(right: float, most: int, seconds: Callable[[int], float]) -> int:
    """Return the number of tokens to guess that yields the most tokens a second; 0 if guessing does not pay.

    `right` is the chance that a guess equals the model's token if all guesses before it do; `seconds(n)` is the step's
    duration with n more rows.
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
