"""V4 and V4R: the distances they select from are what they are said to be, and short runs of both reach their goals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.document import BenchOptions
from bench.figures.targets import FIGURES
from bench.suites import v4, v4r
from bench.workloads.quantised import quantised
from services.vector_search.index import selection


def test_quantised_distances_are_those_of_the_decoded_rows() -> None:
    """Every row is in one list, its nearest; a scan's distances are squares between the query and the decoded codes."""
    rng = np.random.default_rng(4)
    base = rng.standard_normal((1500, 24)).astype(np.float32)
    query = rng.standard_normal(24).astype(np.float32)
    index = quantised(base, 12, 6, rng)
    lists = index.nearest_lists(query[None], 12)[0]
    found = index.scan(query, lists)

    assert np.array_equal(np.sort(found.rows), np.arange(1500))
    to_centres = np.square(query - index.centres).sum(1)
    assert (np.diff(to_centres[lists]) >= 0).all()
    places = np.argsort(index.rows)[found.rows]
    decoded = index.books[np.arange(6), index.codes[places]].reshape(1500, 24)
    np.testing.assert_allclose(
        found.distances, np.square(query - decoded).sum(1), rtol=1e-4, atol=1e-4
    )
    errors = np.square(base[found.rows] - decoded).sum(1)
    assert errors.mean() < 0.5 * np.square(base).sum(1).mean()
    nearest = np.square(base[:, None] - index.centres).sum(2).argmin(1)
    counts = np.bincount(nearest, minlength=12)
    assert np.array_equal(np.diff(index.begins), counts)


def test_short_runs_reach_their_goals(tmp_path: Path) -> None:
    """A short run of each row has a line in every table, a verdict that its figures name, and no goal missed."""
    if selection.kernel() is None:
        pytest.skip("no AVX512 or no compiler here")
    options = BenchOptions(quick=True, setup_dir=tmp_path)
    queues, ratio = v4.run(options), v4r.run(options)

    assert len(queues.tables[0]["rows"]) == 2 * len(v4.KS) * len(v4.QUEUES)
    assert [row[:4] for row in queues.tables[1]["rows"][:1]] == [
        ["Deep (paper)", "R1@100", "92.88", "92.85"]
    ]
    assert [row[2] for row in queues.tables[2]["rows"]] == [
        "100",
        "63",
        "38",
        "23",
        "15",
        "10",
        "8",
    ]
    assert queues.met["recall"] == "goal"
    assert set(ratio.met.values()) == {"goal"}
    for row, body in (("V4", queues), ("V4R", ratio)):
        found = {"tables": body.tables, "met": body.met, "samples": body.samples}
        for figure in FIGURES:
            if figure.row == row:
                assert figure.ours(found)
                assert figure.met in {*body.met, "speed"}  # which nothing judges
