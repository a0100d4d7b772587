"""E1 through the whole mesh: text over HTTP against sentence-transformers in process at its best precision."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from bench.document import BenchOptions, Body
from bench.engine.encoder_process import Engine
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.suites import e1_infinity
from bench.suites.embed_pairs import SHAPES, against, requests_of, row, texts_of
from loadgen import stats
from loadgen.target import Target

PAIRS = 300
PRECISIONS = ("bf16", "fp32")


def measure(body: Body, options: BenchOptions) -> None:
    """Add the mesh's table, samples and verdicts to E1's body."""
    with tempfile.TemporaryDirectory(prefix="spillway-e1-") as folder:
        asyncio.run(_run(body, options, Path(folder)))


async def _best(folder: Path, texts: list[list[str]]) -> str:
    """Return the precision in which sentence-transformers is fastest on this machine now."""
    seconds = {}
    for precision in PRECISIONS:
        async with Engine(folder, "sentence-transformers", precision) as engine:
            seconds[precision] = min([await engine.encode(texts) for _ in range(3)])
    return min(seconds, key=seconds.__getitem__)


async def _run(body: Body, options: BenchOptions, folder: Path) -> None:
    worker = processes.gpu_worker("gpu_worker", "--device", "cpu", "--embed-slo-s", "20")
    rows = []
    for shape in SHAPES:
        texts = texts_of(shape, options.seed)
        precision = await _best(folder, texts)
        mesh = LocalMesh(folder, [processes.router(), worker])
        async with (
            mesh,
            Engine(folder, "sentence-transformers", precision) as rival,
            Target([mesh.url]) as target,
        ):
            blocks = await against(target, rival, texts, requests_of(texts), shape, options, PAIRS)
        cells, ratio = row(shape, blocks, f"sentence-transformers {precision}")
        rows.append([*cells, f"{blocks.loadgen_cpu_s:.1f}"])
        body.samples[f"mesh/{shape.name}"] = blocks.samples()
        body.met[f"mesh, {shape.name}"] = stats.verdict(ratio, 1.3, 1.0)
    columns = ["a request", "against", "mesh texts/s", "rival texts/s", "ratio [95 %]"]
    columns += ["pairs (blocks dropped)", "load generator CPU s"]
    body.table("Through the whole mesh", columns, rows)
    await e1_infinity.run(body, options, folder)
