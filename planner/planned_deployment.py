"""The deployment that runs a schedule: which service has which threads, replicas, batches and settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from planner.deployment import (
    MOST_FRONT,
    DeploymentPlan,
    MachineFingerprint,
    PlacementGroup,
    PlannedPerformance,
    PlannedPoint,
    PlannedService,
    check_plan,
)
from planner.explanation import placement, spread
from planner.inventory import Inventory
from planner.levers import PlanLever
from planner.rag_schema import PlanInputError, RAGSchema
from planner.schedule_search import RagSchedule, ScheduledGroup, SearchSpace, parts

ENCODER = "encoder"  # the entry of a worker that generates nothing


def deployment(
    space: SearchSpace,
    schedule: RagSchedule,
    levers: Iterable[PlanLever] = (),
    front: Sequence[RagSchedule] = (),
) -> DeploymentPlan:
    """Return the plan of a schedule that was chosen from a front, by rising time to first token, as computed.

    PlanInputError if the product cannot run it, or the inventory names no machine.
    """
    inventory = space.inventory
    machine = machine_of(inventory)
    services = [PlannedService("router"), PlannedService("kv_store")]
    groups = []
    for group in schedule.groups:
        service = _service(space, schedule, group)
        services.append(service)
        groups.append(_group(inventory, group, service))
    if schedule.hosts:
        services.append(_search(inventory, schedule))
        groups.append(
            PlacementGroup(
                ["retrieval"], "server", schedule.hosts, {"retrieval": schedule.search_batch},
                "vector_search",
            )
        )  # fmt: skip
    else:
        services.append(PlannedService("vector_search"))
    plan = DeploymentPlan(
        machine=machine,
        services=[*_with_levers(services, levers)],
        predicted=PlannedPerformance(
            ttft_s=schedule.ttft_s, qps=schedule.qps, tpot_s=schedule.tpot_s,
            qps_per_chip=schedule.qps_per_chip, binds="+".join(parts(space, schedule)[0].stages),
        ),
        schedule=groups,
        costs=inventory.costs,
        front=[
            PlannedPoint(each.ttft_s, each.qps, each.chips, each.tpot_s, placement(each))
            for each in spread(front, MOST_FRONT)
        ],
    )  # fmt: skip
    check_plan(plan)
    return plan


def machine_of(inventory: Inventory) -> MachineFingerprint:
    """Return the machine that plans of an inventory are for; PlanInputError if it names none."""
    if inventory.machine is None:
        raise PlanInputError(
            "the inventory names no machine; expected machine: {cores, chips, memory_bytes, product}, as "
            "`spillway profile` writes it"
        )
    return inventory.machine


def runnable_groups(schema: RAGSchema) -> frozenset[tuple[str, ...]]:
    """Return the groups of consecutive stages that one service of ours runs."""
    placed = schema.placed
    every = (
        placed[start:stop]
        for start in range(len(placed)) for stop in range(start + 1, len(placed) + 1)
    )  # fmt: skip
    return frozenset(group for group in every if _runs(group))


def _runs(group: tuple[str, ...]) -> bool:
    """True if a worker has these stages: one that generates has prefix among them, one that encodes embed."""
    return "prefix" in group or ("embed" in group and set(group) <= {"embed", "rerank"})


def _service(space: SearchSpace, schedule: RagSchedule, group: ScheduledGroup) -> PlannedService:
    """Return the entry that runs a group of stages on chips or cores."""
    inventory = space.inventory
    if inventory.decode == "separate":
        raise PlanInputError(
            "the schedule has decode on chips of its own, and a gpu_worker both reads and writes; expected "
            "decode: with_prefix in the inventory"
        )
    if inventory.resource == "chip" and inventory.scaling == "shard" and group.units > 1:
        raise PlanInputError(
            f"the schedule divides {', '.join(group.stages)} among {group.units} accelerators, and a worker has one; "
            "expected scaling: replicate in the inventory"
        )
    if "db_encode" in group.stages:
        raise PlanInputError(
            "the product encodes documents when they are written, not in a request; expected no db_encode in the schema"
        )
    if not _runs(group.stages):
        raise PlanInputError(
            f"the schedule has {', '.join(group.stages)} on its own, and workers are generators, which have prefix, or "
            "encoders, which have embed and may rerank; expected a schema without it, or chips for fewer groups"
        )
    answers = "prefix" in group.stages
    apart = any("embed" in each.stages and each is not group for each in schedule.groups)
    settings = _batches(space, group) if answers else {"SPILLWAY_CHAT_MODEL": "none"}
    settings |= {"SPILLWAY_EMBED_MODEL": "none"} if answers and apart else {}
    by_threads = inventory.resource == "core" and inventory.scaling == "shard"
    return PlannedService(
        "gpu_worker",
        replicas=1 if by_threads else group.units,
        name="" if answers else ENCODER,
        threads=group.units if by_threads else 0,
        device="cpu" if inventory.resource == "core" else "auto",
        settings=settings,
    )


def _batches(space: SearchSpace, group: ScheduledGroup) -> dict[str, str]:
    """Return the settings that give a gpu_worker the batches of its stages."""
    batches = dict(zip(group.stages, group.batches, strict=True))
    found = {"SPILLWAY_MAX_RUNNING": str(batches["decode"])}
    if tokens := space.schema.inference("prefix").tokens:
        found["SPILLWAY_STEP_TOKENS"] = str(batches["prefix"] * tokens)
    return found


def _group(inventory: Inventory, group: ScheduledGroup, service: PlannedService) -> PlacementGroup:
    batches = dict(zip(group.stages, group.batches, strict=True))
    return PlacementGroup([*group.stages], inventory.resource, group.units, batches, service.label)


def _search(inventory: Inventory, schedule: RagSchedule) -> PlannedService:
    """Return the entry that searches: one a host, or one with threads where it takes cores of this machine."""
    if inventory.host_takes:
        return PlannedService("vector_search", threads=schedule.hosts * inventory.host_takes)
    return PlannedService("vector_search", replicas=schedule.hosts)


def _with_levers(
    services: Sequence[PlannedService], levers: Iterable[PlanLever]
) -> Iterator[PlannedService]:
    """Yield the entries with the settings and replicas of levers."""
    chosen = list(levers)
    for entry in services:
        settings, more = dict(entry.settings), 0
        for lever in chosen:
            if lever.service == entry.service and entry.name != ENCODER:
                more += not lever.variable
                settings |= {lever.variable: lever.value} if lever.variable else {}
        yield PlannedService(
            entry.service, entry.replicas + more, entry.name, entry.threads, entry.cores,
            entry.device, settings,
        )  # fmt: skip
    known = {entry.service for entry in services}
    for lever in chosen:
        if not lever.variable and lever.service not in known:
            yield PlannedService(lever.service)
