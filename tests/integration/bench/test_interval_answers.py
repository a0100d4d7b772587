"""G1: a short run in processes of its own, a chat model and a RETRO model beside a search."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.document import BenchOptions
from bench.figures.targets import FIGURES
from bench.suites import g1


@pytest.mark.soak  # every cell with real processes takes a minute beside other tests
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="generation and retrieval need a core each"
)
def test_answers_are_predicted_before_they_are_measured(tmp_path: Path) -> None:
    """A run without time measures nothing; the next one predicts all cells and measures each: nothing is left."""
    late = BenchOptions(quick=True, setup_dir=tmp_path, partial=tmp_path / "kept", minutes=0)
    assert g1.run(late).left == len(g1.QUICK)

    options = BenchOptions(quick=True, setup_dir=tmp_path, partial=tmp_path / "kept")
    body = g1.run(options)

    for table in body.tables:
        assert all(len(line) == len(table["columns"]) for line in table["rows"])
    found = {"tables": body.tables, "met": body.met, "samples": body.samples}
    for figure in FIGURES:
        if figure.row == "G1" and "over HTTP" not in figure.what:
            assert figure.ours(found)
            assert figure.met in body.met
    assert body.left == 0
    main, beside = body.tables
    assert len(main["rows"]) == len(g1.QUICK)
    assert len(beside["rows"]) == sum(g1.BOTH in cell.modes for cell in g1.QUICK)
    for cell in g1.QUICK:
        assert set(body.samples["predicted"][cell.name]) == set(cell.modes)
        (measured,) = body.samples["rounds"][cell.name]
        assert set(measured["seconds"]) == set(cell.modes)
