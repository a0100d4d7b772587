"""F5: resident memory of every process while embeddings, searches and writes go on.

`python -m chaos.f5 --kills SECONDS --json FILE`; the count is the seconds of load.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from spillway_client import AsyncSpillway

from bench.mesh.local_mesh import LocalMesh
from loadgen import bodies
from loadgen.bodies import Request
from loadgen.load import LoadRun
from loadgen.target import Target

DIMENSION = 64
STORED = 12_000
WARM_S = 60.0


@dataclass(slots=True)
class Memory:
    """Resident bytes of each process, once a second, after the warm-up; and what was answered."""

    rss: dict[str, list[int]] = field(default_factory=dict)
    requests: int = 0
    failed: dict[str, int] = field(default_factory=dict)


async def run(seconds: float, warm_s: float, data_dir: Path) -> Memory:
    """Load the mesh for `seconds` after a warm-up, sampling memory once a second."""
    memory = Memory()
    # Small snapshots, so that the stream of writes is trimmed within the run as it is within hours.
    mesh = LocalMesh(data_dir, env={"SPILLWAY_SNAPSHOT_BYTES": "1000000"})
    async with mesh, AsyncSpillway(mesh.url) as client:
        requests = await _requests(client)
        async with Target([mesh.url]) as target:
            await LoadRun(target, requests).closed(6, seconds=warm_s)
            watcher = asyncio.create_task(_watch(mesh, memory))
            load = await LoadRun(target, requests).closed(6, seconds=seconds)
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
    summary = load.summary()
    memory.requests, memory.failed = summary["requests"], summary["codes"]
    return memory


async def _requests(client: AsyncSpillway) -> list[Request]:
    """Store vectors (above the exact limit, so that the graph serves), then mix all kinds of requests."""
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((STORED, DIMENSION)).astype(np.float32)
    await client.collections.create("f5", dimension=DIMENSION, model=None)
    for start in range(0, STORED, 1000):
        part = [
            {"id": f"v{start + i}", "vector": row.tolist()}
            for i, row in enumerate(rows[start : start + 1000])
        ]
        await client.documents("f5").add(part)
    searches = bodies.search("f5", rows[:320], queries=4)
    embeds = bodies.embed(4, 32, seed=3, count=80)
    # The same ids again and again: replacing must not grow anything.
    writes = [
        Request(
            "/v1/collections/f5/documents",
            msgspec.json.encode({"documents": [{"id": f"v{i}", "vector": rows[-i - 1].tolist()}]}),
            1,
        )
        for i in range(80)
    ]
    return list(itertools.chain.from_iterable(zip(searches, embeds, writes, strict=True)))


async def _watch(mesh: LocalMesh, memory: Memory) -> None:
    while True:
        for name, value in mesh.rss_bytes().items():
            memory.rss.setdefault(name, []).append(value)
        await asyncio.sleep(1.0)


def measure(seconds: float, warm_s: float = WARM_S) -> Memory:
    """Run in a directory of its own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="spillway-f5-") as folder:
        return asyncio.run(run(seconds, warm_s, Path(folder)))


if __name__ == "__main__":
    import sys

    from chaos.command import main

    sys.exit(main("F5", sys.argv[1:]))
