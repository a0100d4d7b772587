"""How the pods of the manifests are confined, what they are told in secret, and who of them may talk to whom."""

from __future__ import annotations

from typing import Any

import pytest

from common.config import load
from common.redis import durability
from tests.support.manifests import (
    CONFIGS,
    OVERLAYS,
    ROOT,
    Object,
    environment,
    matches,
    of_kind,
    one,
    overlay,
    pods,
    services,
    with_optional,
)

DEPLOYMENT = (ROOT / "docs" / "deployment.md").read_text()
BUS, CLUSTER_BUS, READS = 6379, 16379, 9465


@pytest.fixture(params=[*OVERLAYS, "optional", "podman"])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """The objects of one overlay; `optional`: of the cpu overlay with the components that none takes."""
    return with_optional() if request.param == "optional" else overlay(request.param)


def test_pods_are_confined(objects: list[Object]) -> None:
    """No pod has root, a writable root file system, a capability, or a token for the cluster's API."""
    for name, template in pods(objects):
        pod = template["spec"]
        (container,) = pod["containers"]
        allowed = pod["securityContext"]

        assert allowed["runAsNonRoot"] is True, name
        assert (allowed["runAsUser"], allowed["runAsGroup"], allowed["fsGroup"]) == (10001,) * 3
        assert allowed["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # they would look like settings


def test_memory_is_what_was_asked_for(objects: list[Object]) -> None:
    """Memory requests are the limits; a Redis' own limit leaves a third for the copy made while it writes its file."""
    for name, template in pods(objects):
        resources = template["spec"]["containers"][0]["resources"]
        asked, limit = resources["requests"], resources["limits"]
        assert asked["memory"] == limit["memory"], name
        assert "cpu" in asked
        if name in {"redis-bus", "redis-pages"}:
            most = _redis(objects, name)["maxmemory"]
            assert int(most.removesuffix("gb")) < int(limit["memory"].removesuffix("Gi"))


def test_volumes_are_declared(objects: list[Object]) -> None:
    """Every mount has its volume, and every volume what it is made of."""
    for name, template in pods(objects):
        pod = template["spec"]
        owner = next(it for it in of_kind(objects, "Deployment", "StatefulSet", "Job")
                     if it["metadata"]["name"] == name)  # fmt: skip
        claims = {it["metadata"]["name"] for it in owner["spec"].get("volumeClaimTemplates", ())}
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        for mount in pod["containers"][0]["volumeMounts"]:
            assert mount["name"] in claims | set(volumes)
        for volume in volumes.values():
            if "configMap" in volume:
                assert one(objects, "ConfigMap", volume["configMap"]["name"])["data"]
            if "persistentVolumeClaim" in volume:
                one(objects, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])


def test_secrets_are_the_operators(objects: list[Object]) -> None:
    """No Secret is in the tree; those that pods ask for are the ones that deployment.md tells how to make."""
    asked = set()
    for _, template in pods(objects):
        for variable in template["spec"]["containers"][0].get("env", ()):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                secret = variable["valueFrom"]["secretKeyRef"]
                asked.add((secret["name"], secret["key"]))

    assert not of_kind(objects, "Secret")
    assert {("redis-bus", "password"), ("redis-bus", "url")} <= asked
    for name, key in asked:
        assert f"create secret generic {name} " in DEPLOYMENT
        assert f"--from-literal={key}=" in DEPLOYMENT


def _redis(objects: list[Object], name: str) -> dict[str, str]:
    found = next(it for it in of_kind(objects, "ConfigMap")
                 if it["metadata"]["name"].startswith(f"{name}-"))  # fmt: skip
    lines = [line for line in found["data"]["redis.conf"].splitlines() if line[:1] not in ("", "#")]
    return dict(line.split(" ", 1) for line in lines)


def test_redis_keeps_the_durability_that_services_expect(objects: list[Object]) -> None:
    """The bus' file has what the level asks for; never `process`, whose supervisor is not there."""
    settings = _redis(objects, "redis-bus")
    for name, container in services(objects):
        env = environment(objects, container) | {"SPILLWAY_REDIS_URL": "redis://redis-bus"}
        config = load(CONFIGS[name], env)
        assert config.durability in {"machine", "replicated"}
        assert durability.problems(config.durability, settings) == []
        assert config.redis_cluster == (settings.get("cluster-enabled") == "yes")
        assert settings["appendfsync"] == "always"


def test_the_cluster_knows_its_nodes() -> None:
    """Three primaries with a replica each: scripts, names and numbers agree."""
    objects = overlay("scale-out")
    nodes = one(objects, "StatefulSet", "redis-bus")["spec"]
    names = [f"redis-bus-{number}.{nodes['serviceName']}" for number in range(nodes["replicas"])]
    service = one(objects, "Service", nodes["serviceName"])["spec"]
    for name in ("redis-bus", "redis-bus-form"):
        container = dict(pods(objects))[name]["spec"]["containers"][0]
        assert environment(objects, container)["PEERS"].split() == names

    assert len(names) == 6
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True


def _allowed(objects: list[Object], direction: str, labels: dict[str, str]) -> list[Any]:
    """Return the rules of one direction ("ingress") that hold for pods with these labels."""
    kind = direction.capitalize()
    return [
        rule
        for policy in of_kind(objects, "NetworkPolicy")
        if matches(policy["spec"]["podSelector"], labels) and kind in policy["spec"]["policyTypes"]
        for rule in policy["spec"].get(direction, ())
    ]


def _open(objects: list[Object], source: str, target: str, port: int) -> bool:
    """Return whether pods of one workload may reach a port of another's: both ends must allow it."""
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(objects)}

    def lets(direction: str, mine: str, peer: str, side: str) -> bool:
        for rule in _allowed(objects, direction, labels[mine]):
            peers = rule.get(side)
            known = peers is None or any(
                "namespaceSelector" not in it and matches(it["podSelector"], labels[peer])
                for it in peers
            )
            if known and port in [it["port"] for it in rule["ports"]]:
                return True
        return False

    return lets("egress", source, target, "to") and lets("ingress", target, source, "from")


def test_who_may_talk_to_whom(objects: list[Object]) -> None:
    """The services reach the bus, routers and vector_search its reads, nodes of a Redis Cluster one another."""
    names = [name for name, _ in pods(objects)]
    clustered = "redis-bus-form" in names
    for source in names:
        for target in names:
            allowed = {port for port in (BUS, CLUSTER_BUS, READS, 8080, 9464)
                       if _open(objects, source, target, port)}  # fmt: skip
            wanted = set()
            if target == "redis-bus" and (source in CONFIGS or source == "redis-bus-form"):
                wanted = {BUS}
            if source == target == "redis-bus" and clustered:
                wanted = {BUS, CLUSTER_BUS}
            if target == "redis-pages" and source in {"gpu-worker", "kv-store", "router"}:
                wanted = {BUS}
            if target == "vector-search" and source in {"router", "vector-search"}:
                wanted = {READS}
            assert allowed == wanted, f"{source} -> {target}"


def test_everything_else_is_refused(objects: list[Object]) -> None:
    """All pods are denied both ways by default; the world reaches the public port only, Prometheus the health ports."""
    everyone = [
        it["spec"] for it in of_kind(objects, "NetworkPolicy") if it["spec"]["podSelector"] == {}
    ]
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(objects)}
    public, watched = set(), set()
    for name, own in labels.items():
        for rule in _allowed(objects, "ingress", own):
            ports = {(name, port["port"]) for port in rule["ports"]}
            if "from" not in rule:
                public |= ports
            elif "namespaceSelector" in rule["from"][0]:
                watched |= ports

    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in everyone
    assert public == {("router", 8080)}
    assert watched == {(name, 9464) for name in CONFIGS}
