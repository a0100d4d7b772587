"""E2: the mesh against the same worker code in process."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from bench.document import BenchOptions, Body
from bench.engine.encoder_process import EncoderProcess
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.suites.embed_pairs import SINGLE, Shape, against, requests_of, row, texts_of, tokens_of
from loadgen import stats
from loadgen.target import Target

PAIRS = 300
# So many requests that the first one's way in and the last one's way out are a small part.
SHAPES = (Shape(32, 32, 16, 4), Shape(32, 128, 8, 4))


def run(options: BenchOptions) -> Body:
    """Measure requests of 32 texts, then of one text, by one worker in both cases."""
    body = Body()
    with tempfile.TemporaryDirectory(prefix="spillway-e2-") as folder:
        asyncio.run(_run(body, options, Path(folder)))
    return body


async def _run(body: Body, options: BenchOptions, folder: Path) -> None:
    # A wide SLO, so that admission lets all clients of the closed loop in on a slow machine, too.
    worker = processes.gpu_worker("gpu_worker", "--device", "cpu", "--embed-slo-s", "20")
    mesh = LocalMesh(folder, [processes.router(), worker])
    rows = []
    async with mesh, EncoderProcess(folder) as engine, Target([mesh.url]) as target:
        for shape in (*SHAPES, SINGLE):
            texts = texts_of(shape, options.seed)
            before = mesh.cpu_seconds()
            blocks = await against(
                target, engine, tokens_of(texts), requests_of(texts), shape, options, PAIRS
            )
            after = mesh.cpu_seconds()
            cells, ratio = row(shape, blocks, f"in process ({engine.about['dtype']})")
            rows.append([*cells, f"{blocks.loadgen_cpu_s:.1f}"])
            used = ", ".join(f"{name} {after[name] - before[name]:.1f}" for name in after)
            body.notes.append(f"{shape.name}: CPU seconds of {used}.")
            body.samples[shape.name] = blocks.samples()
            levels = (0.85, 0.6) if shape is SINGLE else (0.95, 0.85)
            body.met[shape.name] = stats.verdict(ratio, *levels)
    columns = ["a request", "against", "mesh texts/s", "alone texts/s", "ratio [95 %]"]
    columns += ["pairs (blocks dropped)", "load generator CPU s"]
    body.table("", columns, rows)
    body.notes.append(
        "The engine alone gets token lists in batches of 32, whatever the requests to the mesh hold; the mesh "
        "gets text, and shares the cores with Redis, the router and the load generator."
    )
