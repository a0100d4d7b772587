"""Deployment plans as files for containers: an override of compose.yaml, and a kustomize overlay over k8s/overlays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from planner.deployment import SERVICES, DeploymentPlan, PlanError, PlannedService
from planner.plan_check import count_cores

# Services whose replicas each keep files of their own, and the router, whose replicas each publish a port.
_OWN_FILES = {"vector_search": "collections", "kv_store": "kv-store"}
_FIRST_PORT = 8080


class _Override(list[str]):
    """A list that takes the place of the one it is merged with."""


class _Dumper(yaml.SafeDumper):
    """Writes `_Override` as compose reads it, and repeats instead of aliasing."""

    def ignore_aliases(self, _data: Any) -> bool:
        """Return that nothing is aliased."""
        return True


_Dumper.add_representer(
    _Override, lambda dumper, data: dumper.represent_sequence("!override", data, flow_style=True)
)


# -- compose --------------------------------------------------------------------------------------


def compose_override(plan: DeploymentPlan, name: str = "compose.plan.yaml") -> str:
    """Return the YAML text of a file `name` to be merged with compose.yaml; its first lines say by which command."""
    services = {
        service: body for entry in plan.services for service, body in _composed(entry, plan)
    }
    base = {_base(entry) for entry in plan.services} | {"vector_search", "kv_store", "router"}
    for unused in sorted(base - set(services)):
        services[unused] = {"deploy": _replicas(0)}
    volumes = {
        mount.partition(":")[0]: None
        for body in services.values() for mount in body.get("volumes", ())
    }  # fmt: skip
    document = {"services": services, **({"volumes": volumes} if volumes else {})}
    return _compose_command(plan, name) + yaml.dump(document, Dumper=_Dumper, sort_keys=False)


def _compose_command(plan: DeploymentPlan, name: str) -> str:
    profiles = ["gpu" if _on_gpu(plan) else "cpu"]
    if plan.replicas("cpu_worker") and "gpu" not in profiles:
        profiles.append("overflow")
    chosen = ",".join(profiles)
    return (
        f"# A deployment plan ({plan.digest}), written by `spillway plan`. It starts exactly what the plan says:\n"
        f"# COMPOSE_PROFILES={chosen} docker compose -f compose.yaml -f {name} up -d --wait\n"
    )


def _on_gpu(plan: DeploymentPlan) -> bool:
    return any(each.device == "cuda" for each in plan.services)


def _base(entry: PlannedService) -> str:
    """Return the service of compose.yaml that an entry is made of."""
    return "gpu_worker_cuda" if entry.device == "cuda" else entry.service


def _composed(entry: PlannedService, plan: DeploymentPlan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (service, its part of the file) of an entry: one with replicas, or one each where they cannot be equal."""
    base = _base(entry)
    name = base if entry.label == entry.service else entry.label
    alike = entry.service not in {*_OWN_FILES, "router"}
    for number in range(1 if alike else entry.replicas):
        label = name if not number else f"{name}_{number + 1}"
        body: dict[str, Any] = {}
        if label != base:
            body["extends"] = {"file": "compose.yaml", "service": base}
            if entry.service == "router":
                port = _FIRST_PORT + number
                variable = f"{label.upper()}_PORT"
                body["ports"] = _Override([f"127.0.0.1:${{{variable}:-{port}}}:{_FIRST_PORT}"])
            if entry.service in _OWN_FILES:
                body["volumes"] = [f"{label.replace('_', '-')}:/data"]
        body["environment"] = plan.environment(entry)
        if entry.cores:
            body["cpuset"] = entry.cores
        body["deploy"] = _replicas(entry.replicas if alike else 1)
        if cpus := _cpus(entry):
            body["deploy"]["resources"] = {"limits": {"cpus": str(cpus)}}
        yield label, {key: value for key, value in body.items() if value != {}}


def _replicas(number: int) -> dict[str, Any]:
    """Return a service's `deploy`; the mode is the default, but podman-compose starts one replica without it."""
    return {"mode": "replicated", "replicas": number}


def _cpus(entry: PlannedService) -> int:
    """Return how many cores a replica may use at once; 0 where the plan leaves that open."""
    return entry.threads or (count_cores(entry.cores) if entry.cores else 0)


# -- kustomize ------------------------------------------------------------------------------------


def kustomize_overlay(plan: DeploymentPlan, k8s: str) -> str:
    """Return the text of an overlay's kustomization.yaml; `k8s` is the way from the overlay to the folder k8s.

    PlanError where a cluster cannot run a plan as it is: entries of one service that differ, or pinned cores.
    """
    workloads = {service: _only(plan, service) for service in SERVICES}
    names = {service: service.replace("_", "-") for service in SERVICES}
    patches = []
    for service, entry in workloads.items():
        if entry is not None and (cpus := _cpus(entry)):
            patches.append(_cpu_patch(names[service], cpus))
    routers = plan.replicas("router")
    patches.append(
        {
            "target": {"kind": "PodDisruptionBudget", "name": "router"},
            "patch": _patch([("/spec/minAvailable", routers - 1)]),
        }
    )
    settings = {
        names[service]: plan.environment(entry)
        for service, entry in workloads.items() if entry is not None
    }  # fmt: skip
    document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "spillway",
        "resources": [f"{k8s}/overlays/{'gpu' if _on_gpu(plan) else 'cpu'}"],
        "replicas": [
            {"name": names[service], "count": plan.replicas(service)} for service in SERVICES
        ],
        "configMapGenerator": [
            {
                "name": name,
                "behavior": "merge",
                "literals": [f"{variable}={value}" for variable, value in variables.items()],
            }
            for name, variables in settings.items() if variables
        ],
        "patches": patches,
    }  # fmt: skip
    if not document["configMapGenerator"]:
        del document["configMapGenerator"]
    head = f"# A deployment plan ({plan.digest}), written by `spillway plan`: kubectl apply -k DIRECTORY\n"
    return head + yaml.dump(document, Dumper=_Dumper, sort_keys=False)


def _only(plan: DeploymentPlan, service: str) -> PlannedService | None:
    """Return the entry of a service, or None; PlanError if there are several, or if it is pinned."""
    entries = [each for each in plan.services if each.service == service]
    if len(entries) > 1:
        labels = ", ".join(each.label for each in entries)
        raise PlanError(
            f"services: {labels} are entries of {service}; a kustomize overlay has one Deployment a service: "
            "expected one entry of each (compose and `spillway up --plan` run several)"
        )
    if entries and entries[0].cores:
        raise PlanError(
            f"services: {entries[0].label}: cores {entries[0].cores!r}; a cluster chooses the cores: expected threads"
        )
    return entries[0] if entries else None


def _cpu_patch(name: str, cpus: int) -> dict[str, Any]:
    container = "/spec/template/spec/containers/0/resources"
    return {
        "target": {"kind": "Deployment|StatefulSet", "name": name},
        "patch": _patch([(f"{container}/limits/cpu", cpus), (f"{container}/requests/cpu", cpus)]),
    }


def _patch(values: list[tuple[str, int]]) -> str:
    operations = [{"op": "add", "path": path, "value": value} for path, value in values]
    return yaml.dump(operations, Dumper=_Dumper, sort_keys=False)
