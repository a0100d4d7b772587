"""Deployment plans: written and read back, refused with a sentence, compared with a machine."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.deployment import (
    SERVICES,
    DeploymentPlan,
    MachineFingerprint,
    PlacementGroup,
    PlanError,
    PlannedCost,
    PlannedPerformance,
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
    ],
)  # fmt: skip
def test_what_is_no_plan_is_refused(data: bytes, sentence: str) -> None:
    """One sentence names the file, the place in it and what is expected."""
    with pytest.raises(PlanError) as caught:
        read_plan(data, "p.json")

    assert sentence in str(caught.value)
    assert str(caught.value).startswith("p.json: ")
