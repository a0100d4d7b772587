"""The ratio of inference to retrieval units, beside a simulation, brute force and the figures of the paper."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.simulation.disaggregated import simulate
from planner.disaggregation import (
    RetrievalLoad,
    UnitSplit,
    best_split,
    inference_share,
    predict,
    throughput,
    throughput_varying,
)
from planner.scale_out import TreeNetwork, is_known, scaled_quantile, slowest_quantile

TIMES = st.floats(1e-4, 10.0)
LOADS = st.builds(RetrievalLoad, TIMES, TIMES, st.integers(1, 64), st.integers(1, 64))


@given(LOADS, st.integers(2, 60))
def test_the_best_split_is_that_of_all(load: RetrievalLoad, units: int) -> None:
    """No other split of the same units has a higher throughput; with one more unit there is no less."""
    found = best_split(load, units)
    every = [UnitSplit(n, units - n) for n in range(1, units)]

    assert sum(found) == units
    assert throughput(load, found) == max(throughput(load, split) for split in every)
    assert throughput(load, best_split(load, units + 1)) >= throughput(load, found)


def test_too_few_units_are_refused() -> None:
    """One unit cannot do both."""
    with pytest.raises(ValueError, match="expected at least one of each kind"):
        best_split(RetrievalLoad(1.0, 1.0), 1)


@settings(max_examples=15)
@given(LOADS, st.integers(1, 40), st.integers(1, 40), st.integers(0, 1000))
@example(RetrievalLoad(0.012, 0.03, 8, 64), 13, 3, 1)
def test_a_prediction_is_what_a_simulation_does(
    load: RetrievalLoad, inference: int, retrieval: int, seed: int
) -> None:
    """Without variation, tokens/s and every share of time are the simulated ones; with much, the other formula's."""
    split = UnitSplit(inference, retrieval)
    found = predict(load, split)
    steady = simulate(load, split, cycles=200, seed=seed)

    assert steady.tokens_per_s == pytest.approx(found.tokens_per_s, rel=0.03)
    for name in ("computes", "is_answered", "queues", "retrieval_works"):
        assert getattr(steady, name) == pytest.approx(getattr(found, name), abs=0.03)
    assert found.computes + found.is_answered + found.queues == pytest.approx(1.0)
    cycles = 60_000 // inference
    varying = simulate(load, split, cycles=cycles, spread=1.0, seed=seed)
    assert varying.tokens_per_s == pytest.approx(found.tokens_per_s_varying, rel=0.08)
    assert found.tokens_per_s_varying <= found.tokens_per_s * (1 + 1e-9)


def test_many_units_are_not_too_much_for_floats() -> None:
    """The weights of 100,000 units differ by more than a float holds; the limits are still met."""
    load = RetrievalLoad(0.01, 0.02, 8, 4)

    for split in (UnitSplit(100_000, 1), UnitSplit(50_000, 50_000)):
        found = throughput_varying(load, split)
        assert found == pytest.approx(throughput(load, split), rel=1e-3)


# Figure 4.10: the model, its interval, and the share of GPUs in percent.
FIGURE_4_10 = (
    ("Dec-S", 1, 53.7), ("EncDec-S", 8, 77.1), ("EncDec-S", 64, 94.1),
    ("Dec-L", 1, 64.0), ("EncDec-L", 8, 93.8), ("EncDec-L", 64, 99.0),
)  # fmt: skip


@pytest.mark.parametrize(("model", "interval", "percent"), FIGURE_4_10)
def test_shares_of_the_paper(model: str, interval: int, percent: float) -> None:
    """With the times that a share implies it is the best of 1,000 units, and a simulation agrees."""
    share = percent / 100
    step_s = (2 * share - 1) / (1 - share) / interval
    load = RetrievalLoad(step_s, 1.0, interval)
    best = best_split(load, 1000)

    assert inference_share(load) == pytest.approx(share)
    assert best == UnitSplit(round(10 * percent), 1000 - round(10 * percent))
    found = simulate(load, best, cycles=15, spread=0.1)
    assert found.tokens_per_s == pytest.approx(throughput(load, best), rel=0.05)


def test_half_the_units_generate_at_least() -> None:
    """However fast a step, an inference unit is held by its retrieval: the formula's lower limit."""
    assert inference_share(RetrievalLoad(1e-9, 1.0)) == pytest.approx(0.5)
    assert inference_share(RetrievalLoad(1.0, 1e-9, 8)) == pytest.approx(1.0)


# -- the slowest of many --------------------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=50), st.floats(0.01, 0.99))
def test_one_node_is_its_own_distribution(latencies: list[float], quantile: float) -> None:
    """One node's quantile is a latency with that share at most as long; more nodes are never faster."""
    one = slowest_quantile(latencies, 1, quantile)
    below = sum(each <= one for each in latencies)

    assert one in latencies
    assert below >= quantile * len(latencies) - 1e-6
    found = [slowest_quantile(latencies, nodes, quantile) for nodes in (1, 2, 8, 128, 10**6)]
    assert found == sorted(found)
    assert found[-1] <= max(latencies)


def test_the_median_of_128_nodes_is_one_nodes_99th_percentile() -> None:
    """0.5^(1/128) is 0.9946; drawing 128 latencies and taking the longest, many times, gives the same."""
    rng = random.Random(3)
    latencies = [rng.gammavariate(9, 0.001) for _ in range(5000)]
    drawn = sorted(max(rng.choices(latencies, k=128)) for _ in range(2001))

    found = slowest_quantile(latencies, 128, 0.5)
    assert found == sorted(latencies)[math.ceil(0.5 ** (1 / 128) * 5000) - 1]
    assert drawn[1000] == pytest.approx(found, rel=0.05)
    assert [is_known(5000, nodes, 0.99) for nodes in (1, 32, 128)] == [True, True, False]


def test_the_network_is_a_tree() -> None:
    """One hop for one node, eight for 128; both ways, with the bytes of a query and an answer on every level."""
    network = TreeNetwork()

    assert network.latency_s(1) == pytest.approx(20e-6)
    assert network.latency_s(128) == pytest.approx(160e-6)
    assert network.latency_s(127) == pytest.approx(140e-6)
    assert network.latency_s(3, 4000, 1000) == pytest.approx(2 * (20e-6 + 5000 / 12.5e9))
    assert scaled_quantile([0.001], 3, 0.5, network) == pytest.approx(0.00104)
