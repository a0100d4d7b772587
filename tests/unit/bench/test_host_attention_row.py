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
    """All cells and modes are served to their ends, and kept in the partial file; the affinity is as it was."""
    options = BenchOptions(quick=True, setup_dir=tmp_path, partial=tmp_path / "kept")
    body = n1.run(options)

    assert len(os.sched_getaffinity(0)) == CORES
    assert body.left == 0
    assert len(body.tables[0]["rows"]) == sum(len(cell.modes) - 1 for cell in n1.CELLS)
    for table in body.tables:
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
    assert len(body.met) == 4
    found = {"tables": body.tables, "met": body.met, "samples": body.samples}
    for figure in FIGURES:
        if figure.row == "N1":
            assert figure.ours(found)
            assert figure.met in body.met
    assert n1.run(options).tables == body.tables
