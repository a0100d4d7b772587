"""The Kubernetes manifests as tests see them: an overlay's objects, their pods, and what a pod is told."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Common, RouterConfig, SearchConfig, StoreConfig, WorkerConfig

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("cpu", "gpu", "scale-out")  # and `podman`, which no cluster gets
OPTIONAL = ("models", "host-attention")  # components that no overlay takes
CONFIGS: dict[str, type[Common]] = {
    "router": RouterConfig,
    "gpu-worker": WorkerConfig,
    "cpu-worker": WorkerConfig,
    "vector-search": SearchConfig,
    "kv-store": StoreConfig,
}
WORKLOADS = ("Deployment", "StatefulSet", "Job")
_OLDEST = (1, 27)  # its kustomize knows components, and labels by field

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Object = dict[str, Any]


@functools.cache
def _kubectl() -> str:
    found = shutil.which("kubectl")
    if found is None:
        pytest.skip("kubectl is missing; `make setup-full` installs it")
    told = subprocess.run(
        [found, "version", "--client", "-o", "json"], capture_output=True, text=True, check=True
    )
    version = json.loads(told.stdout)["clientVersion"]
    if (int(version["major"]), int(re.sub(r"\D", "", version["minor"]))) < _OLDEST:
        pytest.skip(f"kubectl is too old: {version['gitVersion']}; expected 1.27 or newer")
    return found


def render(directory: Path) -> list[Object]:
    """Return what `kubectl kustomize` makes of a directory; skips the test where there is no such program."""
    done = subprocess.run(
        [_kubectl(), "kustomize", str(directory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # warnings: what is deprecated
    return list(yaml.load_all(done.stdout, _LOADER))


@functools.cache
def overlay(name: str) -> list[Object]:
    """Return the objects of one overlay."""
    return render(K8S / "overlays" / name)


@functools.cache
def with_optional() -> list[Object]:
    """Return the objects of the cpu overlay with the components that no overlay takes."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made).resolve()
        place = os.path.relpath(K8S, directory)
        components = [f"{place}/components/{name}" for name in (*OPTIONAL, "hardened")]
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": "spillway",
            "resources": [f"{place}/overlays/cpu"],
            "components": components,
        }
        (directory / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return render(directory)


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    """Return the objects of some kinds."""
    return [found for found in objects if found["kind"] in kinds]


def one(objects: list[Object], kind: str, name: str) -> Object:
    """Return the object of a kind and name."""
    (found,) = (it for it in of_kind(objects, kind) if it["metadata"]["name"] == name)
    return found


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Return (name of the workload, its pod template)."""
    for found in of_kind(objects, *WORKLOADS):
        yield found["metadata"]["name"], found["spec"]["template"]


def services(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Return (name, container) of our own services."""
    for name, pod in pods(objects):
        if name in CONFIGS:
            (container,) = pod["spec"]["containers"]
            yield name, container


def environment(objects: list[Object], container: Object) -> dict[str, str]:
    """Return the variables a container of a workload's first pod gets; those of Secrets as `<from …>`."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= one(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in container.get("env", ()):
        place = next(iter(variable.get("valueFrom", {"": None})))
        found[variable["name"]] = variable.get("value", f"<from {place}>")
        if variable.get("valueFrom") == {"fieldRef": {"fieldPath": "metadata.name"}}:
            found[variable["name"]] = f"{container['name']}-0"
    return found


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects what has these labels."""
    for label, value in selector.get("matchLabels", {}).items():
        if labels.get(label) != value:
            return False
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True
