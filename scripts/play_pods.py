"""Makes pods of an overlay's workloads, as a cluster's controllers would, in the form that podman plays.

    kubectl kustomize k8s/overlays/podman | python scripts/play_pods.py DIRECTORY

writes DIRECTORY/pods/NAME-NUMBER.yaml for every pod, and prints the pods' names. Podman knows neither StatefulSets nor
Services, starts no probes, publishes every port that is declared, sets no group on volumes, and gives all emptyDirs of
one name the same volume. So every pod is numbered as those of a StatefulSet are, probes and ports are left out, and a
volume is the directory DIRECTORY/NAME-NUMBER/VOLUME. All else (images, commands, users, capabilities, read-only roots,
settings) is as a cluster gets it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def pods(objects: list[Object], directory: Path) -> Iterator[Object]:
    """Yield the pods of every Deployment and StatefulSet."""
    for workload in objects:
        if workload["kind"] in {"Deployment", "StatefulSet"}:
            for number in range(workload["spec"]["replicas"]):
                name = f"{workload['metadata']['name']}-{number}"
                yield _pod(workload["spec"], name, directory / name)


def _pod(workload: Object, name: str, directory: Path) -> Object:
    template = workload["template"]
    claims = [claim["metadata"]["name"] for claim in workload.get("volumeClaimTemplates", ())]
    kept = [each for each in template["spec"].get("volumes", ()) if "emptyDir" not in each]
    empty = [each["name"] for each in template["spec"].get("volumes", ()) if "emptyDir" in each]
    made = [{"name": each, "hostPath": {"path": str(directory / each)}} for each in claims + empty]
    containers = [
        {field: value for field, value in each.items() if field not in (*_PROBES, "ports")}
        for each in template["spec"]["containers"]
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": template["metadata"]["labels"]},
        "spec": template["spec"] | {"containers": containers, "volumes": kept + made},
    }


def make_volumes(pod: Object) -> None:
    """Make the directories of a pod's volumes, for its user."""
    allowed = pod["spec"]["securityContext"]
    for volume in pod["spec"]["volumes"]:
        if "hostPath" in volume:
            path = Path(volume["hostPath"]["path"])
            path.mkdir(parents=True, mode=0o700)
            os.chown(path, allowed["runAsUser"], allowed["fsGroup"])


def main() -> None:
    """Write the pods of what is on standard input, each with all ConfigMaps."""
    directory = Path(sys.argv[1])
    objects = list(yaml.safe_load_all(sys.stdin))
    settings = [each for each in objects if each["kind"] == "ConfigMap"]
    (directory / "pods").mkdir()
    for pod in pods(objects, directory):
        make_volumes(pod)
        name = pod["metadata"]["name"]
        (directory / "pods" / f"{name}.yaml").write_text(yaml.safe_dump_all([*settings, pod]))
        print(name)


if __name__ == "__main__":
    main()
