"""One process of R2: a router that admits as fast as it can, or a worker that finishes what it reads.

`python -m chaos.r2_role router|worker --redis URL --seed N --tally FILE`. A router appends its counts to the
tally, so that a killed one loses the count of its last admissions only.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from common.bus import Bus, BusDown, NewJob
from common.bus.admission import Terms
from common.clock import SystemClock
from common.config import Common
from common.ids import Family, job_id, ulid
from common.wire.jobs import EmbedWork
from common.wire.message import encode
from common.wire.registry import WorkerRecord
from common.wire.results import EmbedResult
from common.worker.incarnation import incarnation_name
from common.worker.worker import Worker

FAMILY = Family("embed.r2", 0)
CLASSES = ("gpu", "cpu")
TASKS = 64  # clients of one router
FLUSH_EVERY = 50
DEADLINE_MS = 30_000
TERMS = (Terms(), Terms(), Terms("count"), Terms("count", "turns"))


class Tally(msgspec.Struct):
    """What one router has seen since its last line: decisions of each kind, and admissions over depth."""

    admitted: int = 0
    refused: int = 0
    over: list[str] = []


class Tallying:
    """Counts decisions and appends them to a file, some at a time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._tally = Tally()

    def count(self, *, admitted: bool, over: str = "") -> None:
        """Count one decision of admission; `over` describes a violation."""
        if admitted:
            self._tally.admitted += 1
        else:
            self._tally.refused += 1
        if over:
            self._tally.over.append(over)
        if over or self._tally.admitted + self._tally.refused >= FLUSH_EVERY:
            self._file.write(msgspec.json.encode(self._tally) + b"\n")
            self._tally = Tally()


async def route(bus: Bus, rng: random.Random, tally: Tallying, name: str) -> None:
    """Admit jobs of random size by every rule for ever, checking each admission against the depth it was made under."""
    payload = encode(EmbedWork(fingerprint="r2", tokens=[[1]]))
    while True:
        jobs = [
            NewJob(job_id(FAMILY, ulid()), payload, rng.randint(1, 8), rng.randint(1, 400))
            for _ in range(rng.choice((1, 1, 1, 3)))
        ]
        classes = CLASSES if rng.random() < 0.8 else tuple(reversed(CLASSES))
        deadline = bus.clock.now_ms() + DEADLINE_MS
        try:
            done = await bus.admission.admit(
                jobs,
                classes=classes,
                router=name,
                tenant="r2",
                deadline_ms=deadline,
                terms=rng.choice(TERMS),
                spread=rng.random() < 0.3,
            )
        except BusDown:
            await asyncio.sleep(0.1)
            continue
        over = ""
        if done.outcome == "admitted" and not (
            done.held[0] <= done.depth[0] and done.held[1] <= done.depth[1]
        ):
            over = f"{done.lane}: holds {done.held} of {done.depth}"
        tally.count(admitted=done.outcome == "admitted", over=over)
        if done.outcome != "admitted":
            await asyncio.sleep(rng.uniform(0.01, 0.04))


async def work(bus: Bus, rng: random.Random, lane: str) -> None:
    """Finish what is read, and publish another depth now and then."""
    record = WorkerRecord(
        worker=incarnation_name(lane), classes=[lane], device="sim", depth_items=300,
        depth_tokens=20_000, depth_queries=200, alpha_items_s=1e-5, beta_s=1e-4, limit_items=64,
        limit_tokens=2000, slo_s=1.0,
    )  # fmt: skip
    worker = Worker(bus, FAMILY, record, largest_items=8, largest_tokens=400)
    await worker.start()
    result = EmbedResult(dimension=1, vectors=b"\0\0\0\0", tokens=1)
    changed = time.monotonic()
    while True:
        try:
            leases = await worker.reader.read(1024, 64_000)
            await asyncio.gather(*(worker.outbox.finish(lease, result) for lease in leases))
            if time.monotonic() - changed > 0.5:
                changed = time.monotonic()
                items = rng.randint(20, 900)
                fresh = msgspec.structs.replace(
                    worker.record,
                    depth_items=items,
                    depth_tokens=items * rng.randint(20, 80),
                    depth_queries=rng.randint(10, items),
                )
                await worker.incarnation.publish(fresh)
        except BusDown:
            await asyncio.sleep(0.1)


async def main_async(args: argparse.Namespace) -> None:
    """Open the bus and play the role until killed."""
    rng = random.Random(args.seed)
    bus = await Bus.open(Common(redis_url=args.redis), SystemClock())
    if args.role == "worker":
        await work(bus, rng, CLASSES[args.seed % 2])
        return
    tally = Tallying(args.tally)
    async with asyncio.TaskGroup() as group:
        for number in range(TASKS):
            group.create_task(route(bus, rng, tally, f"r2-{args.seed}-{number}"))


def main(run: Callable[..., None] = uvloop.run) -> None:
    """Parse the command line and run until killed."""
    parser = argparse.ArgumentParser("python -m chaos.r2_role", description=__doc__)
    parser.add_argument("role", choices=("router", "worker"))
    parser.add_argument("--redis", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--tally", type=Path)
    run(main_async(parser.parse_args()))


if __name__ == "__main__":
    main()
