"""V1 (b) and (c): the same index behind HTTP, admission and Redis."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from spillway_client import AsyncSpillway

from bench.document import BenchOptions, Body
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.pairs import Measured, measure_sides, timed
from bench.workloads import vectors
from bench.workloads.vectors import DataSet, Rows
from loadgen import arrivals, bodies, stats
from loadgen.load import LoadRun
from loadgen.target import Target
from services.vector_search.index.index import Index

K = 10
BATCH = 256
# Requests a pair: enough that the mesh works on one while the next is parsed.
ROUND = 6
CLIENTS = 3
RATE = 50.0


async def run(
    body: Body, options: BenchOptions, built: list[tuple[Index, DataSet]], folder: Path
) -> None:
    """Fill a collection per data set and measure (b) against its index here; (c) on the first."""
    services = [processes.router(), processes.sim_worker(), processes.vector_search()]
    rows, ratios = [], []
    async with (
        LocalMesh(folder, services) as mesh,
        AsyncSpillway(mesh.url, timeout_s=300) as client,
    ):
        for index, data in built:
            await fill(client, data.name, data.base)
            await indexed(client, data.name)
            ef = await _ef(client, data.name)
            served = await _recall(mesh.url, data)
            here = vectors.recall(index.search(data.queries, K, effort=ef).labels, data.truth)
            cells, ratio = await _batches(body, options, (index, ef), data, mesh)
            after = await _ef(client, data.name)
            recalls = f"{served:.4f} / {here:.4f}"
            rows.append([data.name, recalls, f"{ef}" if after == ef else f"{ef}-{after}", *cells])
            ratios.append(ratio)
        _batched(body, rows, ratios)
        await _singles(body, options, *built[0], mesh)


def _batched(body: Body, rows: list[list[str]], ratios: list[dict[str, Any]]) -> None:
    columns = ["data", "recall@10 served / in process", "ef of both", "mesh queries per s"]
    columns += ["in process per s", "ratio [95 %]"]
    columns += ["pairs (blocks dropped)", "CPU s router, vector_search, Redis, load generator"]
    body.table("(b) 256 queries a request through the mesh", columns, rows)
    worst = min(ratios, key=lambda found: found["value"])
    body.met["(b) worst ratio"] = stats.verdict(worst, 0.85, 0.7)


async def fill(client: AsyncSpillway, name: str, base: Rows) -> None:
    """Store rows as documents `0`, `1`, … of a collection of vectors."""
    await client.collections.create(name, dimension=base.shape[1], metric="dot", model=None)
    documents = client.documents(name)
    for start in range(0, len(base), 1000):
        part = base[start : start + 1000]
        await documents.add(
            [{"id": str(start + i), "vector": row.tolist()} for i, row in enumerate(part)]
        )


async def indexed(client: AsyncSpillway, name: str, timeout_s: float = 600.0) -> None:
    """Wait until the collection's graph serves and takes in nothing any more."""
    limit = time.monotonic() + timeout_s
    while time.monotonic() < limit:
        before = (await client.collections.get(name)).stats or {}
        await asyncio.sleep(2.0)
        after = (await client.collections.get(name)).stats or {}
        if after.get("index") == "graph" and not after["newer"] and before == after:
            return
    raise TimeoutError(f"collection {name} was not indexed within {timeout_s:g} s")


async def _ef(client: AsyncSpillway, name: str) -> int:
    """Return the ef by which a collection is served: the index here is searched with the same."""
    return int(((await client.collections.get(name)).stats or {})["ef"])


async def _recall(url: str, data: DataSet) -> float:
    """Return recall@10 of the collection as served."""
    found: list[list[int]] = []
    async with Target([url]) as target:
        for request in bodies.search(data.name, data.queries[: 4 * BATCH], queries=BATCH, k=K):
            answer = await target.send(request)
            rows = msgspec.json.decode(answer.body)["data"]
            rows.sort(key=lambda row: row["index"])
            found += [[int(hit["id"]) for hit in row["data"]] for row in rows]
    return vectors.recall(found, data.truth[: 4 * BATCH])


async def _batches(
    body: Body, options: BenchOptions, searched: tuple[Index, int], data: DataSet, mesh: LocalMesh
) -> tuple[list[str], dict[str, Any]]:
    index, ef = searched
    async with Target([mesh.url]) as target:
        load = LoadRun(target, bodies.search(data.name, data.queries, queries=BATCH, k=K))

        async def through_mesh(_number: int) -> Measured:
            done = await load.closed(CLIENTS, count=ROUND)
            if any(not sample.ok for sample in done.samples):
                raise RuntimeError(f"searches failed: {done.summary()['codes']}")
            return Measured(done.seconds, done.cpu_s)

        async def in_process(number: int) -> None:
            for i in range(ROUND):
                start = (number * ROUND + i) * BATCH % (len(data.queries) - BATCH)
                index.search(data.queries[start : start + BATCH], K, effort=ef)

        before = mesh.cpu_seconds()
        blocks = await measure_sides(through_mesh, timed(in_process), pairs=options.rounds(300, 5))
        after = mesh.cpu_seconds()
    body.samples[f"{data.name}/mesh batch"] = blocks.samples()
    ratio = stats.paired_ratio(blocks.theirs, blocks.ours)
    speeds = [ROUND * BATCH / float(np.median(t)) for t in (blocks.ours, blocks.theirs)]
    used = [f"{after[n] - before[n]:.1f}" for n in ("router", "vector_search", "redis")]
    cells = [
        *(f"{speed:,.0f}" for speed in speeds),
        f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
        f"{ratio['n']} ({blocks.dropped})",
        ", ".join([*used, f"{blocks.loadgen_cpu_s:.1f}"]),
    ]
    return cells, ratio


async def _singles(
    body: Body, options: BenchOptions, index: Index, data: DataSet, mesh: LocalMesh
) -> None:
    requests = bodies.search(data.name, data.queries, queries=1, k=K)
    seconds = 6.0 if options.quick else 60.0
    async with Target([mesh.url]) as target:
        load = LoadRun(target, requests)
        await load.open(arrivals.steady(RATE), 2.0)
        done = await load.open(arrivals.steady(RATE), seconds)
    alone = []
    for row in data.queries[:1000]:
        began = time.perf_counter()
        index.search(row[None, :], K)
        alone.append(time.perf_counter() - began)
    summary = done.summary()
    base = stats.percentiles(alone)
    added = [(s.latency_s - base["p50"]) * 1e3 for s in done.samples if s.ok]
    p50, p99 = stats.interval(added, 50), stats.interval(added, 99)
    cells = [
        f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]" for found in (p50, p99)
    ]
    body.table(
        f"(c) one query through the mesh ({data.name}), 50 a second: milliseconds added to the search",
        ["queries", "failed", "p50 [95 %]", "p99 [95 %]", "search alone p50 (ms)"],
        [
            [
                str(summary["requests"]), str(summary["requests"] - summary["ok"]), *cells,
                f"{base['p50'] * 1e3:.2f}",
            ]
        ],
    )  # fmt: skip
    body.samples["mesh/single_added_ms"] = added
    body.met["(c) p50"] = stats.verdict(p50, 2.0, 4.0, higher=False)
    body.met["(c) p99"] = stats.verdict(p99, 10.0, 20.0, higher=False, width=stats.TAIL)
