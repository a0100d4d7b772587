"""The documents name what exists, and all of it."""

from __future__ import annotations

import re
from pathlib import Path

from common.config import known_names

_DECLARATION = r'(?:Counter|Gauge|Histogram|Info|histogram|gauge|counter)\(\s*"(spillway_[a-z_]+)"'
ROOT = Path(__file__).parents[3]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
METRICS = (ROOT / "docs" / "metrics.md").read_text()


def test_every_variable_is_documented() -> None:
    """Each variable the product reads is in the table of operations.md, and no other is."""
    documented = set(re.findall(r"SPILLWAY_([A-Z_]+)", OPERATIONS))

    assert set(known_names()) == documented


def test_every_metric_is_documented() -> None:
    """Each metric declared in the code is in the table of metrics.md, and no other is."""
    declared = set()
    for path in [*ROOT.glob("services/**/*.py"), *ROOT.glob("common/**/*.py")]:
        declared |= set(re.findall(_DECLARATION, path.read_text()))
    documented = set(re.findall(r"`(spillway_[a-z_]+)", METRICS))
    plain = {name.removesuffix("_total") for name in documented}

    assert {name.removesuffix("_total") for name in declared} == plain


def test_documents_link_to_files_that_exist() -> None:
    """Every relative link and every path in backquotes that looks like ours exists."""
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        text = path.read_text()
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"
        for name in re.findall(
            r"`((?:common|engine|services|cli|loadgen|planner|bench|chaos|client|scripts|docs|tests|deploy|k8s|models|examples)/[\w./-]+)`",
            text,
        ):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_architecture_is_short_and_names_each_file_of_a_turn_once() -> None:
    """The page has at most 120 lines; a chat turn is eight steps through at most 12 files, none named twice."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    turn = text[text.index("## A chat turn") : text.index("## I want to")]
    files = re.findall(r"`([\w/]+\.(?:py|lua))`", turn)

    assert len(text.splitlines()) <= 120
    assert re.findall(r"^(\d)\. ", turn, re.MULTILINE) == list("12345678")
    assert len(files) <= 12
    assert len(set(files)) == len(files)
