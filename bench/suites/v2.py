"""V2: filtered search through the mesh: k results whenever k match, and the right ones."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from spillway_client import AsyncSpillway

from bench.document import BenchOptions, Body
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.search_mesh import indexed
from bench.workloads import vectors
from bench.workloads.vectors import Rows
from loadgen import bodies
from loadgen.target import Target

K = 10
BUCKETS = 1000
SHARES = (0.5, 0.1, 0.01, 0.001)
PARCEL = 50


def run(options: BenchOptions) -> Body:
    """Ask filtered queries whose truth is known, for filters at random and along the clusters."""
    body = Body()
    with tempfile.TemporaryDirectory(prefix="spillway-v2-") as folder:
        asyncio.run(_run(body, options, Path(folder)))
    return body


async def _run(body: Body, options: BenchOptions, folder: Path) -> None:
    count = options.pick(30_000, 12_000)
    rng = np.random.default_rng(options.seed)
    rows = vectors.clustered(count + 1000, rng, 64)
    base, queries = rows[:count], rows[count : count + (100 if options.quick else 1000)]
    buckets = {
        "random": rng.integers(0, BUCKETS, count),
        # Documents of a filter lie together, and mostly far from the query: the hard case.
        "clustered": np.argsort(np.argsort(base[:, 0])) * BUCKETS // count,
    }
    services = [processes.router(), processes.sim_worker(), processes.vector_search()]
    cells: list[list[str]] = []
    short, recalls = 0, list[float]()
    async with (
        LocalMesh(folder, services) as mesh,
        AsyncSpillway(mesh.url, timeout_s=300) as client,
    ):
        await _fill(client, base, buckets)
        await indexed(client, "v2")
        async with Target([mesh.url]) as target:
            for kind, numbers in buckets.items():
                for share in SHARES:
                    allowed = numbers < share * BUCKETS
                    condition = {kind: {"$lt": share * BUCKETS}}
                    found, paths = await _ask(target, queries, condition)
                    truth = _truth(base, queries, allowed)
                    few = sum(len(f) < len(t) for f, t in zip(found, truth, strict=True))
                    got = _recall(found, truth)
                    short, recalls = short + few, [*recalls, got]
                    cells.append([kind, f"{share * 100:g} %", str(int(allowed.sum()))])
                    cells[-1] += [
                        str(len(queries)),
                        str(few),
                        f"{got:.4f}",
                        "/".join(sorted(paths)),
                    ]
    columns = ["filter", "passes", "documents", "queries", "fewer than k", "recall@10", "way"]
    body.table(f"{count} documents of 64 dimensions, k = 10, through the mesh", columns, cells)
    body.samples["rows"] = cells
    body.met["k whenever k match"] = "missed" if short else "goal"
    body.met["recall@10"] = "goal" if min(recalls) >= 0.95 else "missed"


async def _fill(client: AsyncSpillway, base: Rows, buckets: dict[str, Any]) -> None:
    await client.collections.create("v2", dimension=base.shape[1], metric="dot", model=None)
    for start in range(0, len(base), 1000):
        added = []
        for i in range(start, min(start + 1000, len(base))):
            metadata = {kind: int(numbers[i]) for kind, numbers in buckets.items()}
            added.append({"id": str(i), "vector": base[i].tolist(), "metadata": metadata})
        await client.documents("v2").add(added)


async def _ask(
    target: Target, queries: Rows, condition: dict[str, Any]
) -> tuple[list[list[int]], set[str]]:
    found: list[list[int]] = []
    paths = set()
    for request in bodies.search("v2", queries, queries=PARCEL, k=K, filter=condition):
        answer = await target.send(request)
        if answer.status != 200:
            raise RuntimeError(f"search answered {answer.status} {answer.body[:200]!r}")
        body = msgspec.json.decode(answer.body)
        paths.add(body["path"])
        body["data"].sort(key=lambda row: row["index"])
        found += [[int(hit["id"]) for hit in row["data"]] for row in body["data"]]
    return found, paths


def _truth(base: Rows, queries: Rows, allowed: Any) -> list[list[int]]:
    names = np.flatnonzero(allowed)
    scores = queries @ base[names].T
    k = min(K, len(names))
    best = np.argsort(-scores, axis=1)[:, :k]
    return [[int(names[i]) for i in row] for row in best]


def _recall(found: list[list[int]], truth: list[list[int]]) -> float:
    hits = sum(len(set(f) & set(t)) for f, t in zip(found, truth, strict=True))
    return hits / max(1, sum(len(t) for t in truth))
