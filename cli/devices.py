"""`spillway devices`: show this machine's devices, and the lanes that `spillway up` makes for them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from common.config import SupervisorConfig, WorkerConfig, load
from common.devices import Machine, detect, lanes, show_cores, torch_version, unused, within_reach
from common.errors import ConfigError
from common.placement import DEMONSTRATION, overflow_workers, place, place_host

HELP = "show accelerators, cores and limits of this machine, and the lanes they make"
_GIB = 1 << 30
_PAGES = {
    "hugetlb": "reserved pages of 2 MiB",
    "transparent": "pages of 2 MiB as they are found",
    "small": "small pages",
}


def add(subparsers: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser("devices", help=HELP, description=HELP)
    parser.add_argument("--json", action="store_true", help="for programs")
    about = "measure the host's memory too, as attention on the host reads it: seconds"
    parser.add_argument("--memory", action="store_true", help=about)
    parser.add_argument("--config", metavar="FILE", help="a TOML file with SPILLWAY_* names")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the devices and lanes; ConfigError if the settings for the lanes cannot be used."""
    machine = detect()
    found = survey(machine, os.environ, args.config, torch_version())
    if args.memory:
        threads = place_host(
            machine, load(WorkerConfig, os.environ, file=args.config).host_cores
        ).threads
        found["host_memory"] = _measured(machine, threads)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, line in _lines(found):
        print(f"{name:<14}{line}")
    return 0


def survey(
    machine: Machine, env: Mapping[str, str], file: str | None, torch: str
) -> dict[str, Any]:
    """Return the machine, and the workers and lanes that `up` would start with this environment and file."""
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


def _measured(machine: Machine, threads: int) -> dict[str, Any]:
    """Return the kind of pages, latency and bandwidth of shared memory; ConfigError if they cannot be measured."""
    from engine.host.memory_probe import BYTES, measure_memory  # noqa: PLC0415 - the kernels may have to be built

    room = (
        machine.memory_bytes if machine.memory_limit_bytes is None else machine.memory_limit_bytes
    )
    memory = measure_memory(threads, min(BYTES, room // 8))
    if memory is None:
        raise ConfigError("--memory: needs the compiled kernels; expected a C++ compiler here")
    return {**memory._asdict(), "threads": threads}


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines for people as (name, text); lines of further accelerators have no name."""
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
        *([("host memory", _host_memory(found["host_memory"]))] if "host_memory" in found else []),
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


def _host_memory(memory: dict[str, Any]) -> str:
    return (
        f"{_PAGES[memory['page_kind']]}, {memory['latency_ns']:.0f} ns a read, "
        f"{memory['bandwidth'] / 1e9:.1f} GB/s by threads: {memory['threads']}"
    )


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
