"""How two checkouts are compared: slower is seen, equal passes, and documents of different shape are refused."""

from __future__ import annotations

import pytest

from tests.guards import pairs


def test_costs_of_each_row() -> None:
    """A row's figures come from its samples; other rows have none."""
    assert pairs.r1(
        {"process/steady/nothing": [3.0, 1.0, 2.0], "machine/x": [9.0], "hops_s": {}}
    ) == {"process/steady/nothing": 2.0}
    assert pairs.e2({"32": {"pairs_s": [[3.0, 2.0], [4.0, 1.0]]}, "1": {"pairs_s": []}}) == {
        "32": 2.75
    }


def test_a_slower_side_fails() -> None:
    """A ratio under 1 says that we are slower; the median decides."""
    assert pairs.ratio({"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 2.0, "c": 9.0}) == pytest.approx(1.0)
    assert pairs.ratio({"a": 2.0}, {"a": 1.0}) == pytest.approx(0.5)
    assert pairs.passes([0.98, 0.5, 1.5])
    assert not pairs.passes([0.97, 0.5, 1.5])
    with pytest.raises(ValueError, match="nothing to compare"):
        pairs.ratio({"a": 1.0}, {"b": 1.0})


def test_the_interval_holds_the_median() -> None:
    """The interval of equal values is that value; of others it spreads around the median."""
    assert pairs.interval([1.0] * 5) == (1.0, 1.0)
    low, high = pairs.interval([0.8, 0.9, 1.0, 1.1, 1.2])
    assert 0.8 <= low < 1.0 < high <= 1.2


def test_what_a_row_missed() -> None:
    """A row without a missed promise has passed."""
    assert pairs.missed({"met": {"nothing lost": "goal", "equal": "must"}}) == []
    assert pairs.missed({"met": {"nothing lost": "missed"}}) == ["nothing lost"]
