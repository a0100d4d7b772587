"""Grounding's pure part: queries of a conversation, the budget, the template, and citations in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest, Unavailable
from common.wire.search import Hit
from services.router.text.passages import (
    Citations,
    Passage,
    budget,
    cited,
    merged,
    nothing_found,
    passages_of,
    queries,
    render,
    sentence_ends,
    shown,
)

TEXTS = st.lists(
    st.lists(st.sampled_from(["One.", "Two is here!", "A word", "x", "Three?\n"]), max_size=6).map(
        " ".join
    ),
    max_size=6,
)
# Answers full of what markers are made of.
ANSWERS = st.lists(
    st.sampled_from(["[", "]", "1", "2", "3", "7", ",", " ", "[1]", "[1, 2]", "a", "é", "\n"])
).map("".join)


def passages(texts: Sequence[str]) -> list[Passage]:
    return [Passage(n, f"d{n}", n, 10 * n, 10 * n + len(t), 0.5, t) for n, t in enumerate(texts, 1)]


PAGES = passages(["Alpha.", "Beta.", "Gamma."])


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=8).map(sorted),
    st.integers(1, 9),
    st.integers(0, 60),
    st.integers(1, 30),
    st.data(),
)
def test_pages_of_passages(
    starts: list[int], first: int, start: int, length: int, data: st.DataObject
) -> None:
    """Every character of a passage, and of a part of it, stands on the page that its document's metadata says."""
    starts = [0, *starts]
    hit = Hit(
        "d", 1.0, 0, start, start + length, "x" * length, {"pages": starts, "first_page": first}
    )
    (passage,) = passages_of([hit])
    begin = data.draw(st.integers(start, start + length - 1))
    end = data.draw(st.integers(begin + 1, start + length))
    part = passage.cut(begin, end)

    assert (part.start, part.end, len(part.text)) == (begin, end, end - begin)
    for some in (passage, part):
        for character in range(some.start, some.end):
            assert some.page_at(character) == first + sum(at <= character for at in starts) - 1


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {"pages": []}, {"pages": "0"}, {"pages": ["a"]}, {"pages": [0], "first_page": "x"}],
)
def test_metadata_of_others_means_no_pages(metadata: dict[str, object] | None) -> None:
    """What is no list of numbers is somebody's own metadata."""
    (passage,) = passages_of([Hit("d", 1.0, 0, 0, 4, "text", metadata)])

    assert (passage.page, passage.page_at(2)) == (0, 0)
    assert cited("[1]", [passage])[0].page == 0


@given(TEXTS, st.integers(0, 80))
def test_a_budget_keeps_what_fits(texts: list[str], room: int) -> None:
    """The longest prefix that fits, whole; of the first at least its sentences that fit; never more than the room."""
    given_ = passages(texts)

    def size(some: Sequence[Passage]) -> int:
        return sum(len(p.text) + 2 for p in some)

    readable = bool(given_) and any(end + 2 <= room for end in sentence_ends(given_[0].text)[:1])
    if given_ and size(given_[:1]) > room and not readable:
        with pytest.raises(InvalidRequest) as caught:
            budget(given_, lambda some: size(some) <= room)
        assert caught.value.code == "context_length_exceeded"
        return
    kept = budget(given_, lambda some: size(some) <= room)

    assert size(kept) <= room or not kept
    if kept and kept != given_[: len(kept)]:
        cut, whole = kept[0], given_[0]
        assert len(kept) == 1
        assert whole.text.startswith(cut.text)
        assert cut.end - cut.start == len(cut.text) in sentence_ends(whole.text)
        longer = [end for end in sentence_ends(whole.text) if end > len(cut.text)]
        assert not longer or longer[0] + 2 > room
    elif len(kept) < len(given_):
        assert size(given_[: len(kept) + 1]) > room


def test_a_passage_is_cut_after_a_sentence() -> None:
    """Sentences and lines end where they seem to; the last end is the text's own."""
    text = "One is 1.5 m. Two?\nThree"

    assert [text[:end] for end in sentence_ends(text)] == [
        "One is 1.5 m.",
        "One is 1.5 m. Two?",
        text,
    ]


@given(ANSWERS, st.lists(st.integers(0, 60), max_size=8))
def test_citations_do_not_depend_on_the_pieces(answer: str, cuts: list[int]) -> None:
    """However an answer is cut into pieces, its citations are those of the whole, and each stands at its marker."""
    citations = Citations(PAGES)
    marks = sorted({0, len(answer), *(min(cut, len(answer)) for cut in cuts)})
    for first, last in itertools.pairwise(marks):
        citations.feed(answer[first:last])

    assert citations.found == cited(answer, PAGES)
    for citation in citations.found:
        marker = answer[citation.at[0] : citation.at[1]]
        assert (marker[0], marker[-1]) == ("[", "]")
        assert str(citation.index) in marker
        page = PAGES[citation.index - 1]
        assert (citation.document_id, citation.start, citation.end) == (
            page.document_id,
            page.start,
            page.end,
        )


def test_citations_name_passages() -> None:
    """One marker may name several passages; unknown numbers and other brackets are no citations."""
    answer = "It is so [1], and so [2, 3][9]. See [a], [1.5], [000001], [] and [ 2 ]."

    assert [(c.index, answer[slice(*c.at)]) for c in cited(answer, PAGES)] == [
        (1, "[1]"),
        (2, "[2, 3]"),
        (3, "[2, 3]"),
        (2, "[ 2 ]"),
    ]


def test_a_template_gets_passages_and_question() -> None:
    """The model's template decides; without one the router's own asks for citations; what it cannot do is said."""
    own = "{% for p in passages %}{{ p.index }}={{ p.document_id }}:{{ p.text }};{% endfor %}?{{ question }}"

    assert render(own, PAGES[:2], "why") == "1=d1:Alpha.;2=d2:Beta.;?why"
    assert "[1] Alpha.\n\n[2] Beta.\n\nQuestion: why" in render("", PAGES[:2], "why")
    assert "(No passages.)\n\nQuestion: {{ 1 }}" in render("", [], "{{ 1 }}")
    for broken in ("{% for %}", "{{ passages.x.y }}", "{{ ().__class__.__bases__[0] }}"):
        with pytest.raises(Unavailable, match="grounding template"):
            render(broken, PAGES, "why")


@pytest.mark.parametrize(
    ("questions", "answer", "wanted"),
    [
        (["Who is the mayor of Orla?"], "", ["Who is the mayor of Orla?"]),
        (
            ["Who is the mayor of Orla?", "Which river flows through Tun?"],
            "Bo [1].",
            ["Which river flows through Tun?"],
        ),
        (
            [
                "Old?",
                "Who is the mayor of Orla?",
                "And its river?",
                "What about its founding year?",
            ],
            "The Ims [2].",
            [
                "What about its founding year?",
                "What about its founding year? The Ims [2]. And its river? Who is the mayor of Orla?",
            ],
        ),
        (["Orla?", "its river?"], "", ["its river?", "its river? Orla?"]),
    ],
)
def test_a_follow_up_is_searched_with_what_it_leans_on(
    questions: list[str], answer: str, wanted: list[str]
) -> None:
    """A question that stands alone is searched alone; one that leans also with answer and questions before it."""
    assert queries(questions, answer) == wanted


def test_hits_of_several_queries_are_merged() -> None:
    """Each chunk once, with its best score, best first; hits without text cannot be read."""
    one = [Hit("a", 0.9, 0, 0, 4, "text"), Hit("b", 0.5, 1, 0, 4, "text")]
    two = [Hit("b", 0.95, 1, 0, 4, "text"), Hit("c", 0.7), Hit("a", 0.1, 1, 4, 8, "more")]

    best = merged([one, two], 3)
    assert [(hit.id, hit.chunk, hit.score) for hit in best] == [
        ("b", 1, 0.95),
        ("a", 0, 0.9),
        ("c", 0, 0.7),
    ]
    assert [(p.index, p.document_id) for p in passages_of(best)] == [(1, "b"), (2, "a")]


def test_passages_are_shown_with_text_only_when_asked() -> None:
    """The response names passages; their text is there on demand."""
    bare = shown("docs", 7, PAGES[:1], include_text=False)
    whole = shown("docs", 7, PAGES[:1], include_text=True)

    assert (bare["collection"], bare["found"]) == ("docs", 7)
    row = {"index": 1, "document_id": "d1", "chunk": 1, "start": 10, "end": 16, "score": 0.5}
    assert bare["passages"] == [row]
    assert whole["passages"] == [{**row, "text": "Alpha."}]
    assert "collection 'docs'" in nothing_found("docs")
