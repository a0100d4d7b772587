"""Q1: grounded answers of the shipped model over HTTP, from its handbook and, by quotes, from other documents."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from spillway_client import AsyncSpillway

from bench.document import BenchOptions, Body
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.workloads import docs_questions, grounded
from cli import handbook

_BATCH = 50


def run(options: BenchOptions) -> Body:
    """Serve encoder, search and the shipped model, load the handbook and `docs`, and ask both."""
    body = Body()
    with tempfile.TemporaryDirectory(prefix="spillway-q1-") as folder:
        asyncio.run(_run(body, options, Path(folder)))
    return body


async def _run(body: Body, options: BenchOptions, folder: Path) -> None:
    services = [
        processes.router(),
        processes.chat_worker("gpu_worker", "--device", "cpu"),
        processes.vector_search(),
        processes.kv_store(),
    ]
    async with LocalMesh(folder, services) as mesh:
        async with AsyncSpillway(mesh.urls[0]) as client:
            await client.collections.create(grounded.COLLECTION)
            pages = handbook.documents(handbook.directory(folder))
            for first in range(0, len(pages), _BATCH):
                await client.documents(grounded.COLLECTION).add(
                    [{"id": p.id, "text": p.text} for p in pages[first : first + _BATCH]]
                )
        await grounded.measure(mesh.urls[0], options.rounds(1000, 20), body)
        async with AsyncSpillway(mesh.urls[0]) as client:
            await docs_questions.load(client)
            await docs_questions.measure(client, body)
