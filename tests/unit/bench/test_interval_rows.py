"""G1S and G3: short runs have the tables that their figures read, and reach their goals; G1: its predictions."""

from __future__ import annotations

from pathlib import Path

from bench.document import BenchOptions, Body
from bench.figures.targets import FIGURES
from bench.simulation.piperag_published import INTERVALS
from bench.suites import g1, g1s, g3


def whole(row: str, body: Body) -> None:
    """Every line of a table has its columns, and every figure of the row reads the document."""
    for table in body.tables:
        assert all(len(line) == len(table["columns"]) for line in table["rows"])
    found = {"tables": body.tables, "met": body.met, "samples": body.samples}
    figures = [figure for figure in FIGURES if figure.row == row]
    assert figures
    for figure in figures:
        assert figure.ours(found)
        assert figure.rival(found)
        assert figure.met in body.met


def test_a_short_simulation_reaches_every_goal(tmp_path: Path) -> None:
    """The thesis' seconds and efforts come out; with fewer answers the margin still keeps late searches few."""
    body = g1s.run(BenchOptions(quick=True, setup_dir=tmp_path))

    whole("G1S", body)
    assert set(body.met.values()) == {"goal"}
    published, efforts, intervals, hardware, noise = body.tables
    assert [row[2] for row in published["rows"]] == ["14.82", "12.33", "11.04"]
    assert len(efforts["rows"]) == len(INTERVALS)
    assert len(intervals["rows"]) == len(g1s.NPROBES)
    assert len(hardware["rows"]) == len(g1s.FASTER) ** 2
    assert len(noise["rows"]) == len(INTERVALS) * len(g1s.SPREADS)


def test_the_engine_takes_the_steps_that_are_simulated(tmp_path: Path) -> None:
    """The engine, whose sequences stop and go on in batches, needs exactly the steps and batches of the simulation."""
    body = g3.run(BenchOptions(quick=True, setup_dir=tmp_path))

    whole("G3", body)
    assert set(body.met.values()) == {"goal"}
    figure, limits, engine = body.tables
    assert len(figure["rows"]) == 8
    assert len(limits["rows"]) == len(g3.LIMITED) * len(g3.LIMITS)
    assert len(engine["rows"]) == len(g3.QUICK)
    for row in engine["rows"]:
        assert row[3] == row[4]
        assert row[5] == row[6]


def test_a_profile_is_predicted_by_two_lines() -> None:
    """Each chunk beside a search takes the longer of both, the first search and the last chunk are alone."""
    profile = g1.Profile(3, [1.0, 2.0, 4.0], [3.0, 1.0, 2.0], [0.5, 1.0, 2.0], [1.0])

    assert profile.share == 1.0
    assert profile.predicted(g1.CELLS[0].modes) == {
        g1.PIPELINED: 2.0 + 2.0 + 2.0 + 4.0, g1.SEQUENTIAL: 7.0 + 6.0, g1.BOTH: 3.5 + 3.0
    }  # fmt: skip
