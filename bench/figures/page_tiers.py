"""The figures of page tiers in the summary: conversations, warm turns, eviction."""

from __future__ import annotations

from functools import partial

from bench.figures.figure import Figure, Found
from bench.suites.p5 import JUDGED, MOONCAKE, way
from bench.workloads.turn_systems import LEVELS, PAIRS, RATIOS, judged
from bench.workloads.warm_turns import GOALS, MUSTS


def _warm(found: Found, name: str, tier: str) -> str:
    table = found["tables"][0]
    rows = (row for row in table["rows"] if (row[0], row[2]) == (name, tier))
    if (row := next(rows, None)) is None:
        return "not measured"
    cell = dict(zip(table["columns"], row, strict=True))
    return f"{cell['ratio [95 %]']}, {cell['ms']} ms"


def _slowest(found: Found) -> str:
    tables = {table["columns"][0]: table for table in found["tables"]}
    measured, virtual = tables["tier"], tables["seconds of a page"]
    at = next(n for n, name in enumerate(measured["columns"]) if name.endswith("ratio [95 %]"))
    worst = max((row[at] for row in measured["rows"]), key=lambda text: float(text.split()[0]))
    exact = max(float(cell.partition(" / ")[0]) for row in virtual["rows"] for cell in row[2:])
    return f"{worst}; on the virtual clock {exact:.3f}"


def _conversations(model: str, rival: str, must: str, goal: str, ours: str) -> Figure:
    def row(found: Found, system: str) -> dict[str, str]:
        tables = (table for table in found["tables"] if ratio in table["columns"])
        rows = ((table["columns"], cells) for table in tables for cells in table["rows"])
        return next(
            (dict(zip(columns, cells, strict=True)) for columns, cells in rows if cells[:2] == [model, system]),
            {ratio: "not measured", "turns/s": "-"},
        )  # fmt: skip

    ratio, said = RATIOS[ours], ours.partition(", ")[2]
    return Figure(
        "P1", f"conversations at equal latency, {model}: {said} / {rival}", must, goal,
        lambda f: f"{row(f, rival)[ratio]}, {row(f, ours)['turns/s']} turns/s",
        judged(model, ours, rival), lambda f: f"{rival}: {row(f, rival)['turns/s']} turns/s",
    )  # fmt: skip


def _ways(found: Found) -> str:
    """Return how many of P5's loads and sizes reach the goal, and the shortest way of all."""
    words = [word for key, word in found["met"].items() if key.endswith("way from LRU")]
    loads = found["samples"]["loads"]
    ways = {
        f"{kind}, {int(size):,}": way(at)
        for kind, load in loads.items()
        for size, at in load["sizes"].items()
        if int(size) in JUDGED and kind != MOONCAKE
    }
    there = {name: each for name, each in ways.items() if each is not None}
    worst = min(there, key=lambda name: there[name])
    return f"{words.count('goal')} of {len(words)}; least {there[worst]:.0%} ({worst})"


def _below(found: Found, rival: str) -> str:
    words = [word for key, word in found["met"].items() if f"never below {rival}" in key]
    return f"{sum(word != 'goal' for word in words)} of {len(words)} loads"


def _inexact(found: Found) -> str:
    rows = found["tables"][0]["rows"]
    splits = sum(int(row[1].replace(",", "")) for row in rows)
    return f"{sum(int(row[-1]) for row in rows)} of {splits:,}"


def _fullest(found: Found) -> str:
    tiers = next(each for each in found["tables"] if each["columns"][0] == "tier")
    worst = max(tiers["rows"], key=lambda row: float(row[-1].rstrip("%")))
    return f"{worst[-1]} at most ({worst[0]})"


PAGE_FIGURES: tuple[Figure, ...] = (
    Figure(
        "F5P", "bytes of a tier / its budget over many turns", "≤ 110 %", "≤ 105 %", _fullest,
        "every tier within its budget",
    ),
    *(
        _conversations(model, rival, f"≥ {LEVELS[rival][1]}", f"≥ {LEVELS[rival][0]}", ours)
        for model in ("S", "M")
        for ours, rivals in PAIRS.items()
        for rival in rivals
    ),
    *(
        Figure(
            "P2", f"first token of a warm turn, {name}, from {tier} / computed", f"≤ {MUSTS[tier]}", f"≤ {goal}",
            partial(_warm, name=name, tier=tier), f"{name}, from {tier}",
        )
        for name, goals in GOALS.items()
        for tier, goal in goals.items()
    ),
    Figure(
        "P3", "never slower: worst median of any tier's speed and pages / computed", "≤ 1.05", "≤ 1.03",
        _slowest, "",
    ),
    Figure("P4", "restored pages: splits that are not exact", "0", "0 of 10,000", _inexact, ""),
    Figure(
        "P5", "eviction on loads not seen: way from LRU to who knows how often, 1k and 5k pages", "≥ 0 at all sizes",
        "≥ 40 %", _ways, "",
    ),
    Figure("P5", "eviction on loads not seen: below LRU at some size", "0", "0", partial(_below, rival="LRU"), ""),
    Figure(
        "P5", "eviction on loads not seen: below S3-FIFO at 1k to 5k pages", "-", "0", partial(_below, rival="S3-FIFO"),
        "",
    ),
    Figure(
        "P5", "eviction: a decision among 10,000 sessions, p50", "≤ 200 us", "≤ 200 us",
        lambda f: f"{f['tables'][-1]['rows'][-1][1].partition(' ')[0]} us", "a decision",
    ),
)  # fmt: skip
