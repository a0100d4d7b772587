"""Inventory: the chips and hosts that a deployment may use, what they can do, and what stages took on them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from planner.deployment import MachineFingerprint, PlannedCost
from planner.rag_schema import PlanInputError, StageName, read_struct

_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 12)]
_Power = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Chip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a roofline model needs of one chip: FLOP/s, bytes of its memory, bytes/s of it."""

    flops: _Rate
    memory_bytes: _Rate
    bandwidth: _Rate


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a roofline model needs of one host that searches: a core scans one query's codes at `scan` bytes/s.

    All cores together reach `efficiency` of the memory's `bandwidth`. The defaults are those of the thesis.
    """

    cores: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 96
    memory_bytes: _Rate = 384e9
    bandwidth: _Rate = 460e9
    scan: _Rate = 18e9
    efficiency: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8


# Table 3.2 of the thesis.
XPU_A = Chip(197e12, 16e9, 819e9)
XPU_B = Chip(275e12, 32e9, 1200e9)
XPU_C = Chip(459e12, 96e9, 2765e9)
CHIPS = {"XPU-A": XPU_A, "XPU-B": XPU_B, "XPU-C": XPU_C}


class ProfilePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured stage: seconds of a batch on so many units, requests/s, and the share of their memory it takes."""

    stage: StageName
    units: _Power
    batch: _Power
    latency_s: _Seconds
    qps: _Rate
    memory: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0


class Inventory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What there is. Units are counted in powers of two; a plan uses at most `chips` chips and `hosts` hosts.

    `resource` is what a chip is: an accelerator, or a core of a machine without one. `chip` and `host` are for the
    roofline model (a name of table 3.2, or figures), `profile` stands in for it. Chips of a group `shard` a batch
    among them, or `replicate` the whole model, each with batches of its own. `decode` runs on chips of its own, or on
    those of `prefix`. A host brings `chips_per_host` chips along, which are charged with it whether used or not, or
    takes `host_takes` chips of the inventory (a search on cores of the same machine).
    """

    chips: _Count
    hosts: _Count
    resource: Literal["chip", "core"] = "chip"
    chip: Literal["XPU-A", "XPU-B", "XPU-C"] | Chip | None = None
    host: Host = Host()
    chips_per_host: _Count = 0
    host_takes: _Count = 0
    scaling: Literal["shard", "replicate"] = "shard"
    decode: Literal["separate", "with_prefix"] = "separate"
    profile: list[ProfilePoint] = []
    costs: list[PlannedCost] = []  # of the workers' own models, for the plan to be watched by
    machine: MachineFingerprint | None = None

    def charged(self, chips: int, hosts: int) -> int:
        """Return how many chips a plan with so many of each is charged with."""
        return max(chips + hosts * self.host_takes, hosts * self.chips_per_host)

    @property
    def pauses(self) -> bool:
        """True if a group does nothing while a search between two of its stages runs; workers that decode go on."""
        return self.decode == "separate"

    @property
    def model(self) -> Chip | None:
        """The chip's figures, if they are known."""
        return CHIPS[self.chip] if isinstance(self.chip, str) else self.chip


def read_inventory(data: bytes, where: str) -> Inventory:
    """Return the inventory of a file's YAML or JSON text; PlanInputError says where, what and what is expected."""
    found = read_struct(data, where, Inventory)
    if not found.chips:
        raise PlanInputError(
            f"{where}: chips is 0: the models of a pipeline need one; expected at least 1, or {found.resource} counts "
            "of a machine (`spillway profile`)"
        )
    if not found.hosts:
        raise PlanInputError(f"{where}: hosts is 0: a search needs one; expected at least 1")
    if found.chip is None and not found.profile:
        raise PlanInputError(
            f"{where}: neither chip nor profile is there; expected chip: one of {', '.join(CHIPS)} or its flops, "
            "memory_bytes and bandwidth; or a profile (`spillway profile` measures it)"
        )
    return found
