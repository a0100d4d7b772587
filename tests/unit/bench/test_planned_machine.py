"""G2M: what is told of measurements, from measurements that are made up; the candidates that are drawn."""

from __future__ import annotations

import random
import statistics
from itertools import takewhile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.document import BenchOptions, Body
from bench.figures.targets import FIGURES
from bench.suites import g2m
from bench.workloads.machine_costs import MachineCalibration, fitted, joined
from cli.planned_services import PlannedServices, fingerprint
from common.config import WorkerConfig
from loadgen import arrivals
from planner.deployment import read_plan, write_plan
from planner.load_simulation import (
    LineCost,
    LoadSimulation,
    RagLoad,
    StepSeconds,
    predict_capacity,
)
from planner.machine_candidates import WorkerCosts, candidates, draw

CORES = 2
LOAD = RagLoad(250, 16)


def calibration(threads: int) -> MachineCalibration:
    """Return costs of a machine whose second thread gives four fifths more."""
    part = 1.0 if threads == 1 else 1 / 1.8
    worker = WorkerCosts(LineCost(0.004, 0.002 * part), StepSeconds(0.006, 0.001 * part, 0.0005))
    return MachineCalibration(
        threads, worker, LineCost(0.001, 0.0005), 0.004, 0.0003, 0.003, LOAD, 0.3 * part
    )


def kept(capacity: float = 1.0, first: float = 1.0) -> g2m.MachineKept:
    """Return what is measured where all is as predicted but for these factors."""
    found = g2m.MachineKept({str(each): calibration(each) for each in (1, CORES)})
    costs, load = joined([*found.calibrations.values()])
    for candidate in g2m.drawn(CORES, BenchOptions()):
        simulated = candidate.simulated(costs, CORES)
        predicted = predict_capacity(simulated, load, clients=g2m.CLIENTS)
        holds = {}
        for share in g2m.SHARES:
            rate, seed = share * predicted, round(100 * share)
            due = takewhile(lambda at: at < 20.0, arrivals.poisson(rate, random.Random(seed)))
            served = LoadSimulation(simulated, load).run(due)
            ttft_s = statistics.median(each.ttft_s for each in served)
            holds[str(share)] = g2m.RateHold(rate, 20.0, seed, first * ttft_s, len(served), 0)
        found.deployments[candidate.name] = g2m.MeasuredDeployment(capacity * predicted, holds)
    return found


@pytest.mark.parametrize(
    ("capacity", "first", "missed"),
    [
        (1.0, 1.0, set()),
        (0.9, 1.1, set()),
        (0.7, 1.0, {"capacity within 20 %"}),
        (1.0, 1.3, {"first token within 15 %"}),
    ],
)
def test_goals_are_those_of_the_row(capacity: float, first: float, missed: set[str]) -> None:
    """What is as far off as the row allows reaches its goals; a verdict that is missed is the one that is wrong."""
    body = Body()
    g2m.describe(body, kept(capacity, first), CORES, BenchOptions())

    assert {name for name, verdict in body.met.items() if verdict == "missed"} == missed
    assert len(body.met) == 3
    assert len(body.tables[0]["rows"]) == g2m.DRAWN
    found = {"tables": body.tables, "met": body.met, "samples": body.samples}
    for figure in (each for each in FIGURES if each.row == "G2M"):
        assert figure.ours(found)
        assert figure.met in body.met


def test_a_part_of_the_measurements_is_told(tmp_path: Path) -> None:
    """Without deployments there is a table of dashes and no verdict; what is kept survives its file."""
    some = g2m.MachineKept({str(each): calibration(each) for each in (1, CORES)})
    body = Body()
    g2m.describe(body, some, CORES, BenchOptions())
    place = tmp_path / "kept"
    place.write_bytes(msgspec.msgpack.encode(kept()))

    assert body.met == {}
    assert set(body.tables[0]["rows"][0][2:]) == {"-"}
    assert msgspec.msgpack.decode(place.read_bytes(), type=g2m.MachineKept) == kept()


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(3, 6))
def test_drawn_candidates_differ_in_all_three_decisions(seed: int, power: int, count: int) -> None:
    """Placement, allocation and batching each have two values or more; the same seed draws the same."""
    cores = 1 << power
    every = [*candidates(g2m.threads_of(cores), cores)]
    chosen = draw(every, count, seed)

    assert len({each.name for each in chosen}) == count
    assert len({each.own_encoder for each in chosen}) == 2
    assert len({(each.writers, each.threads) for each in chosen}) > 1
    assert len({each.running for each in chosen}) == 2
    assert chosen == draw(every, count, seed)
    assert all(each.writers * each.threads <= cores for each in every)


def test_every_candidate_is_a_plan(tmp_path: Path) -> None:
    """Its services are a plan that can be written, read and made into processes with their settings."""
    for candidate in candidates([1, CORES], CORES):
        plan = g2m.plan_of(candidate, fingerprint(), tmp_path, qps=1.0, ttft_s=0.1)
        planned = PlannedServices(
            read_plan(write_plan(plan), "plan.json"), "plan.json", {}, None, {}
        )
        encoders = [each for each in planned.replicas() if each.name == "encoder"]

        assert plan.replicas("gpu_worker") == candidate.writers + candidate.own_encoder
        assert len(encoders) == candidate.own_encoder
        for each in plan.of_service("gpu_worker"):
            config = planned.config(each)
            assert isinstance(config, WorkerConfig)
            assert config.chat_model == ("none" if each.name == "encoder" else str(tmp_path))


def test_ranking_leaves_near_predictions_without_an_order() -> None:
    """Only two whose predictions differ by a twentieth or more can be in the wrong order."""
    assert g2m.ranked_right([1.0, 1.04, 2.0], [1.1, 1.0, 3.0])
    assert not g2m.ranked_right([1.0, 1.2, 2.0], [1.1, 1.0, 3.0])


@given(st.floats(0, 10), st.floats(0, 10))
def test_a_line_is_found_again(base: float, slope: float) -> None:
    """Points of a line give the line; a line that falls gives its mean, one from below 0 a slope alone."""
    found = fitted([(x, base + slope * x) for x in (1, 2, 4, 8)])

    assert found == pytest.approx((base, slope), abs=1e-6)
    assert fitted([(1, 3.0), (2, 1.0)]) == (2.0, 0.0)
    assert fitted([(1, 0.0), (2, 3.0)]) == (0.0, 1.0)
