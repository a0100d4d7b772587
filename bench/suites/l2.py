"""L2: tokens a second of 8 and 32 streams, at short and long contexts, against llama.cpp and vLLM."""

from __future__ import annotations

import asyncio
from itertools import product

from bench.document import BenchOptions, Body
from bench.rivals.engine_process import LLAMA, VLLM
from bench.suites.engine_pairs import (
    KINDS,
    SHAPES,
    EngineCell,
    EngineKept,
    describe,
    divergence_cell,
    judged,
    measured,
    told,
)

CONTEXTS, STREAMS = (64, 2048), (8, 32)
STEPS = {"L": 4, "M": 16}
MUST = 1.0


def cells(*, quick: bool = False) -> list[EngineCell]:
    """Return every cell: each kind of weights against llama.cpp, bf16 against vLLM too."""
    if quick:
        return [
            EngineCell("M", kind, LLAMA, 8, tokens, 4)
            for kind, tokens in (("bf16", 64), ("int8", 512))
        ]
    rivals = [(kind, LLAMA) for kind in KINDS] + [("bf16", VLLM)]
    return [
        EngineCell(shape, kind, rival, streams, context, STEPS[shape])
        for shape, context, (kind, rival), streams in product(SHAPES, CONTEXTS, rivals, STREAMS)
    ]


def goal_of(cell: EngineCell) -> float:
    """Return how many times a rival's tokens a second are the goal; int4 has none of its own but the must."""
    if cell.rival == VLLM:
        return 1.2
    many = {"bf16": 1.5, "int8": 2.5 if cell.streams == 8 else 3.0}
    return many.get(cell.kind, MUST)


def run(options: BenchOptions) -> Body:
    """Measure batches of streams with weights of every kind (quick: two cells of the smaller model)."""
    wanted = cells(quick=options.quick)
    found = asyncio.run(measured(wanted, options))
    body = Body(left=found.partial.left)
    table(body, [cell for cell in wanted if cell.name in found.kept.cells], found.kept)
    describe(body, wanted, found.kept)
    return body


def table(body: Body, there: list[EngineCell], kept: EngineKept) -> None:
    """Add the table and the verdicts, of which those of L count."""
    rows = []
    for cell in there:
        found, word = kept.cells[cell.name], judged(cell, kept, goal_of(cell), MUST)
        rows.append(
            [*cell.where(), cell.rival, f"{cell.streams} x {cell.tokens}", *found.rates(cell), told(found.ratio()),
             word, divergence_cell(cell, kept), found.count()]
        )  # fmt: skip
        if cell.shape == "L":
            body.met[f"{cell.streams} streams at {cell.tokens}, {cell.kind}, {cell.rival}"] = word
    columns = [
        "shape",
        "weights",
        "rival",
        "streams x context",
        "ours tokens/s",
        "rival tokens/s",
        "ratio [95 %]",
    ]
    columns += ["reached", "KL, ours / rival", "pairs (blocks dropped)"]
    body.table("Steps of many streams together", columns, rows)
