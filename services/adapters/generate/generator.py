"""The generator of one gpu_worker: loads and measures a model, publishes and registers it, and builds its loop."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from common import log
from common.bus import Bus
from common.bus.metrics import lane_label
from common.config import WorkerConfig
from common.devices import detect
from common.errors import ConfigError
from common.ids import Family
from common.pages.store import PageStore
from common.placement import Placement, place_host
from common.registry.models import Models
from common.types.helper_address import HelperAddress
from common.wire.registry import WorkerRecord
from common.worker.incarnation import incarnation_name
from common.worker.worker import Worker
from engine.decoder.capacity import DecoderCapacity, measure
from engine.decoder.engine import SEVERAL, DecoderEngine
from engine.decoder.executor.interface import Executor, StagedExecutor
from engine.decoder.kv.offload import CachePolicy
from engine.decoder.offload.costs import OffloadProfile, keep, kept
from engine.decoder.offload.homes import HomePlanner
from engine.decoder.offload.plan import OffloadMode
from engine.decoder.offload.probes import measure_stages
from engine.decoder.scheduler import StepLimits
from engine.device import DeviceQueue
from services.adapters.generate.loop import GenerationLoop, with_capacity
from services.adapters.generate.metrics import LANE, EngineMetrics
from services.adapters.metrics import WorkMetrics
from services.adapters.worker import NONE

if TYPE_CHECKING:
    from engine.decoder.executor.torch_executor import TorchExecutor

_log = log.get("engine")
# On a CPU, device and host are the same memory: the host's part only lies on the way to the tiers below.
HOST_PART = 1 / 16


class Generator:
    """The chat model that a gpu_worker serves beside its encoders: call `load` on the compute thread, then `attach`."""

    def __init__(self, config: WorkerConfig, service: str, metrics: WorkMetrics) -> None:
        if not math.isfinite(config.chat_slo_s):
            raise ConfigError(
                f"SPILLWAY_CHAT_SLO_S is {config.chat_slo_s}; expected a finite number"
            )
        self._config, self._service, self._work = config, service, metrics
        self._executor: Executor | None = None
        self._capacity: DecoderCapacity | None = None
        self._homes: HomePlanner | None = None

    @classmethod
    def of(cls, config: WorkerConfig, service: str, metrics: WorkMetrics) -> Generator | None:
        """Return the configured generator, or None if none is configured."""
        return None if config.chat_model in {"", NONE} else cls(config, service, metrics)

    def load(self) -> None:
        """Load the model and measure its steps; ConfigError names a setting that cannot be met."""
        config = self._config
        if config.host_split and config.host_attention != "auto":
            raise ConfigError(
                f"SPILLWAY_HOST_SPLIT is on and SPILLWAY_HOST_ATTENTION is {config.host_attention!r}: only auto plans "
                "sequences over both tiers; expected auto, or SPILLWAY_HOST_SPLIT off"
            )
        if config.host_attention == "off":
            executor = _executor(config)
        else:
            executor = staged = _staged(config)
            self._homes = _homes(config, staged)
        self._executor = executor
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
            host_attention=config.host_attention,
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
            homes=self._homes,
        )
        return GenerationLoop(worker, engine, metrics)


def _executor(config: WorkerConfig) -> Executor:
    if config.device == "sim":
        from engine.decoder.executor.simulated_executor import SimulatedExecutor  # noqa: PLC0415 - each device loads only what it needs

        return SimulatedExecutor(alpha_s=config.alpha, beta_s=config.beta, kv_bytes=config.kv_bytes)
    return _loaded(config)


def _staged(config: WorkerConfig) -> StagedExecutor:
    """Return the executor if it can attend on the host, else raise ConfigError."""
    if config.device == "sim":
        raise ConfigError(
            f"SPILLWAY_HOST_ATTENTION is {config.host_attention!r} on the sim device, which attends to nothing; "
            "expected off"
        )
    return _loaded(config, place_host(detect(), config.host_cores))


def _homes(config: WorkerConfig, executor: StagedExecutor) -> HomePlanner:
    """Return the planner of homes, with stored costs, or costs measured now."""
    folder = Path(config.data_dir) / "cache"
    machine = " ".join(
        (platform.node(), executor.device, executor.dtype, str(config.threads), config.host_cores, str(detect().cores))
    )  # fmt: skip
    points = kept(folder, machine, executor.fingerprint)
    if points is None:
        points = measure_stages(executor, config.step_tokens, config.max_running)
        keep(folder, machine, executor.fingerprint, points)
    asked = config.host_attention
    mode = OffloadMode.ASYMMETRIC if asked == "auto" else OffloadMode(asked)
    return HomePlanner(
        executor, OffloadProfile(points), mode, step_s=config.itl_s, split=config.host_split
    )


def _loaded(config: WorkerConfig, host: Placement | None = None) -> TorchExecutor:
    from engine.decoder.executor.torch_executor import TorchExecutor  # noqa: PLC0415

    return TorchExecutor.load(
        config.chat_model,
        device=config.device,
        dtype=config.chat_dtype,
        threads=config.threads,
        kv_bytes=config.kv_bytes,
        host_bytes=_host_bytes(config, attends=host is not None),
        exact=config.exact,
        form=config.page_form,
        host_threads=host.threads if host else 0,
        host_cores=host.cores if host else (),
        helper=HelperAddress.of(config.data_dir, config.host_socket, config.host_secret)
        if host
        else None,
        passage_bytes=config.passage_kv_bytes,
    )


def _host_bytes(config: WorkerConfig, *, attends: bool) -> int | None:
    """Return the bytes of the host's pages; None leaves them to the executor, as where the host `attends`."""
    from engine.kernels.page_memory import SHARE_CPU, available_memory  # noqa: PLC0415 - imports torch
    from engine.torch_setup import place_of  # noqa: PLC0415 - imports torch

    if config.host_kv_bytes != "auto":
        return config.host_kv_bytes
    if attends or place_of(config.device).type != "cpu":
        return None
    return int(HOST_PART * (config.kv_bytes or SHARE_CPU * available_memory()))
