"""Cores of the overflow worker beside an accelerator: WindVE's CPU placement, as pure functions.

One worker a machine takes cores from the highest index downwards within one NUMA node; the low cores are left to the
services and to the accelerator's driver. A core is a hardware thread, as in `common.devices`.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from common.devices import Machine, lanes, parse_cores, show_cores
from common.errors import ConfigError

# The paper keeps a quarter of its ARM machine's 128 cores for the accelerator; fewer cores keep the plain number.
_MANY_CORES = 64
DEMONSTRATION = "two embedding lanes on one kind of device are for tests and demonstration"


class Placement(NamedTuple):
    """The cores to run on, rising (empty: the scheduler chooses), and the number of computing threads."""

    cores: tuple[int, ...]
    threads: int


def overflow_workers(machine: Machine, asked: int | Literal["auto"]) -> int:
    """Return the number of overflow workers; `asked` is SPILLWAY_OVERFLOW_WORKERS: auto is one with a second lane."""
    return len(lanes(machine)) - 1 if asked == "auto" else asked


def kept_cores(machine: Machine) -> int:
    """Return the number of physical cores kept from overflow: one for the services and one per accelerator.

    On ARM with at least _MANY_CORES at least a quarter is kept; never all of them.
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

    Without `threads`: one core of each physical core that is left in one NUMA node, at most the cgroup's quota less the
    kept cores. The node is one without an accelerator if it has at least half as many cores left as the node with the
    most, else the node with the most. With `threads`: that many cores, first of that node (unused physical cores before
    second hardware threads), then of other nodes, last of the kept cores.
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
    """Return the node to compute on; `left` counts each node's free physical cores. Of equal nodes the highest."""
    enough = threads or max(left.values()) / 2
    beside = {accelerator.node for accelerator in machine.accelerators}
    away = [node for node, cores in left.items() if node not in beside and cores >= enough]
    return max(away or left, key=lambda node: (left[node], node))


def place(machine: Machine, *, threads: int = 0, cores: str = "") -> Placement:
    """Return an overflow worker's cores and threads; ConfigError if `cores`, SPILLWAY_CORES, cannot be used.

    `threads` is SPILLWAY_THREADS, 0: one per core. The worker is not pinned without an accelerator, since all processes
    compute on the same cores and the scheduler divides these best. It is not pinned under a quota of CPU time either:
    then others share the machine, and may be pinned to the same highest cores.
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
    """Return the cores and threads of attention on the host: `cores`, SPILLWAY_HOST_CORES, or half of the usable ones.

    ConfigError if `cores` cannot be used.
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
