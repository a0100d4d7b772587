"""N1S: a short run has every table that its figures read, and the shapes that so few requests can show."""

from __future__ import annotations

import math
from pathlib import Path

from bench.document import BenchOptions
from bench.figures.targets import FIGURES
from bench.suites import n1s
from bench.suites.n1s import SETTINGS, Setting
from engine.decoder.offload.plan import OffloadMode

JUDGED_LONG = {
    "rise to a balance point, fall towards 1",
    "more host bandwidth gains more",
    "planning",
}


def test_a_short_run_has_its_shape(tmp_path: Path) -> None:
    """Every mode and machine has a line; what does not need many requests, or a quiet machine, reaches its goal."""
    body = n1s.run(BenchOptions(quick=True, setup_dir=tmp_path))

    assert len(body.tables[0]["rows"]) == len(SETTINGS)
    assert len(body.tables[1]["rows"]) == len(n1s.PEAKS)
    assert len(body.tables[2]["rows"]) == 2 * (len(OffloadMode) - 1)
    for table in body.tables:
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
    assert {word for name, word in body.met.items() if name not in JUDGED_LONG} == {"goal"}
    found = {"tables": body.tables, "met": body.met, "samples": body.samples}
    for figure in FIGURES:
        if figure.row == "N1S":
            assert figure.ours(found)
            assert figure.met in body.met


def test_the_load_at_a_limit_lies_between_two_loads() -> None:
    """A limit crossed half way between two loads is reached half way between them, one never crossed nowhere."""
    setting = Setting(*SETTINGS[0][:4], (1, 1), (1.0, 2.0, 3.0), limit_s=2.0)

    assert n1s._rate_at(setting, (0.5, 1.0, 3.0)) == 2.5
    assert n1s._rate_at(setting, (2.5, 3.0, 3.0)) == 1.0
    assert n1s._rate_at(setting, (0.5, 1.0, 1.5)) == math.inf
