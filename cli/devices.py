"""`spillway devices`: show this machine's devices, and the lanes that `spillway up` makes of them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from common.config import SupervisorConfig, WorkerConfig, load
from common.devices import Machine, detect, lanes, show_cores, torch_version, unused, within_reach
from common.placement import DEMONSTRATION, overflow_workers, place

HELP = "show accelerators, cores and limits of this machine, and the lanes they make"
_GIB = 1 << 30


def add(subparsers: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser("devices", help=HELP, description=HELP)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--config", metavar="FILE", help="a TOML file with SPILLWAY_* names")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was found; ConfigError if the settings that decide the lanes cannot be used."""
    found = survey(detect(), os.environ, args.config, torch_version())
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, line in _lines(found):
        print(f"{name:<14}{line}")
    return 0


def survey(
    machine: Machine, env: Mapping[str, str], file: str | None, torch: str
) -> dict[str, Any]:
    """Return the machine, and what `up` with this environment and file would start on it."""
    worker = load(WorkerConfig, env, file=file)
    asked = load(SupervisorConfig, env, file=file).overflow_workers
    used = within_reach(machine, device=worker.device, env=env, torch=torch)
    cores, threads = place(used, threads=worker.threads, cores=worker.cores)
    found: dict[str, Any] = msgspec.to_builtins(machine)
    for shown, each in zip(found["accelerators"], machine.accelerators, strict=True):
        shown["unused"] = unused(each, device=worker.device, env=env, torch=torch)
    return {
        **found,
        "usable_cores": machine.usable_cores,
        "lanes": lanes(used, overflow=asked != 0),
        "overflow": {
            "workers": overflow_workers(used, asked),
            "cores": show_cores(cores),
            "threads": threads,
        },
    }


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of the lines for people; a further accelerator's has no name."""
    accelerators = [_accelerator(each) for each in found["accelerators"]] or ["none"]
    nodes = [f"{node['index']}: {show_cores(node['cores'])}" for node in found["nodes"]]
    count, physical = len(found["cores"]), len(found["physical"])
    online = max(count, sum(len(node["cores"]) for node in found["nodes"]))
    return [
        *zip(["accelerators", *[""] * len(accelerators)], accelerators, strict=False),
        ("cores", f"{show_cores(found['cores'])}: {count} of {online}, {physical} physical"),
        ("threads", f"{found['usable_cores']} at once"),
        ("NUMA nodes", ", ".join(nodes)),
        ("cgroup limits", _limits(found)),
        ("abilities", " ".join(found["abilities"]) or "none of those that matter"),
        ("memory", f"{found['memory_bytes'] / _GIB:.1f} GiB"),
        ("lanes", f"{', '.join(found['lanes'])}: {_why(found)}"),
        ("overflow", _overflow(found)),
    ]


def _accelerator(each: dict[str, Any]) -> str:
    place_ = "" if each["node"] is None else f", NUMA node {each['node']}"
    why = f"; unused: {each['unused']}" if each["unused"] else ""
    return f"{each['path'] or each['kind']}  {each['name']}{place_}{why}"


def _limits(found: dict[str, Any]) -> str:
    quota, limit = found["quota_cores"], found["memory_limit_bytes"]
    parts = [f"{quota:g} cores of CPU time"] if quota is not None else []
    parts += [f"{limit / _GIB:.1f} GiB of memory"] if limit is not None else []
    return ", ".join(parts) or "none"


def _why(found: dict[str, Any]) -> str:
    if len(found["lanes"]) == 2:
        return "what the accelerator cannot finish in time spills to the CPUs"
    if any(not each["unused"] for each in found["accelerators"]):
        return "SPILLWAY_OVERFLOW_WORKERS is 0"
    return "one kind of device, so one embedding lane"


def _overflow(found: dict[str, Any]) -> str:
    overflow = found["overflow"]
    count, threads = overflow["workers"], overflow["threads"]
    if not count:
        return "no worker"
    where = f"cores {overflow['cores']}" if overflow["cores"] else "any cores"
    line = f"workers: {count}, on {where}, threads of each: {threads}"
    return line if len(found["lanes"]) == 2 else f"{line}; {DEMONSTRATION}"
