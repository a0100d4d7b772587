"""F5 for pages: the bytes of every tier, and what processes hold, while conversations wander through small tiers."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from chaos.memory_watch import MeshMemory, watched
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
    """What the mesh held after the warm-up, what its workers counted of pages, and what was answered."""

    memory: MeshMemory = field(default_factory=MeshMemory)
    counted: dict[str, int] = field(default_factory=dict)
    turns: int = 0
    failed: dict[str, int] = field(default_factory=dict)


async def run(turns: int, data_dir: Path, seed: int) -> TierMemory:
    """Have conversations of about so many turns in all, after a quarter as many to warm up."""
    found = TierMemory()
    services = [processes.router(), processes.chat_worker("gpu_worker", "--device", "cpu")]
    mesh = LocalMesh(data_dir, [*services, processes.kv_store()], env=SMALL)
    async with mesh, Chat(mesh.urls) as chat, Target(mesh.urls) as target:
        load = ChatLoad(chat, target, scripts(SHAPE, seed), Asking("session"))
        talks = round(turns / SHAPE.turns)
        await load.closed(CLIENTS, count=max(1, talks // 4))
        async with watched(mesh) as found.memory:
            talk = await load.closed(CLIENTS, count=talks)
        found.counted = await TierCounts().total(mesh)
    found.turns = len(talk.replies)
    for reply in talk.replies:
        if not reply.ok:
            found.failed[reply.code] = found.failed.get(reply.code, 0) + 1
    return found


def measure(turns: int, seed: int) -> TierMemory:
    """Run in a directory of its own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="spillway-f5-") as folder:
        return asyncio.run(run(turns, Path(folder), seed))
