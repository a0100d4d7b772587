"""`spillway status` and `spillway down`: show and stop the processes of a data directory."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from typing import Any

import msgspec

from cli.deployment_check import compare, fetch_mesh, lines
from cli.http import Endpoint
from cli.instance import Instance, wait_exit
from cli.planned_services import shown_plan
from common.config import SupervisorConfig, load
from common.errors import ConfigError
from planner.deployment import DeploymentPlan

STATUS_HELP = "show an instance's processes and whether they are ready"
DOWN_HELP = "stop an instance in order"
_ASK_S = 3.0
# Exit statuses of `status`, as service managers use them.
READY, NOT_READY, NOT_RUNNING = 0, 1, 3


def add_status(subparsers: Any) -> None:
    """Add `status`."""
    parser = subparsers.add_parser("status", help=STATUS_HELP, description=STATUS_HELP)
    _add_place(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def add_down(subparsers: Any) -> None:
    """Add `down`."""
    parser = subparsers.add_parser("down", help=DOWN_HELP, description=DOWN_HELP)
    _add_place(parser)
    parser.add_argument("--now", action="store_true", help="do not drain")


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", help="which instance (default .spillway)")
    parser.add_argument("--config", metavar="FILE", help="a TOML file with SPILLWAY_* names")


def _load(args: argparse.Namespace) -> tuple[Instance, SupervisorConfig]:
    config = load(SupervisorConfig, os.environ, file=args.config, args={"data_dir": args.data_dir})
    return Instance.at(config.data_dir), config


def _ask(port: int) -> tuple[str, str]:
    """Return a service's answer to /readyz, as a word and the reasons."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=_ASK_S) as answer:
            answer.read()
            return "ready", ""
    except urllib.error.HTTPError as error:
        try:
            reasons = json.loads(error.read()).get("reasons", {})
        except (ValueError, AttributeError):
            reasons = {}
        return "not ready", "; ".join(f"{name}: {why}" for name, why in reasons.items())
    except OSError as error:
        return "no answer", str(error)


def _alive(pid: int) -> bool:
    return not wait_exit(pid, 0.0)


def collect(instance: Instance) -> dict[str, Any]:
    """Return the status of an instance: its state, its address and its processes."""
    pid = instance.holder()
    note = instance.read_note("supervisor")
    if pid is None:
        return {"running": False, "data_dir": str(instance.data_dir), "services": []}
    known = note.get("processes", {})
    services = []
    for name, told in instance.notes().items():
        if name == "supervisor" or not isinstance(told.get("pid"), int):
            continue
        service = str(told.get("service", name))
        alive = _alive(told["pid"])
        state, why = ("ended", "") if not alive else ("running", "")
        if alive and told.get("health_port"):
            state, why = _ask(int(told["health_port"]))
        elif alive and service in known:  # embedded servers have no health port
            state = known[service].get("state", "running")
        same = [of for of in known.values() if of.get("pid") == told["pid"]]
        services.append(
            {
                "name": name,
                "pid": told["pid"],
                "state": state,
                "why": why,
                "restarts": same[0].get("restarts", 0) if same else 0,
            }
        )
    return {
        "running": True,
        "data_dir": str(instance.data_dir),
        "pid": pid,
        "url": note.get("url", ""),
        "state": note.get("state", "starting"),
        "sample": note.get("sample", ""),
        "chat_model": note.get("chat_model", ""),
        "services": services,
        "plan": _plan(note),
        "given_up": [name for name, of in known.items() if of.get("state") == "failed"],
    }


def _plan(note: dict[str, Any]) -> dict[str, Any] | None:
    """Return the comparison of the instance with the plan of its start; None if it was started without a plan."""
    if not note.get("plan"):
        return None
    plan = msgspec.convert(note["plan"], DeploymentPlan)
    where = Endpoint(str(note.get("url", "")), os.environ.get("SPILLWAY_API_KEY") or None)
    try:
        report = compare(plan, fetch_mesh(where))
    except ConfigError as error:
        return {"plan": shown_plan(plan), "lines": [str(error)]}
    return {"plan": shown_plan(plan), "lines": lines(report)}


def run_status(args: argparse.Namespace) -> int:
    """Print the running processes; 0 = ready, 1 = not ready, 3 = not running."""
    found = collect(_load(args)[0])
    services = found["services"]
    all_ready = bool(services) and all(service["state"] == "ready" for service in services)
    if args.json:
        print(json.dumps({**found, "ready": all_ready}, indent=2))
    elif not found["running"]:
        print(f"no instance runs in {found['data_dir']}")
    else:
        print(f"{found['url']}  {found['state']}  process {found['pid']}  {found['data_dir']}")
        for service in services:
            line = f"  {service['name']:<18} {service['pid']:>8}  {service['state']:<10}"
            if service["restarts"]:
                line += f"  restarted {service['restarts']} times"
            print(f"{line}  {service['why']}".rstrip())
        for name in found["given_up"]:
            print(f"  {name:<18} given up; see {found['data_dir']}/logs/{name}.log")
        if found["plan"]:
            print(f"  {found['plan']['plan']}")
            for line in found["plan"]["lines"]:
                print(f"    {line}")
        if found["chat_model"]:
            print(f"  chat model         {found['chat_model']}")
        if found["sample"] == "loading":
            print("  the sample collections are being loaded")
    if not found["running"]:
        return NOT_RUNNING
    return READY if all_ready and not found["given_up"] else NOT_READY


def run_down(args: argparse.Namespace) -> int:
    """Stop the instance and wait for its end; 0 even if no instance runs."""
    instance, config = _load(args)
    pid = instance.holder()
    if pid is None:
        left = instance.end_leftovers()
        print(
            f"spillway: ended {left} processes that a crashed instance had left"
            if left
            else f"spillway: no instance runs in {instance.data_dir}"
        )
        return 0
    patience_s = 3 * (config.drain_s + 15.0) + 30.0
    try:
        os.kill(pid, signal.SIGTERM)
        if args.now and not wait_exit(pid, 0.2):
            os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return 0
    if not wait_exit(pid, patience_s):
        sys.stderr.write(f"spillway: process {pid} has not ended within {patience_s:g} s\n")
        return 1
    print("spillway: stopped")
    return 0
