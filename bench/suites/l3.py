"""L3: prompt tokens a second, against llama.cpp with the same weights and bits."""

from __future__ import annotations

from itertools import product
from statistics import median

from bench.document import BenchOptions, Body
from bench.suites import engine_pairs
from bench.suites.engine_pairs import KINDS, SHAPES, both, compare, told
from loadgen import stats

JUDGED = 2048
PROMPTS = {
    128: 24,
    512: 12,
    JUDGED: 12,
    4095: 4,
}  # tokens, and pairs; with the answer's first that fills a context
GOALS = {"bf16": 1.2, "int8": 2.0, "int4": 1.2}


def run(options: BenchOptions) -> Body:
    """Measure prompts with weights of every kind (quick: short ones)."""
    return engine_pairs.run(Body(), options, _measure)


async def _measure(body: Body, options: BenchOptions) -> None:
    rows = []
    for (name, shape), (kind, theirs) in product(SHAPES.items(), KINDS.items()):
        async with both(kind, options, shape=shape) as models:
            for tokens, pairs in PROMPTS.items():
                if tokens > options.pick(4096, 128):
                    continue
                blocks = await compare(models, options.pick(pairs, 2), "prefill", tokens=tokens)
                ratio = stats.paired_ratio(blocks.theirs, blocks.ours)
                speeds = [tokens / median(side) for side in (blocks.ours, blocks.theirs)]
                rows.append(
                    [
                        name, f"{kind} / {theirs}", str(tokens), f"{speeds[0]:.0f}", f"{speeds[1]:.0f}", told(ratio),
                        f"{median(blocks.ours):.2f} / {median(blocks.theirs):.2f}",
                        f"{len(blocks.ours)} ({blocks.dropped})",
                    ]
                )  # fmt: skip
                body.samples[f"{name}/{kind}/{tokens}"] = blocks.samples()
                if name == "L" and tokens == options.pick(JUDGED, 128):
                    body.met[f"prompt, {kind}"] = stats.verdict(ratio, GOALS[kind], 0.8)
    columns = ["shape", "weights", "prompt", "ours tokens/s", "llama.cpp tokens/s", "ratio [95 %]"]
    columns += ["first token after s, ours / theirs", "pairs (blocks dropped)"]
    body.table("Prompts", columns, rows)
