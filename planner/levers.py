"""Levers: settings of the product that move what binds. Whoever implements one registers it here, and nobody else."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from planner.deployment import ServiceName
from planner.rag_schema import InferenceStage, RAGSchema


class PlanLever(NamedTuple):
    """What moves stages that bind: a setting of a service, or (without a variable) one replica of it more.

    `weight_bytes` is what a weight of its stages takes with it (0: as without).
    """

    name: str
    service: ServiceName
    variable: str
    value: str
    stages: tuple[str, ...]
    does: str
    weight_bytes: float = 0.0

    def applied(self, schema: RAGSchema) -> RAGSchema:
        """Return a schema as the roofline model sees it with this lever."""
        if not self.weight_bytes:
            return schema
        stages = {
            name: msgspec.structs.replace(stage, weight_bytes=self.weight_bytes)
            if isinstance(stage, InferenceStage) and name in self.stages
            else stage
            for name, stage in schema.stages.items()
        }
        return msgspec.structs.replace(schema, stages=stages)


_GENERATOR = ("rewrite_prefix", "rewrite_decode", "prefix", "decode")
LEVERS = (
    PlanLever(
        "int8", "gpu_worker", "SPILLWAY_CHAT_DTYPE", "int8", _GENERATOR,
        "weights of 8 bits, half the bytes that a step reads", 1.0,
    ),
    PlanLever(
        "int4", "gpu_worker", "SPILLWAY_CHAT_DTYPE", "int4", _GENERATOR,
        "weights of 4 bits, a quarter of the bytes that a step reads", 0.5,
    ),
    PlanLever(
        "host_attention", "gpu_worker", "SPILLWAY_HOST_ATTENTION", "auto", ("decode",),
        "attention on the host where the accelerator has no room for more sequences",
    ),
    PlanLever(
        "page_tiers", "gpu_worker", "SPILLWAY_PAGE_PUBLISH", "through", ("prefix",),
        "every page kept in further tiers at once, so that equal beginnings are not read again",
    ),
    PlanLever(
        "overflow", "cpu_worker", "", "", ("embed",),
        "a second lane of embeddings on cores, for what the first cannot finish in time",
    ),
    PlanLever(
        "shards", "vector_search", "", "", ("retrieval",),
        "a collection in more shards, each scanned by a process of its own (`spillway shards split`)",
    ),
)  # fmt: skip


def helping(stages: tuple[str, ...]) -> list[PlanLever]:
    """Return the levers that help one of these stages."""
    return [lever for lever in LEVERS if set(lever.stages) & set(stages)]
