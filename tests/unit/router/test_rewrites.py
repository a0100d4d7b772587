"""Rewriting of questions: what is read from what a model wrote, and the queries of the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.text.rewrites import carried, read


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


def test_a_question_carries_the_turns_before_it() -> None:
    """As it is, then with each of the last four turns, the newest last; instructions and tools are no turns."""

    def said(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    first = [said("system", "Be brief."), said("user", " Why? ")]
    assert carried(first) == ["Why?"]
    turns = [[said("user", f"q{n}"), said("assistant", f"{n}" * 300)] for n in range(6)]
    later = [*first[:1], *(message for turn in turns for message in turn), said("user", "Why?")]
    assert carried(later) == ["Why?", *(f"Why? q{n} " + f"{n}" * 200 for n in range(2, 6))]
    unanswered = [said("assistant", "Hello."), said("user", "a"), said("user", "b"), *first[1:]]
    assert carried(unanswered) == ["Why?", "Why? a", "Why? b"]
    assert carried([said("user", "a"), said("user", "  ")])[0] == ""
