"""A worker finds its depth by probes to its own lane, is nobody's meanwhile, and does not probe again."""

from __future__ import annotations

import asyncio
from typing import Self

import msgspec
from prometheus_client import CollectorRegistry

from common.bus import Bus, NewJob, keys
from common.bus.admission import Terms
from common.ids import Family, job_id, ulid
from common.wire.message import decode
from common.wire.registry import DepthRecord, WorkerRecord
from common.worker.incarnation import incarnation_name
from common.worker.worker import Worker as FamilyWorker
from engine.device import DeviceQueue
from engine.encoder.capacity import calibrate
from engine.encoder.simulated import SimulatedEncoder
from services.adapters.encode.depth_finder import DepthFinder
from services.adapters.encode.loop import EmbeddingLoop, with_capacity
from services.adapters.metrics import WorkMetrics

FAMILY = Family("embed.sim")
WAIT_S = 60.0


class Worker:
    """A sim device's loop that begins closed, as workers do for policies that count queries."""

    def __init__(self, bus: Bus, lane: str, alpha_s: float, beta_s: float, slo_s: float) -> None:
        self.model = SimulatedEncoder(alpha_items_s=alpha_s, beta_s=beta_s)
        self.capacity = calibrate(self.model, slo_s, takes_all=True)
        record = WorkerRecord(
            worker=incarnation_name(lane), classes=[lane], device="sim", depth_items=0,
            depth_tokens=0, fingerprint=self.model.fingerprint,
        )  # fmt: skip
        record = msgspec.structs.replace(with_capacity(record, self.capacity), closed=True)
        self.consumer = FamilyWorker(bus, FAMILY, record)
        self.device = DeviceQueue()
        self.stopping = asyncio.Event()
        self.loop = EmbeddingLoop(
            self.consumer, self.model, self.capacity, clock=bus.clock, device=self.device,
            metrics=WorkMetrics(CollectorRegistry()).on(f"embed.sim/0:{lane}", "sim"),
        )  # fmt: skip
        self.finder = DepthFinder(bus, self.consumer, self.model, self.capacity)

    async def __aenter__(self) -> Self:
        await self.consumer.start()
        self.task = asyncio.create_task(self.loop.run(self.stopping, 5.0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stopping.set()
        async with asyncio.timeout(WAIT_S):
            await self.task
        self.device.close()


async def ask(bus: Bus) -> str:
    """Ask the door for one query by depths in queries; return the lane or why not."""
    job = NewJob(job_id(FAMILY, ulid()), b"", 1, 75)
    admission = await bus.admission.admit(
        [job], classes=("gpu", "cpu"), router="r", tenant="t",
        deadline_ms=bus.clock.now_ms() + 60_000, terms=Terms("count"),
    )  # fmt: skip
    if admission.outcome == "admitted":
        await bus.control.cancel(job.id)
    return admission.lane or admission.reason


async def found(bus: Bus) -> list[DepthRecord]:
    """Return what is kept of the family's devices."""
    return [
        decode(raw, DepthRecord) for raw in await bus.connection.call("HVALS", keys.depths(FAMILY))
    ]


async def test_probes_then_opens(bus: Bus) -> None:
    """While it probes nobody else gets in; then its depth is kept, published, and read at the next start."""
    async with Worker(bus, "gpu", 0.004, 0.01, 0.15) as first:
        finding = asyncio.create_task(first.finder.find(first.stopping))
        refused = set()
        while not finding.done():
            answer = await ask(bus)
            if first.consumer.record.closed:  # it opened while asked: either answer is right then
                refused.add(answer)
            await asyncio.sleep(0.02)
        await finding
        (kept,) = await found(bus)
        batches = first.consumer.record.batches
        assert refused == {"no_worker"}
        assert batches >= len(kept.points)
        assert 0 < kept.depth <= 35  # no device of this cost answers 36 within its objective
        assert first.consumer.record.depth_queries == kept.depth
        bus.workers.forget(FAMILY)
        assert await ask(bus) == "gpu"
    async with Worker(bus, "gpu", 0.004, 0.01, 0.15) as second:
        await second.finder.find(second.stopping)
        assert await found(bus) == [kept]
        assert second.consumer.record.depth_queries == kept.depth


async def test_a_device_that_always_misses(bus: Bus) -> None:
    """Where one query misses the objective the depth is 0, and nothing is admitted."""
    async with Worker(bus, "gpu", 0.01, 0.2, 0.1) as worker:
        await worker.finder.find(worker.stopping)
        (kept,) = await found(bus)
        assert (kept.by_line, kept.depth) == (0, 0)
        bus.workers.forget(FAMILY)
        assert await ask(bus) == "depth"


async def test_the_overflow_is_tuned_beside_the_accelerator(bus: Bus) -> None:
    """The CPU's worker waits for the accelerator's depth and probes with both running."""
    async with (
        Worker(bus, "gpu", 0.004, 0.01, 0.15) as gpu,
        Worker(bus, "cpu", 0.02, 0.02, 0.15) as cpu,
    ):
        both = asyncio.gather(gpu.finder.find(gpu.stopping), cpu.finder.find(cpu.stopping))
        async with asyncio.timeout(WAIT_S):
            await both
        records = gpu.consumer.record, cpu.consumer.record
        assert not any(record.closed for record in records)
        assert records[0].depth_queries <= 35
        assert records[1].depth_queries <= 6
        probed = max(await found(bus), key=lambda one: one.by_line)
        # Beside what it was probed with alone, the accelerator has answered in every round of the CPU's.
        assert records[0].batches > len(probed.points) + 5
