"""A slowdown is learned within a few batches, shared by a machine's lanes, bounded by what was seen, and forgotten."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cost.slowdown import HALF_S, Slowness, slowdown

RATIOS = st.lists(st.floats(0.05, 20), max_size=30)
EVIDENCE = st.builds(Slowness, st.floats(-2, 2), st.floats(0, 4))


def learned(ratios: list[float]) -> Slowness:
    known = Slowness()
    for ratio in ratios:
        known = known.after(ratio)
    return known


@given(RATIOS)
def test_between_the_fit_and_what_was_seen(ratios: list[float]) -> None:
    """The factor lies between 1 and the largest and the smallest ratio of the batches."""
    factor = slowdown(learned(ratios))

    assert min([1.0, *ratios]) * (1 - 1e-9) <= factor <= max([1.0, *ratios]) * (1 + 1e-9)


@given(st.floats(0.3, 3))
def test_learned_within_a_few_batches(ratio: float) -> None:
    """After six equal batches four fifths of their slowdown, as a logarithm, are believed."""
    factor = slowdown(learned([ratio] * 6))

    assert 0.8 * abs(math.log(ratio)) <= abs(math.log(factor)) <= abs(math.log(ratio)) + 1e-9


@given(RATIOS, st.floats(0.05, 20))
def test_one_batch_decides_little(ratios: list[float], outlier: float) -> None:
    """A batch moves the logarithm by at most log 2, whatever it took; the first says the most."""
    before = learned(ratios)
    after = before.after(outlier)

    assert abs(after.log - before.log) <= math.log(2) + 1e-9


@given(EVIDENCE, st.lists(EVIDENCE, max_size=4), st.floats(0, 1000), st.randoms())
def test_shared_and_forgotten(
    own: Slowness, others: list[Slowness], seconds: float, rng: object
) -> None:
    """Between the extremes of all lanes and 1; nearer to 1 with time; the order of the other lanes says nothing."""
    factors = [1.0, math.exp(own.log), *(math.exp(each.log) for each in others)]
    assert min(factors) - 1e-9 <= slowdown(own, others) <= max(factors) + 1e-9
    assert slowdown(own, others[::-1]) == pytest.approx(slowdown(own, others))

    assert abs(math.log(slowdown(own.faded(seconds)))) <= abs(math.log(slowdown(own))) + 1e-9
    assert own.faded(HALF_S).weight == pytest.approx(own.weight / 2)


def test_a_silent_lane_learns_from_its_neighbour() -> None:
    """A lane without batches is as slow as the other lane of its machine; one with many decides by itself."""
    slow, quick = learned([2.0] * 10), learned([1.0] * 10)

    assert slowdown(Slowness(), [slow]) > 1.5
    assert slowdown(quick, [slow]) < 1.25
    assert slowdown(quick, [slow]) < slowdown(slow, [quick]) < slowdown(slow)
