"""Statistics: known values come out, noise stays inside its interval, moved blocks are dropped."""

from __future__ import annotations

import numpy as np

from loadgen import stats


def test_percentiles_of_known_values() -> None:
    """p50 and p99 of 0..100 are 50 and 99."""
    found = stats.percentiles(list(range(101)))

    assert (found["p50"], found["p99"], found["max"]) == (50.0, 99.0, 100.0)


def test_percentiles_of_nothing() -> None:
    """No values give no percentiles rather than an error."""
    assert stats.percentiles([]) == {}


def test_paired_ratio_finds_the_ratio() -> None:
    """A true ratio of 1.5 under shared noise lies in a narrow interval."""
    rng = np.random.default_rng(1)
    theirs = rng.lognormal(0, 0.3, 300)
    ours = theirs * 1.5 * rng.lognormal(0, 0.05, 300)
    found = stats.paired_ratio(list(ours), list(theirs))

    assert found["low"] < 1.5 < found["high"]
    assert found["high"] - found["low"] < 0.05
    assert found["n"] == 300


def test_ratio_of_quantiles_finds_the_ratio() -> None:
    """Twice as long a tail lies in a narrow interval, whatever the number of values on either side."""
    rng = np.random.default_rng(2)
    found = stats.ratio_of(list(2 * rng.exponential(1, 8000)), list(rng.exponential(1, 4000)), 99)

    assert found["low"] < 2.0 < found["high"]
    assert found["high"] - found["low"] < 0.6
    assert found["n"] == 8000


def test_moved_blocks_are_dropped() -> None:
    """A block whose machine became 30 % slower does not count, its neighbours do."""
    assert stats.keep_still([100, 95, 60, 65]) == [True, False, True]


def test_verdict_words() -> None:
    """A level is met if the median reaches it, the interval's end 0.97 of it, and the interval is narrow."""
    found = {"value": 1.0, "low": 0.98, "high": 1.03}

    assert stats.verdict(found, 1.0, 0.5) == "goal"
    assert stats.verdict(found, 1.01, 0.99) == "must"
    assert stats.verdict(found, 2.0, 1.02) == "missed"
    assert stats.verdict(found, 1.0, 2.0, higher=False) == "goal"
    assert stats.verdict(found, 0.9, 1.2, higher=False) == "must"
    assert stats.verdict(found, 0.5, 0.95, higher=False) == "missed"


def test_a_wide_interval_decides_nothing() -> None:
    """A figure that could be on either side of a level is undecided, unless even its best end misses the level."""
    wide = {"value": 1.1, "low": 0.9, "high": 1.3}

    assert stats.verdict(wide, 1.0, 0.8) == "undecided"
    assert stats.verdict(wide, 3.0, 2.0) == "missed"
    assert stats.verdict(wide, 0.2, 0.5, higher=False) == "missed"
    tail = {"value": 1.0, "low": 0.93, "high": 1.07}
    assert stats.verdict(tail, 0.95, 0.9) == "undecided"
    assert stats.verdict(tail, 0.95, 0.9, width=stats.TAIL) == "goal"
