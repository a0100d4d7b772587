"""The worker process of the gpu or cpu lane: loads its models, measures them, registers, serves its lanes, drains."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Protocol

from common import log
from common.bus import Bus
from common.bus.metrics import lane_label
from common.bus.startup import serve_on_bus, watch_bus
from common.config import WorkerConfig
from common.errors import ConfigError
from common.health import Health
from common.ids import Family
from common.registry.models import Models
from common.wire.registry import WorkerRecord
from common.worker.incarnation import incarnation_name
from common.worker.worker import Worker
from engine.device import DeviceQueue
from engine.encoder.capacity import EncoderCapacity, calibrate
from engine.encoder.model import EncoderModel
from services.adapters.encode.depth_finder import DepthFinder, counts_queries
from services.adapters.encode.loop import EmbeddingLoop, with_capacity
from services.adapters.encode.questions import QuestionDevice
from services.adapters.metrics import WorkMetrics

NONE = "none"  # the name of a model that is not served
# The device's thread needs the interpreter between its calls; a wait of 5 ms for the event loop each time is too long.
_SWITCH_S = 0.0005
_log = log.get("work")


class WorkerLoop(Protocol):
    """A loop that reads one family's lanes and executes the jobs."""

    async def run(self, stopping: asyncio.Event, drain_s: float) -> None:
        """Work until `stopping`; then finish running jobs within `drain_s` seconds, and hand over the rest."""


class ExtraModel(Protocol):
    """A model that a process serves in addition to its encoders, on the same device."""

    def load(self) -> None:
        """Load and measure the model, on the device's thread; ConfigError names a setting that cannot be met."""

    async def attach(self, bus: Bus, device: DeviceQueue) -> WorkerLoop:
        """Publish the model's card, register, and return the model's loop."""


def load_models(config: WorkerConfig) -> list[EncoderModel]:
    """Load the encoder, unless it is "none", and the cross-encoder, if one is configured.

    ConfigError names a setting that cannot be met.
    """
    for name in ("embed_slo_s", "alpha", "alpha_tokens", "beta", "sigma", "drain_s"):
        if not math.isfinite(getattr(config, name)):
            raise ConfigError(
                f"SPILLWAY_{name.upper()} is {getattr(config, name)}; expected a finite number"
            )
    served = config.embed_model != NONE
    if config.device == "sim":
        if not served:
            return []
        from engine.encoder.simulated import SimulatedEncoder  # noqa: PLC0415 - each device loads only what it needs

        return [
            SimulatedEncoder(
                alpha_items_s=config.alpha,
                alpha_tokens_s=config.alpha_tokens,
                beta_s=config.beta,
                sigma=config.sigma,
            )
        ]
    from engine.models.encoders.encoder import Encoder  # noqa: PLC0415

    cache = Path(config.data_dir) / "cache" / "precision.json"

    def load(name: str) -> Encoder:
        model = Encoder.load(
            name, device=config.device, dtype=config.dtype, threads=config.threads, cache=cache
        )
        model.times = config.slowdown
        return model

    models = [load(config.embed_model)] if served else []
    if models and models[0].reranks:
        raise ConfigError(
            f"SPILLWAY_EMBED_MODEL is {config.embed_model!r}, a cross-encoder; expected an encoder "
            "(set a cross-encoder as SPILLWAY_RERANK_MODEL)"
        )
    if config.rerank_model:
        models.append(load(config.rerank_model))
        if not models[-1].reranks:
            raise ConfigError(
                f"SPILLWAY_RERANK_MODEL is {config.rerank_model!r}, which has no classification head; "
                "expected a cross-encoder, or nothing: the encoder then reranks by cosine"
            )
    return list(models)


async def serve(
    config: WorkerConfig,
    instance: str,
    stopping: asyncio.Event,
    *,
    service: str,
    lane: str,
    metrics: WorkMetrics,
    beside: ExtraModel | None = None,
) -> None:
    """Run one worker of `service` on `lane` until `stopping`, then drain; ConfigError if it cannot start.

    TaskEnded if a background task ended without being told to.
    """
    sys.setswitchinterval(_SWITCH_S)
    worker = _Worker(config, service, stopping, lane, metrics, beside)
    waits_for = ("model", "bus", "lane")
    try:
        await serve_on_bus(
            config,
            service,
            instance,
            stopping,
            worker.run,
            waits_for=waits_for,
            load=worker.load,
        )
    finally:
        worker.close()


class _Worker:
    """One worker process, from the loading of its models to the end of its drain."""

    def __init__(
        self,
        config: WorkerConfig,
        service: str,
        stopping: asyncio.Event,
        lane: str,
        metrics: WorkMetrics,
        beside: ExtraModel | None,
    ) -> None:
        self._config, self._service, self._stopping = config, service, stopping
        self._lane, self._metrics, self._beside = lane, metrics, beside
        # The router and the bus serve every request, also the refused ones; so encoders run at lower priority, on the
        # cores that router and bus leave. A generator's steps are too short to be interrupted.
        self.device = DeviceQueue(ended=metrics.device_ended, yields=beside is None)
        # The second thread of a CPU, which computes questions of searches beside the device's tasks.
        self._questions: DeviceQueue | None = None
        self._encoders: list[tuple[EncoderModel, EncoderCapacity]] = []
        self._loops: list[WorkerLoop] = []
        self._finders: list[DepthFinder] = []

    async def load(self, health: Health) -> None:
        """Load and measure all models, on the device's thread."""
        config, device = self._config, self.device
        health.set("model", ready=False, why="loading weights, choosing the precision")
        models = await device.run(load_models, config, kind="start")
        if not models and self._beside is None:
            raise ConfigError(
                f"SPILLWAY_EMBED_MODEL is {NONE!r} and no other model is configured: {self._service} would serve "
                "nothing; expected an encoder, or for a gpu_worker a generator (SPILLWAY_CHAT_MODEL)"
            )
        health.set("model", ready=False, why="measuring its speed")
        measure = partial(calibrate, slo_s=config.embed_slo_s, takes_all=counts_queries(config))
        self._encoders = [
            (model, await device.run(measure, model, kind="start")) for model in models
        ]
        if self._beside is not None:
            health.set("model", ready=False, why="loading the generator, measuring its speed")
            await device.run(self._beside.load, kind="start")
        health.set("model", ready=True)
        for model, capacity in self._encoders:
            _log.info(
                "model_ready",
                model=model.name,
                device=model.device,
                dtype=model.dtype,
                **capacity.cost._asdict(),
                **{f"depth_{unit}": most for unit, most in capacity.depth._asdict().items()},
            )

    async def _attach(self, bus: Bus, model: EncoderModel, capacity: EncoderCapacity) -> None:
        """Publish an encoder's card, register a worker in the encoder's family, and return its loop."""
        config = self._config
        card = model.card(created_ms=bus.clock.now_ms(), partitions=config.partitions)
        await Models(bus).publish(card, model.tokenizer_json())
        family = Family(card.family, config.partition)
        finds_depth = counts_queries(config) and not model.reranks
        record = WorkerRecord(
            worker=incarnation_name(self._lane),
            classes=[self._lane],
            device=model.device,
            depth_items=0,
            depth_tokens=0,
            closed=finds_depth,
            fingerprint=model.fingerprint,
            started_ms=bus.clock.now_ms(),
            pid=os.getpid(),
            service=self._service,
        )
        worker = Worker(bus, family, with_capacity(record, capacity))
        await worker.start()
        if finds_depth:
            self._finders.append(DepthFinder(bus, worker, model, capacity))
        metrics = self._metrics.on(lane_label(family, self._lane), model.name)
        metrics.publish(worker.record)
        self._loops.append(
            EmbeddingLoop(
                worker,
                model,
                capacity,
                clock=bus.clock,
                device=self.device,
                metrics=metrics,
                questions=self._question_device(model),
            )
        )

    def _question_device(self, model: EncoderModel) -> QuestionDevice | None:
        """Return what computes an encoder's questions beside its batches; None if its device can only take turns."""
        beside = None if model.reranks else model.beside()
        if beside is None:
            return None
        self._questions = self._questions or DeviceQueue(ended=self._metrics.beside_ended)
        return QuestionDevice(beside, self._questions)

    def close(self) -> None:
        """End the threads that compute."""
        for queue in (self.device, self._questions):
            if queue is not None:
                queue.close()

    async def run(self, bus: Bus, health: Health) -> None:
        """Register, and run all loops until `stopping` and through the drain."""
        for model, capacity in self._encoders:
            await self._attach(bus, model, capacity)
        if self._beside is not None:
            self._loops.append(await self._beside.attach(bus, self.device))
        finders = self._finders
        health.set("bus", ready=True)
        health.set("lane", ready=not finders, why="" if not finders else "probing its depth")
        watch = bus.supervisor.process(watch_bus(bus, health, self._stopping), "watch")
        try:
            async with asyncio.TaskGroup() as group:
                for loop in self._loops:
                    group.create_task(loop.run(self._stopping, self._config.drain_s))
                for finder in finders:
                    await finder.find(self._stopping)
                health.set("lane", ready=True)
        finally:
            await bus.supervisor.end(watch)
