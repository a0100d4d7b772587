"""L3: prompt tokens a second, against llama.cpp with the same weights and bits."""

from __future__ import annotations

from statistics import median

from loadgen import stats
from loadgen.document import Body, Options
from loadgen.suites import engine_pairs
from loadgen.suites.engine_pairs import KINDS, both, compare, told

PROMPT = 2048
GOALS = {"bf16": 1.2, "int8": 2.0, "int4": 1.2}


def run(options: Options) -> Body:
    """Measure a prompt with weights of every kind (quick: a short one)."""
    return engine_pairs.run(Body(), options, _measure)


async def _measure(body: Body, options: Options) -> None:
    rows, tokens = [], options.pick(PROMPT, 128)
    for kind, theirs in KINDS.items():
        async with both(kind, options) as models:
            blocks = await compare(models, options.rounds(12, 2), "prefill", tokens=tokens)
        ratio = stats.paired_ratio(blocks.theirs, blocks.ours)
        speeds = [tokens / median(side) for side in (blocks.ours, blocks.theirs)]
        rows.append(
            [
                f"{kind} / {theirs}", f"{speeds[0]:.0f}", f"{speeds[1]:.0f}", told(ratio),
                f"{median(blocks.ours):.2f} / {median(blocks.theirs):.2f}",
                f"{len(blocks.ours)} ({blocks.dropped})",
            ]
        )  # fmt: skip
        body.samples[kind] = blocks.samples()
        body.met[f"prompt, {kind}"] = stats.verdict(ratio, GOALS[kind], 0.8)
    columns = ["weights", "ours tokens/s", "llama.cpp tokens/s", "ratio [95 %]"]
    columns += ["first token after s, ours / theirs", "pairs (blocks dropped)"]
    body.table(f"A prompt of {tokens} tokens", columns, rows)
