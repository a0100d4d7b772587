"""F2: cancelled and abandoned work stops within one step."""

from __future__ import annotations

import msgspec

from bench.document import BenchOptions, Body
from chaos.f2 import EMBEDDINGS, SLACK_S, Stop, measure
from chaos.work import Work
from loadgen import stats


def run(options: BenchOptions) -> Body:
    """Stop requests by cancel and by disconnect (20 rounds each; quick: 1)."""
    return describe(measure(options.rounds(20, 1)), EMBEDDINGS)


def describe(stops: list[Stop], work: Work) -> Body:
    """Turn stops into a table, samples and verdicts."""
    body = Body(samples={"stops": msgspec.to_builtins(stops)}, notes=["Simulated device."])
    ways = sorted({stop.way for stop in stops})
    rows = [_row(way, [stop for stop in stops if stop.way == way]) for way in ways]
    columns = ["stopped by", "jobs", "over after p50 (ms)", "slowest (ms)", "ended as", "went on"]
    title = f"Jobs queued and running, steps of {work.step_s * 1e3:.0f} ms"
    body.table(title, columns, rows)
    slowest = max((max(stop.over_s, default=0.0) for stop in stops), default=0.0)
    left = sum(stop.left for stop in stops)
    late = slowest > work.step_s + SLACK_S
    body.met["work stops within one step"] = "missed" if left or late else "goal"
    return body


def _row(way: str, stops: list[Stop]) -> list[str]:
    over = [value for stop in stops for value in stop.over_s]
    found = stats.percentiles(over)
    ends: dict[str, int] = {}
    for stop in stops:
        for name, count in stop.ends.items():
            ends[name] = ends.get(name, 0) + count
    told = ", ".join(f"{count} {name}" for name, count in sorted(ends.items()))
    cells = [f"{found[key] * 1e3:.0f}" if found else "-" for key in ("p50", "max")]
    return [way, str(len(over)), *cells, told, str(sum(stop.left for stop in stops))]
