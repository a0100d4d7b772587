"""F5: memory of every process, both Redis and every tier under full load: embeddings, searches, writes, conversations.

`python -m chaos.f5 --kills SECONDS --json FILE`; the count is the seconds of load.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from spillway_client import AsyncSpillway

from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.memory_groups import GroupUse, MemoryGroups
from bench.mesh.processes import Service
from chaos.f5_pages import SHAPE
from chaos.memory_watch import MeshMemory, watched
from chaos.tiers import SMALL
from loadgen import bodies
from loadgen.bodies import Request
from loadgen.chat.client import Chat
from loadgen.chat.load import Asking, ChatLoad
from loadgen.chat.scripts import scripts
from loadgen.load import LoadRun
from loadgen.target import Target

DIMENSION = 64
STORED = 12_000
WARM_S = 60.0
CLIENTS, TALKERS = 6, 3
# What else lasts for hours or days comes and goes within the run: small snapshots trim the stream of writes, and
# sessions, which are kept for a week by default, go half a minute after their last turn.
ENV = SMALL | {"SPILLWAY_SNAPSHOT_BYTES": "1000000", "SPILLWAY_SESSION_TTL_S": "30"}
_GIB = 1 << 30
# As compose.yaml has them.
LIMITS = {
    "router": 1 * _GIB, "gpu_worker": 4 * _GIB, "cpu_worker": 2 * _GIB, "vector_search": 4 * _GIB,
    "kv_store": 1 * _GIB, "redis": 2 * _GIB, "redis-pages": 3 * _GIB,
}  # fmt: skip


@dataclass(slots=True)
class LoadMemory:
    """What the mesh held after the warm-up, what was answered, and what its memory groups say, if it had any."""

    memory: MeshMemory = field(default_factory=MeshMemory)
    requests: int = 0
    turns: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    groups: dict[str, GroupUse] = field(default_factory=dict)


def services() -> list[Service]:
    """Return one process of every kind."""
    return [
        processes.router(),
        processes.chat_worker("gpu_worker", "--device", "cpu"),
        processes.cpu_worker(),
        processes.vector_search(),
        processes.kv_store(),
    ]


async def run(
    seconds: float, warm_s: float, data_dir: Path, seed: int = 1, groups: MemoryGroups | None = None
) -> LoadMemory:
    """Load the mesh for `seconds` after a warm-up; MemoryGroups limit its processes."""
    found = LoadMemory()
    mesh = LocalMesh(data_dir, services(), env=ENV, groups=groups)
    async with mesh, AsyncSpillway(mesh.url) as client, Chat(mesh.urls) as chat:
        requests = await _requests(client)
        async with Target(mesh.urls) as target:
            load = LoadRun(target, requests)
            talk = ChatLoad(chat, target, scripts(SHAPE, seed), Asking("session"))

            async def both(length_s: float) -> None:
                async with asyncio.TaskGroup() as group:
                    group.create_task(load.closed(CLIENTS, seconds=length_s))
                    group.create_task(talk.closed(TALKERS, seconds=length_s))

            await both(warm_s)
            async with watched(mesh) as found.memory:
                await both(seconds)
        found.groups = groups.use() if groups is not None else {}
    found.requests, found.turns = len(load.samples), len(talk.replies)
    codes = [sample.code for sample in load.samples if not sample.ok]
    codes += [reply.code for reply in talk.replies if not reply.ok]
    found.failed = dict(Counter(codes))
    return found


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


def measure(
    seconds: float, warm_s: float = WARM_S, seed: int = 1, cgroup: Path | None = None
) -> LoadMemory:
    """Run in a directory of its own that is gone afterwards, with limits of memory below `cgroup` if that is named."""
    limits = contextlib.nullcontext() if cgroup is None else MemoryGroups(cgroup, LIMITS)
    with tempfile.TemporaryDirectory(prefix="spillway-f5-") as folder, limits as groups:
        return asyncio.run(run(seconds, warm_s, Path(folder), seed, groups))


if __name__ == "__main__":
    import sys

    from chaos.command import main

    sys.exit(main("F5", sys.argv[1:]))
