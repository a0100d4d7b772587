"""K1: linears of a few and of many rows: packed kernels beside torch's, oneDNN's and torchao's, in one table."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from bench.document import BenchOptions, Body
from common.devices import detect
from common.errors import ConfigError
from engine.models.decoders.compiled_decoder import PackedLinear, WeightKind, load_kernels

# inputs, outputs: L's four matrices; MiniLM's
SHAPES = {
    "L qkv": (2048, 3072), "L out": (2048, 2048), "L gate, up": (2048, 16_384), "L down": (8192, 2048),
    "MiniLM up": (384, 1536), "MiniLM down": (1536, 384),
}  # fmt: skip
GROUP = 64
ROWS = (1, 2, 4, 8, 16, 32, 512)
KINDS: tuple[WeightKind, ...] = ("bf16", "int8", "int4")


def run(options: BenchOptions) -> Body:
    """Time every shape, the best of several in turn (quick: two)."""
    kernels, threads = load_kernels(), detect().usable_cores
    if kernels is None:
        raise ConfigError("K1: there are no compiled kernels here; expected a C++ compiler")
    torch.set_num_threads(threads)
    body, rows, wins, whole = Body(), [], 0, 0
    for name, (inputs, outputs) in SHAPES.items():
        weight = torch.randn(outputs, inputs) * inputs**-0.5
        half = weight.to(torch.bfloat16)
        packed = torch.ops.mkldnn._reorder_linear_weight(half)
        ours = [PackedLinear(kernels, weight, kind, threads) for kind in KINDS]
        int8, int4 = _int8(weight), _int4(weight)
        for count in ROWS:
            x = torch.randn(count, inputs)
            x16 = x.to(torch.bfloat16)
            calls: list[Callable[[], object]] = [
                partial(torch.nn.functional.linear, x16, half),
                partial(torch.ops.mkldnn._linear_pointwise, x16, packed, None, "none", [], ""),
                *(partial(each, x) for each in ours),
                partial(int8, x16),
                partial(int4, x16),
            ]
            best = _best(calls, options.rounds(40 if count < 100 else 12, 2))
            gflops = [2 * count * inputs * outputs / seconds / 1e9 for seconds in best]
            wins += gflops[2] >= max(gflops[:2])
            whole += (gflops[3] >= gflops[5]) + (gflops[4] >= gflops[6])
            rows.append([name, str(count), *(f"{rate:.0f}" for rate in gflops)])
            body.samples[f"{name}/{count}"] = best
    columns = ["matrix", "rows", "torch bf16", "oneDNN packed bf16"]
    columns += [*(f"ours {kind}" for kind in KINDS), "torchao int8", "torchao int4"]
    body.table("GFLOP/s", columns, rows)
    body.notes.append(
        f"{threads} threads, the best of several, each in turn. Ours takes fp32 rows and rounds them itself; the "
        "others are given bf16. torchao's are the kernels of torch that it calls on a CPU, for weights in whole "
        "numbers and inputs in bf16 (_weight_int8pack_mm, a scale an output; _weight_int4pack_mm_for_cpu, one for 64 "
        f"inputs): ours is at least as fast in {whole} of {2 * len(rows)} cells. In bf16 it is at least as fast as the "
        f"better of torch and oneDNN in {wins} of {len(rows)}. The decoder takes ours throughout, since a row's bits "
        "must not depend on how many there are; the encoder takes oneDNN, which is faster where inputs are few."
    )
    return body


def _int8(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return torch's product with int8 weights, one scale an output."""
    scales = weight.abs().amax(1) / 127
    codes = (weight / scales[:, None]).round().to(torch.int8)
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, codes, scales.to(torch.bfloat16))


def _int4(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return torch's product with int4 weights, one scale and zero for GROUP inputs of an output."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = groups.abs().amax(2) / 7
    codes = (groups / scales[..., None]).round().clamp(-8, 7).flatten(1).to(torch.int32) + 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    both = torch.stack((scales.T, torch.zeros_like(scales.T)), 2).to(torch.bfloat16).contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, both)


def _best(calls: list[Callable[[], object]], times: int) -> list[float]:
    found = [float("inf")] * len(calls)
    for _ in range(times):
        for number, call in enumerate(calls):
            began = time.perf_counter()
            call()
            found[number] = min(found[number], time.perf_counter() - began)
    return found
