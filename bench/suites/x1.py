"""X1: the engine's logits and greedy text against transformers, for every family."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict

from bench.document import BenchOptions, Body
from bench.engine.exactness import FAMILIES, measure


def run(options: BenchOptions) -> Body:
    """Measure every family, 1,000 sequences each (quick: 20)."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    count = options.rounds(1000, 20)
    body = Body()
    rows = [measure(family, sequences=count, seed=options.seed) for family in FAMILIES]
    columns = ["family", "models", "sequences", "tokens", "logits, whole", "logits, mixed batches"]
    columns += ["transformers' own rounding", "beyond both", "text differs", "excused (gap < 1e-3)"]
    body.table(
        "fp32 against transformers, random models",
        columns,
        [
            [
                row.family,
                *map(str, (row.models, row.sequences, row.tokens)),
                *(f"{worst:.1e}" for worst in (row.logits_whole, row.logits_mixed, row.own)),
                *map(str, (row.beyond, row.different, row.excused)),
            ]
            for row in rows
        ],
    )
    body.samples["rows"] = [asdict(row) for row in rows]
    for row in rows:
        body.met[row.family] = "met" if row.met else "missed"
    body.notes.append(
        "Logits: the worst row's largest difference over its largest logit (goal 1e-4). Some of these models turn any "
        "rounding into more: transformers' own, against its result in fp64, stands beside ours, and what is off by "
        "more than 1e-4 and more than twice that is counted as beyond both. Text: 32 greedy tokens, "
        "generated in mixed batches on scattered pages; a first difference is excused where the oracle's two "
        "likeliest logits are nearer than 1e-3, in at most 0.1 % of sequences. Every model has another random "
        "configuration: heads, grouped heads, head size, biases, tying, rotation (default, linear, llama3, yarn), "
        "windows."
    )
    return body
