"""F4: SIGTERM with 50 requests in flight; none is cut short, and it is unready within 100 ms."""

from __future__ import annotations

import statistics

import msgspec

from bench.document import BenchOptions, Body
from chaos.f4 import IN_FLIGHT, UNREADY_S, Drain, measure


def run(options: BenchOptions) -> Body:
    """Drain a router and a worker (10 times each; quick: once)."""
    return describe(measure(options.rounds(10, 1)))


def describe(drains: list[Drain]) -> Body:
    """Turn drains into a table, samples and verdicts."""
    body = Body(notes=["Simulated devices."])
    add(body, "", drains)
    return body


def add(body: Body, title: str, drains: list[Drain]) -> None:
    """Add a table of drains to a body, and lower its verdicts to what they show."""
    body.samples.setdefault("drains", []).extend(msgspec.to_builtins(drains))
    kinds = sorted({drain.victim.rpartition("-")[0] for drain in drains})
    rows = [_row(kind, [d for d in drains if d.victim.startswith(kind)]) for kind in kinds]
    columns = ["terminated", "times", "requests in flight", "answered whole", "cut short"]
    columns += ["unready after, median (ms)", "worst (ms)", "gone after, worst (s)"]
    body.table(title, columns, rows)
    cut = [drain for drain in drains if drain.cut]
    slow = [drain for drain in drains if drain.unready_s > UNREADY_S]
    codes = [drain for drain in drains if drain.exit_code != 0]
    body.notes += [f"{drain.victim}: {drain.cut}" for drain in cut[:5]]
    for what, bad in (("0 cut short", cut or codes), ("unready in 100 ms", slow)):
        body.met[what] = "missed" if bad or body.met.get(what) == "missed" else "goal"


def _row(kind: str, drains: list[Drain]) -> list[str]:
    return [
        kind,
        str(len(drains)),
        str(IN_FLIGHT * len(drains)),
        str(sum(drain.whole for drain in drains)),
        str(sum(sum(drain.cut.values()) for drain in drains)),
        f"{statistics.median(drain.unready_s for drain in drains) * 1e3:.0f}",
        f"{max(drain.unready_s for drain in drains) * 1e3:.0f}",
        f"{max(drain.gone_s for drain in drains):.1f}",
    ]
