"""Assemble a worker: load, warm, calibrate, register, work, drain; the same for both lanes."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from common import log
from common.bus import Bus
from common.bus.metrics import lane_label
from common.bus.startup import open_bus
from common.clock import SystemClock
from common.config import WorkerConfig
from common.errors import ConfigError
from common.health import Health
from common.ids import Family
from common.registry.models import Models
from common.supervisor import Supervisor
from common.wire.registry import WorkerRecord
from common.worker.consumer import Consumer
from engine.device import DeviceQueue
from engine.encoder.calibration import calibrate
from engine.encoder.capacity import EncoderCapacity
from engine.encoder.model import EncoderModel
from services.adapters.encode.depth_finder import DepthFinder, counts_queries
from services.adapters.encode.loop import EmbeddingLoop
from services.adapters.metrics import WorkMetrics

NONE = "none"  # the name of a model that is not served
# Computing takes the interpreter between its calls; it must not wait 5 ms each time behind the event loop.
_SWITCH_S = 0.0005
_WATCH_S = 0.5
_DOWN_S = 3.0
_log = log.get("work")


class WorkerLoop(Protocol):
    """What reads one family's lanes and works them off."""

    async def run(self, stopping: asyncio.Event, drain_s: float) -> None:
        """Work until `stopping`; then end within `drain_s` what runs, and hand over the rest."""
        ...


class ExtraModel(Protocol):
    """What a process serves beside its encoders, on the same compute thread."""

    def load(self) -> None:
        """Load and measure, on the compute thread; ConfigError says what cannot be had."""
        ...

    async def attach(self, bus: Bus, thread: DeviceQueue) -> WorkerLoop:
        """Publish its card, register, and return its loop."""
        ...


def load_models(config: WorkerConfig) -> list[EncoderModel]:
    """Load the encoder, and the cross-encoder if one is configured; ConfigError says what cannot be had.

    An encoder named "none" is not served.
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

    TaskEnded if a background task ended by itself.
    """
    sys.setswitchinterval(_SWITCH_S)
    async with Supervisor(stopping) as supervisor:
        health = Health(
            service,
            instance=instance,
            data_dir=config.data_dir,
            waits_for=("model", "bus", "lane"),
            supervisor=supervisor,
        )
        await _serve(config, stopping, health, lane, metrics, beside)


async def _serve(
    config: WorkerConfig,
    stopping: asyncio.Event,
    health: Health,
    lane: str,
    metrics: WorkMetrics,
    beside: ExtraModel | None,
) -> None:
    service = health.service
    runner = await health.serve(config.health_host, config.health_port)
    thread = DeviceQueue()
    try:
        health.set("model", ready=False, why="loading weights, choosing the precision")
        models = await thread.run(load_models, config)
        if not models and beside is None:
            raise ConfigError(
                f"SPILLWAY_EMBED_MODEL is {NONE!r} and no other model is configured: {service} would serve nothing; "
                "expected an encoder, or for a gpu_worker a generator (SPILLWAY_CHAT_MODEL)"
            )
        health.set("model", ready=False, why="measuring its speed")
        count = partial(calibrate, takes_all=counts_queries(config))
        measured = [await thread.run(count, model, config.embed_slo_s) for model in models]
        if beside is not None:
            health.set("model", ready=False, why="loading the generator, measuring its speed")
            await thread.run(beside.load)
        health.set("model", ready=True)
        for model, result in zip(models, measured, strict=True):
            _log.info(
                "model_ready",
                model=model.name,
                device=model.device,
                dtype=model.dtype,
                **result.cost._asdict(),
                **{f"depth_{k}": v for k, v in result.depth._asdict().items()},
            )
        bus = await open_bus(config, SystemClock(), health, stopping)
        if bus is None:
            return
        try:
            parts = (bus, health, thread, metrics)
            await _work(
                config,
                stopping,
                list(zip(models, measured, strict=True)),
                service,
                lane,
                parts,
                beside,
            )
        finally:
            await bus.close()
    finally:
        thread.close()
        await runner.cleanup()


async def _work(
    config: WorkerConfig,
    stopping: asyncio.Event,
    models: list[tuple[EncoderModel, EncoderCapacity]],
    service: str,
    lane: str,
    parts: tuple[Bus, Health, DeviceQueue, WorkMetrics],
    beside: ExtraModel | None,
) -> None:
    bus, health, thread, metrics = parts
    loops: list[WorkerLoop] = []
    finders: list[DepthFinder] = []
    for model, measured in models:
        card = model.card(created_ms=bus.clock.now_ms(), partitions=config.partitions)
        await Models(bus).publish(card, model.tokenizer_json())
        family = Family(card.family, config.partition)
        counts = counts_queries(config) and not model.reranks
        record = _record(bus, model, measured, service, lane)
        consumer = Consumer(bus, family, msgspec.structs.replace(record, closed=counts))
        await consumer.start()
        if counts:
            finders.append(DepthFinder(bus, consumer, model, measured))
        mine = metrics.on(lane_label(family, lane), model.name)
        mine.tell(consumer.record)
        loops.append(
            EmbeddingLoop(
                consumer,
                model,
                measured,
                clock=bus.clock,
                thread=thread,
                metrics=mine,
            )
        )
    if beside is not None:
        loops.append(await beside.attach(bus, thread))
    health.set("bus", ready=True)
    health.set("lane", ready=not finders, why="" if not finders else "probing its depth")
    watch = bus.supervisor.process(_watch(bus, health, stopping), "watch")
    try:
        async with asyncio.TaskGroup() as group:
            for loop in loops:
                group.create_task(loop.run(stopping, config.drain_s))
            for finder in finders:
                await finder.find(stopping)
            health.set("lane", ready=True)
    finally:
        await bus.supervisor.end(watch)


def _record(
    bus: Bus, model: EncoderModel, pace: EncoderCapacity, service: str, lane: str
) -> WorkerRecord:
    record = WorkerRecord(
        worker=Consumer.incarnation(lane),
        classes=[lane],
        device=model.device,
        depth_items=0,
        depth_tokens=0,
        fingerprint=model.fingerprint,
        started_ms=bus.clock.now_ms(),
        pid=os.getpid(),
        service=service,
    )
    return pace.record(record)


async def _watch(bus: Bus, health: Health, stopping: asyncio.Event) -> None:
    """Keep readiness true to the bus, and unready from the moment of the stop."""
    while not stopping.is_set():
        down_s = bus.connection.down_s()
        health.set("bus", down_s < _DOWN_S, f"Redis has been away for {down_s:.0f} s")
        try:
            async with asyncio.timeout(_WATCH_S):
                await stopping.wait()
        except TimeoutError:
            continue
    health.draining()
