"""L2: tokens a second of 8 and 32 streams, against llama.cpp with the same weights and bits."""

from __future__ import annotations

from itertools import product
from statistics import median

from bench.document import BenchOptions, Body
from bench.suites import engine_pairs
from bench.suites.engine_pairs import KINDS, SHAPES, both, compare, told
from loadgen import stats

CONTEXT, STEPS = 64, 4
GOALS = {("bf16", 8): 1.5, ("bf16", 32): 1.3, ("int8", 8): 2.0, ("int8", 32): 2.0}


def run(options: BenchOptions) -> Body:
    """Measure batches of streams with weights of every kind (quick: few pairs)."""
    return engine_pairs.run(Body(), options, _measure)


async def _measure(body: Body, options: BenchOptions) -> None:
    rows = []
    for (name, shape), (kind, theirs) in product(SHAPES.items(), KINDS.items()):
        async with both(kind, options, shape=shape) as models:
            for streams in (8, 32):
                work = {"streams": streams, "context": CONTEXT, "steps": STEPS}
                blocks = await compare(models, options.rounds(30, 2), "decode", **work)
                ratio = stats.paired_ratio(blocks.theirs, blocks.ours)
                speeds = [streams * STEPS / median(side) for side in (blocks.ours, blocks.theirs)]
                rows.append(
                    [
                        name, f"{kind} / {theirs}", str(streams), f"{speeds[0]:.1f}", f"{speeds[1]:.1f}", told(ratio),
                        f"{len(blocks.ours)} ({blocks.dropped})",
                    ]
                )  # fmt: skip
                body.samples[f"{name}/{kind}/{streams}"] = blocks.samples()
                if name == "L":
                    goal = GOALS.get((kind, streams), 1.0)
                    body.met[f"{streams} streams, {kind}"] = stats.verdict(ratio, goal, 1.0)
    columns = ["shape", "weights", "streams", "ours tokens/s", "llama.cpp tokens/s", "ratio [95 %]"]
    columns.append("pairs (blocks dropped)")
    body.table(f"Streams at {CONTEXT} tokens of context, {STEPS} steps", columns, rows)
