"""Measure each hop of an embedding's path: the services' own code, one hop at a time, on a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.mesh.local_mesh import LocalMesh
from common.bus import Bus, NewJob, Notifications
from common.clock import SystemClock
from common.config import Common
from common.ids import Family, job_id, ulid
from common.registry.models import Models
from common.wire.jobs import decode_work
from common.wire.registry import WorkerRecord
from common.wire.results import EmbedResult
from common.wire.workflows import ResponseOptions
from common.worker.incarnation import incarnation_name
from common.worker.leases import Lease
from common.worker.worker import Worker
from engine.encoder.simulated import SimulatedEncoder
from loadgen import bodies, stats
from services.router.cards import Cards
from services.router.responses import json_bodies
from services.router.text import requests
from services.router.text.bodies import RequestLimits

FAMILY = Family("embed.sim", 0)
LIMITS = RequestLimits(2048, 300_000, 32, 8192)
HOPS = {
    "parse and tokenize": "router: JSON body, tokenizer, the job's message",
    "admit": "router to Redis and back: depth checked, job recorded and queued, one script",
    "wait in the lane": "Redis to worker: from the answer of admit to the job in the worker's hands",
    "read the job": "worker: message decoded and checked",
    "finish": "worker to Redis and back: result logged, journal rung, job ended, one script",
    "journal": "Redis to router: from the answer of finish to the outcome in the router's hands",
    "answer": "router: result to JSON",
}


class _Path:
    """One router's side and one worker's side of the bus, in one process, stepped by hand."""

    def __init__(self, router: Bus, worker_bus: Bus, cards: Cards) -> None:
        self.router, self.cards = router, cards
        self.journal = Notifications(router.connection, "hops")
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        record = WorkerRecord(
            worker=incarnation_name("hops"), classes=["gpu"], device="sim",
            depth_items=1000, depth_tokens=100_000, beta_s=0.005,
        )  # fmt: skip
        self.worker = Worker(worker_bus, FAMILY, record)
        self.at = 0.0

    def step(self, hop: str) -> None:
        """Book the time since the last step to `hop`."""
        now = time.perf_counter()
        self.times[hop].append(now - self.at)
        self.at = now

    async def request(self, raw: bytes, vector: bytes) -> None:
        """Take one request along its whole path."""
        specs, default = await self.cards.specs(), await self.cards.embed_default()
        reading = asyncio.create_task(self._read())
        await asyncio.sleep(0.005)
        name = job_id(FAMILY, ulid())
        outcome = asyncio.create_task(self.journal.end(name, self.router.clock.now_ms() + 10_000))
        await asyncio.sleep(0.002)
        self.at = time.perf_counter()
        parcel = requests.embeddings(raw, specs, default, LIMITS).parcels[0]
        self.step("parse and tokenize")
        job = NewJob(name, parcel.payload, parcel.items, parcel.tokens)
        deadline = self.router.clock.now_ms() + 10_000
        await self.router.admission.admit(
            [job], classes=["gpu"], router="hops", tenant="default", deadline_ms=deadline
        )
        self.step("admit")
        lease = (await reading)[0]
        self.step("wait in the lane")
        decode_work(lease.payload)
        self.step("read the job")
        await self.worker.outbox.finish(
            lease, EmbedResult(dimension=384, vectors=vector, tokens=16)
        )
        self.step("finish")
        await outcome
        self.step("journal")
        json_bodies.embeddings(
            ResponseOptions(kind="embed", model="sim", base64=True, tokens=16), 384, [vector]
        )
        self.step("answer")

    async def _read(self) -> list[Lease]:
        while True:
            leases = await self.worker.reader.read(128, 32_768)
            if leases:
                return list(leases)


@asynccontextmanager
async def _path(folder: Path) -> AsyncIterator[_Path]:
    async with LocalMesh(folder, []) as mesh:
        config = Common(redis_url=mesh.redis_url, data_dir=str(folder))
        router, worker = (
            await Bus.open(config, SystemClock()),
            await Bus.open(config, SystemClock()),
        )
        model = SimulatedEncoder(alpha_items_s=0.0, beta_s=0.005)
        await Models(worker).publish(model.card(), model.tokenizer_json())
        path = _Path(router, worker, Cards(router, str(folder)))
        await path.worker.start()
        await path.journal.start()
        try:
            yield path
        finally:
            await path.worker.stop()
            await path.journal.stop()
            await router.close()
            await worker.close()


async def measure(count: int, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of every hop for `count` requests of one text of 16 tokens."""
    requests = bodies.embed(1, 16, seed=1)
    vector = b"\0" * (4 * 384)
    async with _path(folder) as path:
        for number in range(20 + count):
            if number == 20:
                path.times.clear()
            await path.request(requests[number % len(requests)].body, vector)
        return dict(path.times)


def rows(times: dict[str, list[float]]) -> list[list[str]]:
    """Return the table's rows in the order of the path."""
    found = []
    for hop, what in HOPS.items():
        p = stats.percentiles(times[hop])
        found.append([hop, what, *(f"{p[key] * 1e6:.0f}" for key in ("p50", "p90", "p99"))])
    total = stats.percentiles([sum(parts) for parts in zip(*times.values(), strict=True)])
    found.append(["together", "", *(f"{total[key] * 1e6:.0f}" for key in ("p50", "p90", "p99"))])
    return found
