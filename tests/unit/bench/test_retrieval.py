"""The judge of searches on real questions."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.workloads.retrieval import Question, cranfield, difference, judge, passages_of, perl


def test_the_judge_knows_the_measures() -> None:
    """The best order has 1 everywhere; an answer at rank 3 alone has half the gain and a third of the rank."""
    assert judge([4, 5, 6], frozenset({4, 5})) == (1.0, 1.0, 1.0)
    assert judge([1, 2, 4], frozenset({4})) == pytest.approx((0.5, 1 / 3, 1.0))
    assert judge(list(range(20)), frozenset({15})) == (0.0, 0.0, 0.0)


def test_a_difference_has_its_bounds() -> None:
    """The same difference everywhere has no width; a mixed one holds its mean."""
    assert difference([2.0] * 9, [1.0] * 9) == (1.0, 1.0, 1.0)
    mean, low, high = difference([1.0, 0.0] * 20, [0.0, 0.5] * 20)
    assert low < mean < high


def test_passages_overlap_and_hold_every_word() -> None:
    """A text of 300 words is three passages; an empty one none."""
    words = [str(number) for number in range(300)]
    pieces = [piece.split() for piece in passages_of(" ".join(words))]
    assert [len(piece) for piece in pieces] == [130, 130, 80]
    assert list(dict.fromkeys(word for piece in pieces for word in piece)) == words
    assert passages_of("  ") == []


def test_sets_are_read_from_their_files(tmp_path: Path) -> None:
    """Cranfield's fields and judgements; perlfaq's questions without their headings, among other pages."""
    (tmp_path / "cran.all.1400").write_text(
        ".I 1\n.T\nwings .\n.A\nx\n.B\ny\n.W\nlift .\n.I 2\n.T\nflow .\n.A\n.B\n.W\n\n"
    )
    (tmp_path / "cran.qry").write_text(".I 001\n.W\nwhat lifts ?\n.I 002\n.W\nwhat flows ?\n")
    (tmp_path / "cranqrel").write_text("1 1 2\n2 2 -1\n2 1 5\n2 2 4\n")
    assert cranfield(tmp_path) == (
        ["wings . lift .", "flow ."],
        [Question("what lifts ?", frozenset({0})), Question("what flows ?", frozenset({1}))],
    )
    (tmp_path / "perlfaq1.pod").write_text(
        "=head2 What is I<Perl>?\n\nA language.\n=head1 AUTHOR\n"
    )
    (tmp_path / "perlop.pod").write_text("=head1 NAME\n\nperlop\n")
    (tmp_path / "perltoc.pod").write_text("What is Perl?")
    assert perl(tmp_path) == (
        ["A language.", "NAME perlop"],
        [Question("What is Perl?", frozenset({0}))],
    )
