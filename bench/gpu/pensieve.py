"""Page tiers on an accelerator: warm turns from pinned host memory, never slower, and copies beside computing.

    python -m bench.gpu.pensieve --device cuda --json pensieve.json          # on the machine with the accelerator
    python -m bench.gpu.pensieve --device cpu --tiny --json tiny.json        # a rehearsal

Attention over pages is timed beside copying them out and beside one token at a time, as in Pensieve's figure 3.17.
Resumable as `bench.gpu.chat`.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows

from bench.engine.tiered import Tiered
from bench.gpu import shapes
from bench.gpu.engine import gathered, timed
from bench.gpu.record import Record, arguments
from common.config import WorkerConfig
from common.pages.identity import PAGE
from engine.decoder.executor.interface import PageMove
from engine.decoder.executor.page_copier import TorchPageCopier
from engine.decoder.executor.torch_executor import StepRows, TorchExecutor
from engine.decoder.kv import tiers
from engine.kernels.page_memory import PageMemory
from engine.models.decoders.family import parse_decoder
from engine.models.decoders.torch_decoder import attention_on

TINY, BIG = ("tiny",), ("llama-1b", "llama-8b")
HISTORY = (2048, 8192)
HITS = (0.0, 0.5, 1.0)
TURNS = 12
BATCH, QUERIES, CONTEXT = 32, 8, 2048  # of the figure
KV_BYTES = 8 << 30


def warm(runner: TorchExecutor, tokens: int, tiny: bool) -> dict[str, Any]:
    """Measure first tokens after so much history: computed, from the device, and from the host by share of pages."""
    tiers.SPARE = 1.0  # every idle page is copied to the host at once
    return asyncio.run(_warm(runner, 64 if tiny else tokens, 2 if tiny else TURNS))


async def _warm(runner: TorchExecutor, tokens: int, turns: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    draw = random.Random(tokens)
    async with Tiered(runner, WorkerConfig(pages_url="none", step_tokens=4096)) as engine:
        for turn in range(-2, turns):  # the first ones warm
            prompt = [draw.randrange(runner.shape.vocabulary) for _ in range(tokens + 7)]
            seconds = {"computed": (await engine.turn(prompt)).first_s}
            await engine.save(prompt)
            seconds["device"] = (await engine.turn(prompt)).first_s
            for share in reversed(HITS):  # each leaves all pages on the device
                engine.forget(prompt, "device")
                for page_id in engine.ids(prompt):
                    if draw.random() >= share:
                        for pool in engine.tiers.host:
                            pool.forget(page_id)
                seconds[f"host {share:.0%}"] = (await engine.turn(prompt)).first_s
                await engine.save(prompt)
            if turn >= 0:
                for name, first_s in seconds.items():
                    found.setdefault(name, []).append(first_s)
    return {"seconds": found}


def overlap(runner: TorchExecutor, tokens: int, tiny: bool) -> dict[str, Any]:
    """Time the copying of a history alone, and when each layer of it had come, in seconds from its start."""
    pages = min((64 if tiny else tokens) // PAGE, runner.shape.host_pages)
    copier = runner.copier
    assert isinstance(copier, TorchPageCopier)
    copier.written([(0, page) for page in range(pages)])  # or all would be damaged pages
    moves = [PageMove("load", 0, bytes([page % 256]) * 16, page, page) for page in range(pages)]
    curves = []
    for _ in range(3):
        began, come = time.perf_counter(), []
        loading = copier.load(moves)
        for layer in range(loading.arrival.layers):
            loading.arrival.wait(layer)
            if runner.device == "cuda":
                torch.cuda.synchronize()
            come.append(time.perf_counter() - began)
        curves.append(come)
    best = min(curves, key=lambda curve: curve[-1])
    size = pages * runner.shape.page_bytes[0]
    return {"layers_come_s": best, "bytes_per_s": size / best[-1]}


def attention(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Time one layer's attention of a few query tokens a sequence: over pages, copied out, and token by token."""
    spec = parse_decoder(shapes.SHAPES["tiny" if tiny else BIG[-1]], where="config.json")
    batch, context = (2, 64) if tiny else (BATCH, CONTEXT)
    each = context // PAGE
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    pool = PageMemory(spec, None, [0], batch * each, dtype=kind, device=device)
    pool.data.normal_()
    free = list(range(pool.pages))
    random.Random(1).shuffle(free)
    tables = [free[n * each : (n + 1) * each] for n in range(batch)]
    shared, ours = spec.heads // spec.kv_heads, attention_on(device)
    positions = list(range(context - QUERIES, context))
    queries = [StepRows(positions, [table]) for table in tables]
    (planned,) = ours.plan(queries, [pool], shared)
    q = torch.randn(batch * QUERIES, spec.heads, spec.head_dim, device=device, dtype=kind)
    single = [[StepRows([at], [table]) for table in tables] for at in positions]
    rounds = [ours.plan(some, [pool], shared)[0] for some in single]
    rows = q.view(batch, QUERIES, spec.heads, spec.head_dim)
    seen = torch.arange(context, device=device) <= torch.tensor(positions, device=device)[:, None]

    def copied() -> torch.Tensor:
        keys, values = gathered(pool, queries)
        return F.scaled_dot_product_attention(
            rows.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=True
        )

    def one_by_one() -> None:
        for at, plan in enumerate(rounds):
            ours.attend(rows[:, at].contiguous(), pool, 0, plan)

    mine = ours.attend(q, pool, 0, planned).view(rows.shape).transpose(1, 2)
    worst = (copied() - mine).abs().max()
    seconds = {
        "pages": timed(device, lambda: ours.attend(q, pool, 0, planned)),
        "copied out": timed(device, copied),
        "token by token": timed(device, one_by_one),
    }
    return {"seconds": seconds, "worst": float(worst)}


def show(cells: dict[str, Any]) -> None:
    """Print a line a cell."""
    for name, cell in cells.items():
        if "layers_come_s" in cell:
            last = 1e3 * cell["layers_come_s"][-1]
            print(
                f"{name:28} {cell['bytes_per_s'] / 1e9:.1f} GB/s, the last layer after {last:.2f} ms"
            )
            continue
        told = cell["seconds"].items()
        shown = (
            f"{who} {1e3 * (median(s) if isinstance(s, list) else s):.3f} ms" for who, s in told
        )
        print(f"{name:28} {', '.join(shown)}")


def main(argv: list[str] | None = None) -> int:
    """Measure what is not measured yet: 0 done, 3 cells are left for another run."""
    args = arguments(__doc__, argv, models="18 GB")
    record = Record(args.json, args.device, args.minutes)
    with torch.inference_mode():
        record.fill("attention", partial(attention, torch.device(args.device), args.tiny))
    for shape in TINY if args.tiny else BIG:
        cells = {
            f"{kind}/{shape}/{tokens}": tokens for kind in ("warm", "overlap") for tokens in HISTORY
        }
        if not record.wants(*cells):
            continue
        with tempfile.TemporaryDirectory() as folder:
            where = (args.models or Path(folder)) / shape
            shapes.write(where, shapes.SHAPES[shape], args.device)
            room = KV_BYTES // 256 if args.tiny else KV_BYTES
            runner = TorchExecutor.load(
                str(where), device=args.device, dtype="bf16", kv_bytes=room, host_bytes=room
            )
            for name, tokens in cells.items():
                measure = warm if name.startswith("warm") else overlap
                record.fill(name, partial(measure, runner, tokens, args.tiny))
            del runner
    show(record.cells)
    return record.status()


if __name__ == "__main__":
    sys.exit(main())
