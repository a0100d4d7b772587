"""F5: resident memory of every process under sustained load."""

from __future__ import annotations

import statistics

import msgspec

from bench.document import BenchOptions, Body
from chaos.f5 import WARM_S, measure


def run(options: BenchOptions) -> Body:
    """Load the whole mesh (300 s; quick: 10 s) and compare the first fifth's memory with the last's."""
    seconds = options.rounds(300, 10)
    memory = measure(float(seconds), 3.0 if options.quick else WARM_S)
    body = Body(samples=msgspec.to_builtins(memory))
    rows, worst = [], 0.0
    for name, values in sorted(memory.rss.items()):
        part = max(1, len(values) // 5)
        first, last = statistics.median(values[:part]), statistics.median(values[-part:])
        growth = last / first - 1.0
        worst = max(worst, growth)
        cells = [f"{value / 2**20:.0f}" for value in (first, last, max(values))]
        rows.append([name, *cells, f"{growth * 100:+.1f} %"])
    columns = ["process", "first fifth (MiB)", "last fifth (MiB)", "peak (MiB)", "growth"]
    body.table(f"Resident memory over {seconds} s of load", columns, rows)
    body.notes.append(f"{memory.requests} requests, failed: {memory.failed or 'none'}.")
    body.met["growth"] = "goal" if worst <= 0.05 else "must" if worst <= 0.10 else "missed"
    return body
