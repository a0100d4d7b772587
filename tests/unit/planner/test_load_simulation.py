"""The simulation of a deployment under load: against queueing theory where there is a formula, and its invariants."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.load_simulation import (
    LineCost,
    LoadSimulation,
    RagLoad,
    SimulatedDeployment,
    SimulatedWorker,
    StepSeconds,
    poisson,
    predict_capacity,
    predict_ttft,
)

ONE = RagLoad(1, 1)


def station(seconds: float, workers: int = 1, cores: int = 64) -> SimulatedDeployment:
    """Return workers of which each answers one request at a time, in so many seconds."""
    each = SimulatedWorker(1, step=StepSeconds(seconds, 0.0, 0.0), max_running=1)
    return SimulatedDeployment(cores, (each,) * workers)


def waits(deployment: SimulatedDeployment, rate: float, count: int = 8000) -> float:
    """Return the mean seconds from arrival to answer."""
    found = LoadSimulation(deployment, ONE).run(poisson(rate, count, 7))
    return sum(each.ttft_s for each in found) / count


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_worker_is_an_m_d_1_queue(load: float) -> None:
    """The mean wait is that of the Pollaczek-Khinchine formula."""
    expected = 0.1 * (1 + load / (2 * (1 - load)))

    assert waits(station(0.1), load / 0.1) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_several_workers_are_an_m_d_k_queue(load: float) -> None:
    """The mean wait is about half of the Erlang C formula's, which is exact for exponential times (Cosmetatos)."""
    servers, seconds = 4, 0.1
    offered = load * servers
    terms = [offered**n / math.factorial(n) for n in range(servers)]
    last = offered**servers / math.factorial(servers) / (1 - load)
    exponential = last / (sum(terms) + last) * seconds / (servers * (1 - load))
    more = 1 + (1 - load) * (servers - 1) * (math.sqrt(4 + 5 * servers) - 2) / (16 * offered)

    found = waits(station(seconds, servers), load * servers / seconds) - seconds
    assert found == pytest.approx(exponential / 2 * more, rel=0.15)


def test_threads_share_the_cores() -> None:
    """Two workers of two threads on two cores are as fast as one, and twice as fast on four."""
    both = [
        predict_capacity(
            SimulatedDeployment(
                cores, (SimulatedWorker(2, step=StepSeconds(0.1, 0.0, 0.0), max_running=1),) * 2
            ),
            ONE, clients=8,
        )
        for cores in (2, 4)
    ]  # fmt: skip

    assert both == pytest.approx([10, 20], rel=0.02)


def test_a_worker_that_yields_computes_in_what_others_leave() -> None:
    """Beside a generator on every core an encoder of a tenth of the weight takes eleven times as long."""
    writer = SimulatedWorker(1, step=StepSeconds(0.0, 1.0, 0.0), max_running=1, step_tokens=1000)
    encoder = SimulatedWorker(1, embed=LineCost(0.1), weight=0.1)
    deployment = SimulatedDeployment(1, (writer, encoder))
    first, second = LoadSimulation(deployment, RagLoad(100, 1)).run([0.0, 0.1])

    assert first.ttft_s == pytest.approx(0.1 + 100 + 0.1)  # 1.1 s with ten elevenths of the core
    assert second.first_s == pytest.approx(first.first_s + 100)


def test_a_request_alone_takes_the_sum_of_its_stages() -> None:
    """Router, hop, embedding, search and the steps that read its prompt, then the delivery of its first token."""
    worker = SimulatedWorker(2, LineCost(0.01, 0.002), StepSeconds(0.003, 0.001, 0.0005), 4, 100)
    deployment = SimulatedDeployment(2, (worker,), LineCost(0.004, 0.001), 1, 0.005, 0.0002, 0.006)
    steps = 3 * (0.003 + 0.0005) + 0.250
    delivery = 0.0002 * 3 / 2  # three threads on two cores: the next step goes on meanwhile
    expected = 0.005 + 0.006 + 0.012 + 0.005 + steps + delivery

    assert predict_ttft(deployment, RagLoad(250, 8), 0) == pytest.approx(expected)


costs = st.floats(0.0001, 0.01)


@given(
    threads=st.integers(1, 2),
    workers=st.integers(1, 3),
    running=st.integers(1, 4),
    tokens=st.integers(1, 64),
    seconds=st.tuples(costs, costs, costs, costs, costs),
    load=st.builds(RagLoad, st.integers(1, 100), st.integers(1, 6)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_every_request_is_answered_in_order(
    threads: int,
    workers: int,
    running: int,
    tokens: int,
    seconds: tuple[float, float, float, float, float],
    load: RagLoad,
    seed: int,
) -> None:
    """None is lost, none is faster than alone; cores never give more seconds than they have; a rerun is the same."""
    embed, search, base, token, row = seconds
    worker = SimulatedWorker(
        threads, LineCost(embed), StepSeconds(base, token, row), running, tokens
    )
    deployment = SimulatedDeployment(2, (worker,) * workers, LineCost(search, search), 1, embed)
    arrivals = poisson(20.0, 30, seed)
    found = LoadSimulation(deployment, load).run(arrivals)
    again = LoadSimulation(deployment, load).run(arrivals)

    assert found == again
    assert sorted(each.arrived_s for each in found) == arrivals
    assert all(each.arrived_s < each.first_s <= each.done_s for each in found)
    least = base + token * min(load.prompt_tokens, tokens) + embed + search
    assert min(each.ttft_s for each in found) >= least * (1 - 1e-9)
    # What no batch can save: each prompt token is read once.
    work = len(arrivals) * token * load.prompt_tokens * threads
    assert max(each.done_s for each in found) - arrivals[0] >= work / 2 * (1 - 1e-9)


def test_more_load_waits_longer() -> None:
    """The median first token rises with the rate, and capacity is where it grows without end."""
    worker = SimulatedWorker(2, LineCost(0.003, 0.001), StepSeconds(0.004, 0.0003, 0.001))
    deployment = SimulatedDeployment(2, (worker,), LineCost(0.001, 0.0005), 1, 0.004, 0.0005)
    load = RagLoad(450, 24)
    capacity = predict_capacity(deployment, load, clients=16)
    found = [
        predict_ttft(deployment, load, share * capacity, count=600) for share in (0, 0.3, 0.6, 0.9)
    ]

    assert found == sorted(found)
    assert predict_ttft(deployment, load, 1.3 * capacity, count=600) > 3 * found[-1]
