"""The step reporter: publishes a worker's latest step with attention on the host, for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from common import log
from common.bus import BusDown, BusFull
from common.registry.latest_steps import LatestSteps
from common.wire.registry import StageSpan, StepRecord
from common.worker.worker import Worker
from engine.decoder.offload.computed_step import ComputedStep
from engine.decoder.offload.homes import HomePlanner
from engine.decoder.offload.plan import Resume

EVERY_S = 1.0
MOST_STAGES = 400
_log = log.get("engine")


class StepReporter:
    """Publishes the latest step in stages that `homes` planned, at most once a second."""

    def __init__(self, worker: Worker, homes: HomePlanner) -> None:
        self._worker, self._homes = worker, homes
        self._told: ComputedStep | None = None

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.tell()
            except (BusDown, BusFull):
                continue
            except Exception:  # noqa: BLE001 - the report is only a hint to operators
                _log.exception("step_untold")

    async def tell(self) -> None:
        """Publish the latest step, unless it is published already."""
        step, worker = self._homes.computed, self._worker
        if step is None or step is self._told:
            return
        share = self._homes.on_host / max(1, self._homes.decoded)
        now_ms, resumed = worker.bus.clock.now_ms(), self._homes.resumed
        record = record_of(step, host_share=share, at_ms=now_ms, resumed=resumed)
        await LatestSteps(worker.bus).publish(worker.family, worker.name, record)
        self._told = step


def record_of(
    step: ComputedStep, *, host_share: float, at_ms: int, resumed: Mapping[Resume, int]
) -> StepRecord:
    """Return the published form of a step, with the stages of as many layers as the size limit allows."""
    layers = 1 + max((each.layer for each in step.stages), default=-1)
    shown = MOST_STAGES * layers // max(1, len(step.stages))
    began_s = min((each.begin_s for each in step.stages), default=0.0)
    return StepRecord(
        at_ms=at_ms,
        why=step.why,
        decoded=step.decoded,
        on_host=step.on_host,
        host_share=host_share,
        predicted_s=step.predicted_s,
        measured_s=step.measured_s,
        long_slack_s=step.long_slack_s,
        short_slack_s=step.short_slack_s,
        device_idle_s=step.device_idle_s,
        host_idle_s=step.host_idle_s,
        layers=layers,
        stages=[
            StageSpan(
                each.stage, each.part, each.layer, each.begin_s - began_s, each.end_s - began_s
            )
            for each in step.stages
            if each.layer < shown
        ],
        resumed={str(use): count for use, count in resumed.items()},
    )
