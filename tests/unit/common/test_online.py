"""The cost model as it runs: it follows the device, not its hiccups, and knows how far off it is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cost.linear import LinearCost, Probe
from common.cost.online import Explained, Lateness, OnlineCost

SHAPES = ((1, 8), (1, 64), (8, 256), (8, 1024), (32, 2048))
COSTS = st.builds(LinearCost, st.floats(1e-3, 0.3), st.floats(0, 1e-2), st.floats(1e-6, 1e-3))


def probes(cost: LinearCost) -> list[Probe]:
    return [Probe(items, tokens, cost.seconds(items, tokens)) for items, tokens in SHAPES]


def drive(
    online: OnlineCost, cost: LinearCost, rng: random.Random, *, batches: int, noise: float = 0.03
) -> None:
    for _ in range(batches):
        items = rng.randint(1, 64)
        tokens = items * rng.randint(20, 500)
        online.observe(items, tokens, cost.seconds(items, tokens) * rng.lognormvariate(0, noise))


@given(COSTS, st.floats(0.3, 4), st.integers(0, 2**32))
def test_follows_a_device_that_has_changed(cost: LinearCost, factor: float, seed: int) -> None:
    """After some hundred batches of a device that runs at another speed, its batches are predicted again."""
    online = OnlineCost(probes(cost))
    drive(online, cost.scaled(factor), random.Random(seed), batches=500)

    for items, tokens in ((16, 4000), (32, 8000), (64, 16000)):  # like those it has seen
        expected = cost.scaled(factor).seconds(items, tokens)
        assert online.cost.seconds(items, tokens) == pytest.approx(expected, rel=0.1)


@given(COSTS, st.integers(0, 2**32))
def test_deaf_to_single_outliers(cost: LinearCost, seed: int) -> None:
    """A batch that took ten times as long, now and then, hardly moves the prediction."""
    rng, online = random.Random(seed), OnlineCost(probes(cost))
    drive(online, cost, rng, batches=200)
    for _ in range(5):
        online.observe(16, 2000, 10 * cost.seconds(16, 2000))
        drive(online, cost, rng, batches=20)

    assert online.cost.seconds(16, 2000) == pytest.approx(cost.seconds(16, 2000), rel=0.1)


@given(COSTS)
def test_one_shape_alone_does_not_unlearn_the_others(cost: LinearCost) -> None:
    """Hundreds of equal batches leave what was probed of other shapes where it was."""
    online = OnlineCost(probes(cost))
    for _ in range(1000):
        online.observe(32, 4096, cost.seconds(32, 4096))

    for items, tokens in SHAPES:
        assert online.cost.seconds(items, tokens) == pytest.approx(
            cost.seconds(items, tokens), rel=0.05
        )


def test_a_known_cost_stays() -> None:
    """A simulated device's cost is what it is said to be, whatever is measured."""
    known = LinearCost(0.01, 0.001, 0.0)
    online = OnlineCost([], fixed=known)

    assert online.observe(10, 100, 0.04) == pytest.approx(2.0)
    assert online.cost == known


@given(st.integers(0, 2**32))
def test_explains_its_device(seed: int) -> None:
    """The share of variance explained is near 1 for a linear device with little noise, 0 for noise alone."""
    cost = LinearCost(0.003, 2e-4, 7e-5)
    online = OnlineCost(probes(cost))
    drive(online, cost, random.Random(seed), batches=300, noise=0.01)
    assert online.r2 > 0.95

    nothing, rng = Explained(), random.Random(seed)
    for _ in range(500):
        nothing.add(1.0, rng.lognormvariate(0, 0.5))
    assert nothing.value < 0.2
    assert Explained().value == 0.0


@given(st.lists(st.floats(-5, 5), max_size=300), st.floats(0.5, 0.99))
def test_lateness_is_a_quantile(residuals: list[float], quantile: float) -> None:
    """At most the given share of the window is later than the value, which is never negative."""
    late = Lateness(quantile, window=100)
    for residual in residuals:
        late.add(residual)
    window = residuals[-100:]

    assert late.value >= 0
    assert sum(r > late.value for r in window) <= (1 - quantile) * len(window) + 1e-9


def test_lateness_before_anything_is_known() -> None:
    """A prior stands in until there are as many residuals as the quantile needs."""
    late = Lateness(0.99, prior=1.0)
    assert late.value == 1.0
    for _ in range(50):
        late.add(-0.1)
    assert late.value == pytest.approx(0.5)
    for _ in range(50):
        late.add(float("nan") if _ % 2 else -0.1)
    assert 0 < late.value < 0.5
    for _ in range(50):
        late.add(-0.1)
    assert late.value == 0.0
