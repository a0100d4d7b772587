"""R1: latency added by router, bus and worker hop, also beside 1,000 open streams and beside pages that move.

And the cost of every hop.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from bench import hops
from bench.document import BenchOptions, Body
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.processes import Service
from bench.workloads.page_traffic import PageTraffic
from bench.workloads.streams import Streams
from loadgen import arrivals, bodies, stats
from loadgen.load import LoadRun, RequestRun
from loadgen.target import Target

RATE = 100.0
DEVICE_S = 0.005
STREAMS = 1000
PAGES_BYTES = 64 << 20  # so little that pages are evicted all the time
PAGES = {"pages moving": math.inf, "pages moving at 64 MB/s": 64e6}
LEVELS: tuple[Literal["process", "machine"], ...] = ("process", "machine")


def run(options: BenchOptions) -> Body:
    """Measure both durability levels, then beside pages, then the hops."""
    body = Body(notes=["Simulated device: exactly 5 ms a batch; its 5 ms are taken off."])
    rows: list[list[str]] = []
    for level in LEVELS:
        with tempfile.TemporaryDirectory(prefix="spillway-r1-") as folder:
            asyncio.run(_level(body, rows, level, options, Path(folder)))
    with tempfile.TemporaryDirectory(prefix="spillway-r1-") as folder:
        asyncio.run(_beside_pages(body, rows, options, Path(folder)))
    columns = ["durability", "arrivals", "open beside it", "requests", "failed"]
    columns += ["p50 [95 %]", "p99 [95 %]", "sent late p99"]
    body.table("Milliseconds added at 100 requests a second, one text of 16 tokens", columns, rows)
    with tempfile.TemporaryDirectory(prefix="spillway-r1-") as folder:
        times = asyncio.run(hops.measure(options.pick(1000, 50), Path(folder)))
    body.table(
        "The request path hop by hop, microseconds, one request at a time",
        ["hop", "what", "p50", "p90", "p99"],
        hops.rows(times),
    )
    body.samples["hops_s"] = times
    return body


async def _level(
    body: Body,
    rows: list[list[str]],
    level: Literal["process", "machine"],
    options: BenchOptions,
    folder: Path,
) -> None:
    seconds = float(options.rounds(60, 5))
    async with (
        LocalMesh(folder, _services(), durability=level) as mesh,
        Target([mesh.url]) as target,
    ):
        load = LoadRun(target, bodies.embed(1, 16, seed=options.seed))
        await load.open(arrivals.steady(RATE), 3.0)
        before = mesh.cpu_seconds()
        done = await load.open(arrivals.steady(RATE), seconds)
        used = {name: value - before[name] for name, value in mesh.cpu_seconds().items()}
        _note(body, rows, level, "steady", "nothing", done)
        if level == "process":
            per = ", ".join(
                f"{name} {value / len(done.samples) * 1e3:.2f}" for name, value in used.items()
            )
            body.notes.append(
                f"CPU milliseconds a request: {per}, load generator "
                f"{done.cpu_s / len(done.samples) * 1e3:.2f}."
            )
        count = options.pick(STREAMS, 50)
        async with Streams(mesh, count) as streams:
            _note(
                body,
                rows,
                level,
                "steady",
                f"{count} streams",
                await load.open(arrivals.steady(RATE), seconds),
            )
            poisson = _poisson(options.seed)
            _note(
                body, rows, level, "Poisson", f"{count} streams", await load.open(poisson, seconds)
            )
        body.notes.append(
            f"{level}: of {count} open event streams {streams.whole} got their outcome when it came."
        )
        body.met[f"{count} open streams, {level}"] = "goal" if streams.whole == count else "missed"


async def _beside_pages(
    body: Body, rows: list[list[str]], options: BenchOptions, folder: Path
) -> None:
    seconds = float(options.rounds(60, 5))
    env = {"SPILLWAY_PAGES_BYTES": str(PAGES_BYTES)}
    mesh = LocalMesh(folder, [*_services(), processes.kv_store()], env=env)
    async with mesh, Target([mesh.url]) as target:
        load = LoadRun(target, bodies.embed(1, 16, seed=options.seed))
        for beside, rate in PAGES.items():
            async with PageTraffic(mesh.pages_url, PAGES_BYTES, rate) as traffic:
                await load.open(arrivals.steady(RATE), 3.0)
                before = {"mover": traffic.cpu_seconds(), **mesh.cpu_seconds()}
                done = await load.open(arrivals.steady(RATE), seconds)
                after = {"mover": traffic.cpu_seconds(), **mesh.cpu_seconds()}
            _note(body, rows, "process", "steady", beside, done)
            used = {name: value - before[name] for name, value in after.items()}
            used["load generator"] = done.cpu_s
            shares = ", ".join(f"{name} {value / done.seconds:.0%}" for name, value in used.items())
            put, got = (
                count / traffic.moved.seconds / 1e6
                for count in (traffic.moved.put, traffic.moved.got)
            )
            body.notes.append(
                f"{beside}: {put:.0f} MB/s put and {got:.0f} MB/s got in the mesh's second Redis, from which kv_store "
                "evicts to its disk. They compete with router, worker and load generator for "
                f"{len(os.sched_getaffinity(0))} cores; shares of one core: {shares}."
            )


def _services() -> list[Service]:
    return [processes.router(), processes.sim_worker(beta_s=DEVICE_S), processes.vector_search()]


def _poisson(seed: int) -> Iterator[float]:
    return arrivals.poisson(RATE, random.Random(seed))


def _note(
    body: Body, rows: list[list[str]], level: str, times: str, beside: str, done: RequestRun
) -> None:
    added = [(s.latency_s - DEVICE_S) * 1e3 for s in done.samples if s.ok]
    failed = len(done.samples) - len(added)
    p50, p99 = stats.interval(added, 50), stats.interval(added, 99)
    late = done.summary()["sent_late_s"]["p99"] * 1e3
    cells = [_cell(found) for found in (p50, p99)]
    rows.append([level, times, beside, str(len(done.samples)), str(failed), *cells, f"{late:.2f}"])
    body.samples[f"{level}/{times}/{beside}"] = added
    if level == "process" and times == "steady":
        body.met[f"p50 beside {beside}"] = stats.verdict(p50, 2.0, 4.0, higher=False)
        body.met[f"p99 beside {beside}"] = stats.verdict(
            p99, 10.0, 20.0, higher=False, width=stats.TAIL
        )
        body.met[f"no failure beside {beside}"] = "missed" if failed else "goal"


def _cell(found: dict[str, Any]) -> str:
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
