"""A plan beside the processes that a mesh reports: equal, or by what it differs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.deployment import (
    DeploymentPlan,
    MachineFingerprint,
    PlannedCost,
    PlannedPerformance,
    PlannedService,
)
from planner.plan_check import ReportedProcess, differences

MACHINE = MachineFingerprint(cores=2, chips=0, memory_bytes=8 << 30, product="0.1.0")
STORE = {"SPILLWAY_CHAT_MODEL": "/models/one"}
PLAN = DeploymentPlan(
    machine=MACHINE,
    services=[
        PlannedService("router"),
        PlannedService("gpu_worker", 2, threads=1, settings=STORE),
        PlannedService("gpu_worker", name="encoder", settings={"SPILLWAY_CHAT_MODEL": "none"}),
        PlannedService("vector_search", cores="0-1"),
        PlannedService("kv_store"),
    ],
    predicted=PlannedPerformance(ttft_s=0.1, qps=1.0),
)
RUNNING = [
    ReportedProcess("router", threads=1, cores=2),
    ReportedProcess("gpu_worker", "0", 1, 2, {"SPILLWAY_CHAT_MODEL": "one"}),
    ReportedProcess("gpu_worker", "1", 1, 2, {"SPILLWAY_CHAT_MODEL": "one"}),
    ReportedProcess("gpu_worker", "2", 2, 2, {"SPILLWAY_CHAT_MODEL": "none"}),
    ReportedProcess("vector_search", threads=2, cores=2),
    ReportedProcess("kv_store", threads=1, cores=2),
    ReportedProcess("prometheus"),  # no service of a plan
]


def compared(running: list[ReportedProcess], plan: DeploymentPlan = PLAN) -> list[str]:
    """Return the differences, with "" for every setting that is not reported."""
    return differences(plan, running, lambda _entry, _variable: "")


@given(st.permutations(RUNNING))
def test_a_mesh_that_runs_its_plan(running: list[ReportedProcess]) -> None:
    """The order of the processes says nothing, nor does the folder of a model."""
    assert compared(running) == []


@pytest.mark.parametrize(
    ("index", "changed", "expected"),
    [
        (1, {"threads": 2}, ["gpu_worker 0: threads 2, planned 1"]),
        (4, {"cores": 4}, ["vector_search 0: cores 4, planned 2"]),
        (3, {"settings": {}}, ["encoder 2: SPILLWAY_CHAT_MODEL '', planned 'none'"]),
        (0, {"service": "cpu_worker"}, ["router: a replica is missing", "cpu_worker 0: not planned"]),
    ],
)  # fmt: skip
def test_what_differs_is_named(index: int, changed: dict[str, object], expected: list[str]) -> None:
    """The entry, the instance, and the value beside the planned one."""
    running = [*RUNNING]
    running[index] = msgspec.structs.replace(running[index], **changed)

    assert compared(running) == expected


@given(st.sets(st.integers(0, len(RUNNING) - 2)))
def test_every_missing_process_is_counted(dropped: set[int]) -> None:
    """One sentence for each replica that does not run."""
    running = [each for index, each in enumerate(RUNNING) if index not in dropped]

    assert len(compared(running)) == len(dropped)


def test_a_router_that_knows_other_costs_is_not_as_planned() -> None:
    """The costs that the router watches are a part of the plan."""
    plan = msgspec.structs.replace(PLAN, costs=[PlannedCost("chat", 0.25, tokens=480)])
    told = msgspec.structs.replace(
        RUNNING[0], settings={"SPILLWAY_PLANNED_COSTS": "chat:1:480=0.25"}
    )

    assert compared(RUNNING, plan) == [
        "router 0: SPILLWAY_PLANNED_COSTS '', planned 'chat:1:480=0.25'"
    ]
    assert compared([told, *RUNNING[1:]], plan) == []
