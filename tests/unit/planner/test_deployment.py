"""Deployment plans: written and read back, refused with a sentence, compared with a machine."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import RouterConfig, load
from common.errors import ConfigError
from common.registry.processes import shown_settings
from planner.deployment import (
    MOST_FRONT,
    SERVICES,
    DeploymentPlan,
    MachineFingerprint,
    PlacementGroup,
    PlanError,
    PlannedCost,
    PlannedPerformance,
    PlannedPoint,
    PlannedService,
    read_plan,
    write_plan,
)

MACHINE = MachineFingerprint(cores=2, chips=0, memory_bytes=8 << 30, product="0.1.0")
PLAN = DeploymentPlan(
    machine=MACHINE,
    services=[
        PlannedService("router"),
        PlannedService("gpu_worker", threads=1, device="cpu", settings={"SPILLWAY_MAX_RUNNING": "8"}),
        PlannedService("vector_search", threads=1),
        PlannedService("kv_store"),
    ],
    schedule=[
        PlacementGroup(["embed", "prefix"], "core", 1, {"embed": 4, "prefix": 1}, "gpu_worker"),
        PlacementGroup(["retrieval"], "core", 1, {"retrieval": 4}, "vector_search"),
    ],
    predicted=PlannedPerformance(ttft_s=0.2, qps=3.0, tpot_s=0.01, binds="prefix"),
    costs=[PlannedCost("chat", 0.2, tokens=480)],
)  # fmt: skip


@given(
    replicas=st.integers(1, 256),
    threads=st.integers(0, 1024),
    ttft_s=st.floats(0, 1e6),
    qps=st.floats(0, 1e9),
    settings=st.dictionaries(st.from_regex(r"\ASPILLWAY_X[A-Z0-9_]{0,20}\Z"), st.text(max_size=20)),
)
def test_a_plan_is_read_as_it_was_written(
    replicas: int, threads: int, ttft_s: float, qps: float, settings: dict[str, str]
) -> None:
    """Reading gives what was written, digest included; another plan has another digest."""
    worker = PlannedService("gpu_worker", replicas, "encoders", threads, settings=settings)
    plan = msgspec.structs.replace(
        PLAN,
        services=[*PLAN.services, worker],
        predicted=PlannedPerformance(ttft_s=ttft_s, qps=qps),
    )
    found = read_plan(write_plan(plan), "plan.json")

    assert found == plan
    assert found.digest == plan.digest != PLAN.digest
    assert found.replicas("gpu_worker") == replicas + 1


POSITIVE = st.floats(min_value=1e-300, max_value=1e300)
POINTS = st.builds(
    PlannedPoint,
    st.floats(1e-9, 1e6),
    st.floats(1e-9, 1e12),
    st.integers(1, 1 << 20),
    st.floats(0, 1e6),
    st.from_regex(r"\A[a-z0-9_+: ]{0,200}\Z"),
)


@given(
    ttft_s=st.floats(1e-9, 1e6),
    qps=POSITIVE,
    qps_per_chip=POSITIVE,
    front=st.lists(POINTS, max_size=MOST_FRONT),
)
def test_a_router_takes_and_tells_the_front_of_any_plan(
    ttft_s: float, qps: float, qps_per_chip: float, front: list[PlannedPoint]
) -> None:
    """What a plan puts into the variable is a value that the router takes, and the mesh's report of it is whole."""
    given_ = PlannedPerformance(ttft_s=ttft_s, qps=qps, qps_per_chip=qps_per_chip)
    plan = msgspec.structs.replace(PLAN, predicted=given_, front=front)
    found = read_plan(write_plan(plan), "plan.json")
    told = found.environment(found.services[0])["SPILLWAY_PLANNED_FRONT"]
    config = load(RouterConfig, {"SPILLWAY_PLANNED_FRONT": told})

    assert shown_settings(config) == {"SPILLWAY_PLANNED_FRONT": told}
    unit, _, points = told.partition(";")
    assert unit == "core"
    own, *others = points.split(",")
    assert own.endswith(":0:embed+prefix:1 retrieval:1")
    assert others == [str(each) for each in front]


def test_a_plan_without_its_rate_a_chip_tells_no_front() -> None:
    """A plan written by hand may lack what the plot needs; then its router is told nothing."""
    assert PLAN.point() is None
    assert "SPILLWAY_PLANNED_FRONT" not in PLAN.environment(PLAN.services[0])


@pytest.mark.parametrize(
    "text", ["chip", "chip;", "cook;1:1:1:1:a", "chip;1:1:0:1:a", "chip;1:1:1:1:<b>"]
)
def test_what_is_no_front_stops_a_router(text: str) -> None:
    """The variable and its value are named, and what is expected."""
    with pytest.raises(
        ConfigError, match=r"SPILLWAY_PLANNED_FRONT is '.*': expected chip; or core;"
    ):
        load(RouterConfig, {"SPILLWAY_PLANNED_FRONT": text})


@pytest.mark.parametrize("service", SERVICES)
def test_threads_and_device_become_settings(service: Any) -> None:
    """Threads, cores and device are the variables by which the service knows them; others stay as they are."""
    each = PlannedService(service, 1, "", 2, "0-1", "cpu", {"SPILLWAY_DRAIN_S": "5"})
    expected = {
        "gpu_worker": {"SPILLWAY_THREADS": "2", "SPILLWAY_DEVICE": "cpu"},
        "cpu_worker": {"SPILLWAY_THREADS": "2", "SPILLWAY_CORES": "0-1", "SPILLWAY_DEVICE": "cpu"},
        "vector_search": {"SPILLWAY_SEARCH_THREADS": "2"},
        "router": {"SPILLWAY_TEXT_PROCESSES": "2"},
    }

    assert each.environment() == {**expected.get(service, {}), "SPILLWAY_DRAIN_S": "5"}


def test_a_machine_is_told_from_another() -> None:
    """Every part is compared; memory within a twentieth is the same."""
    other = MachineFingerprint(cores=4, chips=1, memory_bytes=16 << 30, product="0.2.0")

    assert MACHINE.differences(other) == [
        "cores 2 and 4",
        "chips 0 and 1",
        "product 0.1.0 and 0.2.0",
        f"memory_bytes {8 << 30} and {16 << 30}",
    ]
    assert MACHINE.differences(msgspec.structs.replace(MACHINE, memory_bytes=(8 << 30) - 1)) == []


def _written(**changed: Any) -> bytes:
    return json.dumps({**json.loads(write_plan(PLAN)), **changed}).encode()


SERVICE = {"service": "router"}
ALL = [{"service": name} for name in SERVICES]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "p.json: Input data was truncated; expected a deployment plan"),
        (b"[" * 100_000, "p.json: "),
        (b"[]", "p.json: Expected `object`, got `array`"),
        (b"\xff", "p.json: "),
        (_written(version=2), "p.json: version 2; expected a plan of version 1"),
        (_written(surprise=1), "contains unknown field `surprise`"),
        (_written(services=[]), "of length >= 1 - at `$.services`"),
        (_written(services=[SERVICE]), "services: gpu_worker is missing; expected at least one"),
        (_written(services=[*ALL, SERVICE]), "services: two entries are named 'router'"),
        (_written(services=[{"service": "cook"}]), "Invalid enum value 'cook' - at `$.services"),
        (_written(services=[{"service": "router", "replicas": 0}]), "at `$.services[0].replicas`"),
        (_written(services=[{"service": "router", "settings": {"PATH": ""}}]), "at `key` in `$.serv"),
        (
            _written(services=[*ALL[1:], {**SERVICE, "name": "front"}],
                     schedule=[{"stages": ["a"], "resource": "core", "allocation": 1, "batches": {},
                                "service": "router"}]),
            "schedule: 'router' is no entry of services; expected one of cpu_worker, front",
        ),
        (
            _written(schedule=[{"stages": ["a"], "resource": "core", "allocation": 1,
                                "batches": {"b": 1}}]),
            "schedule: a batch of 'b'; expected a stage of its group: a",
        ),
        (
            _written(services=[*ALL, {"service": "gpu_worker", "name": "w", "threads": 2,
                                      "settings": {"SPILLWAY_THREADS": "1"}}]),
            "w: SPILLWAY_THREADS is '1' in settings and '2' by threads, cores or device",
        ),
        (_written(predicted={"ttft_s": -1, "qps": 1}), "at `$.predicted.ttft_s`"),
        (_written(costs=[{"kind": "chat", "seconds": 0}]), "at `$.costs[0].seconds`"),
        (_written(front=[{"ttft_s": 1, "qps": 1, "chips": 0}]), "at `$.front[0].chips`"),
        (_written(front=[{"ttft_s": 1, "qps": 1, "chips": 1}] * 33), "at `$.front`"),
    ],
)  # fmt: skip
def test_what_is_no_plan_is_refused(data: bytes, sentence: str) -> None:
    """One sentence names the file, the place in it and what is expected."""
    with pytest.raises(PlanError) as caught:
        read_plan(data, "p.json")

    assert sentence in str(caught.value)
    assert str(caught.value).startswith("p.json: ")
