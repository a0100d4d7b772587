"""Traces replayed through the door's decisions: nobody who was promised a time is made late."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from bench.simulation.replay import Arrival, Device, Replay, texts
from common.cost.linear import LinearCost
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


@given(st.integers(0, 2**32))
def test_bursts_on_noisy_devices(seed: int) -> None:
    """With noise of 3 % next to nothing is late, and hardly less is done than by a door that knows the future."""
    rng = random.Random(seed)
    devices = [
        Device(LinearCost(0.02, 1e-3, 3e-4), lambda r: r.lognormvariate(0, 0.03)),
        Device(LinearCost(0.05, 5e-3, 1.5e-3), lambda r: r.lognormvariate(0, 0.03)),
    ]
    trace = texts(arrivals.bursty(15, rng), rng, seconds=60, within_s=1.0)
    ours = Replay(devices, "windve-tokens", slo_s=1.0, seed=seed).run(trace)
    bound = Replay(devices, "clairvoyant", slo_s=1.0, seed=seed).run(trace)
    counted = Replay(devices, "windve", slo_s=1.0, seed=seed).run(trace)

    assert ours.missed <= 0.01 * sum(ours.admitted)
    assert ours.tokens >= 0.85 * bound.tokens
    assert ours.admitted[1] > 0, "bursts spill"
    assert counted.missed > ours.missed, "depths in queries do not know how long texts are"


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
