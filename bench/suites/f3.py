"""F3: one hung worker; requests to others keep their p99, its own jobs are reclaimed."""

from __future__ import annotations

import msgspec
import numpy as np

from bench.document import BenchOptions, Body
from chaos.f3 import ENDED_S, measure
from loadgen import stats


def run(options: BenchOptions) -> Body:
    """Measure rounds of a calm block and one with a stopped worker (6 of 12 s; quick: 1 of 8 s)."""
    rounds = measure(options.rounds(6, 1), 8.0 if options.quick else 12.0, options.seed)
    body = Body(samples={"rounds": msgspec.to_builtins(rounds)}, notes=["Simulated devices."])
    calm = [value for each in rounds for value in each.calm_s]
    others = [value for each in rounds for value in each.others_s]
    stuck = [value for each in rounds for value in each.stuck_s]
    ratio = _ratio(others, calm)
    rows = [
        _row("both workers run", calm),
        _row("one stopped, requests to the other", others),
        _row("one stopped, requests it had taken", stuck),
    ]
    body.table("Latency in milliseconds", ["requests", "count", "p50", "p99", "max"], rows)
    failed = sum(sum(each.failed.values()) for each in rounds)
    body.notes.append(
        f"p99 with one stopped / p99 calm: {ratio['value']:.3f} "
        f"[{ratio['low']:.3f}, {ratio['high']:.3f}]; {failed} requests failed."
    )
    body.met["p99 of others"] = stats.verdict(ratio, 1.05, 1.20, higher=False, width=stats.TAIL)
    late = [value for value in stuck if value > ENDED_S]
    body.met["its jobs reclaimed"] = "missed" if late or failed else "goal"
    return body


def _row(name: str, values: list[float]) -> list[str]:
    found = stats.percentiles(values)
    cells = [f"{found[key] * 1e3:.1f}" if found else "-" for key in ("p50", "p99", "max")]
    return [name, str(len(values)), *cells]


def _ratio(others: list[float], calm: list[float]) -> dict[str, float]:
    rng = np.random.default_rng(1)
    a, b = np.asarray(others), np.asarray(calm)
    draws = [
        float(np.percentile(rng.choice(a, a.size), 99) / np.percentile(rng.choice(b, b.size), 99))
        for _ in range(500)
    ]
    low, high = np.percentile(draws, [2.5, 97.5])
    value = float(np.percentile(a, 99) / np.percentile(b, 99))
    return {"value": value, "low": float(low), "high": float(high)}
