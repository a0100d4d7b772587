"""The cross-encoder's training: no page of `docs`, questions that a page answers, wrong passages, and a run cut off."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.ranker import lists
from bench.ranker.corpus import Corpus
from bench.ranker.lists import NEGATIVES, RankedList
from bench.ranker.pages import WINDOW_CHARS, TextPage, begins, docstrings, pages, sections, windows
from bench.ranker.questions import asked, words_of
from bench.ranker.training import Training, TrainingPlan, factor_at, frozen_at

PAGE = TextPage(
    "trees.copy_all",
    "Return a copy of a whole tree.\n\n"
    "If the target exists already, nothing is copied. The order is kept for leaves.\n\n"
    "depth : int\n    The number of levels below the root that are copied at most, all if it is not given.",
)
TEXTS = st.text(alphabet="abc If.,:\n TheisRets", max_size=1200)


def test_a_page_that_begins_like_a_document_of_the_collection_is_left_out() -> None:
    """Pages of an installed package are found by name; one known already is not."""
    found = pages(set(), ["packaging"])
    rest = pages({begins(found[0].text)}, ["packaging", "not-installed-at-all"])

    assert len(found) > 20
    assert found[0] not in rest
    assert [page for page in found if page in rest] == found[1:]


@given(TEXTS)
def test_windows_are_short_and_hold_the_page_in_order(text: str) -> None:
    """Each window is a part of the page, the first one begins with its name, none is too long."""
    page = TextPage("name.of.it", text)
    found = windows(3, page)
    whole = f"{page.name}\n\n{text}"
    at = 0
    for window in found:
        assert len(window.text) <= WINDOW_CHARS
        at = whole.index(window.text, at)
    assert not found or whole.startswith(found[0].text) or len(found[0].text) < len(page.name)


def test_docstrings_and_sections_have_names() -> None:
    """Public names and headings lead to their texts; private names are left out."""
    tree = ast.parse(
        '"""M."""\nclass A:\n  """C."""\n  def f(self):\n    """F."""\ndef _g():\n  """G."""\n'
    )

    assert [(p.name, p.text) for p in docstrings(tree, "m")] == [
        ("m", "M."),
        ("m.A", "C."),
        ("m.A.f", "F."),
    ]
    assert list(sections("pack", "intro\n# Use\nso\n## More #\nthus\n")) == [
        TextPage("pack: Use", "so"),
        TextPage("pack: More", "thus"),
    ]


def test_questions_of_every_kind_are_made_of_a_page() -> None:
    """What it is about, a detail by name, and a follow-up that names the page only in the turn before."""
    (window,) = windows(0, PAGE)
    made = [asked(PAGE, window.text, random.Random(n)) for n in range(200)]
    texts = {
        kind: {q.text for q in made if q and q.kind == kind}
        for kind in ("about", "detail", "follow-up")
    }

    assert all(texts.values())
    assert "How do I get a copy of a whole tree?" in texts["about"]
    assert any(
        text.startswith("What happens if the target exists already?") for text in texts["detail"]
    )
    assert all("copy_all: Return a copy" in text for text in texts["follow-up"])
    assert words_of("a.readAll_lines") == "read all lines"


@given(TEXTS, st.integers(0, 99))
def test_a_question_is_the_same_every_time_and_rests_on_its_page(text: str, seed: int) -> None:
    """Any text makes a question whose source it holds, or none, without an error."""
    page = TextPage("some.name", text)
    first, again = (asked(page, text, random.Random(seed)) for _ in range(2))

    assert first == again
    if first is not None:
        assert first.text
        assert "".join(first.source.split()) in "".join(text.split())


@given(st.lists(st.integers(0, 40), unique=True, max_size=32), st.integers(0, 99), st.data())
def test_wrong_passages_are_of_other_pages(
    nearest: list[int], seed: int, data: st.DataObject
) -> None:
    """At most seven, each once, none of the right one's page, and none that says the same."""
    page_of = data.draw(st.lists(st.integers(0, 9), min_size=41, max_size=41))
    alike = data.draw(st.lists(st.sampled_from("abcdef"), min_size=41, max_size=41))
    found = lists.wrong(nearest, page_of, 5, alike, random.Random(seed))
    usable = {at for at in nearest if page_of[at] != page_of[5] and alike[at] != alike[5]}

    assert len(set(found)) == len(found) == min(NEGATIVES, len(usable))
    assert set(found) <= usable


def test_a_tenth_of_the_pages_is_held_out() -> None:
    """The same pages for the same seed, about one in ten."""
    held = [lists.held_out(page, 7) for page in range(5000)]

    assert held == [lists.held_out(page, 7) for page in range(5000)]
    assert 400 < sum(held) < 600


def test_figures_of_places() -> None:
    """Reciprocal ranks and recall by hand; a page that was not found counts nothing."""
    places = [0, 1, None, 3]

    assert lists.reciprocal(places) == pytest.approx((1 + 1 / 2 + 1 / 4) / 4)
    assert lists.recall(places, 2) == 0.5
    assert lists.place_of(9, lists.reordered([4, 9, 7], [0.1, 0.5, 0.5])) == 0
    assert lists.place_of(8, [4, 9, 7]) is None


@given(st.floats(0, 1))
def test_the_schedule_warms_up_and_ends_at_zero(progress: float) -> None:
    """The rate's factor is between 0 and 1; layers are only ever set free."""
    assert 0 <= factor_at(progress) <= 1
    assert factor_at(0) == factor_at(1) == 0
    assert frozen_at(progress) <= frozen_at(progress / 2)


def test_a_run_that_is_cut_off_ends_with_the_same_weights(tmp_path: Path) -> None:
    """A run goes on from its checkpoint, learns what an uninterrupted one learns, and keeps the embeddings."""
    corpus = _corpus()
    corpus.save(tmp_path / "corpus.json")
    assert Corpus.load(tmp_path / "corpus.json") == corpus
    plan = TrainingPlan(lists=4, batch=2, tokens=24, save_every_s=0.0, tell_every=1)
    torch.set_num_threads(1)

    whole = Training(plan, corpus, tmp_path / "whole.pt")
    before = whole.weights()
    told = list(whole.go())
    cut = Training(plan, corpus, tmp_path / "cut.pt")
    next(iter(cut.go()))
    resumed = Training(plan, corpus, tmp_path / "cut.pt")
    assert resumed.step == 1
    rest = list(resumed.go())

    assert [each["loss"] for each in told[1:]] == [each["loss"] for each in rest]
    after, others = whole.weights(), resumed.weights()
    assert all(torch.equal(after[name], others[name]) for name in after)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert any("layer.5" in name for name in changed)
    assert not any("embeddings" in name for name in changed)


def _corpus() -> Corpus:
    texts = [
        f"page {n}: it tells of {word}"
        for n, word in enumerate(("oak", "elm", "ash", "fir", "yew", "box", "bay", "fig"))
    ]
    some: list[Any] = [
        RankedList(f"what tells of {texts[n].split()[-1]}?", (n, *(m for m in range(8) if m != n)))
        for n in range(6)
    ]
    return Corpus(texts, some, [("what tells of bay?", 6, list(range(8)))])
