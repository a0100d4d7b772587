"""E1 through the whole mesh: text over HTTP against sentence-transformers in process at its best setting."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from bench.document import BenchOptions, origin
from bench.engine.encoder_process import EncoderProcess
from bench.mesh import processes
from bench.mesh.local_mesh import LocalMesh
from bench.partial import PartialResults
from bench.rivals.sweep import Setting, best, sweep
from bench.suites.embed_pairs import SHAPES, EmbedFound, EmbedKept, against, requests_of, texts_of
from loadgen.target import Target

PAIRS, TRIES = 300, 3
SETTINGS: tuple[Setting, ...] = (
    {"precision": "bf16", "batch": 32}, {"batch": 8}, {"batch": 16}, {"precision": "fp32"},
)  # fmt: skip


async def _rate(folder: Path, texts: list[list[str]], setting: Setting) -> float:
    """Return the texts a second of sentence-transformers in a process of its own."""
    async with _rival(folder, setting) as engine:
        seconds = [await engine.encode(texts) for _ in range(1 + TRIES)]
    return sum(map(len, texts)) / min(seconds[1:])


def _rival(folder: Path, setting: Setting) -> EncoderProcess:
    return EncoderProcess(
        folder, "sentence-transformers", f"{setting['precision']} {setting['batch']}"
    )


async def measure(kept: PartialResults[EmbedKept], options: BenchOptions, folder: Path) -> None:
    """Measure both shapes, the rival at the best of its settings."""
    worker = processes.gpu_worker("gpu_worker", "--device", "cpu", "--embed-slo-s", "20")
    for shape in SHAPES:
        name, texts = f"mesh/{shape.name}", texts_of(shape, options.seed)
        if options.only not in name or name in kept.kept.cells or not kept.begins():
            continue
        base, *tried = SETTINGS
        some = tried[:1] if options.quick else tried
        swept = await sweep(partial(_rate, folder, texts), base, some, (RuntimeError,))
        kept.kept.swept[name] = swept
        async with (
            LocalMesh(folder, [processes.router(), worker]) as mesh,
            _rival(folder, best(swept)) as rival,
            Target([mesh.url]) as target,
        ):
            blocks = await against(target, rival, texts, requests_of(texts), shape, options, PAIRS)
        kept.kept.cells[name] = EmbedFound(blocks, "sentence-transformers", origin().commit)
        kept.save()
