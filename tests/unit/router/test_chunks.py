"""Splitting documents: the pieces cover the text, hold the limits, and know where they stand."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.router.text.chunks import sections, split

WORDS = st.lists(
    st.sampled_from(
        [
            "word ",
            "a",
            "# Title\n",
            "\n\n",
            "Heading\n=======\n",
            ". ",
            "é",
            "日本語",
            "```\n",
            "x" * 40,
            "\t",
            "- item\n",
        ]
    ),
    max_size=120,
).map("".join)


def offsets_of(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"\w{1,6}|[^\w\s]", text)]


@given(WORDS, st.integers(1, 40), st.integers(0, 30))
def test_pieces_cover_the_text_within_the_limit(text: str, limit: int, overlap: int) -> None:
    """Every character and token is in a piece, no piece is over the limit, and order is kept."""
    offsets = offsets_of(text)
    pieces = split(text, offsets, limit, overlap)
    assert pieces[0].start == 0
    assert pieces[-1].end == len(text)
    seen: set[int] = set()
    for piece in pieces:
        assert piece.last - piece.first <= limit
        assert piece.start <= piece.end
        seen.update(range(piece.first, piece.last))
        for token in range(piece.first, piece.last):
            assert piece.start <= offsets[token][0]
            assert offsets[token][1] <= piece.end
    assert seen == set(range(len(offsets)))
    for before, after in pairwise(pieces):
        assert before.start < after.start <= before.end
        assert before.last - after.first <= overlap
        assert after.first > before.first


def test_sections_start_at_headings_but_not_in_code() -> None:
    """Markdown and rst headings open a section; a comment in a code fence does not."""
    text = "intro\n# One\ntext\n```\n# not a heading\n```\nTitle\n-----\nbody\n"

    assert [0, 6, text.index("Title")] == sections(text)


def test_a_piece_prefers_to_end_at_a_paragraph() -> None:
    """Within the last quarter of the limit a paragraph's end is where the cut falls."""
    text = "one two three four five six\n\nseven eight nine ten eleven"
    pieces = split(text, offsets_of(text), 8, 0)

    assert text[pieces[0].start : pieces[0].end] == "one two three four five six\n\n"
