"""The plots of the rows on page tiers: conversations, warm turns, never slower, eviction, bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.workloads.warm_turns import GOALS, MUSTS, TIERS
from loadgen import stats
from loadgen.html import plots
from loadgen.html.plots import Mark, Ratio

_POLICIES = ("lru", "s3fifo", "spillway", "informed", "clairvoyant")


def p1(samples: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Latency over throughput as the rate rises: each model's systems, then what the paper's figures show."""
    titles = {
        "M": ("Model M", 100.0),
        "S": ("Model S", 30.0),
        "turns": ("Conversations of at least five turns (figure 3.15)", None),
        "think": ("A small host, by think time (figure 3.16)", None),
        "policy": ("A small host alone, by eviction (figure 3.14)", None),
        "simulated": ("Simulated: one batch, or prompts first (figure 3.18)", None),
    }
    found = []
    for first, (title, limit_ms) in titles.items():
        series: dict[str, tuple[list[float], list[float]]] = {}
        for key, points in samples["points"].items():
            if key.startswith(first):
                name = key.partition(first)[2].lstrip(":, ").partition(" #")[0]  # of every repeat
                turns, latencies = series.setdefault(name, ([], []))
                # JSON holds null for an infinite latency, which has no place in a plot.
                shown = [point for point in points if point["normalized_s"] is not None]
                turns += [point["turns_per_s"] for point in shown]
                latencies += [1e3 * point["normalized_s"] for point in shown]
        marks = [Mark("limit", limit_ms)] if limit_ms else []
        if series:
            repeated = any(" #2" in key for key in samples["points"] if key.startswith(first))
            drawn = plots.dots(series, "turns/s", "p90 ms by token", marks, joined=not repeated)
            found.append((title, drawn))
    return found


def p2(samples: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each model's warm turns, as a share of what computing takes."""
    found = []
    for name, blocks in samples.items():
        rounds = [each for block in blocks for each in block["rounds"]]
        firsts = {tier: [each[tier][0][0] for each in rounds] for tier in ("computed", *TIERS)}
        for tier in TIERS:
            ratio = stats.paired_ratio(firsts[tier], firsts["computed"])
            values = ratio["value"], ratio["low"], ratio["high"]
            must, goal = MUSTS.get(tier), GOALS[name].get(tier)
            found.append(Ratio(f"{name}, {tier}", *values, must, goal))
    return [("First token of a warm turn", plots.ratios(found, "of computing, 95 %", log=True))]


def p3(samples: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Turns by the tier's speed and the pages it has; at 1 is computing everything."""
    found = []
    for name, sides in samples["cells"].items():
        quads = zip(sides["ours"], sides["theirs"], strict=True)
        ratio = stats.interval([math.sqrt(math.prod(a) / math.prod(b)) for a, b in quads])
        found.append(Ratio(name, ratio["value"], ratio["low"], ratio["high"], 1.05, 1.0))
    exact: dict[str, dict[str, float]] = {}
    for name, ratios in samples.items():
        if name.startswith("virtual"):
            _, speed, share, tokens = name.split(", ")
            exact.setdefault(f"{share} there, {tokens} tokens", {})[speed] = median(ratios)
    speeds = list(next(iter(exact.values()), {}))
    series = {name: [values[speed] for speed in speeds] for name, values in exact.items()}
    series["computing"] = [1.0] * len(speeds)
    kept = {name: series[name] for name in list(series)[2::3]} | {"computing": series["computing"]}
    return [
        ("First token with a tier, median", plots.ratios(found, "of computing, 95 %")),
        (
            f"On the virtual clock: {', '.join(f'{n} {speed}' for n, speed in enumerate(speeds))}",
            plots.lines(range(len(speeds)), kept, "the tier", "median, of computing"),
        ),
    ]


def memory(kept: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Bytes of every tier, of every process and of each Redis' data over the run."""
    titles = {"tiers": "Every tier", "rss": "Resident memory", "used": "Data of each Redis"}
    return [sizes(title, kept[name]) for name, title in titles.items()]


def sizes(title: str, kept: Mapping[str, Sequence[float]]) -> tuple[str, str]:
    """Bytes of each thing over a run, looked at once a second."""
    found = {name: [value / 2**20 for value in values] for name, values in kept.items()}
    count = max(len(values) for values in found.values())
    return title, plots.lines(range(count), found, "seconds", "MiB")


def p5(samples: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pages held on each load, by size."""
    found = []
    for kind, load in samples["loads"].items():
        held = load["sizes"]
        shares = {policy: [100 * at[policy] for at in held.values()] for policy in _POLICIES}
        found.append((f"{kind}, by pages of the tier", plots.bars(list(held), shares, "% held")))
    return found
