"""A deployment plan as files for containers: what compose merges, and what kustomize makes of the overlay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from kubernetes_validate import utils as schemas

from cli import main
from common.config import RouterConfig, SearchConfig, WorkerConfig, load
from planner.deployment import (
    DeploymentPlan,
    MachineFingerprint,
    PlanError,
    PlannedCost,
    PlannedPerformance,
    PlannedPoint,
    PlannedService,
    write_plan,
)
from planner.manifests import compose_override, kustomize_overlay
from tests.integration.deploy.test_compose import COMPOSE, CONFIGS, ROOT, config
from tests.support.manifests import K8S, environment, of_kind, one, render, services

PLAN = DeploymentPlan(
    machine=MachineFingerprint(cores=8, chips=0, memory_bytes=32 << 30, product="0.1.0"),
    services=[
        PlannedService("router", 2),
        PlannedService("gpu_worker", 3, threads=2, settings={"SPILLWAY_MAX_RUNNING": "8"}),
        PlannedService("vector_search", 2, threads=1),
        PlannedService("kv_store"),
    ],
    predicted=PlannedPerformance(ttft_s=0.2, qps=9.0, qps_per_chip=1.5),
    costs=[PlannedCost("chat", 0.2, tokens=480)],
    front=[PlannedPoint(0.2, 9.0, 6, 0.02, "prefix+decode:6 retrieval:2")],
)
FRONT = "chip;0.2:9:6:0:,0.2:9:6:0.02:prefix+decode:6 retrieval:2"
ENCODER = PlannedService(
    "gpu_worker", name="encoder", threads=1, settings={"SPILLWAY_CHAT_MODEL": "none"}
)
PINNED = msgspec.structs.replace(ENCODER, cores="0-3", threads=0)


class Loader(yaml.SafeLoader):
    """Reads `!override` as the list that it is."""


def _sequence(loader: yaml.SafeLoader, node: yaml.Node) -> list[Any]:
    assert isinstance(node, yaml.SequenceNode)
    return list(loader.construct_sequence(node))


Loader.add_constructor("!override", _sequence)


def merged(plan: DeploymentPlan) -> dict[str, dict[str, Any]]:
    """Return compose.yaml's services with the override's parts over them, as compose merges them."""
    found: dict[str, dict[str, Any]] = {
        name: dict(one) for name, one in COMPOSE["services"].items()
    }
    document = yaml.load(compose_override(plan), Loader)
    for name, part in document["services"].items():
        base = COMPOSE["services"][part.get("extends", {}).get("service", name)]
        each = {**base, **{key: part[key] for key in ("ports", "volumes", "cpuset") if key in part}}
        each["environment"] = {**base["environment"], **part.get("environment", {})}
        limits = {
            **base["deploy"]["resources"]["limits"],
            **part["deploy"].get("resources", {}).get("limits", {}),
        }
        assert part["deploy"]["mode"] == "replicated"  # else podman-compose starts one replica
        each["deploy"] = {"resources": {"limits": limits}, "replicas": part["deploy"]["replicas"]}
        found[name] = each
    used = {mount.partition(":")[0] for each in found.values() for mount in each.get("volumes", [])}
    declared = {*COMPOSE["volumes"], *document.get("volumes", {})}
    assert {name for name in used if not name.startswith(".")} <= declared
    return found


def test_compose_runs_the_plan() -> None:
    """Replicas, cores and settings are the plan's; what keeps files or publishes a port is a service of its own."""
    found = merged(PLAN)
    routers = [found["router"], found["router_2"]]
    told = config(found["router_2"])

    assert found["gpu_worker"]["deploy"]["replicas"] == 3
    assert found["gpu_worker"]["deploy"]["resources"]["limits"]["cpus"] == "2"
    worker = config(found["gpu_worker"])
    assert isinstance(worker, WorkerConfig)
    assert (worker.threads, worker.max_running, worker.device) == (2, 8, "cpu")
    assert isinstance(told, RouterConfig)
    assert told.planned_costs == "chat:1:480=0.2"
    assert told.planned_front == FRONT
    assert routers[1]["ports"] == ["127.0.0.1:${ROUTER_2_PORT:-8081}:8080"]
    assert [found[name]["volumes"] for name in ("vector_search", "vector_search_2")] == [
        ["collections:/data"],
        ["vector-search-2:/data"],
    ]
    search = config(found["vector_search_2"])
    assert isinstance(search, SearchConfig)
    assert search.search_threads == 1


def test_compose_runs_several_entries_and_nothing_else() -> None:
    """An entry with a name extends its service; a service that the plan lacks has no replica."""
    alone = msgspec.structs.replace(
        PLAN, services=[*[s for s in PLAN.services if s.service != "gpu_worker"], PINNED]
    )
    found = merged(alone)

    assert found["gpu_worker"]["deploy"]["replicas"] == 0
    assert found["encoder"]["cpuset"] == "0-3"
    assert found["encoder"]["deploy"]["resources"]["limits"]["cpus"] == "4"
    encoder = config(found["encoder"])
    assert isinstance(encoder, WorkerConfig)
    assert encoder.chat_model == "none"
    assert "COMPOSE_PROFILES=cpu docker compose -f compose.yaml -f" in compose_override(alone)


def test_compose_knows_the_plans_profiles() -> None:
    """With an accelerator the worker for CUDA is meant; an overflow worker beside none has its profile."""
    cuda = PlannedService("gpu_worker", device="cuda")
    rest = [each for each in PLAN.services if each.service != "gpu_worker"]
    on_gpu = msgspec.structs.replace(PLAN, services=[*rest, cuda, PlannedService("cpu_worker")])
    overflow = msgspec.structs.replace(
        PLAN, services=[*PLAN.services, PlannedService("cpu_worker")]
    )

    assert "COMPOSE_PROFILES=gpu " in compose_override(on_gpu)
    assert "COMPOSE_PROFILES=cpu,overflow " in compose_override(overflow)
    assert merged(on_gpu)["gpu_worker_cuda"]["deploy"]["replicas"] == 1


def test_the_command_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`spillway plan write` makes a file and an overlay; kustomize makes valid objects of it, as the plan says."""
    place = tmp_path / "plan.json"
    place.write_bytes(write_plan(PLAN))
    words = ["plan", "write", str(place), "--compose", str(tmp_path / "compose.plan.yaml")]
    words += ["--kustomize", str(tmp_path / "overlay"), "--k8s", str(K8S)]
    assert main.main(words) == 0
    assert capsys.readouterr().out.count("written: ") == 2

    objects = render(tmp_path / "overlay")
    for each in objects:
        schemas.validate(each, "1.30", strict=True)
    replicas = {
        each["metadata"]["name"]: each["spec"]["replicas"]
        for each in of_kind(objects, "Deployment", "StatefulSet")
        if not each["metadata"]["name"].startswith("redis")
    }
    assert replicas == {
        "router": 2, "gpu-worker": 3, "cpu-worker": 0, "vector-search": 2, "kv-store": 1,
    }  # fmt: skip
    containers = dict(services(objects))
    worker = load(WorkerConfig, environment(objects, containers["gpu-worker"]))
    assert (worker.threads, worker.max_running) == (2, 8)
    assert containers["gpu-worker"]["resources"]["limits"]["cpu"] == 2
    assert containers["gpu-worker"]["resources"]["requests"]["cpu"] == 2
    router = load(RouterConfig, environment(objects, containers["router"]))
    assert router.planned_costs == "chat:1:480=0.2"
    assert router.planned_front == FRONT
    assert one(objects, "PodDisruptionBudget", "router")["spec"]["minAvailable"] == 1


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([ENCODER], "gpu_worker, encoder are entries of gpu_worker; a kustomize overlay has one"),
        ([PlannedService("cpu_worker", cores="0-3")], "cpu_worker: cores '0-3'; a cluster chooses"),
    ],
)
def test_what_a_cluster_cannot_run_is_refused(more: list[PlannedService], sentence: str) -> None:
    """One sentence says what, and what runs it instead."""
    with pytest.raises(PlanError) as caught:
        kustomize_overlay(msgspec.structs.replace(PLAN, services=[*PLAN.services, *more]), "../k8s")

    assert sentence in str(caught.value)


def test_the_plans_services_are_those_of_the_files() -> None:
    """Every service of a plan has a container in compose.yaml."""
    assert {f"services.{each.service}" for each in PLAN.services} <= set(CONFIGS)
    assert (ROOT / "compose.yaml").is_file()
