"""The plots of each row, drawn from the raw samples of its JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from bench.figures.html import tier_charts
from bench.hot_path import stale
from bench.pairs import PairBlocks
from bench.peak import Speed
from loadgen import stats
from loadgen.html import plots
from loadgen.html.plots import Mark, Ratio

Charts = list[tuple[str, str]]
_MS = 1e3


def of(found: Mapping[str, Any]) -> Charts:
    """Return (title, SVG) of every plot of a document; none where tables say it all.

    The samples of a stale row may have another form than those the row keeps now: such a row has no plot.
    """
    draw = _CHARTS.get(found["id"])
    try:
        return draw(found["samples"]) if draw else []
    except (LookupError, TypeError):
        if stale(found):
            return []
        raise


def _ratio(
    samples: Mapping[str, Any], key: str, must: float | None, goal: float | None
) -> Ratio | None:
    """Return how many times faster than the rival the pairs under `key` show us; None if they are not there."""
    if key not in samples:
        return None
    kept = samples[key]
    gflops = kept["peaks_gflops"]
    # Earlier runs measured no copy, and no stolen time.
    copies = kept.get("peaks_gbs", [1.0] * len(gflops))
    stolen = kept.get("stolen", [0.0] * len(gflops))
    speeds = [Speed(*each) for each in zip(gflops, copies, stolen, strict=True)]
    blocks = PairBlocks(all_pairs=kept["pairs_s"], speeds=speeds, block=kept["block"])
    blocks.sift()
    ratio = stats.paired_ratio(blocks.theirs, blocks.ours)
    return Ratio(key, ratio["value"], ratio["low"], ratio["high"], must, goal)


def _ratios(
    samples: Mapping[str, Any],
    title: str,
    levels: Mapping[str, tuple[float | None, float | None]],
) -> Charts:
    found = [_ratio(samples, key, *level) for key, level in levels.items()]
    kept = [each for each in found if each is not None]
    return [(title, plots.ratios(kept, "times the rival's speed, 95 % interval"))]


def _e1(samples: Mapping[str, Any]) -> Charts:
    goals = {"process": 1.6, "mesh": 1.5, "infinity": 1.3, "onnxruntime": 1.3, "openvino": 1.3}
    levels: dict[str, tuple[float | None, float | None]] = {
        key: (1.0, goals[key.split("/")[0]])
        for key in samples
        if "/" in key and key.split("/")[0] in goals
    }
    return _ratios(samples, "Ours against the rival", levels)


def _e2(samples: Mapping[str, Any]) -> Charts:
    levels: dict[str, tuple[float | None, float | None]] = {
        key: (0.6, 0.75) if key.startswith("1 ") else (0.85, 0.95) for key in samples
    }
    return _ratios(samples, "The mesh against its own engine", levels)


def _r1(samples: Mapping[str, Any]) -> Charts:
    runs = {name: values for name, values in samples.items() if "/" in name}
    marks = [
        Mark("goal p50", 1.3),
        Mark("must p50", 2.6),
        Mark("goal p99", 5),
        Mark("must p99", 10),
    ]
    hops = {name: stats.percentiles(values) for name, values in samples.get("hops_s", {}).items()}
    parts = {key: [hop[key] * 1e6 for hop in hops.values()] for key in ("p50", "p90")}
    return [
        ("Latency added", plots.cdf(runs, "milliseconds", marks, log=True)),
        ("Hop by hop", plots.bars(list(hops), parts, "microseconds")),
    ]


def _r1c(samples: Mapping[str, Any]) -> Charts:
    first = {name: run["ttft_s"] for name, run in samples.items()}
    gaps = {name: _ms(run["itl_s"]) for name, run in samples.items()}
    return [
        ("Time to the first token", plots.cdf(first, "seconds")),
        ("Between two pieces", plots.cdf(gaps, "milliseconds", [Mark("one step", 100)])),
    ]


def _kills(samples: Mapping[str, Any]) -> Charts:
    healed: dict[str, list[float]] = {}
    allowed: dict[str, list[float]] = {}
    ready: dict[str, list[float]] = {}
    for kill in sorted(samples["kills"], key=lambda kill: str(kill["victim"])):
        healed.setdefault(kill["victim"], []).append(kill["healed_s"])
        allowed.setdefault(kill["victim"], []).append(kill["limit_s"])
        ready.setdefault(kill["victim"], []).append(kill["ready_s"])
    operations = samples["operations"]
    counts = {"answered right": [float(count) for count in operations.values()]}
    return [
        (
            "Open requests ended, after each kill",
            plots.strips(healed, "seconds after the kill", allowed),
        ),
        ("Process ready again", plots.strips(ready, "seconds after the kill")),
        ("Operations under the kills", plots.bars(list(operations), counts, "operations")),
    ]


def _stops(samples: Mapping[str, Any]) -> Charts:
    over: dict[str, list[float]] = {}
    for stop in samples["stops"]:
        over.setdefault(stop["way"], []).extend(_ms(stop["over_s"]))
    return [("Work over after the stop", plots.cdf(over, "milliseconds", [Mark("one step", 400)]))]


def _f3(samples: Mapping[str, Any]) -> Charts:
    series: dict[str, list[float]] = {}
    for each in samples["rounds"]:
        for name, block in (("calm", each["calm"]), (f"{each['victim']} stopped", each["hung"])):
            for values in block["others_s"].values():
                series.setdefault(name, []).extend(_ms(values))
    return [("Latency of requests to others", plots.cdf(series, "milliseconds", log=True))]


def _drains(samples: Mapping[str, Any]) -> Charts:
    unready: dict[str, list[float]] = {}
    for drain in samples["drains"]:
        unready.setdefault(drain["victim"].rpartition("-")[0], []).append(drain["unready_s"] * _MS)
    limits = {name: [100.0] for name in unready}
    return [("Unready after SIGTERM", plots.strips(unready, "milliseconds", limits))]


def _f5(samples: Mapping[str, Any]) -> Charts:
    return tier_charts.memory(samples["memory"])


def _c1(samples: Mapping[str, Any]) -> Charts:
    first, later = {}, {}
    for name, rows in samples.items():
        whole = [row for row in rows if row[4] == 200 and not row[5] and row[2] is not None]
        label = name.partition(": ")[2]
        first[label] = [(row[2] - row[0]) * _MS for row in whole]
        later[label] = [(row[3] - row[2]) / (row[9] - 1) * _MS for row in whole if row[9] > 1]
    return [
        ("Time to the first token", plots.cdf(first, "milliseconds", [Mark("limit", 1000)])),
        ("Time per later token", plots.cdf(later, "milliseconds", [Mark("limit", 100)])),
    ]


def _q1(samples: Mapping[str, Any]) -> Charts:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for reply in samples["replies"]:
        kinds.setdefault(reply["kind"], []).append(reply)
    shares = {
        name: [100 * sum(reply[key] for reply in some) / len(some) for some in kinds.values()]
        for name, key in (("exact", "exact"), ("page cited", "cited"), ("page retrieved", "hit"))
    }
    seconds = {name: [reply["seconds"] for reply in some] for name, some in kinds.items()}
    return [
        ("Answers", plots.bars(list(kinds), shares, "%", [Mark("must present", 75)])),
        ("Time to the whole answer", plots.cdf(seconds, "seconds")),
    ]


def _x1(samples: Mapping[str, Any]) -> Charts:
    rows = samples["rows"]
    worst = [
        Ratio(f"{row['family']}, {name}", row[key], row[key], row[key], goal=1e-4)
        for row in rows
        for name, key in (("whole", "logits_whole"), ("mixed", "logits_mixed"))
    ]
    return [
        ("Worst row's largest difference", plots.ratios(worst, "of its largest logit", log=True))
    ]


def _w1(samples: Mapping[str, Any]) -> Charts:
    points = {
        name: ([n for n, _ in one["points"]], [seconds for _, seconds in one["points"]])
        for name, one in samples.items()
        if name.endswith("/2")
    }
    title = "Seconds of the last answer, objective 2 s"
    return [(title, plots.dots(points, "queries at once", "seconds", [Mark("objective", 2.0)]))]


def _w2(samples: Mapping[str, Any]) -> Charts:
    points = {
        lane: (
            [n for n, _ in samples[lane]["points"]],
            [_MS * s for _, s in samples[lane]["points"]],
        )
        for lane in ("gpu", "cpu")
    }
    rounds = {name: _ms(took) for name, took in samples["rounds"].items()}
    return [
        ("Probes", plots.dots(points, "queries at once", "milliseconds")),
        ("Closed rounds", plots.cdf(rounds, "milliseconds")),
    ]


def _w3(samples: Mapping[str, Any]) -> Charts:
    policies: dict[str, tuple[list[float], list[float]]] = {}
    for name, one in samples.items():
        if isinstance(one, dict):
            x, y = policies.setdefault(name.rpartition("/")[2], ([], []))
            x.append(one["share"])
            y.append(max(100 * one["missed"], 1e-3))
    real = {name: values for name, values in samples.items() if name.startswith("mesh/")}
    late, share = "% late (0.001: none)", "tokens in time / clairvoyant's"
    return [
        ("Replayed: late against done", plots.dots(policies, share, late, [Mark("goal", 0.1)])),
        ("Through the mesh: latency", plots.cdf(real, "seconds", [Mark("due", 1.0)])),
    ]


def _beside(must: float | None) -> Callable[[Mapping[str, Any]], Charts]:
    """Return the plot of an engine's rows, all against the same level."""

    def draw(samples: Mapping[str, Any]) -> Charts:
        pairs = [
            key for key, kept in samples.items() if "pairs_s" in kept and "/the machine/" not in key
        ]
        return _ratios(samples, "Ours against the rival", dict.fromkeys(pairs, (must, None)))

    return draw


def _l4(samples: Mapping[str, Any]) -> Charts:
    seconds = {
        side: [
            _MS * stats.percentiles([pair[n] for pair in one["pairs_s"]])["p50"]
            for one in samples.values()
        ]
        for n, side in enumerate(("attention", "reading 512 MiB"))
    }
    return [
        ("Decode attention over as many bytes", plots.bars(list(samples), seconds, "milliseconds"))
    ]


def _k1(samples: Mapping[str, Any]) -> Charts:
    counts = list(dict.fromkeys(int(key.rpartition("/")[2]) for key in samples))
    matrices = list(dict.fromkeys(key.rpartition("/")[0] for key in samples))
    faster = {
        name: [
            min(samples[f"{name}/{count}"][:2]) / samples[f"{name}/{count}"][2] for count in counts
        ]
        for name in matrices
    }
    at = [math.log2(count) for count in counts]
    title = "bf16: how many times as fast as the better of torch and oneDNN"
    return [(title, plots.lines(at, faster, "rows, as powers of 2", "times"))]


def _n2(samples: Mapping[str, Any]) -> Charts:
    errors = {name: [100 * error for error in samples[name]] for name in ("S", "M")}
    shares = samples["shares"]
    whole = sum(shares.values())
    parts = {"share": [100 * spent / whole for spent in shares.values()]}
    marks = [Mark("goal (median)", 10), Mark("must (median)", 15)]
    return [
        ("Error of a step's prediction", plots.cdf(errors, "%", marks)),
        ("Where a step of 32 streams goes", plots.bars(list(shares), parts, "%")),
    ]


def _ms(values: list[float]) -> list[float]:
    return [value * _MS for value in values]


_CHARTS: dict[str, Callable[[Mapping[str, Any]], Charts]] = {
    "E1": _e1, "E2": _e2, "R1": _r1, "R1C": _r1c, "F1": _kills, "F1C": _kills, "F1A": _kills, "F1P": _kills,
    "F2": _stops, "F2C": _stops, "F3": _f3, "F4": _drains, "F4C": _drains, "F5": _f5, "C1": _c1, "Q1": _q1, "X1": _x1,
    "W1": _w1, "W2": _w2, "W3": _w3, "L1": _beside(1.0), "L2": _beside(1.0), "L3": _beside(1.0), "L4": _l4,
    "L5": _beside(None), "K1": _k1, "N2": _n2, "P1": tier_charts.p1, "P2": tier_charts.p2,
    "F1R": _kills, "P3": tier_charts.p3, "P5": tier_charts.p5, "F5P": _f5,
}  # fmt: skip
