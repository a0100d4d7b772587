"""L1: tokens a second of one stream, against llama.cpp and vLLM, and as a share of what memory can bring."""

from __future__ import annotations

import asyncio

from bench.document import BenchOptions, Body
from bench.rivals import gguf_file
from bench.rivals.engine_process import LLAMA, VLLM
from bench.suites.engine_pairs import (
    KINDS,
    PEAK,
    SHAPES,
    EngineCell,
    EngineKept,
    describe,
    divergence_cell,
    judged,
    measured,
    share_of_bandwidth,
    told,
)
from loadgen import stats

CONTEXT, STEPS = 64, 16
GOALS, MUST, SHARE = {LLAMA: 1.1, VLLM: 1.0}, 1.0, 0.8
MUST_OF_A_FILE = 0.9


def cells(*, quick: bool = False) -> list[EngineCell]:
    """Return every cell: each kind of weights against llama.cpp and the machine, bf16 against vLLM too.

    The last are those in which both sides read the same GGUF file.
    """
    rivals = [(kind, LLAMA) for kind in KINDS] + [("bf16", VLLM)] + [(kind, PEAK) for kind in KINDS]
    rivals += [(kind, LLAMA) for kind in gguf_file.TYPES]
    shapes = ["M"] if quick else SHAPES
    return [
        EngineCell(shape, kind, rival, 1, CONTEXT, STEPS)
        for shape in shapes
        for kind, rival in rivals
    ]


def run(options: BenchOptions) -> Body:
    """Measure one stream with weights of every kind (quick: the smaller model, few pairs)."""
    wanted = cells(quick=options.quick)
    found = asyncio.run(measured(wanted, options))
    body = Body(left=found.partial.left)
    tables(body, [cell for cell in wanted if cell.name in found.kept.cells], found.kept)
    describe(body, wanted, found.kept)
    return body


def tables(body: Body, there: list[EngineCell], kept: EngineKept) -> None:
    """Add both tables and the verdicts, of which those of L count."""
    rows, shares = [], []
    for cell in there:
        found = kept.cells[cell.name]
        if cell.rival == PEAK:
            share = share_of_bandwidth(cell, found)
            word = stats.verdict(share, SHARE, SHARE)
            what = f"one stream, {cell.kind}: share of bandwidth"
            shares.append(
                [cell.shape, cell.kind, found.rates(cell)[0], told(share), word, found.count()]
            )
        else:
            must = MUST_OF_A_FILE if cell.of_a_file else MUST
            word = judged(cell, kept, GOALS[cell.rival], must)
            what = f"one stream, {cell.kind}, {cell.rival}"
            sizes = " / ".join(f"{size / 2**30:.2f}" for size in found.memory)
            starts = " / ".join(f"{seconds:.1f}" for seconds in found.start_s)
            rows.append(
                [*cell.where(), cell.rival, *found.rates(cell), told(found.ratio()), word,
                 divergence_cell(cell, kept), sizes, starts, found.count()]
            )  # fmt: skip
        if cell.shape == "L":
            body.met[what] = word
    columns = [
        "shape",
        "weights",
        "rival",
        "ours tokens/s",
        "rival tokens/s",
        "ratio [95 %]",
        "reached",
    ]
    columns += ["KL, ours / rival", "memory GiB", "start s", "pairs (blocks dropped)"]
    body.table(f"One stream, {CONTEXT} to {CONTEXT + STEPS} tokens of context", columns, rows)
    columns = ["shape", "weights", "tokens/s", "share [95 %]", "reached", "pairs (blocks dropped)"]
    body.table(
        "Bytes of weights a second, as a share of reading memory in the same run", columns, shares
    )
