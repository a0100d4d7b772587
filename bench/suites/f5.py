"""F5: memory of every process, of both Redis and of every tier under full load."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from bench.document import BenchOptions, Body
from bench.mesh.local_mesh import PAGES
from chaos.f5 import LIMITS, WARM_S, LoadMemory, measure
from chaos.f5_pages import BUDGETS
from chaos.memory_watch import MeshMemory

GOAL, MUST = 0.05, 0.10  # above a budget, or above the first fifth of a run


def run(options: BenchOptions) -> Body:
    """Load the whole mesh (300 s; quick: 10 s) and compare the first fifth's memory with the last's."""
    seconds = options.rounds(300, 10)
    warm_s = 3.0 if options.quick else WARM_S
    return describe(measure(float(seconds), warm_s, options.seed, options.cgroup), seconds)


def describe(found: LoadMemory, seconds: int) -> Body:
    """Turn what was measured into tables, samples and verdicts."""
    body = Body(samples=msgspec.to_builtins(found))
    add_memory(body, found.memory, f"{seconds} s of load")
    body.notes.append(
        f"Embeddings, searches, writes of the same ids again and again, and conversations by session at once: "
        f"{found.requests} requests, {found.turns} turns, failed: {found.failed or 'none'}. One process of every kind."
    )
    if found.groups:
        rows = [
            [name, f"{use.limit >> 20:,}", f"{use.peak / 2**20:,.0f}", str(use.kills)]
            for name, use in sorted(found.groups.items())
        ]
        body.table("Memory groups", ["process", "limit (MiB)", "peak (MiB)", "killed in"], rows)
        over = any(use.kills or use.peak > use.limit for use in found.groups.values())
        body.met["limits of the memory groups"] = "missed" if over else "goal"
    else:
        limits = ", ".join(f"{name} {limit >> 30}" for name, limit in LIMITS.items())
        body.met["limits of the memory groups"] = "not measured"
        body.notes.append(
            f"No cgroup was named; `--cgroup DIR` limits every process as compose.yaml does (GiB: {limits})."
        )
    return body


def add_memory(body: Body, memory: MeshMemory, over: str) -> None:
    """Add the tables and verdicts of what processes, both Redis and every tier held."""
    kinds = {"resident": memory.rss, "used by data": memory.used}
    rows, worst = [], 0.0
    for kind, some in kinds.items():
        for name, values in sorted(some.items()):
            cells, growth = _growth(values)
            rows.append([name, kind, *cells])
            worst = max(worst, growth if name != PAGES else 0.0)
    columns = ["process", "bytes", "first fifth (MiB)", "last fifth (MiB)", "peak (MiB)", "growth"]
    body.table(f"Memory over {over}", columns, rows)
    body.met["growth of every process"] = _verdict(worst)
    rows, worst = _budgets(memory.tiers)
    columns = ["tier", "budget (MiB)", "median (MiB)", "peak (MiB)", "peak / budget"]
    body.table(f"Every tier of pages over {over}", columns, rows)
    body.met["every tier within its budget"] = _verdict(worst)
    body.notes.append(
        "Device, host: what the worker says of its pools; redis, and bytes used by data: INFO's used_memory; disk: "
        "the sizes of all files. The pages Redis may fill its budget: it is judged as a tier, not by its growth. "
        "Sessions go 30 s after their last turn, where a week is the default, so that as many go as come."
    )


def _growth(values: Sequence[int]) -> tuple[list[str], float]:
    part = max(1, len(values) // 5)
    first, last = statistics.median(values[:part]), statistics.median(values[-part:])
    growth = last / first - 1.0
    cells = [f"{value / 2**20:.1f}" for value in (first, last, max(values))]
    return [*cells, f"{100 * growth:+.1f} %"], growth


def _budgets(tiers: Mapping[str, Sequence[int]]) -> tuple[list[list[str]], float]:
    rows, worst = [], 0.0
    for tier, budget in BUDGETS.items():
        sizes = tiers[tier]
        share = max(sizes) / budget
        worst = max(worst, share - 1.0)
        cells = [f"{value / 2**20:.1f}" for value in (budget, statistics.median(sizes), max(sizes))]
        rows.append([tier, *cells, f"{share:.1%}"])
    return rows, worst


def _verdict(over: float) -> str:
    return "goal" if over <= GOAL else "must" if over <= MUST else "missed"
