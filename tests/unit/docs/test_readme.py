"""The README's figures are those of what they are about: generated tables, counts of questions, pages, model sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench import report
from bench.document import RESULTS
from bench.workloads.docs_questions import questions
from cli import handbook

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _numbers(pattern: str) -> list[int]:
    """Return the numbers of the only place in the README that reads so."""
    (found,) = re.findall(pattern, " ".join(README.split()))
    return [int(each) for each in ([found] if isinstance(found, str) else found)]


def test_generated_figures_are_those_of_the_rows() -> None:
    """What stands between the marks is what the rows' JSON makes; no other sentence quotes a speed."""
    assert report.rewrite(README) == README
    outside = re.sub(r"<!-- bench:readme -->.*<!-- /bench:readme -->", "", README, flags=re.S)
    quoted = re.findall(
        r"\d[\d.,]* ?(?:\u00d7|times|tokens/s|ms|queries|requests a second)", outside
    )
    assert quoted == []


def test_questions_about_docs() -> None:
    """The counts of questions are the file's, right ones add up, and are those of row Q1 once it has them."""
    asked, right, good, answerable, refused, unanswerable = _numbers(
        r"Of (\d+) questions about `docs`.* it got (\d+) right: (\d+) of (\d+) that `docs` answers, (\d+) of (\d+) ref"
    )
    kinds = [bool(question.phrases) for question in questions()]
    assert (answerable, unanswerable) == (kinds.count(True), kinds.count(False))
    assert (asked, right) == (answerable + unanswerable, good + refused)
    kept = json.loads((RESULTS / "Q1.json").read_text(encoding="utf-8"))["samples"].get("docs")
    if kept is not None:
        found = [
            sum(row["right"] for row in kept if row["kind"] == kind)
            for kind in ("answerable", "unanswerable")
        ]
        assert [good, refused] == found


def test_pages_of_the_handbook(tmp_path: Path) -> None:
    """The sample collection has as many pages as the README says."""
    assert _numbers(r"`handbook` \((\d+) pages") == [len(handbook.documents(tmp_path))]
