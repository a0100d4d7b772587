"""The figures of the summary in docs/benchmarks.md: must, goal and measured figure of every row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.figures.engines import ENGINE_FIGURES
from bench.figures.figure import NOT_THERE, Figure, Found, at, rows_where
from bench.figures.http_chat import HTTP_FIGURES
from bench.figures.page_tiers import PAGE_FIGURES
from bench.figures.retrieval import RETRIEVAL_FIGURES

COLUMNS = ("row", "part", "must", "goal", "ours", "rival", "reached")


def _embed(what: str, table: int, number: int, goal: str, met: str, rival: str) -> Figure:
    names = {1: "ours texts/s", 2: "mesh texts/s"}
    theirs = {1: "sentence-transformers texts/s", 2: "rival texts/s"}
    return Figure(
        "E1", what, "≥ 1.0", goal,
        lambda f: f"{at(f, table, number, 'ratio [95 %]')}, {at(f, table, number, names[table])} texts/s",
        met, lambda f: f"{rival}: {at(f, table, number, theirs[table])} texts/s",
    )  # fmt: skip


def _served(rival: str, shape: str) -> Figure:
    """Return the line of a server of embeddings beside ours, over HTTP."""

    def cells(found: Found) -> dict[str, str]:
        return next(iter(rows_where(found, {"against": rival, "a request": shape})), {})

    def ours(found: Found) -> str:
        seen = cells(found)
        return f"{seen['ratio [95 %]']}, {seen['mesh texts/s']} texts/s" if seen else NOT_THERE

    def theirs(found: Found) -> str:
        seen = cells(found)
        return f"{rival}: {seen['rival texts/s']} texts/s" if seen else "-"

    what = f"HTTP on both sides, {shape}: ours / {rival}"
    return Figure("E1", what, "≥ 1.0", "≥ 1.3", ours, f"{rival}, {shape}", theirs)


def _mesh(what: str, number: int, must: str, goal: str) -> Figure:
    return Figure(
        "E2", f"the mesh against its engine in process, {what}", must, goal,
        lambda f: f"{at(f, 0, number, 'ratio [95 %]')}, {at(f, 0, number, 'mesh texts/s')} texts/s",
        what, lambda f: f"engine alone: {at(f, 0, number, 'alone texts/s')} texts/s",
    )  # fmt: skip


def _added(beside: str, p50: float, p99: float) -> tuple[Figure, Figure]:
    """Return R1's two percentiles with Poisson arrivals beside what stood open or moved."""

    def cell(found: Found, column: str) -> str:
        table = _titled(found, "at 100 requests a second")
        rows = [row for row in table["rows"] if row[:3] == ["process", "Poisson", beside]]
        return f"{rows[0][table['columns'].index(column)]} ms" if rows else "not measured"

    return (
        Figure(
            "R1", f"latency added, Poisson arrivals, p50, {beside} beside it", f"≤ {2 * p50:g} ms", f"≤ {p50:g} ms",
            lambda f: cell(f, "p50 [95 %]"), f"p50 beside {beside}",
        ),
        Figure(
            "R1", f"latency added, Poisson arrivals, p99, {beside} beside it", f"≤ {2 * p99:g} ms", f"≤ {p99:g} ms",
            lambda f: cell(f, "p99 [95 %]"), f"p99 beside {beside}",
        ),
    )  # fmt: skip


def _kills(row: str, what: str) -> tuple[Figure, Figure]:
    def lost(found: Found) -> str:
        done = sum(found["samples"]["operations"].values())
        return f"{len(found['samples']['wrong'])} of {done:,} operations, {len(found['samples']['kills'])} kills"

    def late(found: Found) -> str:
        kills = found["samples"]["kills"]
        if not kills:
            return "no kill yet"
        over = [kill["healed_s"] - kill["limit_s"] for kill in kills]
        worst = kills[over.index(max(over))]
        count = sum(value > 0 for value in over)
        nearest = f"{worst['healed_s']:.2f} s of {worst['limit_s']:.2f} s"
        return f"{count} of {len(kills)} late; nearest to its limit: {nearest}"

    limit = "≤ 6 s; the only one of its kind: + its start + 1 s"
    return (
        Figure(
            row,
            f"{what}: lost, doubled or changed",
            "0",
            "0",
            lost,
            "nothing lost, doubled or changed",
        ),
        Figure(row, f"{what}: recovery", limit, "the same", late, "recovery in time"),
    )


def _stops(row: str, what: str) -> Figure:
    def slowest(found: Found) -> str:
        worst = max(max(stop["over_s"], default=0.0) for stop in found["samples"]["stops"])
        return f"{worst * 1e3:.0f} ms at the slowest of {sum(len(s['over_s']) for s in found['samples']['stops'])} jobs"

    return Figure(row, what, "one step (400 ms)", "one step", slowest, "work stops within one step")


def _drains(row: str, what: str) -> tuple[Figure, Figure]:
    def cut(found: Found) -> str:
        drains = found["samples"]["drains"]
        whole = sum(drain["whole"] for drain in drains)
        return f"{sum(sum(d['cut'].values()) for d in drains)} of {whole + sum(sum(d['cut'].values()) for d in drains)}"

    def unready(found: Found) -> str:
        return f"{max(drain['unready_s'] for drain in found['samples']['drains']) * 1e3:.0f} ms at the slowest"

    return (
        Figure(row, f"SIGTERM, {what} cut short", "0", "0", cut, "0 cut short"),
        Figure(
            row, f"SIGTERM, {what}: unready", "≤ 100 ms", "≤ 100 ms", unready, "unready in 100 ms"
        ),
    )


def _titled(found: Found, part: str) -> dict[str, Any]:
    """Return the first table whose title holds this; IndexError if there is none."""
    tables: list[dict[str, Any]] = [each for each in found["tables"] if part in each["title"]]
    return tables[0]


def _rows(found: Found, part: str) -> list[dict[str, str]]:
    """Return the rows of the first table whose title holds this, by column."""
    table = _titled(found, part)
    return [dict(zip(table["columns"], cells, strict=True)) for cells in table["rows"]]


def _retro() -> tuple[Figure, ...]:
    """Return the lines of G1P: perplexity with retrieval, content by staleness, facts of generated texts."""

    def gain(found: Found, interval: str, name: str) -> str:
        rows = _rows(found, "Perplexity")
        (row,) = (
            row for row in rows if row["interval"] == interval and row["retrieval"].startswith(name)
        )
        return row["by that of none [95 %]"]

    def content(found: Found, row: int) -> str:
        cells = _titled(found, "Cosine")["rows"][row]
        return f"{cells[1]}, {cells[-1]}"

    def facts(found: Found) -> str:
        return ", ".join(
            f"{row['retrieval']} {row['interval']}: {row['facts [95 %]'].split(' ')[0]}"
            for row in _rows(found, "Later facts")
        )

    met = "retrieval lowers perplexity by 5 %"
    return (
        *(
            Figure(
                "G1P", f"RETRO-type model: perplexity by that without retrieval, {name} at interval 64", "≤ 0.95",
                "≤ 0.95", partial(gain, interval="64", name=name), met,
            )
            for name in ("sequential", "pipelined")
        ),
        Figure(
            "G1P", "cosine of content with a fresh query's, staleness 1 and 64", "shape", "shape",
            lambda f: content(f, 0), "similarity falls with staleness",
            lambda f: f"thesis: {content(f, 2)}",
        ),
        Figure(
            "G1P", "later facts told rightly", "≥ sequential - 1 point", "the same", facts,
            "pipelined tells as many facts as sequential, to a point",
        ),
    )  # fmt: skip


def _slots() -> tuple[Figure, ...]:
    """Return the lines of G1Q: what S makes of passages by place and shift, and what replacing them computes."""

    def perplexities(found: Found, *kinds: tuple[str, str]) -> str:
        rows = _rows(found, "What S makes")
        cells = [
            row["perplexity"]
            for passages, place in kinds
            for row in rows
            if row["passages"].startswith(passages) and row["place"] == place
        ]
        return " / ".join(cells)

    def computed(found: Found) -> str:
        rows = [row for row in _rows(found, "Answers of") if row["model"] == "S"]
        return ", ".join(
            f"{row['place']}, {row['prompt']}: {row['computed a replacement']}" for row in rows
        )

    often, default = ("once", "before"), ("pipelined, every", "before")
    return (
        Figure(
            "G1Q", "S, perplexity: passages found as the text goes on / once", "< 1", "< 1",
            lambda f: perplexities(f, default, often),
            "S: passages found as the text goes on tell more than those found once",
        ),
        Figure(
            "G1Q", "S, perplexity: passages before / after the question", "≤ 1", "≤ 1",
            lambda f: perplexities(f, default, ("pipelined, every", "after")),
            "S: passages before the question tell no less than after it",
        ),
        Figure(
            "G1Q", "S, perplexity: passages of a stale query shifted / as found", "≤ 1", "≤ 1",
            lambda f: perplexities(f, default, ("pipelined, not shifted", "before")),
            "S: shifted passages of a stale query tell no less than as found",
        ),
        Figure(
            "G1Q", "a prompt replaced and read anew: the same tokens", "always", "always",
            lambda _found: "each answer compared", "a replaced prompt gives the tokens of one that is read anew",
        ),
        Figure(
            "G1Q", "S: tokens computed a replacement", "those behind kept pages", "the same", computed,
            "a replacement computes what comes after its first new token, and the rest of that page",
        ),
    )  # fmt: skip


def _process(name: str, column: str, rival: str, goal: str) -> Figure:
    """Return the line of V1's lowest ratio in process of a column; `rival` is the column that names who it is to."""

    def worst(found: Found) -> dict[str, str]:
        rows = [row for row in _rows(found, "(a) in process, queries") if row[column] != "-"]
        return min(rows, key=lambda row: float(row[column].split()[0]))

    def ours(found: Found) -> str:
        row = worst(found)
        return f"{row[column]} ({row['data']}, {row['queries']})"

    return Figure(
        "V1", f"vector search in process, equal recall: ours / {name}, worst", "≥ 1.0", goal, ours,
        f"(a) against {name}", lambda f: worst(f).get(rival, rival),
    )  # fmt: skip


def _recall_in_process(found: Found) -> str:
    rows = _rows(found, "(a) every library")
    return min(row["recall@10"] for row in rows if row["library"] == "ours")


def _worst_row(found: Found, *, many: bool) -> list[str]:
    """Return V1's cell with the lowest ratio to the best rival, of those with many queries a request or the others."""
    rows: list[list[str]] = _titled(found, "(b) queries a second")["rows"]
    some = [row for row in rows if (row[2] == "256 a request") == many and row[6] != "-"]
    return min(some, key=lambda row: float(row[6].split()[0]))


def _worst_cell(found: Found, *, many: bool) -> str:
    row = _worst_row(found, many=many)
    return f"{row[6]} ({row[0]}, {row[2]}, filter passes {row[1]})"


def _worst_rival(found: Found, *, many: bool) -> str:
    row = _worst_row(found, many=many)
    return f"{row[3]}, {row[5]} queries/s"


def _recall_served(found: Found) -> str:
    rows: list[list[str]] = _titled(found, "(b) every server")["rows"]
    return min(row[6] for row in rows if row[3] == "ours")


def _growth(found: Found) -> str:
    table = found["tables"][0]
    worst = max(table["rows"], key=lambda row: float(row[-1].split()[0]))
    where = worst[: table["columns"].index("first fifth (MiB)")]
    return f"{worst[-1]} at most ({', '.join(where)})"


def _worst_budget(found: Found) -> str:
    """Return the least share of searches that ended within a time budget that was said to fit."""
    table = _titled(found, "time budget")
    column = table["columns"].index("within it")
    shares = [float(row[column].split()[0]) for row in table["rows"] if row[column] != "-"]
    return f"{min(shares):.2f} %" if shares else "none fits"


def _least_memory(found: Found, row: int) -> str:
    """Return the share of the rows' bytes and the bytes a vector that four shards needed, of those tried."""
    _, share, size, wide = _titled(found, "least limits")["rows"][row]
    return "none of those tried" if share == "-" else f"{share}: {size} bytes a vector of {wide}"


def _lists(found: Found) -> str:
    """Return recall, queries/s, and the rows written beside them, of inverted lists within the limits."""
    row = found["tables"][0]["rows"][0]
    return f"{row[2]} at {row[3]} queries/s, {row[6]} rows/s written"


def _beside_exact(found: Found) -> str:
    rows = found["tables"][0]["rows"]
    return f"{float(rows[0][3]) / float(rows[1][3]):.1f} times: {rows[0][3]} and {rows[1][3]} queries/s"


def _cells(found: Found, part: str, column: str) -> list[float]:
    """Return the numbers that the columns of this name begin with, in the first table whose title holds `part`."""
    return [
        float(cell.split()[0].rstrip("%"))
        for row in _rows(found, part)
        for name, cell in row.items()
        if name.startswith(column)
    ]


def _queues(found: Found) -> str:
    rows = _rows(found, "CPU microseconds for a million candidates")
    near = [row for row in rows if row["order"].startswith("near")]
    ratios = [float(row["16 queues / best [95 %]"].split()[0]) for row in near]
    return f"{min(ratios):.2f} to {max(ratios):.2f} of the best exact selection's, near lists first"


def _simulated(found: Found) -> str:
    ratios = _cells(found, "Figure 4.10", "formula / simulated")
    return f"{100 * max(abs(ratio - 1) for ratio in ratios):.1f} % at the furthest"


def _yes(rows: list[list[str]], column: int) -> tuple[int, int]:
    """Return how many rows say yes in a column, and how many there are."""
    return sum(row[column] == "yes" for row in rows), len(rows)


def _worst_family(found: Found, kind: str) -> str:
    """Return the family whose bytes a second are the smallest part of Llama's, and the part."""
    rows = _rows(found, f"{kind}, one stream")
    worst = min(rows, key=lambda row: float(row["by Llama [95 %]"].split()[0]))
    return f"{worst['by Llama [95 %]']} ({worst['family']})"


def _host_attention() -> tuple[Figure, ...]:
    """Return the lines of N1: the best cell of few pages, its host share, and the worst of those with pages for all."""

    def cells(found: Found, pages: str) -> list[dict[str, str]]:
        rows = _rows(found, "device and host on one core each")
        return [r for r in rows if r["mode"] == "asymmetric" and r["pages for"].startswith(pages)]

    def gain(row: dict[str, str]) -> float:
        return float(row["mode / alone [95 %]"].split()[0])

    def best(found: Found) -> dict[str, str]:
        return max(cells(found, "4 x"), key=gain)

    def ample(found: Found) -> dict[str, str]:
        return min(cells(found, "32 x"), key=gain)

    return (
        Figure(
            "N1", "attention on the host by the device alone, pages for 4 sequences, best cell", "≥ 1.3", "≥ 1.3",
            lambda f: f"{best(f)['mode / alone [95 %]']} ({best(f)['pages for']})", "few pages ≥ 1.3",
            lambda f: f"simulated before: {best(f)['mode / alone: simulated']}",
        ),
        Figure(
            "N1", "share of decode rows attended on the host there", "≥ 0.3", "≥ 0.3",
            lambda f: best(f)["host share"], "host share ≥ 0.3",
        ),
        Figure(
            "N1", "attention on the host by the device alone, pages for all, worst cell", "≥ 0.95", "≥ 0.98",
            lambda f: ample(f)["mode / alone [95 %]"], "nothing to gain ≥ 0.98",
        ),
    )  # fmt: skip


def _offload() -> tuple[Figure, ...]:
    """Return the lines of N1S: gains by capacity, by the host's bandwidth, the worst cell, and planning."""

    def peaks(part: str, of: str) -> Callable[[Found], str]:
        def told(found: Found) -> str:
            rows = [row for row in _rows(found, part) if row[next(iter(row))].startswith(of)]
            return ", ".join(row["peak"] for row in rows)

        return told

    def least(found: Found) -> str:
        rows = _rows(found, "Figure 9")
        cells = [(float(c), row["machine"], name) for row in rows for name, c in row.items()
                 if name.startswith("answer") and c != "-"]  # fmt: skip
        gain, machine, name = min(cells)
        return f"{gain:.2f} ({machine}, {name})"

    def planned(found: Found) -> str:
        return f"{max(_cells(found, 'Planning one step', 'ms, median')):.2f} ms"

    return (
        Figure(
            "N1S", "simulated: host attention by the device alone, every machine and length", "≥ 0.95", "≥ 0.95",
            least, "never much slower than the device alone",
        ),
        Figure(
            "N1S", "simulated T4 with 2,400, 1,024 and 640 KV tokens: peaks", "rising", "rising",
            peaks("Figure 9", "T4"), "fewer KV tokens gain more", lambda _: "paper: 7.5, KV not stated",
        ),
        Figure(
            "N1S", "simulated A10G beside hosts of 50, 50, 100, 200 GB/s: peaks", "rising", "rising",
            peaks("Figure 10a", "g5"), "more host bandwidth gains more", lambda _: "paper: 1.12, 1.13, 1.30, 1.79",
        ),
        Figure(
            "N1S", "simulated: rise to a balance point, then fall towards 1", "shape", "shape",
            lambda f: " ".join(c for n, c in _rows(f, "Figure 9")[0].items() if n.startswith("answer")),
            "rise to a balance point, fall towards 1",
        ),
        Figure("N1S", "planning a step of 200 requests", "≤ 1 ms", "≤ 1 ms", planned, "planning"),
    )  # fmt: skip


def _lists_recall(found: Found) -> str:
    rows: list[list[str]] = _titled(found, "kinds of index")["rows"]
    return min(row[5] for row in rows if row[1].startswith("ivfpq"))


def _scan_ratio(bits: int) -> Figure:
    """Return V1L's line of the scan of codes of so many bits: the worst set."""

    def told(found: Found) -> str:
        name = f"ours, {bits} bits"
        rows = [row for row in _titled(found, "scan of the lists")["rows"] if row[2] == name]
        row = min(rows, key=lambda row: float(row[6].split()[0]))
        return f"{row[6]} ({row[0]}, {row[1]} lists)"

    return Figure(
        "V1L", f"scan of lists of {bits}-bit codes, one thread: ours / faiss', worst", "-", "≥ 1.0",
        told, f"scan of {bits} bits ≥ 1.0", lambda _: "faiss, the same codes",
    )  # fmt: skip


def _tuning() -> tuple[Figure, ...]:
    """Return V5's lines: the worst set of each level."""

    def worst(column: str, *, largest: bool = False) -> Callable[[Found], str]:
        def told(found: Found) -> str:
            cells = [row[column] for row in _rows(found, "what was reached")]
            return (max if largest else min)(cells, key=lambda cell: float(cell.rstrip("%")))

        return told

    share, plan, off = "predicted within 0.85", "plan / best, worst", "E[N] off, worst"
    return (
        Figure(
            "V5", "tuning: settings built whose speed was predicted within 0.85", "≥ 90 %", "≥ 90 %",
            worst(share), "predictions",
        ),
        Figure(
            "V5", "tuning: the plan / the best of all settings built", "≥ 0.95", "≥ 0.95",
            worst(plan), "plan / best",
        ),
        Figure(
            "V5", "tuning: size-biased number of codes, off", "≤ 10 %", "≤ 10 %",
            worst(off, largest=True), "E[N]",
        ),
        Figure(
            "V5", "tuning: minutes at 200,000 and 1,000,000 rows", "≤ 20, ≤ 40", "≤ 20, ≤ 40",
            worst("minutes", largest=True), "minutes",
        ),
    )  # fmt: skip


def _short(found: Found) -> str:
    rows = found["tables"][0]["rows"]
    return f"{sum(int(row[4]) for row in rows)} of {sum(int(row[3]) for row in rows):,} queries"


def _recall(found: Found) -> str:
    return f"{min(float(row[5]) for row in found['tables'][0]['rows']):.4f} at the least"


def _texts(found: Found) -> str:
    rows = found["samples"]["rows"]
    return f"{sum(row['different'] for row in rows)} of {sum(row['sequences'] for row in rows):,} texts"


def _logits(found: Found) -> str:
    rows = found["samples"]["rows"]
    ours = max(max(row["logits_whole"], row["logits_mixed"]) for row in rows)
    return f"{ours:.1e} at the most, {sum(row['beyond'] for row in rows)} beyond"


def _divergence(weights: str, found: Found) -> str:
    """Return how many times ours llama.cpp's divergence is."""
    rows = (row for table in found["tables"][1:] for row in table["rows"])
    return next((row[-1] for row in rows if row[0] == weights), NOT_THERE)


def _worst_shape(found: Found, column: str) -> str:
    """Return a cell of the shape whose attention reads at the least share of the bandwidth."""
    rows = range(len(found["tables"][0]["rows"]))
    worst = min(rows, key=lambda row: float(at(found, 0, row, "share [95 %]").split()[0]))
    return at(found, 0, worst, column)


def _streams(found: Found) -> str:
    rows = found["tables"][0]["rows"]
    return f"{sum(int(row[3]) for row in rows)} of {sum(int(row[0]) for row in rows):,}"


def _fuzzed(found: Found) -> str:
    return ", ".join(f"{row[2]} ({row[0]})" for row in found["tables"][0]["rows"])


def _over(found: Found) -> str:
    return f"{at(found, 0, 0, 'over depth')} of {at(found, 0, 0, 'admissions')}"


def _hung(found: Found) -> str:
    table = found["tables"][0]
    column = table["columns"].index("p99 / p99 calm [95 %]")
    worst = max(table["rows"], key=lambda row: float(row[column].split()[0]))
    return f"{worst[column]} at most ({worst[0]} stopped, {worst[1]})"


def _unlike(found: Found) -> str:
    rows = found["tables"][0]["rows"]
    unlike = sum(row[2] != row[3] for row in rows)
    return f"{unlike} of {len(rows)}"


def _policies(
    found: Found, worst: Callable[[list[float]], float], column: str, policy: str = "windve-tokens"
) -> str:
    """Return the worst of a policy's cells: late ones in both replays, shares of the clairvoyant's in the first."""
    cells = [
        row[table["columns"].index(column)]
        for table in found["tables"][: 2 if column == "late" else 1]
        for row in table["rows"]
        if row[2] == policy
    ]
    value = worst([float(cell.split()[0]) for cell in cells])
    return f"{value:g} %" if "%" in cells[0] else f"{value:g}"


def _through(found: Found, policy: str) -> str:
    """Return a policy's share of late answers through the mesh."""
    table = found["tables"][-1]
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    return str(rows[policy]["late"])


def _delayed(what: str, column: str, must: str, goal: str, met: str = "") -> Figure:
    """Return the line of V3's best pair, simulated: the lower figure of the two readings of the hardware."""

    def lower(found: Found) -> str:
        rows = [row for row in _rows(found, "The best pairs") if row["parallel"] == what]
        worst = min(rows, key=lambda row: float(row[column]))
        return f"{worst[column]} ({worst['best']} groups/candidates)"

    return Figure(
        "V3", f"delayed synchronization, simulated, {what}{met}", must, goal, lower, f"simulated, {what}{met}",
        lambda _found: "thesis: 2.62" if what == "within a query" and not met else "thesis: 1.95" if not met else "-",
    )  # fmt: skip


def _walked(found: Found, ef: int, walk: str, column: str = "of best-first's speed [95 %]") -> str:
    rows = _rows(found, f"x 96, ef {ef},")
    return next(row[column] for row in rows if row["walk, groups/candidates"] == walk)


_SHARE = "tokens in time / clairvoyant's"
_ST = "sentence-transformers"
_SHAPES = ("32 texts of 32 tokens", "32 texts of 128 tokens", "1 text of 128 tokens")
FIGURES: tuple[Figure, ...] = (
    _embed("embeddings in process, 32 tokens: ours / rival", 1, 0, "≥ 1.6", "process/32", _ST),
    _embed("embeddings in process, 128 tokens: ours / rival", 1, 1, "≥ 1.6", "process/128", _ST),
    _embed(f"mesh, {_SHAPES[0]}: ours / rival", 2, 0, "≥ 1.5", f"mesh, {_SHAPES[0]}", _ST),
    _embed(f"mesh, {_SHAPES[1]}: ours / rival", 2, 1, "≥ 1.5", f"mesh, {_SHAPES[1]}", _ST),
    *(
        _served(rival, shape)
        for rival in ("infinity", "onnxruntime", "openvino")
        for shape in _SHAPES
    ),
    Figure(
        "E1", "embeddings: lowest cosine to fp32", "≥ 0.9995", "≥ 0.9995",
        lambda f: at(f, 0, 0, "lowest"), "accuracy", lambda f: f"{_ST} bf16: {at(f, 0, 1, 'lowest')}",
    ),
    _mesh(_SHAPES[0], 0, "≥ 0.85", "≥ 0.95"),
    _mesh(_SHAPES[1], 1, "≥ 0.85", "≥ 0.95"),
    _mesh(_SHAPES[2], 2, "≥ 0.6", "≥ 0.85"),
    *_added("nothing", 1.3, 5.0),
    *_added("pages moving", 2.0, 10.0),
    *_added("pages moving at 64 MB/s", 2.0, 10.0),
    Figure("R2", "admissions with use over depth", "0", "0 in 10^6", _over, "0 over depth"),
    _process("hnswlib", "of hnswlib [95 %]", "hnswlib", "≥ 1.5"),
    _process("the best of faiss, usearch and svs", "of the best other [95 %]", "best other", "≥ 1.0"),
    Figure(
        "V1", "vector search in process: recall@10, lowest", "≥ 0.95", "≥ 0.95", _recall_in_process,
        "(a) recall@10 ≥ 0.95",
    ),
    Figure(
        "V1", "vector search over HTTP, 256 queries a request: ours / the best server, worst", "≥ 2", "≥ 4",
        lambda f: _worst_cell(f, many=True), "(b) 256 a request", lambda f: _worst_rival(f, many=True),
    ),
    Figure(
        "V1", "vector search over HTTP, 1, 8 and 64 in flight: ours / the best server, worst",
        "≥ 1.0 (pgvector 0.4)", "≥ 1.0", lambda f: _worst_cell(f, many=False), "(b) every other cell",
        lambda f: _worst_rival(f, many=False),
    ),
    Figure(
        "V1", "vector search over HTTP: recall@10 served, lowest", "≥ 0.95", "≥ 0.95", _recall_served,
        "(b) recall@10 ≥ 0.95 served",
    ),
    Figure(
        "V1", "one query through the mesh, 50 a second: p50 added to the search", "≤ 2 ms", "≤ 1 ms",
        lambda f: f"{_titled(f, '(c) one')['rows'][0][2]} ms", "(c) p50",
    ),
    Figure(
        "V1W", "searches beside 500 rows/s written: p99, recall@10", "recall ≥ 0.95", "recall ≥ 0.95",
        lambda f: "{3} ms, {4}".format(*_titled(f, "searches a second")["rows"][1]),
        "recall@10 ≥ 0.95 beside a writer",
    ),
    Figure(
        "V1W", "recall@10 after 30 % churn", "- 0.01", "- 0.01",
        lambda f: _titled(f, "were deleted")["rows"][0][3], "recall within 0.01 after churn",
    ),
    Figure(
        "V1W", "searches with a time budget that fits: share within it, worst", "≥ 99 %", "≥ 99 %",
        _worst_budget, "within their time budget",
    ),
    Figure(
        "V1M", "four shards in cgroups: least memory that serves at recall@10 ≥ 0.95, of the rows' bytes",
        "< 0.5", "< 0.5",
        lambda f: _least_memory(f, 0), "served by less than 0.5 of the rows' bytes",
    ),
    Figure(
        "V1M", "four shards in cgroups: least memory in which they are filled, of the rows' bytes",
        "< 0.5", "< 0.5",
        lambda f: _least_memory(f, 1), "filled in less than that",
    ),
    Figure(
        "V1L", "inverted lists in process: recall@10 at the effort that they chose, lowest", "≥ 0.95", "≥ 0.95",
        _lists_recall, "recall@10 ≥ 0.95",
    ),
    _scan_ratio(8),
    _scan_ratio(4),
    *_tuning(),
    Figure(
        "V6", "2M x 128 in four processes of 300 MiB, 500 rows/s written beside: recall@10", "≥ 0.95", "≥ 0.95",
        _lists, "recall@10 while rows are added",
    ),
    Figure(
        "V6", "the same: queries/s, inverted lists / exact scan", "≥ 10", "≥ 10", _beside_exact,
        "queries/s beside an exact scan",
    ),
    Figure("V2", "filtered search: fewer than k though k match", "0", "0", _short, "k whenever k match"),
    Figure("V2", "filtered search: recall@10", "≥ 0.95", "≥ 0.95", _recall, "recall@10"),
    _delayed("within a query", "of best-first's speed", "≥ 1.7", "≥ 2.5"),
    _delayed("across queries", "of best-first's speed", "≥ 1.3", "≥ 1.7"),
    *(
        _delayed(what, "over that", "≥ 1.1", "≥ 1.2", ": over the best row of one group")
        for what in ("within a query", "across queries")
    ),
    *(
        Figure(
            "V3", f"delayed synchronization on the CPU, two threads, ef {ef}, one query after another: of "
            "best-first's speed on one", "≥ 1.0", "≥ 1.0", partial(_walked, ef=ef, walk="helped 2/2"),
            f"CPU, ef {ef}: two threads one query after another",
        )
        for ef in (64, 256)
    ),
    *(
        Figure(
            "V3", f"the service's walk (2/2), ef {ef}{told}: of best-first's speed",
            "≥ 1.0", "≥ 1.0",
            partial(_walked, ef=ef, walk="alone 2/2", column=f"{column}of best-first's speed [95 %]"),
            f"CPU, ef {ef}: the service's walk{met}",
        )
        for ef in (64, 256)
        for told, column, met in (
            (", one query after another", "", ""), (", queries 2 ms apart", "2 ms apart: ", ", queries apart"),
        )
    ),
    Figure(
        "V4", "approximate queues, 8 to 64 of the formula's length: answers like an exact selection's, fewest",
        "≥ 99 %", "≥ 99 %", lambda f: f"{min(_cells(f, 'What the queues change', 'identical [')):.2f} %", "identical",
    ),
    Figure(
        "V4", "approximate queues: points of R@10 and R@100 lost, most", "≤ 0.1", "≤ 0.1",
        lambda f: f"{max(_cells(f, 'What the queues change', 'points lost')):.3f}", "recall",
    ),
    Figure("V4", "approximate queues, 16: CPU speed", "-", "-", _queues, "speed"),
    *_host_attention(),
    *_offload(),
    Figure(
        "V4R", "throughput by the formula beside a simulation, six ratios of the thesis", "± 5 %", "± 5 %",
        _simulated, "throughput at the best ratio",
    ),
    Figure(
        "V4R", "best ratio of 1,000 units, with the times that the thesis' ratios imply", "53.7 … 99.0 %", "the same",
        lambda f: " ".join(row[4].removesuffix(" %") for row in _titled(f, "Figure 4.10")["rows"]),
        "ratios of figure 4.10",
    ),
    Figure(
        "V4R", "slowest of 128 nodes: growth of median and p99, one query, then 64", "shape", "shape",
        lambda f: ", ".join(row[-2] for row in _titled(f, "Figure 4.7")["rows"]), "shape of figure 4.7",
        lambda f: "thesis: " + ", ".join(row[-1] for row in _titled(f, "Figure 4.7")["rows"]),
    ),
    *_retro(),
    *_slots(),
    Figure(
        "G2", "15 cells of figure 3.5c, percent of the time in retrieval: the furthest", "2 points", "1 point",
        lambda f: f"{f['samples']['figure 3.5c/furthest']:.2f} points", "figure 3.5c",
    ),
    Figure(
        "G2", "one search; table 3.4's schedule and baseline, requests/s a chip", "10.67 ms, 1.067, 0.648", "the same",
        lambda f: ", ".join(row[1] for i, row in enumerate(_titled(f, "Single numbers")["rows"]) if i in {0, 2, 4}),
        "retrieval and table 3.4", lambda _f: "thesis: 10 ms, 1.08, 0.65",
    ),
    Figure(
        "G2", "pruned search beside all schedules: fronts equal", "all", "all",
        lambda f: "{} of {}".format(*_yes(_titled(f, "The pruned search")["rows"], 4)), "pruning equals brute force",
    ),
    Figure(
        "G2", "requests/s a chip beside all stages on the prefix' chips: case II, case IV", "-", "-",
        lambda f: "{} x, {} x".format(*(_titled(f, "The best schedule")["rows"][i][3] for i in (0, 2))), "-",
        lambda _f: "thesis: 1.7 x, 1.5 x",
    ),
    Figure(
        "G2", "micro-batches of one dominating stage: percent of the time to first token saved",
        "25 / 37.5 / 43.8 / 46.9 / 48.4", "the same",
        lambda f: " / ".join(cell.split()[0] for cell in _titled(f, "Figure 3.17")["rows"][0][1:]),
        "micro-batching of one dominating stage",
    ),
    Figure(
        "G2", "deepest first: the mean completion earlier, at equal throughput, by", "> 0", "> 0",
        lambda f: ", ".join(row[4] for row in _titled(f, "Completion of collocated")["rows"]),
        "deepest first: an earlier mean",
    ),
    Figure(
        "G2M", "deployments by capacity in the predicted order", "right", "right",
        lambda f: ", ".join(f"{row[0]}: {row[2]}" for row in f["tables"][0]["rows"]), "ranking of deployments",
    ),
    Figure(
        "G2M", "capacity predicted within", "-", "20 %",
        lambda f: f"{100 * f['samples']['capacity/furthest']:.0f} %", "capacity within 20 %",
    ),
    Figure(
        "G2M", "median first token at 30, 60, 90 % of the predicted capacity, predicted within", "-", "15 %",
        lambda f: f"{100 * f['samples']['first token/furthest']:.0f} %", "first token within 15 %",
    ),
    *_kills("F1", "kill -9 under embeddings, search, ingest"),
    *_kills("F1C", "kill -9 under chat"),
    *_kills("F1A", "kill -9 under everything at once"),
    *_kills("F1P", "kill -9 under conversations with pages in every tier"),
    *_kills("F1R", "kill -9 under answers that retrieve while they are written"),
    _stops("F2", "cancelled or abandoned embeddings stop"),
    _stops("F2C", "cancelled or abandoned streams stop"),
    Figure("F3", "a hung worker of each kind: p99 of requests to others", "≤ + 20 %", "≤ + 5 %", _hung, ""),
    *_drains("F4", "requests"),
    *_drains("F4C", "streams"),
    Figure("F5", "memory growth under load", "≤ + 10 %", "≤ + 5 %", _growth, ""),
    Figure("F6", "5xx, hangs, crashes under fuzzing", "0", "0", _fuzzed, "0 responses of 5xx, hangs, crashes"),
    Figure(
        "C1", "chat on the CPU, 2 turns/s: TTFT p50 / p99", "no failure", "no failure",
        lambda f: f"{at(f, 0, 2, 'TTFT p50 / p99 (ms)')} ms", "no failure",
    ),
    Figure("R1C", "1,000 open streams: failed", "0", "0", _streams, "no failure of 1000 open streams"),
    Figure(
        "Q1", "grounded answers of the shipped model, exact", "≥ 75 %", "≥ 75 %",
        lambda f: at(f, 0, 0, "exact"), "present: exact at least 75%",
    ),
    Figure(
        "Q2", "follow-ups whose page is in the first 5: without a rewriting, by the rule, by hand",
        "≤ 60 % without", "≤ 60 % without",
        lambda f: " / ".join(at(f, 0, row, "in the first 5") for row in (1, 2, 4)),
        "without a rewriting at most 60% in the first 5",
    ),
    Figure(
        "W1", "depth by probes through the mesh: devices unlike the true line's", "0", "0",
        _unlike, "regression, no noise",
    ),
    Figure(
        "W2", "depth predicted against exhaustive search, real encoders", "10 %", "5 %, or 1",
        lambda f: ", ".join(f"{row[0]} {row[6]}" for row in f["tables"][0]["rows"]), "predicted against exhaustive",
    ),
    Figure(
        "W3", "bursts of mixed lengths: admitted and late, worst", "1 %", "0.1 %",
        lambda f: _policies(f, max, "late"), "late, windve-tokens",
        lambda f: f"depths in queries: {_policies(f, max, 'late', 'windve')}",
    ),
    Figure(
        "W3", "bursts of mixed lengths: tokens in time / a clairvoyant's, worst", "≥ 0.85", "≥ 0.95",
        lambda f: _policies(f, min, _SHARE),
        "tokens in time, windve-tokens / clairvoyant",
        lambda f: f"depths in queries: {_policies(f, min, _SHARE, 'windve')}",
    ),
    Figure(
        "W3", "bursts of mixed lengths, two real encoders through the mesh: admitted and late", "1 %", "0.1 %",
        partial(_through, policy="windve-tokens"), "late through the mesh, windve-tokens",
        lambda f: f"depths in queries: {_through(f, 'windve')}",
    ),
    Figure("X1", "greedy text unlike transformers', fp32", "≤ 0.1 %, excused", "0", _texts, ""),
    Figure(
        "X1", "logits unlike transformers', relative", "≤ 1e-4, or twice its own", "the same", _logits, "",
        lambda f: f"transformers in fp32: {max(row['own'] for row in f['samples']['rows']):.1e}",
    ),
    *ENGINE_FIGURES,
    Figure(
        "L4", "paged attention over 2,048 tokens: share of the bandwidth, the worst of four shapes", "≥ 0.45", "≥ 0.8",
        lambda f: f"{_worst_shape(f, 'share [95 %]')}, {_worst_shape(f, 'attention GB/s')} GB/s", "",
        lambda f: f"torch, gathered: {_worst_shape(f, 'torch (gathered) GB/s')} GB/s",
    ),
    *(
        Figure(
            "L6", f"families beside Llama, {kind}: bytes of weights a second, the worst of nine", "≥ 0.8", "≥ 0.8",
            partial(_worst_family, kind=kind), f"worst family, {kind}",
        )
        for kind in ("bf16", "int8", "int4")
    ),
    Figure(
        "K1", "linears: cells at least as fast as torch and oneDNN, bf16", "-", "-",
        lambda f: f"{sum(max(map(float, row[2:4])) <= float(row[4]) for row in f['tables'][0]['rows'])} of "
        f"{len(f['tables'][0]['rows'])}", "",
    ),
    *(
        Figure(
            "N2", f"step prediction, {name}: median error", "≤ 15 %", "≤ 10 %",
            partial(at, table=0, row=n, column="median error"), f"prediction, {name}",
        )
        for n, name in enumerate("SM")
    ),
    Figure(
        "N2", "a step of 32 streams outside the model, M", "≤ 5 %", "≤ 5 %",
        lambda f: f"{1 - f['samples']['shares']['model'] / sum(f['samples']['shares'].values()):.1%}",
        "outside the model",
    ),
    *HTTP_FIGURES,
    *PAGE_FIGURES,
    *RETRIEVAL_FIGURES,
    Figure(
        "X2", "exact answers of the shipped model, int8 / int4", "as fp32, to 1 point", "the same",
        lambda f: f"{at(f, 0, 2, 'exact')} / {at(f, 0, 3, 'exact')}", "int8 answers as exactly",
        lambda f: f"fp32: {at(f, 0, 0, 'exact')}",
    ),
    *(
        Figure(
            "X2", f"KL of {kind}: {form}'s / ours, text by text", "no worse", "no worse",
            partial(_divergence, f"{kind} / {form}"),
            f"KL of {kind} beside {form}",
        )
        for kind, form in (("int8", "Q8_0"), ("int4", "Q4_0"), ("int4", "Q4_K"))
    ),
)  # fmt: skip
