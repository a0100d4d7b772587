"""The engine on an accelerator: decode of an 8B shape beside the roofline, paged attention beside torch's own.

    python -m bench.gpu.engine --device cuda --json engine.json            # on the machine with the accelerator
    python -m bench.gpu.engine --device cpu --tiny --json tiny.json        # a rehearsal

The roofline of a step is the longer of two times: of its bytes (weights, keys and values) at the measured bandwidth,
and of its products at the measured speed of a large matrix product. Resumable as `bench.gpu.chat`.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from bench.gpu import shapes
from bench.gpu.chat import STEP_TOKENS, Burst, prompts
from bench.gpu.record import Record, arguments
from common.pages.identity import PAGE
from engine.decoder.executor.torch_executor import StepRows, TorchExecutor
from engine.kernels.page_memory import PageMemory
from engine.models.decoders.family import parse_decoder
from engine.models.decoders.spec import DecoderSpec
from engine.models.decoders.torch_decoder import attention_on
from engine.models.decoders.weights import wanted

SHAPE, TINY = "llama-8b", "tiny"
STREAMS, CONTEXTS = (1, 8, 64, 256), (512, 4096)
PROMPT, NEW, REPEATS = 256, 128, 3
KV_BYTES = 16 << 30  # 256 streams of 384 tokens, and room


def timed(device: torch.device, work: Callable[[], object], times: int = 20) -> float:
    """Return the median seconds of some work, after a few runs that warm."""
    seconds = []
    for turn in range(times + 3):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= 3:
            seconds.append(time.perf_counter() - began)
    return median(seconds)


def peak(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Measure the bandwidth of reading and writing memory, and the speed of a large product in bf16."""
    size = 256 if tiny else 8192
    one = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    memory = torch.zeros((1 << 20) if tiny else (1 << 30), dtype=torch.uint8, device=device)
    other = torch.empty_like(memory)
    copied_s = timed(device, lambda: other.copy_(memory))
    return {
        "bytes_per_s": 2 * memory.numel() / copied_s,
        "flops": 2 * size**3 / timed(device, lambda: one @ one),
    }


def decode(
    runner: TorchExecutor, streams: int, limits: dict[str, Any], tiny: bool
) -> dict[str, Any]:
    """Measure so many streams side by side: tokens a second, and the share of the roofline that is."""
    length, new = (32, 16) if tiny else (PROMPT, NEW)
    speeds = []
    for turn in range(REPEATS + 1):
        given = prompts(runner, streams, length, seed=streams * 100 + turn)
        burst = Burst(runner, given, new, STEP_TOKENS[-1])
        burst.run()
        speeds.append(burst.decode_tokens_per_s)
    spec = _spec(tiny)
    sizes = {name: torch.Size(size).numel() for name, size in wanted(spec)}
    read = sum(sizes.values()) - sizes["model.embed_tokens.weight"]  # of the table a row each
    token_bytes = 4 * spec.layers * spec.kv_heads * spec.head_dim
    attended = streams * (length + new / 2)
    bytes_s = (2 * read + attended * token_bytes) / limits["bytes_per_s"]
    products = 2 * read * streams + 4 * attended * spec.layers * spec.heads * spec.head_dim
    roof_s = max(bytes_s, products / limits["flops"])
    speed = median(speeds[1:])  # the first one warms
    return {
        "tokens_per_s": speeds[1:],
        "roofline_tokens_per_s": streams / roof_s,
        "share": speed * roof_s / streams,
    }


def attention(device: torch.device, streams: int, context: int, tiny: bool) -> dict[str, Any]:
    """Time one layer's decode attention: over pages, and torch's two over keys and values that lie in one piece."""
    spec = _spec(tiny)
    each = context // PAGE
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    pool = PageMemory(spec, None, [0], streams * each, dtype=kind, device=device)
    pool.data.normal_()
    free = list(range(pool.pages))
    random.Random(1).shuffle(free)
    queries = [StepRows([context - 1], [free[n * each : (n + 1) * each]]) for n in range(streams)]
    ours = attention_on(device)
    planned = ours.plan(queries, [pool], spec.heads // spec.kv_heads)[0]
    q = torch.randn(streams, spec.heads, spec.head_dim, device=device, dtype=kind)
    found = {"pages": timed(device, lambda: ours.attend(q, pool, 0, planned))}
    keys, values = gathered(pool, queries)
    whole = q[:, :, None]
    sdpa = partial(F.scaled_dot_product_attention, whole, keys, values, enable_gqa=True)
    worst = (sdpa()[:, :, 0] - ours.attend(q, pool, 0, planned)).abs().max()
    found["sdpa"] = timed(device, sdpa)
    found["gathered sdpa"] = timed(
        device,
        lambda: F.scaled_dot_product_attention(whole, *gathered(pool, queries), enable_gqa=True),
    )
    flex = _flex(device)
    found["flex"] = timed(device, lambda: flex(whole, keys, values, enable_gqa=True))
    nbytes = 2 * keys.numel() * keys.element_size()
    return {"seconds": found, "pages_bytes_per_s": nbytes / found["pages"], "worst": float(worst)}


def _spec(tiny: bool) -> DecoderSpec:
    return parse_decoder(shapes.SHAPES[TINY if tiny else SHAPE], where="config.json")


def gathered(pool: PageMemory, queries: list[StepRows]) -> tuple[Tensor, Tensor]:
    """Return keys and values, (sequences, kv heads, tokens, dim), gathered from their pages."""
    tables = torch.tensor([query.pages[0] for query in queries], device=pool.data.device)
    pages = pool.data[tables, 0]  # sequences, pages, 2, kv heads, PAGE, dim
    keys, values = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).unbind(0)
    return keys.contiguous(), values.contiguous()


def _flex(device: torch.device) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - slow to import

    if device.type == "cpu":

        def plain(*given: Any, **more: Any) -> Tensor:
            with warnings.catch_warnings(action="ignore"):  # that it is not compiled
                found: Tensor = flex_attention(*given, **more)
                return found

        return plain
    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


def show(cells: dict[str, Any]) -> None:
    """Print a line a cell."""
    for name, cell in cells.items():
        if "share" in cell:
            speed = median(cell["tokens_per_s"])
            print(f"{name:28} {speed:12.1f} tokens/s, {cell['share']:.1%} of the roofline")
        elif "seconds" in cell:
            told = ", ".join(f"{who} {1e6 * s:.0f} us" for who, s in cell["seconds"].items())
            print(f"{name:28} {told}; {cell['pages_bytes_per_s'] / 1e9:.0f} GB/s over pages")
        else:
            print(
                f"{name:28} {cell['bytes_per_s'] / 1e9:.0f} GB/s, {cell['flops'] / 1e12:.1f} TFLOP/s"
            )


def main(argv: list[str] | None = None) -> int:
    """Measure what is not measured yet: 0 done, 3 cells are left for another run."""
    args = arguments(__doc__, argv, models="16 GB")
    device = torch.device(args.device)
    record = Record(args.json, args.device, args.minutes)
    with torch.inference_mode():
        record.fill("peak", partial(peak, device, args.tiny))
        for streams in STREAMS[:2] if args.tiny else STREAMS:
            for context in CONTEXTS[:1] if args.tiny else CONTEXTS:
                name = f"attention/{streams}/{context}"
                record.fill(name, partial(attention, device, streams, context, args.tiny))
    shape = TINY if args.tiny else SHAPE
    names = {f"decode/{shape}/{streams}": streams for streams in STREAMS}
    if record.wants(*names) and "peak" in record.cells:
        with tempfile.TemporaryDirectory() as folder:
            where = (args.models or Path(folder)) / shape
            shapes.write(where, shapes.SHAPES[shape], args.device)
            room = KV_BYTES // 64 if args.tiny else KV_BYTES
            runner = TorchExecutor.load(str(where), device=args.device, dtype="bf16", kv_bytes=room)
            for name, streams in names.items():
                limits = record.cells["peak"]
                record.fill(name, partial(decode, runner, streams, limits, args.tiny))
    show(record.cells)
    return record.status()


if __name__ == "__main__":
    sys.exit(main())
