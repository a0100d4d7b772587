"""F5P: the bytes of every tier of pages over many turns, against its budget; the worker's memory stays as it is."""

from __future__ import annotations

import statistics

import msgspec

from bench.document import BenchOptions, Body
from chaos import tiers
from chaos.f5_pages import BUDGETS, SHAPE, measure


def run(options: BenchOptions) -> Body:
    """Have conversations of 10,000 turns (quick: 200) through tiers of a few mebibytes."""
    memory = measure(options.rounds(10_000, 200), options.seed)
    body = Body(samples=msgspec.to_builtins(memory))
    rows, worst = [], 0.0
    for tier, budget in BUDGETS.items():
        sizes = memory.tiers[tier]
        share = max(sizes) / budget
        worst = max(worst, share)
        cells = [f"{value / 2**20:.1f}" for value in (budget, statistics.median(sizes), max(sizes))]
        rows.append([tier, *cells, f"{share:.1%}"])
    columns = ["tier", "budget (MiB)", "median (MiB)", "peak (MiB)", "peak / budget"]
    body.table(f"Bytes of every tier over {memory.turns:,} turns", columns, rows)
    rows, growth = [], 0.0
    for name, values in sorted(memory.rss.items()):
        part = max(1, len(values) // 5)
        first, last = statistics.median(values[:part]), statistics.median(values[-part:])
        if name == "gpu_worker":
            growth = last / first - 1.0
        cells = [f"{value / 2**20:.0f}" for value in (first, last, max(values))]
        rows.append([name, *cells, f"{last / first - 1.0:+.1%}"])
    columns = ["process", "first fifth (MiB)", "last fifth (MiB)", "peak (MiB)", "growth"]
    body.table("Resident memory meanwhile", columns, rows)
    body.table("Pages found and moved", *tiers.table(memory.counted))
    body.notes.append(
        f"Conversations of {SHAPE.turns:g} turns in the mean, by session; failed: {memory.failed or 'none'}. Device, "
        "host: what the worker says of its pools; redis: INFO's used_memory; disk: the sizes of all files. The bus' "
        "Redis keeps every session, and grows with them."
    )
    body.met["every tier within its budget"] = _verdict(worst - 1.0)
    body.met["growth of the worker"] = _verdict(growth)
    return body


def _verdict(over: float) -> str:
    return "goal" if over <= 0.05 else "must" if over <= 0.10 else "missed"
