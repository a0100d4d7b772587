"""E1's tables and verdicts from known figures, and its bound of accuracy."""

from __future__ import annotations

import numpy as np
import pytest

from bench.figures import targets
from bench.figures.figure import NOT_THERE
from bench.pairs import PairBlocks
from bench.rivals.sweep import Swept
from bench.suites import e1, e1_servers
from bench.suites.e1_accuracy import within_bound
from bench.suites.embed_pairs import SHAPES, SINGLE, EmbedFound, EmbedKept


def _found(ours: float, theirs: float, against: str) -> EmbedFound:
    blocks = PairBlocks([ours] * 30, [theirs] * 30, all_pairs=[(ours, theirs)] * 30)
    return EmbedFound(blocks, against, "c0ffee")


def _kept() -> EmbedKept:
    kept = EmbedKept(
        cosines={"ours, bf16": [0.9999, 0.99995], "sentence-transformers, bf16": [0.9999]}
    )
    names = {f"process/{length}": e1.ST for length in e1.LENGTHS}
    names |= {f"mesh/{shape.name}": e1.ST for shape in SHAPES}
    names |= {
        f"{rival}/{shape.name}": rival
        for rival in e1_servers.ENVIRONMENTS
        for shape in (*SHAPES, SINGLE)
    }
    for name, against in names.items():
        kept.cells[name] = _found(1.0, 1.55, against)
        kept.swept[name] = [Swept({"a": 1}, 5.0), Swept({"a": 2}, 0.0, "its lowest cosine is 0.93")]
    return kept


def test_tables_verdicts_and_figures_agree() -> None:
    """1.55 times: below the goal in process, above it elsewhere; every figure of the summary is found."""
    body = e1.describe(_kept())

    assert body.met["process/32"] == "must"
    assert {word for name, word in body.met.items() if not name.startswith("process")} == {"goal"}
    assert {rival.name for rival in body.rivals if rival.measured} == {
        e1.ST,
        *e1_servers.ENVIRONMENTS,
    }
    found = {"tables": body.tables, "met": body.met}
    for figure in targets.FIGURES:
        if figure.row == "E1":
            assert NOT_THERE not in figure.ours(found)
            assert figure.met in body.met


@pytest.mark.parametrize(
    ("cosines", "within"),
    [([0.99995] * 9, True), ([0.99995] * 8 + [0.9994], False), ([0.9997] * 9, False)],
)
def test_every_text_and_the_median_are_bound(cosines: list[float], within: bool) -> None:
    """One text too far from fp32 is enough, and so is a low median."""
    assert within_bound(cosines) == within


def test_requests_are_the_same_but_for_the_path() -> None:
    """Each server gets the same bytes; infinity serves under another path."""
    ours, infinity, other = (
        e1_servers.requests([["a", "b"], ["c"]], rival)
        for rival in ("", e1_servers.INFINITY, e1_servers.OPENVINO)
    )
    assert [each.body for each in ours] == [each.body for each in infinity]
    assert ours == other
    assert {each.path for each in infinity} == {"/embeddings"}
    assert np.sum([each.items for each in ours]) == 3
