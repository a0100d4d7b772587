"""F5P: the bytes of every tier of pages over many turns, against its budget; what processes hold stays as it is."""

from __future__ import annotations

import msgspec

from bench.document import BenchOptions, Body
from bench.suites.f5 import add_memory
from chaos import tiers
from chaos.f5_pages import SHAPE, measure


def run(options: BenchOptions) -> Body:
    """Have conversations of 10,000 turns (quick: 200) through tiers of a few mebibytes."""
    found = measure(options.rounds(10_000, 200), options.seed)
    body = Body(samples=msgspec.to_builtins(found))
    add_memory(body, found.memory, f"{found.turns:,} turns")
    body.table("Pages found and moved", *tiers.table(found.counted))
    body.notes.append(
        f"Conversations of {SHAPE.turns:g} turns in the mean, by session; failed: {found.failed or 'none'}. The bus' "
        "Redis keeps every session."
    )
    return body
