"""L5: streams and a prompt beside other engines, each at the kinds of weights it knows."""

from __future__ import annotations

import asyncio
from itertools import product

from bench.document import BenchOptions, Body
from bench.rivals.engine_process import VLLM
from bench.suites.engine_pairs import (
    SHAPES,
    EngineCell,
    EngineKept,
    describe,
    measured,
    told,
)

CONTEXT, PROMPT = 64, 512
STEPS = {1: 16, 8: 8, 32: 8}  # by streams
KIND_OF = {
    "transformers": "bf16",
    "ctranslate2": "int8",
    VLLM: "bf16",
}  # which weights of ours stand beside theirs


def cells(*, quick: bool = False) -> list[EngineCell]:
    """Return every cell: all rivals on both shapes, with one, 8 and 32 streams and a prompt."""
    works = [(streams, CONTEXT, steps) for streams, steps in STEPS.items()] + [(1, PROMPT, 0)]
    shapes, works = (["M"], works[1:2]) if quick else (list(SHAPES), works)
    return [
        EngineCell(shape, kind, rival, *work)
        for (rival, kind), shape, work in product(KIND_OF.items(), shapes, works)
    ]


def run(options: BenchOptions) -> Body:
    """Measure every rival that is set up (quick: one cell of each)."""
    wanted = cells(quick=options.quick)
    found = asyncio.run(measured(wanted, options))
    body = Body(left=found.partial.left)
    table(body, [cell for cell in wanted if cell.name in found.kept.cells], found.kept)
    describe(body, wanted, found.kept)
    return body


def table(body: Body, there: list[EngineCell], kept: EngineKept) -> None:
    """Add the table; L1 to L3 hold what is judged."""
    rows = []
    for cell in there:
        found = kept.cells[cell.name]
        what = f"{cell.streams} x {cell.tokens}" if cell.steps else f"prompt of {cell.tokens}"
        sizes = " / ".join(f"{size / 2**30:.2f}" for size in found.memory)
        starts = " / ".join(f"{seconds:.1f}" for seconds in found.start_s)
        where = [f"{cell.rival}, {cell.kind}", cell.shape, what]
        rows.append([*where, *found.rates(cell), told(found.ratio()), sizes, starts, found.count()])
    columns = [
        "rival, weights",
        "shape",
        "streams x context",
        "ours tokens/s",
        "rival tokens/s",
        "ratio [95 %]",
    ]
    body.table(
        "Beside other engines", [*columns, "memory GiB", "start s", "pairs (blocks dropped)"], rows
    )
