"""The custom resources of the scale-out overlay, KEDA's and the Prometheus Operator's, by their published fields."""

from __future__ import annotations

import re
from typing import Any

from common.config import RouterConfig, WorkerConfig, load
from tests.support.manifests import (
    ROOT,
    Object,
    environment,
    matches,
    of_kind,
    one,
    overlay,
    pods,
    services,
)
from tests.support.promql import selectors

# Fields of keda.sh/v1alpha1 ScaledObject and of its Prometheus scaler, as published with KEDA 2.17.
SPEC = {
    "scaleTargetRef",
    "minReplicaCount",
    "maxReplicaCount",
    "pollingInterval",
    "cooldownPeriod",
    "advanced",
    "triggers",
}
TRIGGER = {"type", "name", "metricType", "metadata"}
METADATA = {"serverAddress", "query", "threshold", "ignoreNullValues"}
# Fields of monitoring.coreos.com/v1 PodMonitor.
MONITOR = {"selector", "podTargetLabels", "podMetricsEndpoints"}
ENDPOINT = {"port", "path", "interval"}


def _objects() -> list[Object]:
    return overlay("scale-out")


def _scaled() -> list[Object]:
    return of_kind(_objects(), "ScaledObject")


def _worker(name: str) -> WorkerConfig:
    env = environment(_objects(), dict(services(_objects()))[name])
    return load(WorkerConfig, env | {"SPILLWAY_REDIS_URL": "redis://redis-bus"})


def test_scaled_objects_have_published_fields() -> None:
    """Each has KEDA's fields and no other; all that is metadata is text, as KEDA wants it."""
    for found in _scaled():
        spec = found["spec"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert found["apiVersion"] == "keda.sh/v1alpha1"
        assert set(spec) == SPEC
        assert set(behavior) == {"scaleUp", "scaleDown"}
        assert len({trigger["name"] for trigger in spec["triggers"]}) == len(spec["triggers"])
        for trigger in spec["triggers"]:
            assert set(trigger) == TRIGGER
            assert set(trigger["metadata"]) == METADATA
            assert all(isinstance(value, str) for value in trigger["metadata"].values())
            assert (trigger["type"], trigger["metricType"]) == ("prometheus", "Value")
            assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_workers_are_scaled_by_keda_alone() -> None:
    """Each ScaledObject has its Deployment, which names no number itself; nothing else scales anything."""
    names = [found["spec"]["scaleTargetRef"]["name"] for found in _scaled()]
    for name in names:
        assert "replicas" not in one(_objects(), "Deployment", name)["spec"]

    assert sorted(names) == ["cpu-worker", "gpu-worker"]
    assert not of_kind(_objects(), "HorizontalPodAutoscaler")


def test_one_worker_stays_and_none_leaves_early() -> None:
    """At least one of each; nobody is sent away before the longest deadline has passed."""
    router = environment(_objects(), dict(services(_objects()))["router"])
    longest_s = load(RouterConfig, router | {"SPILLWAY_REDIS_URL": "redis://x"}).max_timeout_s
    for found in _scaled():
        spec = found["spec"]
        down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        assert spec["minReplicaCount"] == 1
        assert spec["maxReplicaCount"] > 1
        assert spec["cooldownPeriod"] >= longest_s
        assert down["stabilizationWindowSeconds"] >= longest_s


def test_thresholds_follow_the_workers_settings() -> None:
    """Half of a lane's deadline, and 0.8 of its depth; every family that a worker serves is looked at."""
    for found in _scaled():
        name = found["spec"]["scaleTargetRef"]["name"]
        config = _worker(name)
        wanted = {"embed-age": config.embed_slo_s / 2, "used": 0.8}
        if name == "gpu-worker":
            wanted["chat-age"] = config.chat_slo_s / 2
        thresholds: dict[str, Any] = {}
        for trigger in found["spec"]["triggers"]:
            metadata = trigger["metadata"]
            thresholds[trigger["name"]] = float(metadata["threshold"])
            assert f':{name.removesuffix("-worker")}"' in metadata["query"]  # the lane's class

        assert thresholds == wanted


def test_queries_name_metrics_of_the_routers() -> None:
    """What is asked of Prometheus is what routers export, of this namespace."""
    declared = set(
        re.findall(r'"(spillway_[a-z_]+)"', (ROOT / "services/router/metrics.py").read_text())
    )
    for found in _scaled():
        for trigger in found["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            asked = selectors(query)
            assert {selector.metric for selector in asked} <= declared
            where = ("namespace", "=", found["metadata"]["namespace"])
            assert all(where in selector.matchers for selector in asked), query


def test_an_age_counts_while_jobs_wait() -> None:
    """A generation's age adds no worker unless jobs wait behind it; choices say nothing of that."""
    (worker,) = (f for f in _scaled() if f["metadata"]["name"] == "gpu-worker")
    (trigger,) = (t for t in worker["spec"]["triggers"] if t["name"] == "chat-age")

    assert {selector.metric for selector in selectors(trigger["metadata"]["query"])} == {
        "spillway_lane_oldest_age_seconds",
        "spillway_lane_queued",
    }


def test_prometheus_finds_every_service() -> None:
    """The PodMonitor selects all of our pods, at a port they have, under the operator's field names."""
    (monitor,) = of_kind(_objects(), "PodMonitor")
    spec = monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    templates = dict(pods(_objects()))
    chosen = [
        name
        for name in templates
        if matches(spec["selector"], templates[name]["metadata"]["labels"])
    ]

    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(spec) == MONITOR
    assert set(endpoint) == ENDPOINT
    assert sorted(chosen) == sorted(name for name, _ in services(_objects()))
    for name in chosen:
        ports = templates[name]["spec"]["containers"][0]["ports"]
        assert endpoint["port"] in [port["name"] for port in ports]
