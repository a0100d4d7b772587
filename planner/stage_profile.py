"""StageProfile: how long a stage's batch takes on some units, by a roofline model or as it was measured.

Everything that plans asks one function, a `Profile`: (stage, units, batch) gives latency, requests/s, and whether it
fits. Units are chips, for `retrieval` hosts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from planner.inventory import Chip, Host, Inventory
from planner.rag_schema import GENERATING, InferenceStage, PlanInputError, RAGSchema, RetrievalStage


class StageProfile(NamedTuple):
    """Seconds until a batch has passed the stage, requests/s with such batches, and the share of memory it takes.

    Of `decode` the latency is that of its last step, which is the slowest. `weights` is the part of `memory` that is
    the model's, which stages of one model hold once.
    """

    latency_s: float
    qps: float
    memory: float = 0.0
    weights: float = 0.0

    @property
    def fits(self) -> bool:
        """True if the units hold the weights and the batch."""
        return self.memory <= 1.0


Profile = Callable[[str, int, int], StageProfile]
UNKNOWN = StageProfile(math.inf, 0.0, math.inf)  # what was not measured fits nowhere


class ModelShape(NamedTuple):
    """What attention costs by a model's size: layers, width, bytes of keys and values of a token (16 bits)."""

    layers: int
    width: int
    kv_bytes: float


# Llama 3, by parameters.
LLAMA_3 = {
    1e9: ModelShape(16, 2048, 32768), 8e9: ModelShape(32, 4096, 131072), 70e9: ModelShape(80, 8192, 327680),
    405e9: ModelShape(126, 16384, 516096),
}  # fmt: skip


def shape(stage: InferenceStage) -> ModelShape:
    """Return a stage's shape: as given, else that of the Llama 3 of its size, else one without attention."""
    usual = LLAMA_3.get(stage.params, ModelShape(0, 0, 0.0))
    return ModelShape(
        stage.layers or usual.layers, stage.width or usual.width, stage.kv_bytes or usual.kv_bytes
    )


def roofline(schema: RAGSchema, inventory: Inventory) -> Profile:
    """Return the analytical profile of section 3.4: each stage takes what its operations or its bytes take.

    PlanInputError if the schema or the inventory lacks a size that it needs.
    """
    chip = inventory.model
    if chip is None:
        raise PlanInputError(
            "the inventory's chip is missing; expected XPU-A, XPU-B, XPU-C or its flops, memory_bytes and bandwidth"
        )
    for name, stage in schema.stages.items():
        fields = (
            ("vectors", "vector_bytes")
            if isinstance(stage, RetrievalStage)
            else ("params", "tokens")
        )
        for field in fields:
            if not getattr(stage, field):
                raise PlanInputError(
                    f"stages.{name}.{field} is missing; expected it, or an inventory with a measured profile"
                )

    def profile(name: str, units: int, batch: int) -> StageProfile:
        stage = schema.stages[name]
        if isinstance(stage, RetrievalStage):
            return retrieval_profile(stage, inventory.host, units, batch)
        chips, copies = (units, 1) if inventory.scaling == "shard" else (1, units)
        take = generation_profile if name in GENERATING else prompt_profile
        found = take(stage, chip, chips, batch, last_step=name == "decode")
        return found._replace(qps=copies * found.qps)

    return profile


def retrieval_profile(stage: RetrievalStage, host: Host, hosts: int, batch: int) -> StageProfile:
    """Return a search's profile: every query scans its share of every host's codes, a thread a query."""
    queries = batch * stage.queries
    each = stage.vectors * stage.vector_bytes * stage.scan / hosts  # bytes a query and host
    by_cores = each / host.scan * math.ceil(queries / host.cores)
    latency = max(by_cores, queries * each / (host.bandwidth * host.efficiency))
    held = stage.vectors * stage.vector_bytes / (hosts * host.memory_bytes)
    return StageProfile(latency, batch / latency, held)


def prompt_profile(
    stage: InferenceStage, chip: Chip, chips: int, batch: int, *, last_step: bool = False
) -> StageProfile:
    """Return the profile of a model that reads all its tokens at once: an encoder, a reranker, a prefix."""
    del last_step
    model = shape(stage)
    attention = 2 * model.layers * model.width * stage.tokens**2
    operations = batch * (2 * stage.params * stage.tokens + attention)
    weights = stage.params * stage.weight_bytes
    latency = max(
        operations / (chips * chip.flops * stage.efficiency), weights / (chips * chip.bandwidth)
    )
    held = weights + batch * stage.tokens * model.kv_bytes
    whole = chips * chip.memory_bytes
    return StageProfile(latency, batch / latency, held / whole, weights / whole)


def step_s(stage: InferenceStage, chip: Chip, chips: int, batch: int, context: float) -> float:
    """Return the seconds of one step that generates a token for each of a batch, all with such a context."""
    operations = 2 * stage.params * batch / (chips * chip.flops * stage.efficiency)
    weights = stage.params * stage.weight_bytes / (chips * chip.bandwidth)
    cache = batch * shape(stage).kv_bytes * context / (chips * chip.bandwidth)
    return max(operations, weights) + cache


def generation_profile(
    stage: InferenceStage, chip: Chip, chips: int, batch: int, *, last_step: bool
) -> StageProfile:
    """Return the profile of a model that generates its tokens one by one, each step as slow as the last one."""
    whole = stage.context + stage.tokens
    step = step_s(stage, chip, chips, batch, whole)
    weights, room = stage.params * stage.weight_bytes, chips * chip.memory_bytes
    held = weights + batch * whole * shape(stage).kv_bytes
    return StageProfile(
        step if last_step else step * stage.tokens,
        batch / (step * stage.tokens),
        held / room,
        weights / room,
    )


def measured(inventory: Inventory) -> Profile:
    """Return the profile that was measured; what was not measured does not fit."""
    points: dict[tuple[str, int, int], StageProfile] = {
        (point.stage, point.units, point.batch): StageProfile(
            point.latency_s, point.qps, point.memory
        )
        for point in inventory.profile
    }

    def profile(name: str, units: int, batch: int) -> StageProfile:
        if inventory.scaling == "shard" or name == "retrieval":
            return points.get((name, units, batch), UNKNOWN)
        found = points.get((name, 1, batch), UNKNOWN)
        return found._replace(qps=units * found.qps)

    return profile


def profile_of(schema: RAGSchema, inventory: Inventory) -> Profile:
    """Return the measured profile if the inventory has one, else the analytical one; PlanInputError without either."""
    if not inventory.profile:
        return roofline(schema, inventory)
    known = {point.stage for point in inventory.profile}
    for name in schema.stages:
        if name not in known:
            raise PlanInputError(
                f"the inventory's profile has no point of {name}; expected one of every stage of the schema "
                "(`spillway profile` measures them)"
            )
    return measured(inventory)
