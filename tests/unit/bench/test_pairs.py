"""Pairs: both sides do the same work in alternating order, and what a moved machine spoils is left out."""

from __future__ import annotations

import numpy as np
import pytest

from bench import pairs
from bench.pairs import PairBlocks, measure_pairs
from bench.peak import Speed
from bench.workloads import vectors


def test_sides_alternate() -> None:
    """Each pair gives both sides the same number, and every other pair begins with the rival.

    Both work once before the first pair, and once after each measurement of the machine's speed.
    """
    calls: list[tuple[str, int]] = []
    found = measure_pairs(
        lambda n: calls.append(("ours", n)), lambda n: calls.append(("theirs", n)), pairs=4, block=2
    )

    warm = [("ours", 0), ("theirs", 0)]
    assert calls == [
        *warm, *warm, ("ours", 0), ("theirs", 0), ("theirs", 1), ("ours", 1),
        ("ours", 2), ("theirs", 2), ("ours", 2), ("theirs", 2), ("theirs", 3), ("ours", 3),
    ]  # fmt: skip
    assert len(found.all_pairs) == 4
    assert len(found.speeds) == 3


def test_moved_block_is_left_out_and_counted() -> None:
    """Pairs of a block during which the machine became slower, or lost CPU time, are stored but do not count."""
    all_pairs = [(1.0, 2.0), (1.0, 2.0), (9.0, 9.0), (9.0, 9.0)]
    for last in (Speed(60, 10), Speed(100, 7), Speed(101, 10, stolen=0.03)):
        speeds = [Speed(100, 10), Speed(101, 10), last]
        found = PairBlocks(block=2, all_pairs=all_pairs, speeds=speeds)
        found.sift()

        assert found.ours == [1, 1]
        assert found.dropped == 1
        assert len(found.samples()["pairs_s"]) == 4


def test_machine_that_never_holds_still_is_told() -> None:
    """If every block moved, all pairs are shown and all blocks are counted as dropped."""
    speeds = [Speed(100, 10), Speed(50, 10), Speed(100, 10)]
    found = PairBlocks(block=1, all_pairs=[(1, 2), (3, 4)], speeds=speeds)
    found.sift()

    assert found.ours == [1, 3]
    assert found.dropped == 2


def test_plain_functions_must_not_wait() -> None:
    """A pair of plain functions runs without an event loop, so it can be called anywhere."""
    assert measure_pairs(lambda n: None, lambda n: None, pairs=1).dropped >= 0
    assert pairs.BLOCK > 1


@pytest.mark.parametrize("make", [vectors.clustered, vectors.latent, vectors.gaussian])
def test_data_sets_are_unit_and_repeatable(make: object) -> None:
    """A data set is decided by its seed, its rows have length one, and its truth is exact."""
    assert callable(make)
    rows = make(600, np.random.default_rng(1))
    queries, base = rows[:20], rows[20:]
    truth = vectors.nearest(base, queries)

    assert np.array_equal(rows, make(600, np.random.default_rng(1)))
    assert np.allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-5)
    assert np.array_equal(truth[:, 0], (queries @ base.T).argmax(axis=1))
    assert vectors.recall(truth, truth) == 1.0


def test_docstrings_are_real_and_distinct() -> None:
    """The real data set is text of this machine's standard library, no text twice."""
    found = vectors.docstrings(200)

    assert len(found) == 200 == len(set(found))
