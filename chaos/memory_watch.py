"""Memory of a mesh under load: what every process, both Redis and every tier of pages hold, once a second."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import redis.asyncio

from bench.mesh import probe
from bench.mesh.local_mesh import PAGES, REDIS, LocalMesh
from common.pages.store import NONE

SECOND_S = 1.0


@dataclass(slots=True)
class MeshMemory:
    """Bytes once a second: resident of each process, `used_memory` of each Redis, of each tier of pages."""

    rss: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    used: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    tiers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


@contextlib.asynccontextmanager
async def watched(mesh: LocalMesh) -> AsyncIterator[MeshMemory]:
    """Fill the memory it yields until the block ends."""
    memory = MeshMemory()
    urls = {REDIS: mesh.redis_url, PAGES: mesh.pages_url}
    servers = {
        name: redis.asyncio.from_url(url) for name, url in urls.items() if url and url != NONE
    }

    over = asyncio.Event()

    async def watch() -> None:
        while not over.is_set():
            await _look(mesh, servers, memory)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), SECOND_S)

    task = asyncio.create_task(watch())
    try:
        yield memory
    finally:
        over.set()  # a look is not cut short: it would leave its sockets open
        await task
        for server in servers.values():
            await server.aclose()


async def _look(
    mesh: LocalMesh, servers: dict[str, redis.asyncio.Redis], memory: MeshMemory
) -> None:
    for name, server in servers.items():
        memory.used[name].append(int((await server.info("memory"))["used_memory"]))
    found = await probe.metrics(mesh.health_port("gpu_worker") or 0)
    for tier in ("device", "host"):
        size = found.get(f'spillway_page_bytes{{tier="{tier}"}}')
        if size is not None:
            memory.tiers[tier].append(int(size))
    if PAGES in servers:
        memory.tiers["redis"].append(memory.used[PAGES][-1])
        files = [each for each in (mesh.data_dir / "pages").rglob("*") if each.is_file()]
        memory.tiers["disk"].append(sum(map(_size, files)))
    for name, value in mesh.rss_bytes().items():
        memory.rss[name].append(value)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # a segment that has just been compacted
