"""Rewriting of questions: what is read from what a model wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.text.rewrites import read


@pytest.mark.parametrize(
    ("said", "question"),
    [
        ("Who is the mayor of Tun?", "Who is the mayor of Tun?"),
        ("\n\n  Who is the mayor of Tun?\nHe is old.", "Who is the mayor of Tun?"),
        ('Rewritten question: "Who rules Tun?"', "Who rules Tun?"),
        ("**Stand-alone question:** Who rules Tun?", "Who rules Tun?"),
        ("Question: Which question: this one?", "Which question: this one?"),
        ("<think>He means Tun.\n</think>\n\nWho rules Tun?", "Who rules Tun?"),
        ("<think>He means Tun, or", None),
        ("- - -\n?!\n", None),
        ("", None),
    ],
)
def test_a_question_is_read(said: str, question: str | None) -> None:
    """Its first line with a word in it, without label, quotes and reasoning."""
    assert read(said) == question


@given(st.text())
def test_what_is_read_is_one_line_with_words(said: str) -> None:
    """Whatever a model wrote, the query is short, and searching for it makes sense."""
    found = read(said)

    assert found is None or (0 < len(found) <= 512 and found.splitlines() == [found])
