"""L3: prompt tokens a second, against llama.cpp and vLLM, and as a share of what the processor can multiply."""

from __future__ import annotations

import asyncio
from itertools import product

from bench.document import BenchOptions, Body
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
    share_of_products,
    told,
)
from loadgen import stats

JUDGED, PROMPTS = 2048, (512, 2048)
LLAMA_GOALS, VLLM_GOAL, MUST, SHARE = {"bf16": 1.6, "int8": 3.0, "int4": 1.6}, 1.1, 1.0, 0.9


def cells(*, quick: bool = False) -> list[EngineCell]:
    """Return every cell: each kind of weights against llama.cpp and the machine, bf16 against vLLM too."""
    rivals = [(kind, LLAMA) for kind in KINDS] + [("bf16", VLLM)] + [(kind, PEAK) for kind in KINDS]
    shapes, prompts = (["M"], [512]) if quick else (SHAPES, PROMPTS)
    return [
        EngineCell(shape, kind, rival, 1, tokens)
        for shape, (kind, rival), tokens in product(shapes, rivals, prompts)
        if rival != PEAK or tokens == prompts[-1]
    ]


def run(options: BenchOptions) -> Body:
    """Measure prompts with weights of every kind (quick: a short one, the smaller model)."""
    wanted = cells(quick=options.quick)
    found = asyncio.run(measured(wanted, options))
    body = Body(left=found.partial.left)
    tables(body, [cell for cell in wanted if cell.name in found.kept.cells], found.kept)
    describe(body, wanted, found.kept)
    return body


def tables(body: Body, there: list[EngineCell], kept: EngineKept) -> None:
    """Add both tables and the verdicts, of which those of L and 2,048 tokens count."""
    rows, shares = [], []
    for cell in there:
        found = kept.cells[cell.name]
        if cell.rival == PEAK:
            share = share_of_products(cell, found)
            # only bf16 is judged: both sides multiply in bf16, while whole numbers are unpacked on the way
            word = stats.verdict(share, SHARE, SHARE) if cell.kind == "bf16" else "-"
            what = f"prompt of {cell.tokens}, {cell.kind}: share of the GEMM peak"
            where = [cell.shape, cell.kind, str(cell.tokens), found.rates(cell)[0]]
            shares.append([*where, told(share), word, found.count()])
        else:
            goal = VLLM_GOAL if cell.rival == VLLM else LLAMA_GOALS[cell.kind]
            word = judged(cell, kept, goal, MUST)
            what = f"prompt of {cell.tokens}, {cell.kind}, {cell.rival}"
            rows.append(
                [*cell.where(), cell.rival, str(cell.tokens), *found.rates(cell), told(found.ratio()), word,
                 divergence_cell(cell, kept), found.count()]
            )  # fmt: skip
        if cell.shape == "L" and cell.tokens == JUDGED and word != "-":
            body.met[what] = word
    columns = [
        "shape",
        "weights",
        "rival",
        "prompt",
        "ours tokens/s",
        "rival tokens/s",
        "ratio [95 %]",
        "reached",
    ]
    body.table("Prompts", [*columns, "KL, ours / rival", "pairs (blocks dropped)"], rows)
    columns = [
        "shape",
        "weights",
        "prompt",
        "tokens/s",
        "share [95 %]",
        "reached",
        "pairs (blocks dropped)",
    ]
    body.table(
        "Operations a second, as a share of a matrix product of the same bits in the same run",
        columns,
        shares,
    )
    body.notes.append(
        "The matrix product is torch's (oneDNN), 2,048 x 2,048 x 2,048, in bf16 for bf16 and in int8 for the others. "
        "A prompt's operations are those of its layers' matrices and of attention to the tokens before."
    )
