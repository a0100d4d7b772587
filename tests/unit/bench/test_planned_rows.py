"""G2: a short run reaches its goals, and every figure of the row finds what it names."""

from __future__ import annotations

from bench.document import BenchOptions
from bench.figures.targets import FIGURES
from bench.suites import g2


def test_a_short_run_reaches_its_goals() -> None:
    """No verdict is missed; parts can be chosen by name, and the document says that it holds some of them."""
    body = g2.run(BenchOptions(quick=True))

    assert set(body.met.values()) == {"goal"}
    found = {"tables": body.tables, "met": body.met, "samples": body.samples}
    figures = [figure for figure in FIGURES if figure.row == "G2"]
    for figure in figures:
        assert figure.ours(found)
        assert figure.met in {*body.met, "-"}
    some = g2.run(BenchOptions(quick=True, only="cells"))
    assert set(some.met) == {"figure 3.5c", "retrieval and table 3.4"}
    assert some.notes[-1] == f"1 of {len(g2.PARTS)} cells were measured: cells."
