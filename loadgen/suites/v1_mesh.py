"""V1 (b) and (c): the same index behind HTTP, admission and Redis."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import numpy as np
from spillway_client import AsyncSpillway

from loadgen import arrivals, bodies, processes, stats, vectors
from loadgen.document import Body, Options
from loadgen.load import Load
from loadgen.mesh import Mesh
from loadgen.pairs import measure_sides, timed
from loadgen.target import Target
from loadgen.vectors import DataSet, Rows
from services.vector_search.index.index import Index

K = 10
BATCH = 256
# Requests a pair: enough that the mesh works on one while the next is parsed.
ROUND = 6
CLIENTS = 3
RATE = 50.0


async def run(body: Body, options: Options, index: Index, data: DataSet, folder: Path) -> None:
    """Fill a collection, then measure (b) and (c) against the index in this process."""
    services = [processes.router(), processes.vector_search()]
    async with Mesh(folder, services) as mesh, AsyncSpillway(mesh.url, timeout_s=300) as client:
        await fill(client, "v1", data.base)
        await indexed(client, "v1")
        await _recall(body, mesh.url, data)
        await _batches(body, options, index, data, mesh)
        await _singles(body, options, index, data, mesh)


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
        if after.get("index") in (None, "graph") and before == after:
            return
    raise TimeoutError(f"collection {name} was not indexed within {timeout_s:g} s")


async def _recall(body: Body, url: str, data: DataSet) -> None:
    requests = bodies.search("v1", data.queries[: 4 * BATCH], queries=BATCH, k=K)
    found: list[list[int]] = []
    async with Target([url]) as target:
        for request in requests:
            answer = await target.send(request)
            rows = msgspec.json.decode(answer.body)["data"]
            rows.sort(key=lambda row: row["index"])
            found += [[int(hit["id"]) for hit in row["data"]] for row in rows]
    reached = vectors.recall(found, data.truth[: 4 * BATCH])
    body.notes.append(f"Recall@10 of the served collection: {reached:.4f}.")


async def _batches(body: Body, options: Options, index: Index, data: DataSet, mesh: Mesh) -> None:
    requests = bodies.search("v1", data.queries, queries=BATCH, k=K)
    async with Target([mesh.url]) as target:
        load = Load(target, requests)

        async def through_mesh(_number: int) -> None:
            done = await load.closed(CLIENTS, count=ROUND)
            if any(not sample.ok for sample in done.samples):
                raise RuntimeError(f"searches failed: {done.summary()['codes']}")

        async def in_process(number: int) -> None:
            for i in range(ROUND):
                start = (number * ROUND + i) * BATCH % (len(data.queries) - BATCH)
                index.search(data.queries[start : start + BATCH], K)

        before = mesh.cpu_seconds()
        blocks = await measure_sides(
            timed(through_mesh), timed(in_process), pairs=options.rounds(300, 5)
        )
        after = mesh.cpu_seconds()
    ratio = stats.paired_ratio(blocks.theirs, blocks.ours)
    speeds = [ROUND * BATCH / float(np.median(t)) for t in (blocks.ours, blocks.theirs)]
    used = ", ".join(f"{name} {after[name] - before[name]:.1f}" for name in after)
    body.table(
        "(b) 256 queries a request through the mesh (clustered)",
        ["mesh queries per s", "in process per s", "ratio [95 %]", "pairs (blocks dropped)"],
        [
            [
                *(f"{speed:,.0f}" for speed in speeds),
                f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
                f"{ratio['n']} ({blocks.dropped})",
            ]
        ],
    )
    body.notes.append(f"(b) CPU seconds: {used}.")
    body.samples["mesh/batch"] = blocks.samples()
    body.met["(b)"] = stats.verdict(ratio, 0.85, 0.7)


async def _singles(body: Body, options: Options, index: Index, data: DataSet, mesh: Mesh) -> None:
    requests = bodies.search("v1", data.queries, queries=1, k=K)
    seconds = 6.0 if options.quick else 60.0
    async with Target([mesh.url]) as target:
        load = Load(target, requests)
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
        "(c) one query through the mesh, 50 a second: milliseconds added to the search itself",
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
    body.met["(c) p99"] = stats.verdict(p99, 10.0, 20.0, higher=False)
