"""Extractive answers: sentences of passages, word for word, or a refusal."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.text.passages import Passage, cited
from services.router.text.quotes import (
    LABEL,
    REFUSAL,
    compared,
    covered,
    quotes,
    sentences,
    shown,
)

TEXT = """\
# Dams

The northern dam was
built in 1932. Its crest is
12 m wide!

- first item of a list
- second item [2] of a list

| gate | width |
|---|---|
| north | 12 m |

```
$ ask 'When was the dam built?'
The passages do not say.
```
"""


def passage(text: str, start: int = 0, index: int = 1, **more: object) -> Passage:
    return Passage(index, f"d{index}", 0, start, start + len(text), 0.5, text, **more)  # type: ignore[arg-type]


def rows(*vectors: tuple[float, float]) -> bytes:
    return array("f", [value for vector in vectors for value in vector]).tobytes()


def test_sentences() -> None:
    """Wrapped lines are one text, items and rows stand alone, headings say what is spoken of, rules are nothing."""
    given_ = [passage(TEXT, 100)]
    found = sentences(given_)

    assert [compared(one, given_) for one in found] == [
        "Dams: The northern dam was built in 1932.",
        "Dams: Its crest is 12 m wide!",
        "Dams: - first item of a list",
        "Dams: - second item (2) of a list",
        "Dams: | gate | width |",
        "Dams: | north | 12 m |",
    ]
    assert (
        compared(
            sentences([passage("os.path.join\n\nJoin two paths. And more.")])[0],
            [passage("os.path.join\n\nJoin two paths. And more.")],
        )
        == "os.path.join: Join two paths."
    )


@given(st.lists(st.text("aB.!?\n #|-12`[]", max_size=120), max_size=4), st.integers(0, 50))
def test_sentences_stand_where_they_say(texts: list[str], start: int) -> None:
    """Each lies within its passage, is what the document says there, and none overlaps another."""
    given_ = [passage(text, start, n) for n, text in enumerate(texts, 1)]
    last = (-1, 0)
    for one in sentences(given_):
        of = given_[one.place]
        said = of.text[one.start - of.start : one.end - of.start]
        assert of.start <= one.start < one.end <= of.end
        assert said == said.strip()
        assert (one.place, one.start) >= last
        assert "[1]" not in shown(one, given_)
        last = (one.place, one.end)


def test_quotes_cite_the_sentence_and_its_page() -> None:
    """The nearest sentences are the answer, labelled; each citation names its sentence's characters and page."""
    first = passage("The gate is red. The dam was built in 1932.", 90, page=3, page_starts=[107])
    second = passage("Water flows over the dam.\n\nIt was built by Anna. She was tall.", 10, 2)
    found = sentences([first, second])
    made = quotes(
        "When was the dam built?",
        [first, second],
        found,
        rows((1, 0), (0.1, 0), (0.9, 0), (0.2, 0), (0.85, 0), (0.84, 0)),
    )

    assert (
        made.text
        == f"{LABEL}\n\nThe dam was built in 1932. [1]\n\nIt was built by Anna. She was tall. [2]"
    )
    one, two = cited(made.text, made.passages)
    assert (one.document_id, one.start, one.end, one.page, one.last_page) == ("d1", 107, 133, 4, 4)
    assert (two.document_id, two.start, two.end, two.page) == ("d2", 37, 72, 0)
    assert [p.text for p in made.passages] == [
        "The dam was built in 1932.",
        "It was built by Anna. She was tall.",
    ]


@pytest.mark.parametrize("nearest", [0.0, 0.3])
def test_what_is_not_said_is_refused(nearest: float) -> None:
    """Sentences that mean something else answer nothing: the passages are named, and the refusal cites none."""
    given_ = [passage("The gate is red. The dam was built in 1932.")]
    made = quotes("Who won the cup?", given_, sentences(given_), rows((1, 0), (nearest, 0), (0, 0)))

    assert made == (REFUSAL, given_)
    assert quotes("Who won the cup?", [passage("x")], [], rows((1, 0))).text == REFUSAL


def test_words_that_are_shared() -> None:
    """Endings and common words do not count."""
    assert covered("Who keeps the keys?", "The office keeps a key.") == 1.0
    assert covered("Where is it?", "Where is it?") == 0.0
    assert covered("When was the dam built?", "a dam") == 0.5
