"""R1: latency added by router, bus and worker hop, also beside 1,000 open streams and beside pages that move.

And the hops that it is made of.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from bench import hops, ideal_queue
from bench.document import BenchOptions, Body
from bench.mesh import processes
from bench.mesh.bare_hops import bare_hops
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
ARRIVALS = ("steady", "Poisson")
# Milliseconds added at the median and the 99th percentile; a must is twice as much. Poisson arrivals are judged.
GOALS = {"nothing": (1.3, 5.0)} | dict.fromkeys(PAGES, (2.0, 10.0))
ADDS_UP = 0.1


def run(options: BenchOptions) -> Body:
    """Measure both durability levels, then beside pages, then the hops."""
    body = Body()
    body.notes.append(
        "Simulated device: exactly 5 ms a batch of any size; its 5 ms are taken off. With Poisson arrivals 45 of 100 "
        "requests find it busy. What each would wait for a device that nothing delays, computed from the times when "
        "requests were due (`bench/ideal_queue.py`), is taken off as well; beside it stands the latency with it."
    )
    rows: list[list[str]] = []
    for level in LEVELS:
        with tempfile.TemporaryDirectory(prefix="spillway-r1-") as folder:
            asyncio.run(_level(body, rows, level, options, Path(folder)))
    with tempfile.TemporaryDirectory(prefix="spillway-r1-") as folder:
        asyncio.run(_beside_pages(body, rows, options, Path(folder)))
    with tempfile.TemporaryDirectory(prefix="spillway-r1-") as folder:
        asyncio.run(_bare(body, options, Path(folder)))
    columns = ["durability", "arrivals", "open beside it", "requests", "failed"]
    columns += ["p50 [95 %]", "p99 [95 %]", "with the device's queue: p50 / p99", "sent late p99"]
    body.table("Milliseconds added at 100 requests a second, one text of 16 tokens", columns, rows)
    for times in ARRIVALS:
        with tempfile.TemporaryDirectory(prefix="spillway-r1-") as folder:
            asyncio.run(_hops(body, times, options, Path(folder)))
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
        for times in ARRIVALS:
            before = mesh.cpu_seconds()
            done = await load.open(_times(times, options.seed), seconds)
            used = {name: value - before[name] for name, value in mesh.cpu_seconds().items()}
            _note(body, rows, level, times, "nothing", done)
            per = ", ".join(
                f"{name} {value / len(done.samples) * 1e3:.2f}" for name, value in used.items()
            )
            body.notes.append(
                f"{level}, {times}: CPU milliseconds a request: {per}, load generator "
                f"{done.cpu_s / len(done.samples) * 1e3:.2f}."
            )
        count = options.pick(STREAMS, 50)
        async with Streams(mesh, count) as streams:
            done = await load.open(_times("Poisson", options.seed), seconds)
            _note(body, rows, level, "Poisson", f"{count} streams", done)
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
                _note(
                    body,
                    rows,
                    "process",
                    "steady",
                    beside,
                    await load.open(_times("steady", options.seed), seconds),
                )
                before = {"mover": traffic.cpu_seconds(), **mesh.cpu_seconds()}
                done = await load.open(_times("Poisson", options.seed), seconds)
                after = {"mover": traffic.cpu_seconds(), **mesh.cpu_seconds()}
            _note(body, rows, "process", "Poisson", beside, done)
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


async def _bare(body: Body, options: BenchOptions, folder: Path) -> None:
    """Measure the same load on processes that pass the requests on and do nothing else."""
    seconds, rows = float(options.rounds(60, 5)), []
    async with LocalMesh(folder, []) as mesh:
        socket = mesh.redis_url.removeprefix("unix://")
        async with bare_hops(socket, DEVICE_S) as url, Target([url]) as target:
            load = LoadRun(target, bodies.embed(1, 16, seed=options.seed))
            await load.open(arrivals.steady(RATE), 3.0)
            for times in ARRIVALS:
                added, _ = _added(await load.open(_times(times, options.seed), seconds))
                body.samples[f"bare/{times}"] = added
                rows.append([times, *(_cell(stats.interval(added, q)) for q in (50, 99))])
    body.table(
        "Milliseconds added by the machine alone: the same hops with nothing done on them (`bench/mesh/bare_hops.py`)",
        ["arrivals", "p50 [95 %]", "p99 [95 %]"],
        rows,
    )


async def _hops(body: Body, times: str, options: BenchOptions, folder: Path) -> None:
    """Load a mesh whose processes stamp the stages of every request, and tell what each hop takes."""
    files = {name: folder / f"{name}.stamps" for name in ("router", "gpu_worker")}
    services = [
        dataclasses.replace(each, stamps=str(files[each.name])) if each.name in files else each
        for each in _services()
    ]
    async with LocalMesh(folder, services) as mesh, Target([mesh.url]) as target:
        load = LoadRun(target, bodies.embed(1, 16, seed=options.seed))
        await load.open(arrivals.steady(RATE), 3.0)
        done = await load.open(_times(times, options.seed), float(options.rounds(30, 5)))
    found = hops.measure(done, load.began, files["router"], files["gpu_worker"])
    plain = body.samples["queued_ms"][f"process/{times}/nothing"]
    body.table(
        f"The hops of a request, microseconds, {times} arrivals, 100 requests a second",
        ["hop", "what", "mean", "p50", "p99"],
        hops.rows(found, [each / 1e3 + DEVICE_S for each in plain]),
    )
    share = hops.adds_up(found)
    body.notes.append(
        f"{times}: the hops' means add up to the mean of the whole, since each begins where the one before ends; their "
        f"medians add up to {share:.1%} of its median."
    )
    if (
        times == "steady"
    ):  # the waits of Poisson arrivals are skewed, so their medians need not add up
        body.met["the hops add up"] = "goal" if abs(share - 1) <= ADDS_UP else "missed"
    body.samples["hops_s" if times == "steady" else "hops_poisson_s"] = found


def _services() -> list[Service]:
    return [processes.router(), processes.sim_worker(beta_s=DEVICE_S), processes.vector_search()]


def _times(name: str, seed: int) -> Iterator[float]:
    return (
        arrivals.steady(RATE) if name == "steady" else arrivals.poisson(RATE, random.Random(seed))
    )


def _note(
    body: Body, rows: list[list[str]], level: str, times: str, beside: str, done: RequestRun
) -> None:
    added, queued = _added(done)
    failed = len(done.samples) - len(added)
    p50, p99 = stats.interval(added, 50), stats.interval(added, 99)
    late = done.summary()["sent_late_s"]["p99"] * 1e3
    cells = [_cell(p50), _cell(p99), _queued(queued), f"{late:.2f}"]
    rows.append([level, times, beside, str(len(done.samples)), str(failed), *cells])
    off = times if times == "steady" else f"{times}, queue off"
    body.samples[f"{level}/{off}/{beside}"] = added
    body.samples.setdefault("queued_ms", {})[f"{level}/{times}/{beside}"] = queued
    if level == "process" and times == "Poisson" and beside in GOALS:
        middle, tail = GOALS[beside]
        body.met[f"p50 beside {beside}"] = stats.verdict(p50, middle, 2 * middle, higher=False)
        body.met[f"p99 beside {beside}"] = stats.verdict(
            p99, tail, 2 * tail, higher=False, width=stats.TAIL
        )
    if level == "process" and times == "Poisson":
        body.met[f"no failure beside {beside}"] = "missed" if failed else "goal"


def _added(done: RequestRun) -> tuple[list[float], list[float]]:
    """Return the milliseconds added to each request that succeeded, without the device's queue and with it."""
    samples = sorted(done.samples, key=lambda sample: sample.due_s)
    waits = ideal_queue.waits([sample.due_s for sample in samples], DEVICE_S)
    queued = [(s.latency_s - DEVICE_S) * 1e3 for s in samples if s.ok]
    added = [
        (s.latency_s - DEVICE_S - wait) * 1e3
        for s, wait in zip(samples, waits, strict=True)
        if s.ok
    ]
    return added, queued


def _queued(added: Sequence[float]) -> str:
    found = stats.percentiles(added)
    return f"{found['p50']:.2f} / {found['p99']:.2f}"


def _cell(found: dict[str, Any]) -> str:
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
