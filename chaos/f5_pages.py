"""F5 for pages: the bytes of every tier, and what processes hold, while conversations wander through small tiers."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import redis.asyncio

from bench.mesh import probe, processes
from bench.mesh.local_mesh import LocalMesh
from chaos.tiers import SMALL, TierCounts
from loadgen.chat.client import Chat
from loadgen.chat.load import Asking, ChatLoad
from loadgen.chat.scripts import Lengths, ScriptShape, scripts
from loadgen.target import Target

CLIENTS = 8
SHAPE = ScriptShape(Lengths(12.0, limit=40), Lengths(12.0, limit=40), turns=8.0, think_s=0.0)
BUDGETS = {
    "device": int(SMALL["SPILLWAY_KV_BYTES"]),
    "host": int(SMALL["SPILLWAY_HOST_KV_BYTES"]),
    "redis": int(SMALL["SPILLWAY_PAGES_BYTES"]),
    "disk": int(SMALL["SPILLWAY_DISK_BYTES"]),
}


@dataclass(slots=True)
class TierMemory:
    """Bytes once a second after the warm-up: of each tier, resident of each process; and what was answered."""

    tiers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    rss: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    counted: dict[str, int] = field(default_factory=dict)
    turns: int = 0
    failed: dict[str, int] = field(default_factory=dict)


async def run(turns: int, data_dir: Path, seed: int) -> TierMemory:
    """Have conversations of about so many turns in all, after a quarter as many to warm up."""
    memory = TierMemory()
    services = [processes.router(), processes.chat_worker("gpu_worker", "--device", "cpu")]
    mesh = LocalMesh(data_dir, [*services, processes.kv_store()], env=SMALL)
    async with mesh, Chat(mesh.urls) as chat, Target(mesh.urls) as target:
        load = ChatLoad(chat, target, scripts(SHAPE, seed), Asking("session"))
        talks = round(turns / SHAPE.turns)
        await load.closed(CLIENTS, count=max(1, talks // 4))
        watcher = asyncio.create_task(_watch(mesh, memory))
        talk = await load.closed(CLIENTS, count=talks)
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        memory.counted = await TierCounts().total(mesh)
    memory.turns = len(talk.replies)
    for reply in talk.replies:
        if not reply.ok:
            memory.failed[reply.code] = memory.failed.get(reply.code, 0) + 1
    return memory


async def _watch(mesh: LocalMesh, memory: TierMemory) -> None:
    pages = redis.asyncio.from_url(mesh.pages_url)
    try:
        while True:
            found = await probe.metrics(mesh.health_port("gpu_worker") or 0)
            for tier in ("device", "host"):
                size = found.get(f'spillway_page_bytes{{tier="{tier}"}}')
                if size is not None:
                    memory.tiers[tier].append(int(size))
            memory.tiers["redis"].append((await pages.info("memory"))["used_memory"])
            files = [each for each in (mesh.data_dir / "pages").rglob("*") if each.is_file()]
            memory.tiers["disk"].append(sum(_size(each) for each in files))
            for name, value in mesh.rss_bytes().items():
                memory.rss[name].append(value)
            await asyncio.sleep(1.0)
    finally:
        await pages.aclose()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # a segment that has just been compacted


def measure(turns: int, seed: int) -> TierMemory:
    """Run in a directory of its own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="spillway-f5-") as folder:
        return asyncio.run(run(turns, Path(folder), seed))
