"""The latest steps that workers computed in stages, partly attended on the host: published for operators."""

from __future__ import annotations

from collections.abc import Sequence

from common.bus import Bus, keys
from common.ids import Family
from common.wire.message import decode, encode
from common.wire.registry import StepRecord

SHOWN_S = 60.0  # seconds for which a step is shown if no other one follows


class LatestSteps:
    """One step a worker; each has a time to live."""

    def __init__(self, bus: Bus) -> None:
        self._redis = bus.connection

    async def publish(self, family: Family, worker: str, step: StepRecord) -> None:
        """Replace the worker's last step by a new one; one try."""
        name = keys.step(family, worker)
        await self._redis.call("SET", name, encode(step), "PX", int(1000 * SHOWN_S), timeout_s=0.0)

    async def of(self, family: Family, workers: Sequence[str]) -> dict[str, StepRecord]:
        """Return by worker the steps of workers that computed one within SHOWN_S."""
        if not workers:
            return {}
        raw = await self._redis.call("MGET", *(keys.step(family, worker) for worker in workers))
        found = zip(workers, raw, strict=True)
        return {name: decode(step, StepRecord) for name, step in found if step is not None}
