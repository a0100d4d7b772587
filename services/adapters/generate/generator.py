"""The generator of one gpu_worker: load and measure a model, publish and register it, and make its loop."""

from __future__ import annotations

import math
import os

from common import log
from common.bus import Bus
from common.bus.metrics import lane_label
from common.config import WorkerConfig
from common.errors import ConfigError
from common.ids import Family
from common.pages.store import PageStore
from common.registry.models import Models
from common.wire.registry import WorkerRecord
from common.worker.incarnation import incarnation_name
from common.worker.worker import Worker
from engine.decoder.capacity import DecoderCapacity, measure
from engine.decoder.engine import SEVERAL, DecoderEngine
from engine.decoder.executor.interface import Executor
from engine.decoder.kv.offload import CachePolicy
from engine.decoder.scheduler import StepLimits
from engine.device import DeviceQueue
from services.adapters.generate.loop import GenerationLoop, with_capacity
from services.adapters.generate.metrics import LANE, EngineMetrics
from services.adapters.metrics import WorkMetrics
from services.adapters.worker import NONE

_log = log.get("engine")


class Generator:
    """The model that a gpu_worker serves beside its encoders; `load` first, on the compute thread, then `attach`."""

    def __init__(self, config: WorkerConfig, service: str, metrics: WorkMetrics) -> None:
        if not math.isfinite(config.chat_slo_s):
            raise ConfigError(
                f"SPILLWAY_CHAT_SLO_S is {config.chat_slo_s}; expected a finite number"
            )
        self._config, self._service, self._work = config, service, metrics
        self._executor: Executor | None = None
        self._capacity: DecoderCapacity | None = None

    @classmethod
    def of(cls, config: WorkerConfig, service: str, metrics: WorkMetrics) -> Generator | None:
        """Return the configured generator, or None if none is."""
        return None if config.chat_model in {"", NONE} else cls(config, service, metrics)

    def load(self) -> None:
        """Load the model and measure its steps; ConfigError if a setting cannot be met."""
        config = self._config
        self._executor = executor = _executor(config)
        self._capacity = capacity = DecoderCapacity(
            measure(executor, config.step_tokens, config.max_running),
            slo_s=config.chat_slo_s,
            itl_s=config.itl_s,
            context=executor.shape.context,
            fixed=executor.device == "sim",
        )
        _log.info(
            "generator_ready",
            model=executor.name,
            device=executor.device,
            dtype=executor.dtype,
            pages=executor.shape.pages,
            context=executor.shape.context,
            token_s=capacity.token_s,
            step_s=capacity.cost.parts,
            **{f"depth_{name}": value for name, value in capacity.depth._asdict().items()},
        )

    async def attach(self, bus: Bus, device: DeviceQueue) -> GenerationLoop:
        """Publish the card, register in the model's family, and return the loop."""
        executor, capacity, config = self._executor, self._capacity, self._config
        assert executor is not None
        assert capacity is not None
        card = executor.card(created_ms=bus.clock.now_ms(), partitions=config.partitions)
        await Models(bus).publish(card, executor.tokenizer_json())
        record = WorkerRecord(
            worker=incarnation_name(LANE),
            classes=[LANE],
            device=executor.device,
            depth_items=0,
            depth_tokens=0,
            fingerprint=executor.fingerprint,
            started_ms=bus.clock.now_ms(),
            pid=os.getpid(),
            service=self._service,
        )
        family = Family(card.family, config.partition)
        record = with_capacity(record, capacity)
        worker = Worker(bus, family, record, largest_items=1, largest_tokens=1)
        await worker.start()
        metrics = EngineMetrics(self._work.on(lane_label(family, LANE), executor.name))
        shape = executor.shape
        for tier, pages in (("device", shape.pages), ("host", shape.host_pages)):
            metrics.page_bytes.labels(tier).set(sum(shape.page_bytes) * pages)
        metrics.work.depth_items.set(capacity.depth.items)
        metrics.work.depth_tokens.set(capacity.depth.tokens)
        engine = DecoderEngine(
            executor,
            capacity,
            StepLimits(config.step_tokens, config.max_running),
            device,
            clock=bus.clock,
            cache=CachePolicy(config.eviction, config.page_publish, config.pages_ttl_s),
            store=PageStore.of(config, bus.clock),
            lookup=config.prompt_lookup and executor.exact,
            several=SEVERAL,
        )
        return GenerationLoop(worker, engine, metrics)


def _executor(config: WorkerConfig) -> Executor:
    if config.device == "sim":
        from engine.decoder.executor.simulated_executor import SimulatedExecutor  # noqa: PLC0415 - each device loads only what it needs

        return SimulatedExecutor(alpha_s=config.alpha, beta_s=config.beta, kv_bytes=config.kv_bytes)
    from engine.decoder.executor.torch_executor import TorchExecutor  # noqa: PLC0415

    return TorchExecutor.load(
        config.chat_model,
        device=config.device,
        dtype=config.chat_dtype,
        threads=config.threads,
        kv_bytes=config.kv_bytes,
        host_bytes=None if config.host_kv_bytes == "auto" else config.host_kv_bytes,
        exact=config.exact,
        form=config.page_form,
    )
