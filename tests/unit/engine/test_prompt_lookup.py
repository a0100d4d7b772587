"""Prompt lookup: guesses are what followed before, and a draft is as long as it pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decoder.prompt_lookup import WORD, PromptLookup, draft_length

TOKENS = st.lists(
    st.integers(0, 3) | st.sampled_from([256, 65536, 1 << 24, (1 << 31) - 1]), max_size=60
)


def followed(tokens: list[int], count: int) -> list[int]:
    """Return what came after the last words the last time that they stood before."""
    key = tokens[-WORD:]
    for at in range(len(tokens) - WORD - 1, -1, -1):
        if len(key) == WORD and tokens[at : at + WORD] == key:
            return tokens[at + WORD : at + WORD + count]
    return []


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_guesses_are_what_followed(prompt: list[int], answer: list[int], count: int) -> None:
    """The guess is what followed the latest place of the last tokens, whatever bytes the tokens have."""
    lookup = PromptLookup(prompt)
    for at, token in enumerate(answer):
        assert lookup.draft(count) == followed(prompt + answer[:at], count)
        lookup.append(token)
    assert lookup.draft(count) == followed(prompt + answer, count)


def test_right_guesses_are_counted() -> None:
    """A text that repeats itself is soon guessed; one that does not is not."""
    repeats, fresh = PromptLookup([1, 2, 3, 4, 5]), PromptLookup([1, 2, 3, 4, 5])
    for turn in range(50):
        repeats.append(1 + turn % 5)
        fresh.append(100 + turn)
    assert repeats.right > 0.95
    assert fresh.right == 0.0


@pytest.mark.parametrize(
    ("right", "row_s", "expected"),
    [(0.0, 0.0, 0), (1.0, 0.0, 8), (1.0, 0.1, 8), (0.5, 0.1, 2), (0.9, 1.0, 0), (0.04, 0.0, 0)],
)
def test_a_draft_is_as_long_as_it_pays(right: float, row_s: float, expected: int) -> None:
    """Free rows are always worth it; rows as dear as a step are not; in between the best rate of tokens decides."""
    assert draft_length(right, 8, lambda more: 1.0 + more * row_s) == expected


@given(st.floats(0, 1), st.floats(0, 2), st.integers(0, 8))
def test_no_draft_slows_a_stream(right: float, row_s: float, most: int) -> None:
    """The tokens expected a second are more than without a draft."""
    count = draft_length(right, most, lambda more: 1.0 + more * row_s)
    assert 0 <= count <= most
    expected = sum(right**power for power in range(count + 1))
    assert count == 0 or expected / (1.0 + count * row_s) > 1.0
