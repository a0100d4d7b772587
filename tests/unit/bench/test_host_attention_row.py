"""N1: a rehearsal with a tiny model has a line for every mode of every cell, and what its figures read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.document import BenchOptions
from bench.figures.targets import FIGURES
from bench.suites import n1

CORES = len(os.sched_getaffinity(0))


@pytest.mark.skipif(CORES < 2, reason="device and host need a core each")
def test_a_short_run_has_its_shape(tmp_path: Path) -> None:
    """A run without time predicts nothing; then all modes of all cells are served, once, each beside its prediction."""
    late = BenchOptions(quick=True, setup_dir=tmp_path, partial=tmp_path / "kept", minutes=0)
    assert n1.run(late).left >= len(n1.CELLS)

    options = BenchOptions(quick=True, setup_dir=tmp_path, partial=tmp_path / "kept")
    body = n1.run(options)

    assert len(os.sched_getaffinity(0)) == CORES
    assert body.left == 0
    main, helped, machine = body.tables
    lines = [len(cell.modes) - 1 for cell in n1.CELLS if cell.share == 1]
    assert len(main["rows"]) == sum(lines)
    assert len(helped["rows"]) == sum(cell.share < 1 for cell in n1.CELLS)
    assert len(machine["rows"]) == 1
    for table in body.tables:
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
    assert len(body.met) == 6
    predicted = body.samples["predicted"]
    assert {name: set(modes) for name, modes in predicted.items()} == {
        name: set(modes) - {n1.ALONE} for name, modes in body.samples["runs"].items()
    }
    found = {"tables": body.tables, "met": body.met, "samples": body.samples}
    for figure in FIGURES:
        if figure.row == "N1":
            assert figure.ours(found)
            assert figure.met in body.met
    assert n1.run(options).tables == body.tables
