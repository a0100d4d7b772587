"""Traces replayed through the door's decisions: nobody who was promised a time is made late."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation.bound import most_tokens
from bench.simulation.replay import (
    POLICIES,
    Arrival,
    Device,
    Policy,
    Replay,
    clairvoyant,
    texts,
)
from bench.simulation.speed import SpeedTrace, burdened, measured
from common.cost.linear import LinearCost, Probe
from loadgen import arrivals

COSTS = st.builds(LinearCost, st.floats(1e-3, 0.3), st.floats(0, 1e-2), st.floats(1e-5, 1e-3))
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.floats(0, 3),
        st.integers(1, 32),
        st.integers(8, 8000),
        st.floats(0.05, 2.0),
    ),
    max_size=60,
).map(sorted)


@given(COSTS, ARRIVALS)
def test_exact_devices_keep_every_promise(cost: LinearCost, arrivals: list[Arrival]) -> None:
    """On devices without noise nothing that was admitted ends late, whatever comes and however it is mixed."""
    devices = [Device(cost), Device(cost.scaled(5))]
    done = Replay(devices, "clairvoyant", slo_s=1.0).run(arrivals)
    assert (done.offered, done.missed) == (len(arrivals), 0)

    ours = Replay(devices, "windve-tokens", slo_s=1.0).run(arrivals)
    assert (sum(ours.admitted) + ours.refused, ours.missed) == (len(arrivals), 0)


def wandering(rng: random.Random, sigma: float = 0.03) -> SpeedTrace:
    """Return a device's speed that changes each tenth of a second."""
    return SpeedTrace([rng.lognormvariate(0, sigma) for _ in range(997)], 0.1)


def two_devices(rng: random.Random) -> list[Device]:
    """Return an accelerator and a CPU that is five times slower, both with noise."""
    fast = LinearCost(0.02, 1e-3, 3e-4)
    return [Device(fast, wandering(rng)), Device(fast.scaled(5), wandering(rng))]


@given(st.integers(0, 2**32))
def test_bursts_on_noisy_devices(seed: int) -> None:
    """With noise of 3 % next to nothing is late, and hardly less is done than by a door that knows the future."""
    rng = random.Random(seed)
    devices = two_devices(rng)
    trace = texts(arrivals.bursty(15, rng), rng, seconds=60, within_s=1.0)
    ours = Replay(devices, "windve-tokens", slo_s=1.0).run(trace)
    best = Replay(devices, "clairvoyant", slo_s=1.0).run(trace)
    counted = Replay(devices, "windve", slo_s=1.0).run(trace)

    assert ours.missed <= 0.01 * sum(ours.admitted)
    assert ours.tokens >= 0.75 * best.tokens
    assert ours.admitted[1] > 0, "bursts spill"
    assert counted.missed > ours.missed, "depths in queries do not know how long texts are"


@given(st.integers(0, 2**32))
def test_a_machine_slower_in_bursts(seed: int) -> None:
    """Where bursts slow the devices down by up to 70 %, little is late, though the first one is not foreseen."""
    rng = random.Random(seed)
    trace = texts(arrivals.bursty(15, rng), rng, seconds=60, within_s=1.0)
    devices = [
        Device(cost, burdened(speed, [one.at_s for one in trace], 15, 1.7))
        for cost, speed in two_devices(rng)
    ]
    ours = Replay(devices, "windve-tokens", slo_s=1.0).run(trace)

    assert ours.missed <= 0.05 * sum(ours.admitted) + 2


@given(COSTS, ARRIVALS, st.sampled_from(POLICIES), st.integers(0, 2**32), st.floats(0, 0.1))
def test_no_policy_exceeds_the_bound(
    cost: LinearCost, arrivals: list[Arrival], policy: Policy, seed: int, hop_s: float
) -> None:
    """Whatever comes, and however the devices' speed wanders: what ends in time is at most what the bound says."""
    rng = random.Random(seed)
    devices = [Device(cost, wandering(rng, 0.3)), Device(cost.scaled(5), wandering(rng, 0.3))]
    most = most_tokens(arrivals, devices, hop_s=hop_s)

    done = Replay(devices, policy, slo_s=1.0, hop_s=hop_s).run(arrivals)
    assert done.tokens <= most * (1 + 1e-6) + 1e-6
    assert most <= sum(arrival.tokens for arrival in arrivals) * (1 + 1e-9)


@given(COSTS, ARRIVALS)
def test_the_best_clairvoyant(cost: LinearCost, arrivals: list[Arrival]) -> None:
    """The best clairvoyant does at least what one without spare time does, and no more than the bound."""
    devices = [Device(cost), Device(cost.scaled(5))]
    best = clairvoyant(arrivals, devices, slo_s=1.0)

    assert best.tokens >= Replay(devices, "clairvoyant", slo_s=1.0).run(arrivals).tokens
    assert best.tokens <= most_tokens(arrivals, devices) * (1 + 1e-6) + 1e-6


def test_the_bound_is_reached() -> None:
    """Texts that just fill one batch of the longest time, on a device without a fixed cost, are the bound."""
    devices = [Device(LinearCost(0.0, 0.0, 0.01))]
    trace = [Arrival(0.0, 1, 10, 1.0)] * 30
    assert most_tokens(trace, devices) == pytest.approx(100)
    assert Replay(devices, "clairvoyant", slo_s=1.0).run(trace).tokens == 100
    assert most_tokens([], devices) == 0
    assert most_tokens(trace, devices, hop_s=2.0) == 0


@given(
    st.lists(st.floats(0.2, 5), min_size=1, max_size=20),
    st.floats(0, 50),
    st.floats(0, 20),
    st.floats(0.01, 0.5),
)
def test_speed_over_time(
    factors: list[float], start_s: float, work_s: float, step_s: float
) -> None:
    """Work ends when the device has done it; the slower the device, the later."""
    speed = SpeedTrace(factors, step_s)
    end_s = speed.end(start_s, work_s)

    assert speed.work(end_s) - speed.work(start_s) == pytest.approx(work_s, abs=1e-6)
    assert min(factors) * work_s - 1e-6 <= end_s - start_s <= max(factors) * work_s + 1e-6


def test_speeds_are_those_of_the_batches() -> None:
    """A measured trace is as slow as each batch was, for as long as the batch ran."""
    cost = LinearCost(0.0, 0.0, 0.001)
    speed = measured(cost, [Probe(1, 100, 0.1), Probe(1, 100, 0.2)])

    assert speed.end(0.0, 0.1) == pytest.approx(0.1)
    assert speed.end(0.1, 0.1) == pytest.approx(0.3)
    assert speed.rotated(0.1).end(0.0, 0.1) == pytest.approx(0.2)


def test_accelerator_only_never_spills() -> None:
    """The baseline leaves the second device alone; taking turns uses both from the first request on."""
    devices = [Device(LinearCost(0.1, 0.01, 0.0)), Device(LinearCost(0.1, 0.05, 0.0))]
    trace = [Arrival(0.0, 1, 75, 1.0)] * 200
    alone = Replay(devices, "accelerator-only", slo_s=1.0).run(trace)
    both = Replay(devices, "windve", slo_s=1.0).run(trace)
    turns = Replay(devices, "round-robin", slo_s=1.0).run(trace[:10])

    assert alone.admitted == [90, 0]
    assert both.admitted == [90, 18]
    assert turns.admitted == [5, 5]
