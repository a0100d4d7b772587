"""`spillway plan check` and `spillway plan write`: compare a mesh with its plan, and write container files."""

from __future__ import annotations

import argparse
import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from cli.http import Endpoint, endpoint, exit_status
from cli.planned_services import CONFIGS, read_plan_file
from common.config import PREFIX
from common.errors import ConfigError
from planner.deployment import DeploymentPlan, PlanError, PlannedService
from planner.manifests import compose_override, kustomize_overlay
from planner.plan_check import ReportedProcess, differences

CHECK_HELP = "compare a running mesh with its plan: services, settings and costs"
WRITE_HELP = "write a plan as an override of compose.yaml, or as a kustomize overlay"
_ASK_S = 10.0


class PlanReport(msgspec.Struct, frozen=True):
    """A comparison of a mesh with its plan: `differs` and `drifted` are sentences, empty if all is as planned."""

    differs: list[str]
    drifted: list[str]


def add(verbs: Any) -> None:
    """Add both verbs to `spillway plan`."""
    check = verbs.add_parser("check", help=CHECK_HELP, description=CHECK_HELP)
    check.add_argument("file", metavar="PLAN", help="the plan's file")
    check.add_argument("--url", help="the router (default: the instance of the data directory)")
    check.add_argument("--data-dir", help="where to look for a running instance")
    check.add_argument("--json", action="store_true", help="for programs")
    write = verbs.add_parser("write", help=WRITE_HELP, description=WRITE_HELP)
    write.add_argument("file", metavar="PLAN", help="the plan's file")
    about = "the file to write, to lie beside compose.yaml"
    write.add_argument("--compose", metavar="FILE", type=Path, help=about)
    about = "the directory of the overlay to write"
    write.add_argument("--kustomize", metavar="DIR", type=Path, help=about)
    about = "the folder k8s of a checkout (default: k8s)"
    write.add_argument("--k8s", metavar="DIR", type=Path, default=Path("k8s"), help=about)


def run_check(args: argparse.Namespace) -> int:
    """Print the differences of the mesh from the plan: 0 = none, 1 = it differs or its costs have drifted."""
    plan = read_plan_file(args.file)

    def ask() -> int:
        report = compare(plan, fetch_mesh(endpoint(args, os.environ)))
        if args.json:
            print(json.dumps(msgspec.to_builtins(report), indent=2))
        else:
            for line in lines(report):
                print(line)
        return 1 if report.differs or report.drifted else 0

    return exit_status(ask)


def run_write(args: argparse.Namespace) -> int:
    """Write the requested files; ConfigError if the plan cannot be run that way, or a file cannot be written."""
    if args.compose is None and args.kustomize is None:
        raise ConfigError(
            "neither --compose nor --kustomize is given; expected one of them, or both"
        )
    plan = read_plan_file(args.file)
    try:
        if args.compose is not None:
            args.compose.write_text(compose_override(plan, args.compose.name), encoding="utf-8")
            print(f"written: {args.compose}")
        if args.kustomize is not None:
            k8s = os.path.relpath(args.k8s.resolve(), args.kustomize.resolve())
            text = kustomize_overlay(plan, k8s)
            args.kustomize.mkdir(parents=True, exist_ok=True)
            place = args.kustomize / "kustomization.yaml"
            place.write_text(text, encoding="utf-8")
            print(f"written: {place}")
    except PlanError as error:
        raise ConfigError(f"{args.file}: {error}") from None
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; expected a place to write to"
        ) from None
    return 0


def fetch_mesh(where: Endpoint) -> dict[str, Any]:
    """Return a router's answer to GET /v1/mesh; ConfigError if it does not answer."""
    headers = {"Authorization": f"Bearer {where.api_key}"} if where.api_key else {}
    request = urllib.request.Request(f"{where.url.rstrip('/')}/v1/mesh", headers=headers)  # noqa: S310 - the user's own address
    try:
        with urllib.request.urlopen(request, timeout=_ASK_S) as answer:  # noqa: S310
            found: dict[str, Any] = json.loads(answer.read())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where.url}: {error}; expected a router that answers GET /v1/mesh"
        ) from None
    return found


def compare(plan: DeploymentPlan, mesh: dict[str, Any]) -> PlanReport:
    """Return a comparison of a mesh with its plan; `mesh` is the answer of GET /v1/mesh."""
    processes = [_reported(each) for each in mesh.get("processes", [])]
    drifted = [
        f"{each['kind']}: a batch of {each['items']} with {each['tokens']} tokens takes {1e3 * each['live_s']:.4g} ms, "
        f"planned {1e3 * each['seconds']:.4g} ms"
        for each in mesh.get("planned_costs", [])
        if each["drifted"]
    ]
    return PlanReport(differences(plan, processes, _default), drifted)


def _reported(process: dict[str, Any]) -> ReportedProcess:
    settings = dict(text.partition("=")[::2] for text in process["settings"])
    return msgspec.convert({**process, "settings": settings}, ReportedProcess)


def lines(report: PlanReport) -> list[str]:
    """Return a report for people."""
    found = [f"not as planned: {each}" for each in report.differs]
    found += [f"drifted: {each}" for each in report.drifted]
    if report.drifted:
        found.append(
            "`spillway profile` and `spillway plan deployment` make a plan for these costs"
        )
    return found or ["as planned"]


def _default(entry: PlannedService, variable: str) -> str:
    config = CONFIGS[entry.service]()
    value = getattr(config, variable.removeprefix(PREFIX).lower(), "")
    return str(value).lower() if isinstance(value, bool) else str(value)
