"""`spillway up --plan`: exactly the plan's processes run and are reported; what contradicts a plan is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from cli import instance_plan, main
from cli.planned_services import fingerprint
from common.devices import detect
from common.errors import ConfigError
from planner.deployment import (
    DeploymentPlan,
    PlannedCost,
    PlannedPerformance,
    PlannedService,
    write_plan,
)
from tests.integration.cli.conftest import Spillway

CHAT = PlannedService(
    "gpu_worker", 2, "writers", 1, device="sim",
    settings={"SPILLWAY_CHAT_MODEL": "sim-chat", "SPILLWAY_EMBED_MODEL": "none", "SPILLWAY_MAX_RUNNING": "4"},
)  # fmt: skip
ENCODER = PlannedService(
    "gpu_worker", 1, "encoder", 1, device="sim", settings={"SPILLWAY_CHAT_MODEL": "none"}
)


def plan(*more: PlannedService, cores: int = 0, seconds: float = 0.0) -> DeploymentPlan:
    """Return a plan for this machine: two routers, workers and the rest; `seconds` is what embedding should take."""
    here = fingerprint()
    return DeploymentPlan(
        machine=msgspec.structs.replace(here, cores=cores or here.cores),
        services=[
            PlannedService("router", 2),
            *(more or (CHAT, ENCODER)),
            PlannedService("vector_search", threads=1, cores=str(min(detect().cores))),
            PlannedService("kv_store"),
        ],
        predicted=PlannedPerformance(ttft_s=0.1, qps=1.0),
        costs=[PlannedCost("embed", seconds)] if seconds else [],
    )  # fmt: skip


def written(place: Path, made: DeploymentPlan) -> str:
    """Write a plan's file and return its name."""
    place.write_bytes(write_plan(made))
    return str(place)


def test_the_plans_processes_run_and_are_reported(real: Spillway, tmp_path: Path) -> None:
    """Replicas, threads, cores and settings are the plan's; another plan is told from it; drifted costs are shown."""
    file = written(tmp_path / "plan.json", plan(seconds=1e3))
    real.up("--no-sample", "--plan", file)

    assert set(real.pids()) == {
        "redis-0", "redis-pages-0", "router-0", "router-1", "gpu_worker-0", "gpu_worker-1",
        "gpu_worker-2", "vector_search-0", "kv_store-0",
    }  # fmt: skip
    reports = []

    def reported() -> bool:
        done = real.run("plan", "check", file, "--json")
        reports.append(json.loads(done.stdout))
        return bool(reports[-1]["drifted"])

    real.until(
        reported
    )  # processes have announced themselves, and the router has read the workers' costs
    assert reports[-1]["differs"] == []
    assert reports[-1]["drifted"][0].startswith("embed: a batch of 1 with 0 tokens takes ")
    shown = real.run("status").stdout
    assert "plan " in shown
    assert "drifted: embed" in shown
    other = msgspec.structs.replace(CHAT, replicas=1, threads=2)
    differing = written(tmp_path / "other.json", plan(other, ENCODER, seconds=1e3))
    done = real.run("plan", "check", differing)
    assert done.returncode == 1
    assert "not as planned: writers " in done.stdout
    assert "threads 1, planned 2" in done.stdout
    assert ": not planned" in done.stdout
    assert real.run("down").returncode == 0


@pytest.mark.parametrize(
    ("env", "args", "made", "sentence"),
    [
        ({}, {}, plan(cores=64), "the plan is for another machine, cores 64 and"),
        ({"SPILLWAY_MAX_RUNNING": "8"}, {}, plan(), "SPILLWAY_MAX_RUNNING is 8, and 4 for writers in"),
        ({}, {"chat_model": "/m"}, plan(), "SPILLWAY_CHAT_MODEL is '/m', and 'sim-chat' for writers"),
        ({"SPILLWAY_OVERFLOW_WORKERS": "2"}, {}, plan(), "SPILLWAY_OVERFLOW_WORKERS is 2, and"),
        (
            {}, {}, plan(msgspec.structs.replace(CHAT, settings={"SPILLWAY_PORT": "1"})),
            "writers: SPILLWAY_PORT is no setting that a plan makes for gpu_worker",
        ),
        (
            {}, {}, plan(msgspec.structs.replace(CHAT, settings={"SPILLWAY_MAX_RUNNING": "no"})),
            "writers: SPILLWAY_MAX_RUNNING is 'no'",
        ),
        ({}, {}, plan(CHAT, PlannedService("kv_store", name="second")), "2 replicas of kv_store"),
        ({}, {}, plan(msgspec.structs.replace(CHAT, cores="8000")), "writers: cores '8000'; expected"),
        ({}, {}, plan(msgspec.structs.replace(CHAT, cores="x")), "writers: cores: 'x' is neither"),
    ],
)  # fmt: skip
def test_what_contradicts_a_plan_is_refused(
    env: dict[str, str],
    args: dict[str, str],
    made: DeploymentPlan,
    sentence: str,
    tmp_path: Path,
) -> None:
    """One sentence says which setting or which machine, and what is expected; nothing has been started."""
    given = {"data_dir": str(tmp_path / "data"), "plan": written(tmp_path / "plan.json", made)}
    with pytest.raises(ConfigError) as caught:
        instance_plan.make({**given, **args}, env)

    assert sentence in str(caught.value)


def test_another_machines_plan_can_be_insisted_on(tmp_path: Path) -> None:
    """With --other-machine the plan is made as it stands."""
    place = written(tmp_path / "plan.json", plan(cores=64))
    given = {"data_dir": str(tmp_path / "data"), "plan": place, "other_machine": True}
    found = instance_plan.with_port(instance_plan.make(given, {"SPILLWAY_PORT": "0"}))

    names = [each.name for each in found.services()]
    assert names == [
        "router-0", "router-1", "writers-0", "writers-1", "encoder", "vector_search", "kv_store",
    ]  # fmt: skip
    assert len(found.further_ports) == 1
    assert found.further_ports[0] != found.port


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("/nowhere.json", "/nowhere.json: No such file"),
        ("/dev/zero", "/dev/zero is no regular file"),
    ],
)
def test_what_is_no_file_is_refused(
    place: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and one sentence."""
    assert main.main(["up", "--plan", place]) == 2
    assert sentence in capsys.readouterr().err
