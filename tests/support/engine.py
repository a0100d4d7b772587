"""Two sides of a generation for tests: a desk that admits and reads logs, and a worker in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from common.bus import Admission, Bus, NewJob, Notifications
from common.config import WorkerConfig
from common.ids import Family, job_id, ulid
from common.pages.store import PageStore
from common.types.generation import SamplingParams
from common.wire.jobs import GenerateWork
from common.wire.message import encode
from common.wire.registry import WorkerRecord
from common.wire.results import Event, GenerateResult, Piece, decode_delta, decode_result
from common.worker.incarnation import incarnation_name
from common.worker.worker import Worker as FamilyWorker
from engine.decoder.capacity import DecoderCapacity, measure
from engine.decoder.engine import DecoderEngine
from engine.decoder.executor.interface import (
    EarlyEnd,
    Executor,
    PageLoads,
    SampledToken,
    SequenceInput,
)
from engine.decoder.executor.simulated_executor import NAME, SimulatedExecutor
from engine.decoder.kv.offload import CachePolicy
from engine.decoder.scheduler import StepLimits
from engine.device import DeviceQueue
from services.adapters.generate.loop import GenerationLoop, with_capacity
from services.adapters.generate.metrics import EngineMetrics
from services.adapters.metrics import WorkMetrics

FAMILY = Family(f"chat.{NAME}")
LANE = f"chat.{NAME}/0:gpu"
WAIT_S = 90.0
DEADLINE_S = 300.0
BOUNDS = StepLimits(tokens=64, running=8)


class HeldRunner(SimulatedExecutor):
    """The sim device, which a test can hold before a step, and which fails for prompts that begin with POISON."""

    POISON, NAN = 7, 8

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"alpha_s": 0.0, "beta_s": 0.0} | options)
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[list[SequenceInput]] = []

    def execute(
        self,
        batch: Sequence[SequenceInput],
        loading: PageLoads | None = None,
        early: EarlyEnd | None = None,
    ) -> list[SampledToken | None]:
        assert self.gate.wait(WAIT_S)
        self.batches.append(list(batch))
        if any(rows.positions[0] == 0 and rows.tokens[0] == self.POISON for rows in batch):
            raise RuntimeError("poisoned")
        return super().execute(batch, loading, early)


def work(*prompts: str | list[int], max_new: int = 16, **more: Any) -> GenerateWork:
    """Return work for the sim device (one byte, one token)."""
    lists = [list(p.encode()) if isinstance(p, str) else p for p in prompts]
    options: dict[str, Any] = {"fingerprint": SimulatedExecutor(alpha_s=0, beta_s=0).fingerprint}
    options |= {"scope": "t", "sampling": SamplingParams(temperature=0.0)} | more
    return GenerateWork(prompts=lists, max_new=max_new, **options)


def pieces_of(events: Sequence[Event]) -> list[Piece]:
    """Return the pieces a reader of these events has, each once."""
    found: list[Piece] = []
    for event in events:
        if event.kind == "progress":
            last = found[-1].at if found else -1
            found += [piece for piece in decode_delta(event.data).pieces if piece.at > last]
    return found


def text_of(pieces: Sequence[Piece], choice: int = 0) -> str:
    """Return a choice's delivered text."""
    return "".join(piece.text for piece in pieces if piece.choice == choice)


def tokens_of(pieces: Sequence[Piece], choice: int = 0) -> list[int]:
    """Return a choice's tokens."""
    return [token for piece in pieces if piece.choice == choice for token in piece.tokens]


class Desk:
    """What a router does, in few lines."""

    def __init__(self, bus: Bus, journal: Notifications, family: Family = FAMILY) -> None:
        self.bus, self.journal, self.family = bus, journal, family

    async def admit(
        self, asked: GenerateWork | bytes, *, seconds: float = DEADLINE_S, **more: Any
    ) -> str:
        """Admit one job that must be admitted; returns its id."""
        job = job_id(self.family, ulid())
        admission = await self.ask(job, asked, seconds=seconds, **more)
        assert admission.outcome == "admitted", admission
        return job

    async def ask(
        self, job: str, asked: GenerateWork | bytes, *, seconds: float = DEADLINE_S, **more: Any
    ) -> Admission:
        """Admit a job, counted as a router counts it: items are choices, tokens prompts and all that may be new."""
        items, tokens = 1, 1
        if isinstance(asked, GenerateWork):
            items = len(asked.prompts) * asked.n
            tokens = sum(map(len, asked.prompts)) + items * asked.max_new
        payload = encode(asked) if isinstance(asked, GenerateWork) else asked
        return await self.bus.admission.admit(
            [NewJob(job, payload, items, tokens)],
            classes=("gpu",),
            router="r1",
            tenant="t",
            deadline_ms=self.bus.clock.now_ms() + int(seconds * 1000),
            **more,
        )

    async def end(self, job: str) -> Event:
        """Wait for a job's last event."""
        return await self.journal.end(job, self.bus.clock.now_ms() + int(WAIT_S * 1000))

    async def pieces(self, job: str) -> list[Piece]:
        """Return the pieces logged by now; indices must rise by one, but for a fold."""
        events = await self.bus.jobs.log(job)
        indices = [event.index for event in events]
        assert indices == list(range(indices[0], indices[0] + len(indices))) if indices else True
        return pieces_of(events)

    async def result(self, job: str) -> tuple[list[Piece], GenerateResult]:
        """Wait for a job's result and return all its pieces with it."""
        event = await self.end(job)
        assert event.kind == "result", event
        result = decode_result(event.data)
        assert isinstance(result, GenerateResult)
        return await self.pieces(job), result

    async def text(self, job: str, choice: int = 0) -> str:
        """Wait for a job's result and return one choice's text."""
        return text_of((await self.result(job))[0], choice)

    async def until(self, job: str, tokens: int) -> list[Piece]:
        """Wait until so many tokens of choice 0 are logged."""
        async with asyncio.timeout(WAIT_S):
            while len(tokens_of(found := await self.pieces(job))) < tokens:  # noqa: ASYNC110 - a log rings routers only
                await asyncio.sleep(0.01)
        return found


class Worker:
    """A generation loop in this process, to be started and stopped."""

    def __init__(
        self,
        bus: Bus,
        runner: Executor | None = None,
        bounds: StepLimits = BOUNDS,
        config: WorkerConfig | None = None,
    ) -> None:
        """`config` says how pages are kept, and where those below the host are."""
        self.runner: Any = runner or HeldRunner()
        self.registry = CollectorRegistry()
        self.stopping = asyncio.Event()
        measured = measure(self.runner, bounds.tokens, bounds.running)
        if isinstance(self.runner, HeldRunner):
            self.runner.batches.clear()
        capacity = DecoderCapacity(measured, slo_s=60.0, context=self.runner.shape.context)
        record = WorkerRecord(
            worker=incarnation_name("gpu"),
            classes=["gpu"],
            device=self.runner.device,
            depth_items=0,
            depth_tokens=0,
            fingerprint=self.runner.fingerprint,
        )
        card = self.runner.card(created_ms=0, partitions=1)
        self.consumer = FamilyWorker(
            bus,
            Family(card.family),
            with_capacity(record, capacity),
            largest_items=1,
            largest_tokens=1,
        )
        self.thread = DeviceQueue()
        chosen = config or WorkerConfig()
        engine = DecoderEngine(
            self.runner,
            capacity,
            bounds,
            self.thread,
            clock=bus.clock,
            cache=CachePolicy(chosen.eviction, chosen.page_publish, chosen.pages_ttl_s),
            store=None if config is None else PageStore.of(config, bus.clock),
        )
        metrics = WorkMetrics(self.registry).on(LANE, self.runner.name)
        self.loop = GenerationLoop(self.consumer, engine, EngineMetrics(metrics, self.registry))
        self.task: asyncio.Task[None] | None = None

    @property
    def scheduler(self) -> Any:
        """The loop's scheduler."""
        return self.loop.engine.scheduler

    async def start(self, drain_s: float = 20.0) -> Worker:
        """Register and begin."""
        await self.consumer.start()
        self.task = asyncio.create_task(self.loop.run(self.stopping, drain_s))
        return self

    async def stop(self) -> None:
        """Drain and end."""
        self.stopping.set()
        assert self.task is not None
        async with asyncio.timeout(WAIT_S):
            await self.task
        self.thread.close()

    def value(self, name: str, **labels: str) -> float:
        """Return a metric's value."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def generated(self) -> float:
        """Return how many tokens this worker has generated."""
        return self.value("spillway_tokens_total", model=NAME, kind="output")

    def no_page_held(self) -> bool:
        """True if every page is free or only cached."""
        return all(pool.used == 0 for pool in self.scheduler.table.pools)


def ended(outcome: str) -> float:
    """Return how many generations have ended so, at any worker of this process."""
    labels = {"lane": LANE, "outcome": outcome}
    return REGISTRY.get_sample_value("spillway_jobs_total", labels) or 0.0


@asynccontextmanager
async def running(bus: Bus, runner: Executor | None = None, **more: Any) -> AsyncIterator[Worker]:
    """Run one worker and drain it at the end."""
    worker = await Worker(bus, runner, **more).start()
    try:
        yield worker
    finally:
        if isinstance(worker.runner, HeldRunner):
            worker.runner.gate.set()
        await worker.stop()
