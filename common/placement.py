"""Cores of the overflow worker beside an accelerator: WindVE's CPU placement, as pure functions.

One worker a machine takes cores from the highest index downwards within one NUMA node; the low cores are left to the
services and to the accelerator's driver. A core is a hardware thread, as in `common.devices`.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from common.devices import Machine, lanes, parse_cores, show_cores
from common.errors import ConfigError

# The paper keeps a quarter of its ARM machine's 128 cores for the accelerator's side; of few that would be too few.
_MANY_CORES = 64
DEMONSTRATION = "two embedding lanes on one kind of device are for tests and demonstration"


class Placement(NamedTuple):
    """The cores to run on, rising (none: wherever the scheduler likes), and how many threads compute."""

    cores: tuple[int, ...]
    threads: int


def overflow_workers(machine: Machine, asked: int | Literal["auto"]) -> int:
    """Return how many overflow workers to start, of SPILLWAY_OVERFLOW_WORKERS: auto is one for a second lane."""
    return len(lanes(machine)) - 1 if asked == "auto" else asked


def kept_cores(machine: Machine) -> int:
    """Return the physical cores that overflow leaves alone: one for the services and one per accelerator.

    A quarter on ARM with many cores; never all of them.
    """
    cores = len(machine.physical)
    wanted = 1 + len(machine.accelerators)
    if machine.arm and cores >= _MANY_CORES:
        wanted = max(wanted, cores // 4)
    return min(wanted, cores - 1)


def overflow_cores(
    machine: Machine, *, threads: int = 0, reserve: int | None = None
) -> tuple[int, ...]:
    """Return the overflow worker's cores, rising, at least one; the lowest `reserve` physical cores are kept free.

    Without `threads`: one core of each physical core that one NUMA node has left, no more than the cgroup's quota
    pays for beside the kept ones. The node is one without an accelerator if it has half as many left as the richest,
    else the richest. With `threads`: so many, as asked, of that node first; of unused physical cores before second
    hardware threads of the same ones; then of other nodes, and of what is kept last.
    """
    kept = min(kept_cores(machine) if reserve is None else reserve, len(machine.physical) - 1)
    node_of = {core: node.index for node in machine.nodes for core in node.cores}
    left = {node.index: 0 for node in machine.nodes}
    for group in machine.physical[kept:]:
        left[node_of[group[0]]] += 1
    home = _home(machine, left, threads)
    rank = {
        core: (number < kept, node_of[core] != home, core != group[-1], -core)
        for number, group in enumerate(machine.physical)
        for core in group
    }
    if not threads:
        quota = math.inf if machine.quota_cores is None else machine.quota_cores
        threads = max(1, math.floor(min(left[home], quota - kept)))
    return tuple(sorted(sorted(rank, key=rank.__getitem__)[:threads]))


def _home(machine: Machine, left: dict[int, int], threads: int) -> int:
    """Return the node to compute on, `left` being the physical cores each has left; of equals the highest."""
    enough = threads or max(left.values()) / 2
    beside = {accelerator.node for accelerator in machine.accelerators}
    away = [node for node, cores in left.items() if node not in beside and cores >= enough]
    return max(away or left, key=lambda node: (left[node], node))


def place(machine: Machine, *, threads: int = 0, cores: str = "") -> Placement:
    """Return where an overflow worker runs; ConfigError if `cores`, SPILLWAY_CORES, cannot be had.

    `threads` is SPILLWAY_THREADS, 0: as many as there are cores. Without an accelerator nothing is pinned: all
    processes compute on the same cores, and the scheduler divides them best. Nor is it under a quota of CPU time,
    for then the machine is shared with others, which may have taken the same highest cores.
    """
    if cores:
        chosen = _asked(machine, cores, "SPILLWAY_CORES")
        return Placement(chosen, threads or len(chosen))
    if not machine.accelerators:
        return Placement((), threads or machine.usable_cores)
    chosen = overflow_cores(machine, threads=threads)
    shared = machine.quota_cores is not None and machine.quota_cores < len(machine.cores)
    return Placement(() if shared else chosen, threads or len(chosen))


def place_host(machine: Machine, cores: str) -> Placement:
    """Return where attention on the host runs: on `cores`, SPILLWAY_HOST_CORES, or on half of the usable ones, any.

    ConfigError if they cannot be had.
    """
    chosen = _asked(machine, cores, "SPILLWAY_HOST_CORES") if cores else ()
    return Placement(chosen, len(chosen) or max(1, machine.usable_cores // 2))


def _asked(machine: Machine, text: str, name: str) -> tuple[int, ...]:
    try:
        chosen = parse_cores(text)
    except ValueError as error:
        raise ConfigError(
            f"{name} is {text[:200]!r}: {error}; expected a list such as 8-15,24"
        ) from None
    others = set(chosen) - set(machine.cores)
    if others:
        raise ConfigError(
            f"{name} is {text[:200]!r}: this process may not run on {show_cores(others)}; "
            f"expected cores out of {show_cores(machine.cores)}"
        )
    return chosen
