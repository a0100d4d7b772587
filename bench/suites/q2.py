"""Q2: follow-ups of grounded answers: what a rewriting of the question finds and costs, and what reranking does."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from spillway_client import AsyncSpillway

from bench.document import BenchOptions, Body
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.processes import Service
from bench.workloads import (
    docs_questions,
    follow_ups,
    instruct_model,
    rerankings,
    trained_ranker,
    untrained_ranker,
)
from engine.models.encoders.files import model_name


def run(options: BenchOptions) -> Body:
    """Serve encoder, search, a cross-encoder and the generators, load `docs`, and ask the follow-ups."""
    body = Body()
    with tempfile.TemporaryDirectory(prefix="spillway-q2-") as folder:
        asyncio.run(_run(body, options, Path(folder)))
    return body


async def _run(body: Body, options: BenchOptions, folder: Path) -> None:
    instruct = instruct_model.readable(folder)
    trained = trained_ranker.readable()
    ranker = trained or untrained_ranker.written(folder)
    flags = ("--device", "cpu", "--threads", "1", "--rerank-model", str(ranker))
    services = [
        processes.router(),
        processes.chat_worker("gpu_worker", *flags),
        _generator("reader", "--device", "sim", "--beta", "0.0001", "--chat-model", "sim"),
        processes.vector_search(),
    ]
    if instruct is not None:
        services.append(
            _generator(
                "instruct", "--device", "cpu", "--threads", "1", "--chat-model", str(instruct)
            )
        )
    given = follow_ups.follow_ups()
    given = given[: options.rounds(len(given), 4)]
    async with LocalMesh(folder / "data", services) as mesh, AsyncSpillway(mesh.urls[0]) as client:
        await docs_questions.load(client)
        served = [m.id for m in await client.models.list() if m.details["kind"] == "generate"]
        others = [m for m in served if m not in {follow_ups.READER, follow_ups.SHIPPED}]
        await follow_ups.measure(client, given, others[0] if instruct else "", body)
        reranker = rerankings.Reranker(model_name(str(ranker)), trained)
        await rerankings.measure(client, given, reranker, body)
    if instruct is None:
        body.notes.append(f"No model rewrote: {instruct_model.HINT}.")


def _generator(name: str, *flags: str) -> Service:
    """Describe a worker that serves one generator and no encoder."""
    return processes.gpu_worker(name, "--embed-model", "none", *flags)
