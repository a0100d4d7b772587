"""The plan of a deployment: which services run where, by which schedule, and what they are predicted to give.

A planner writes it; `spillway up --plan`, a compose file or a kustomize overlay runs it. It is made for one machine
and names it, so that it is not run on another one unnoticed.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, get_args

import msgspec

VERSION: Literal[1] = 1
ServiceName = Literal["router", "gpu_worker", "cpu_worker", "vector_search", "kv_store"]
SERVICES: tuple[ServiceName, ...] = get_args(ServiceName)
NEEDED: tuple[ServiceName, ...] = ("router", "gpu_worker", "vector_search", "kv_store")
MEMORY_TOLERANCE = 0.05  # kernels of the same machine differ in what they keep for themselves
_ENCODERS = frozenset({"gpu_worker", "cpu_worker"})
_THREADS = {"vector_search": "SPILLWAY_SEARCH_THREADS", "router": "SPILLWAY_TEXT_PROCESSES"}
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^([a-z][a-z0-9_]{0,62})?\Z")]
_Variable = Annotated[str, msgspec.Meta(pattern=r"^SPILLWAY_[A-Z0-9_]+\Z")]
_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Stage = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,62}\Z")]
MOST_FRONT, MOST_PLACEMENT = 32, 200  # points of a front that a plan keeps, letters of a placement
MOST_CHIPS = 1 << 20
_Placement = Annotated[str, msgspec.Meta(pattern=rf"^[a-z0-9_+: ]{{0,{MOST_PLACEMENT}}}\Z")]


class PlanError(ValueError):
    """A plan that cannot be read or run: the message says what, where and what is expected."""


class MachineFingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine a plan was made for: cores that compute at once, accelerators, bytes of memory, product version."""

    cores: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    chips: _Count
    memory_bytes: _Count
    product: str

    def differences(self, other: MachineFingerprint) -> list[str]:
        """Return what another machine has else, a phrase each, this one's value first; none if a plan fits both."""
        found = [
            f"{name} {getattr(self, name)} and {getattr(other, name)}"
            for name in ("cores", "chips", "product")
            if getattr(self, name) != getattr(other, name)
        ]
        if abs(self.memory_bytes - other.memory_bytes) > MEMORY_TOLERANCE * self.memory_bytes:
            found.append(f"memory_bytes {self.memory_bytes} and {other.memory_bytes}")
        return found


class PlannedService(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal processes of one service.

    `name` tells two entries of one service apart ("": the service's own). `threads` compute in each replica (0: as
    many as the service takes), on the `cores` of a list such as 0-3,8 ("": any). `settings` are further variables of
    the environment.
    """

    service: ServiceName
    replicas: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    name: _Name = ""
    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    cores: str = ""
    device: Literal["auto", "cpu", "cuda", "sim"] = "auto"
    settings: dict[_Variable, str] = {}

    @property
    def label(self) -> str:
        """The entry's name, which is the service's where none is given."""
        return self.name or self.service

    def environment(self) -> dict[str, str]:
        """Return the variables that make a replica what the plan says, each with its value; PlanError on two values."""
        found: dict[str, str] = {}
        if self.service in _ENCODERS:
            if self.threads:
                found["SPILLWAY_THREADS"] = str(self.threads)
            if self.cores and self.service == "cpu_worker":
                found["SPILLWAY_CORES"] = self.cores
            if self.device != "auto":
                found["SPILLWAY_DEVICE"] = self.device
        elif self.threads and self.service in _THREADS:
            found[_THREADS[self.service]] = str(self.threads)
        for name, value in self.settings.items():
            if found.setdefault(name, value) != value:
                raise PlanError(
                    f"{self.label}: {name} is {value!r} in settings and {found[name]!r} by threads, cores or device; "
                    "expected one of them"
                )
        return found


class PlacementGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stages that share the same chips or cores; `batches` is the batch of each stage.

    `allocation` is how many units of the `resource` the group has; `service` the entry that runs it, by its label.
    """

    stages: Annotated[list[_Stage], msgspec.Meta(min_length=1)]
    resource: Literal["chip", "core", "server"]
    allocation: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHIPS)]
    batches: dict[str, Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]]
    service: str = ""


class PlannedPerformance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan should give: median time to first token, seconds a token, most requests a second, and what binds."""

    ttft_s: _Seconds
    qps: Annotated[float, msgspec.Meta(ge=0)]
    tpot_s: _Seconds = 0.0
    qps_per_chip: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    binds: str = ""


class PlannedPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one schedule gives on the chips that it is charged; `placement` names its groups and their units.

    A placement is written as `embed+prefix+decode:2 retrieval:1`.
    """

    ttft_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    qps: Annotated[float, msgspec.Meta(gt=0, le=1e12)]
    chips: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHIPS)]
    tpot_s: _Seconds = 0.0
    placement: _Placement = ""

    def __str__(self) -> str:
        """Return the point as the router's SPILLWAY_PLANNED_FRONT has it: ttft_s:qps:chips:tpot_s:placement."""
        return f"{self.ttft_s:.4g}:{self.qps:.4g}:{self.chips}:{self.tpot_s:.4g}:{self.placement}"


class PlannedCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that a stage's batch of so many items and tokens took in the profile that the plan was made of.

    `kind` is the kind of the families whose workers' cost models are compared with it: embed, rerank, chat or search.
    """

    kind: Literal["embed", "rerank", "chat", "search"]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    items: Annotated[int, msgspec.Meta(ge=1)] = 1
    tokens: _Count = 0


class DeploymentPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A deployment as computed: the machine it was made for, its services, its schedule and what it should give.

    `front` holds the schedules that the plan's was chosen among: no other has an earlier first token and more
    requests/s a chip.
    """

    machine: MachineFingerprint
    services: Annotated[list[PlannedService], msgspec.Meta(min_length=1)]
    predicted: PlannedPerformance
    schedule: list[PlacementGroup] = []
    costs: list[PlannedCost] = []
    front: Annotated[list[PlannedPoint], msgspec.Meta(max_length=MOST_FRONT)] = []
    version: Literal[1] = VERSION

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ between plans that differ in anything."""
        return hashlib.blake2b(write_plan(self), digest_size=8).hexdigest()

    def planned_costs(self) -> str:
        """Return the costs as the router's SPILLWAY_PLANNED_COSTS has them: kind:items:tokens=seconds, with commas."""
        return ",".join(f"{c.kind}:{c.items}:{c.tokens}={c.seconds:.6g}" for c in self.costs)

    def point(self) -> PlannedPoint | None:
        """Return what the plan's own schedule should give; None where the plan does not say it of its chips."""
        given = self.predicted
        if not given.ttft_s or not given.qps or not given.qps_per_chip:
            return None
        chips = max(1, round(min(given.qps / given.qps_per_chip, MOST_CHIPS)))
        groups = [f"{'+'.join(each.stages)}:{each.allocation}" for each in self.schedule]
        placement = " ".join(groups)[:MOST_PLACEMENT]
        return PlannedPoint(given.ttft_s, given.qps, chips, given.tpot_s, placement)

    def planned_front(self) -> str:
        """Return unit;point,point… as the router's SPILLWAY_PLANNED_FRONT has it: the plan's own, then the front's.

        The unit is what a rate is divided by, chip or core. "" where the plan has no point of its own.
        """
        own = self.point()
        if own is None:
            return ""
        unit = next((each.resource for each in self.schedule if each.resource != "server"), "chip")
        return f"{unit};{','.join(map(str, [own, *self.front]))}"

    def environment(self, entry: PlannedService) -> dict[str, str]:
        """Return all variables of an entry's replicas; PlanError on two values.

        A router's hold the costs and the front, too: what it watches, and what its dashboard draws.
        """
        found = entry.environment()
        if entry.service == "router":
            told = {
                "SPILLWAY_PLANNED_COSTS": self.planned_costs(),
                "SPILLWAY_PLANNED_FRONT": self.planned_front(),
            }
            found |= {name: value for name, value in told.items() if value}
        return found

    def of_service(self, service: ServiceName) -> list[PlannedService]:
        """Return the entries of a service in their order."""
        return [each for each in self.services if each.service == service]

    def replicas(self, service: ServiceName) -> int:
        """Return how many processes of a service the plan has."""
        return sum(each.replicas for each in self.of_service(service))


def read_plan(data: bytes, where: str) -> DeploymentPlan:
    """Return the plan of a file's JSON text; PlanError names `where`, what is wrong in it and what is expected."""
    try:
        raw = msgspec.json.decode(data)
        found = raw.get("version", VERSION) if isinstance(raw, dict) else VERSION
        if found != VERSION:
            raise PlanError(f"{where}: version {found!r}; expected a plan of version {VERSION}")
        plan = msgspec.json.decode(data, type=DeploymentPlan)
        check_plan(plan)
    except PlanError as error:
        text = str(error)
        raise PlanError(text if text.startswith(where) else f"{where}: {text}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PlanError(f"{where}: {str(error)[:300]}; expected a deployment plan") from None
    return plan


def write_plan(plan: DeploymentPlan) -> bytes:
    """Return a plan as indented JSON text, which `read_plan` reads."""
    return msgspec.json.format(msgspec.json.encode(plan, order="deterministic"), indent=2) + b"\n"


def check_plan(plan: DeploymentPlan) -> None:
    """Check what the types do not say; PlanError says what contradicts what."""
    labels: set[str] = set()
    for each in plan.services:
        if each.label in labels:
            raise PlanError(
                f"services: two entries are named {each.label!r}; expected one, or a `name`"
            )
        labels.add(each.label)
        if each.threads and each.service == "kv_store":
            raise PlanError(
                f"services: {each.label}: threads {each.threads}; expected none, for it computes nothing"
            )
        each.environment()
    for service in NEEDED:
        if not plan.replicas(service):
            raise PlanError(f"services: {service} is missing; expected at least one replica")
    for group in plan.schedule:
        if group.service and group.service not in labels:
            known = ", ".join(sorted(labels))
            raise PlanError(
                f"schedule: {group.service!r} is no entry of services; expected one of {known}"
            )
        if extra := sorted(set(group.batches) - set(group.stages)):
            raise PlanError(
                f"schedule: a batch of {extra[0]!r}; expected a stage of its group: {', '.join(group.stages)}"
            )
