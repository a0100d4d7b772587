"""What the Kubernetes manifests promise: valid objects, settings the services accept, and nothing that dangles."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from kubernetes_validate import utils as schemas

from common.config import WorkerConfig, load
from common.health import Health
from common.lifecycle import _CLOSE_S
from tests.support.manifests import (
    CONFIGS,
    K8S,
    OPTIONAL,
    OVERLAYS,
    ROOT,
    Object,
    environment,
    matches,
    of_kind,
    one,
    overlay,
    pods,
    render,
    services,
    with_optional,
)

CUSTOM = {"ScaledObject", "PodMonitor"}  # checked in test_kubernetes_scaling.py
# compose.yaml builds ours under these names.
IMAGES = {"spillway-mesh:0.1.0", "spillway-worker:0.1.0", "spillway-worker:0.1.0-cuda"}
WITHOUT_TORCH = {"router", "kv-store", "vector-search"}
OLDEST = "1.30"  # the first with preStop.sleep; docs/deployment.md names it
COMPOSE = (ROOT / "compose.yaml").read_text()
URL = "redis://:password@redis-bus:6379"


def _objects(name: str) -> list[Object]:
    return with_optional() if name == "optional" else overlay(name)


@pytest.fixture(params=[*OVERLAYS, "optional"])
def cluster(request: pytest.FixtureRequest) -> list[Object]:
    """What a cluster gets of an overlay; `optional`: of the cpu overlay with the components that none takes."""
    return _objects(request.param)


@pytest.fixture(params=[*OVERLAYS, "optional", "podman"])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """The same, and what podman plays."""
    return _objects(request.param)


def _config(objects: list[Object], name: str) -> Any:
    env = environment(objects, dict(services(objects))[name]) | {"SPILLWAY_REDIS_URL": URL}
    return load(CONFIGS[name], env)


@pytest.mark.parametrize("version", [OLDEST, schemas.latest_version()])
def test_objects_are_valid(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every object of every overlay is what Kubernetes takes, without an unknown field."""
    # Else megabytes of schema are read again for every object.
    monkeypatch.setattr(schemas, "schema_contents", functools.cache(schemas.schema_contents))
    everything = {
        json.dumps(found): found
        for name in (*OVERLAYS, "optional", "podman")
        for found in _objects(name)
        if found["kind"] not in CUSTOM
    }
    for found in everything.values():
        schemas.validate(found, version, strict=True)


def test_every_component_is_checked() -> None:
    """No component lies there that no overlay takes and no test renders."""
    taken = "".join(path.read_text() for path in K8S.glob("overlays/*/kustomization.yaml"))
    for component in (K8S / "components").iterdir():
        assert f"components/{component.name}\n" in taken or component.name in OPTIONAL


def test_settings_are_the_services_own(objects: list[Object]) -> None:
    """Each variable of a pod is one that its own service reads, with a value that it accepts."""
    for name, container in services(objects):
        env = environment(objects, container)
        for variable in env:
            field = variable.removeprefix("SPILLWAY_").lower()
            assert field in CONFIGS[name].__struct_fields__, f"{name}: {variable}"
        assert env["SPILLWAY_REDIS_URL"] == "<from secretKeyRef>"  # it holds a password
        _config(objects, name)

    assert {name for name, _ in services(objects)} == set(CONFIGS)


def test_a_helper_meets_its_gpu_worker() -> None:
    """The helper for attention on the host is beside the gpu_worker, of the same image, and told the same socket."""
    objects = with_optional()
    spec = dict(pods(objects))["gpu-worker"]["spec"]
    (helper,), (worker,) = spec["initContainers"], spec["containers"]
    told = load(WorkerConfig, environment(objects, helper))
    places = [
        {it["mountPath"]: it["name"] for it in each["volumeMounts"]} for each in (helper, worker)
    ]

    assert told.role == "host"
    assert told.host_socket == _config(objects, "gpu-worker").host_socket != ""
    assert told.health_port != _config(objects, "gpu-worker").health_port
    assert _config(objects, "gpu-worker").host_attention == "auto"
    assert places[0]["/host"] == places[1]["/host"]
    assert told.host_socket.startswith("/host/")
    assert helper["image"] == worker["image"]
    assert helper["securityContext"] == worker["securityContext"]
    assert helper["livenessProbe"]["httpGet"]["port"] == told.health_port


def test_settings_agree(objects: list[Object]) -> None:
    """A write waits for no more replicas than there are, and data lie on a volume."""
    for name, container in services(objects):
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {_config(objects, name).data_dir, "/tmp"} <= mounts

    assert 1 <= _config(objects, "router").search_ack <= dict(_replicas(objects))["vector-search"]


def test_pages_have_room(cluster: list[Object]) -> None:
    """Who keeps KV pages knows their server, which holds a tenth more than they may take; the disk fits its volume."""
    (settings,) = (
        it["data"]["redis.conf"]
        for it in of_kind(cluster, "ConfigMap")
        if it["metadata"]["name"].startswith("redis-pages-")
    )
    most = int(re.findall(r"^maxmemory (\d+)gb$", settings, re.MULTILINE)[0]) << 30
    for name in ("gpu-worker", "kv-store", "router"):
        container = dict(services(cluster))[name]
        assert environment(cluster, container)["SPILLWAY_PAGES_URL"] == "<from secretKeyRef>"
        assert 1.1 * _config(cluster, name).pages_bytes <= most
    volumes = {it["name"]: it for it in dict(pods(cluster))["kv-store"]["spec"]["volumes"]}
    room = int(volumes["data"]["emptyDir"]["sizeLimit"].removesuffix("Gi")) << 30
    assert _config(cluster, "kv-store").disk_bytes < room


def _replicas(objects: list[Object]) -> list[tuple[str, int]]:
    kinds = of_kind(objects, "Deployment", "StatefulSet")
    return [(it["metadata"]["name"], it["spec"].get("replicas", 1)) for it in kinds]


def test_commands_and_images_exist(objects: list[Object]) -> None:
    """Each command starts a module of ours, in the image that can run it."""
    for name, container in services(objects):
        module = f"services.{name.replace('-', '_')}"
        image = "spillway-mesh" if name in WITHOUT_TORCH else "spillway-worker"
        assert container["command"] == ["python", "-m", module]
        assert importlib.util.find_spec(f"{module}.__main__") is not None
        assert container["image"].startswith(f"{image}:")
    for _, pod in pods(objects):
        assert {it["image"] for it in pod["spec"]["containers"]} <= IMAGES | {"redis:7-bookworm"}
    for image in IMAGES:
        assert f" {image}\n" in COMPOSE


def test_ports_are_the_configs(cluster: list[Object]) -> None:
    """Containers declare the ports that their settings make the services listen on, where others can reach them."""
    for name, container in services(cluster):
        config = _config(cluster, name)
        wanted = {"health": config.health_port}
        if name == "router":
            wanted["http"] = config.port
            assert (config.host, config.keys) == ("0.0.0.0", "on")
        if name == "vector-search":
            wanted["reads"] = config.reads_port
            assert config.reads_host == "0.0.0.0"

        assert {port["name"]: port["containerPort"] for port in container["ports"]} == wanted
        assert config.health_host == "0.0.0.0"


def test_probes_ask_what_is_served(cluster: list[Object]) -> None:
    """Every service has all three probes, at paths that its health port serves."""
    for name, container in services(cluster):
        probes = {
            "startupProbe": "/livez" if name == "router" else "/startupz",
            "livenessProbe": "/livez",
            "readinessProbe": "/readyz",
        }
        for kind, path in probes.items():
            assert container[kind]["httpGet"] == {"path": path, "port": "health"}
            assert hasattr(Health, path.removeprefix("/"))


def test_grace_is_longer_than_the_drain(objects: list[Object]) -> None:
    """preStop, drain and closing end before Kubernetes ends the process."""
    templates = dict(pods(objects))
    for name, container in services(objects):
        pre_stop_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        longest_s = pre_stop_s + _config(objects, name).drain_s + 2 * _CLOSE_S
        assert templates[name]["spec"]["terminationGracePeriodSeconds"] > longest_s
        if name == "router":
            assert pre_stop_s >= 5  # proxies hear late that it goes


def test_selectors_select(cluster: list[Object]) -> None:
    """Every selector finds pods; a workload's, a Service's and a budget's those of one workload only."""
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(cluster)}

    def chosen(selector: Any) -> list[str]:
        return [name for name in labels if matches(selector, labels[name])]

    for found in of_kind(cluster, "Deployment", "StatefulSet"):
        spec, name = found["spec"], found["metadata"]["name"]
        assert chosen(spec["selector"]) == [name]
        for spread in spec["template"]["spec"].get("topologySpreadConstraints", ()):
            assert chosen(spread["labelSelector"]) == [name]
    for found in of_kind(cluster, "NetworkPolicy"):
        assert chosen(found["spec"]["podSelector"])
    for found in of_kind(cluster, "Service"):
        (name,) = chosen({"matchLabels": found["spec"]["selector"]})
        (container,) = dict(pods(cluster))[name]["spec"]["containers"]
        numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
        for port in found["spec"]["ports"]:
            assert numbers[port["targetPort"]] == port["port"]


def test_pods_can_be_evicted_one_at_a_time(cluster: list[Object]) -> None:
    """Each kind of pod has one budget, which lets a drained node go on."""
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(cluster)}
    replicas, kept = dict(_replicas(cluster)), []
    for found in of_kind(cluster, "PodDisruptionBudget"):
        (name,) = (it for it in labels if matches(found["spec"]["selector"], labels[it]))
        most = found["spec"].get(
            "maxUnavailable", replicas[name] - found["spec"].get("minAvailable", 0)
        )
        assert most == 1
        kept.append(name)

    assert sorted(kept) == sorted(set(replicas) - {"redis-pages"})  # which loses time only


def test_stateful_sets_are_named_as_their_services(cluster: list[Object]) -> None:
    """What never can be changed holds nothing that changes with a release, and names a Service."""
    names = {found["metadata"]["name"] for found in of_kind(cluster, "Service")}
    for found in of_kind(cluster, "StatefulSet"):
        assert found["spec"]["serviceName"] in names
        for claim in found["spec"]["volumeClaimTemplates"]:
            assert "labels" not in claim["metadata"]


def test_a_replica_keeps_its_name_and_its_volume(objects: list[Object]) -> None:
    """A vector_search pod is known by its own name, which it has again with its volume; none waits for another."""
    found = one(objects, "StatefulSet", "vector-search")["spec"]
    (container,) = found["template"]["spec"]["containers"]
    named = {each["name"]: each.get("valueFrom") for each in container["env"]}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}

    assert named["SPILLWAY_REPLICA"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert _config(objects, "vector-search").replica == "vector-search-0"
    assert [mounts[it["metadata"]["name"]] for it in found["volumeClaimTemplates"]] == ["/data"]
    assert found["podManagementPolicy"] == "Parallel"


def test_podman_plays_the_pods_that_a_cluster_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pod that is played is valid, has a name and volumes of its own, and else what a cluster gives it."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    played = list(importlib.import_module("play_pods").pods(overlay("podman"), tmp_path))
    names = [each["metadata"]["name"] for each in played]
    places = [it["hostPath"]["path"] for each in played for it in each["spec"]["volumes"]
              if "hostPath" in it]  # fmt: skip

    assert {"router-0", "redis-bus-0", *(f"vector-search-{n}" for n in range(3))} <= set(names)
    assert len(names) == len(set(names)) == sum(count for _, count in _replicas(overlay("podman")))
    assert len(places) == len(set(places)) > len(names)
    for each in played:
        schemas.validate(each, OLDEST, strict=True)
        (container,) = each["spec"]["containers"]
        template = dict(pods(overlay("podman")))[each["metadata"]["name"].rpartition("-")[0]]
        (given,) = template["spec"]["containers"]
        left_out = {"ports", "startupProbe", "livenessProbe", "readinessProbe"}
        assert container == {
            field: value for field, value in given.items() if field not in left_out
        }


def test_the_documented_overlay_works(tmp_path: Path) -> None:
    """An overlay as deployment.md shows it changes the images and the settings, with all that belongs to them."""
    text = (ROOT / "docs" / "deployment.md").read_text()
    (example,) = re.findall(r"```yaml\n(namespace: spillway\n.*?)```", text, re.DOTALL)
    tree = os.path.relpath(K8S, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(example.replace("../spillway/k8s", tree))
    objects = render(tmp_path)
    container = dict(services(objects))["gpu-worker"]

    assert container["image"] == "registry.example/spillway-worker:0.1.0-cuda"
    assert _config(objects, "gpu-worker").chat_model.startswith("/models/")
    assert _config(objects, "gpu-worker").device == "cuda"
    assert "/models" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_oldest_version_is_the_documented_one() -> None:
    """What is validated is what deployment.md promises."""
    assert f"for Kubernetes {OLDEST} or newer" in (ROOT / "docs" / "deployment.md").read_text()
