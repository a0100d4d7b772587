"""L1: tokens a second of one stream, against llama.cpp with the same weights and bits."""

from __future__ import annotations

from itertools import product
from statistics import median

from bench.document import BenchOptions, Body
from bench.gpu import shapes
from bench.suites import engine_pairs
from bench.suites.engine_pairs import KINDS, SHAPES, both, compare, told, weight_bytes
from loadgen import stats

CONTEXT, STEPS = 64, 16


def run(options: BenchOptions) -> Body:
    """Measure one stream with weights of every kind (quick: the smallest model, few pairs)."""
    return engine_pairs.run(Body(), options, _measure)


async def _measure(body: Body, options: BenchOptions) -> None:
    rows = []
    for (name, shape), (kind, theirs) in product(SHAPES.items(), KINDS.items()):
        async with both(kind, options, shape=shape) as models:
            work = {"streams": 1, "context": CONTEXT, "steps": STEPS}
            blocks = await compare(models, options.rounds(60, 2), "decode", **work)
            memory = [f"{model.rss_bytes() / 2**30:.2f}" for model in models]
            start = [f"{model.started_s:.1f}" for model in models]
        ratio = stats.paired_ratio(blocks.theirs, blocks.ours)
        speeds = [STEPS / median(side) for side in (blocks.ours, blocks.theirs)]
        read = speeds[0] * weight_bytes(kind, shapes.SHAPES[shape]) / 1e9
        rows.append(
            [
                name, f"{kind} / {theirs}", f"{speeds[0]:.1f}", f"{speeds[1]:.1f}", told(ratio), f"{read:.1f}",
                " / ".join(memory), " / ".join(start), f"{len(blocks.ours)} ({blocks.dropped})",
            ]
        )  # fmt: skip
        body.samples[kind if name == "L" else f"{name}/{kind}"] = blocks.samples()
        if name == "L":
            body.met[f"one stream, {kind}"] = stats.verdict(ratio, 1.0, 0.7)
    columns = [
        "shape",
        "weights",
        "ours tokens/s",
        "llama.cpp tokens/s",
        "ratio [95 %]",
        "ours GB/s",
    ]
    columns += ["memory GiB", "start s", "pairs (blocks dropped)"]
    body.table(f"One stream, {CONTEXT} to {CONTEXT + STEPS} tokens of context", columns, rows)
