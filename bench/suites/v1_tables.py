"""The tables and verdicts of V1 (b) from its cells."""

from __future__ import annotations

from typing import Any

import msgspec

from bench.document import Body, Rival
from bench.rivals import environments, pgvector, pgvector_search, search_servers, thin_search_server
from bench.rivals.sweep import distinct, told
from bench.suites.v1_servers import (
    LARGE,
    LARGE_RIVALS,
    LOADS,
    MANY,
    OURS,
    PGVECTOR,
    RECALL,
    RIVALS,
    ROUNDS,
    SLOW_S,
    WORDS,
    ServersCell,
    ServersKept,
    best_rival,
    equals,
    reached,
)

THIN = "behind a thin server of ours (aiohttp, vectors in base64)"
VERSIONS = {
    PGVECTOR: f"{pgvector.VERSION}, prepared statements, a Unix socket",
    search_servers.CHROMA: f"{environments.CHROMA}, its own server",
    search_servers.LANCEDB: f"{environments.LANCEDB}, {THIN}",
    search_servers.MILVUS_LITE: f"{environments.MILVUS_LITE}, {THIN}",
}
BUILDS: dict[str, dict[str, Any]] = {
    PGVECTOR: dict(pgvector_search.BUILDS), search_servers.CHROMA: dict(search_servers.CHROMA_BUILDS),
    search_servers.LANCEDB: dict(thin_search_server.BUILDS[search_servers.LANCEDB]),
    search_servers.MILVUS_LITE: dict(thin_search_server.BUILDS[search_servers.MILVUS_LITE]),
}  # fmt: skip
OTHERS, MANY_MET, SERVED = "(b) every other cell", f"(b) {MANY.name}", "(b) recall@10 ≥ 0.95 served"


def describe(kept: ServersKept, body: Body) -> None:
    """Add what was measured over servers."""
    cells = list(kept.cells.values())
    if cells:
        columns = [
            "data",
            "passes",
            "load",
            "best rival",
            "ours per s",
            "its per s",
            "ratio [95 %]",
        ]
        columns += ["of the best HTTP server", "of pgvector", "rounds (blocks dropped)", "reached"]
        body.table(
            "(b) queries a second over HTTP, one client, recall@10 ≥ 0.95",
            columns,
            [_verdict(cell) for cell in cells],
        )
        columns = [
            "data",
            "passes",
            "load",
            "server",
            "per s",
            "p50 / p99 (ms)",
            "recall@10",
            "setting",
        ]
        body.table("(b) every server", columns, [row for cell in cells for row in _sides(cell)])
        _judge(cells, body)
        _notes(cells, kept, body)
    body.samples["servers"] = msgspec.to_builtins(kept)
    for name in RIVALS:
        tried = {key: each for key, each in kept.tried.items() if key.endswith(f"/{name}")}
        best = _best(cells, name)
        settings = [
            {"cell": key, **msgspec.to_builtins(one)} for key, each in tried.items() for one in each
        ]
        there = any(name in cell.sides for cell in cells)
        body.rivals.append(Rival(name, VERSIONS[name], settings, best, there))


def _best(cells: list[ServersCell], name: str) -> dict[str, str]:
    """Return the settings that a rival was measured with, by data set and filter."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        if name in cell.sides:
            key = f"{cell.set}, passes {cell.passes}:"
            found.setdefault(key, []).append(cell.sides[name].setting)
    return {key: " or ".join(told(each) for each in distinct(some)) for key, some in found.items()}


def _judge(cells: list[ServersCell], body: Body) -> None:
    for what, some in {
        MANY_MET: [cell for cell in cells if cell.load == MANY.name],
        OTHERS: [cell for cell in cells if cell.load != MANY.name],
    }.items():
        words = [word for word in map(reached, some) if word in WORDS]
        if words:
            body.met[what] = min(words, key=WORDS.index)
    served = min(cell.sides[OURS].recall for cell in cells)
    body.met[SERVED] = "goal" if served >= RECALL else "missed"


def _verdict(cell: ServersCell) -> list[str]:
    best, rivals = best_rival(cell), equals(cell)
    http = max((name for name in rivals if name != PGVECTOR), key=cell.rounds.median, default="")
    ratios = [_ratio(cell, name) if name in rivals else "-" for name in (best, http, PGVECTOR)]
    speeds = [f"{cell.rounds.median(name):,.0f}" if name else "-" for name in (OURS, best)]
    rounds = f"{len(cell.rounds.of(OURS))} ({cell.rounds.dropped})"
    return [cell.set, cell.passes, cell.load, best or "-", *speeds, *ratios, rounds, reached(cell)]


def _ratio(cell: ServersCell, name: str) -> str:
    found = cell.rounds.ratio(OURS, name)
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def _sides(cell: ServersCell) -> list[list[str]]:
    rows = []
    for name, side in cell.sides.items():
        times = f"{1e3 * side.latency_s['p50']:.2f} / {1e3 * side.latency_s['p99']:.2f}"
        speed = f"{cell.rounds.median(name):,.0f}"
        setting = told(side.setting) or "its own choice"
        low = "" if side.recall >= RECALL - 0.01 or name == OURS else " (does not count)"
        rows.append(
            [
                cell.set,
                cell.passes,
                cell.load,
                name,
                speed,
                times,
                f"{side.recall:.4f}{low}",
                setting,
            ]
        )
    return rows


def _notes(cells: list[ServersCell], kept: ServersKept, body: Body) -> None:
    loads = ", ".join(
        f"{each.name} ({each.clients} in flight)" if each.queries > 1 else each.name
        for each in LOADS
    )
    body.notes.append(
        f"(b) Loads: {loads}, closed loop. All servers are up and take turns in every round, in an order that turns; a "
        "ratio is the median over rounds. k is 10; answers hold ids and scores. The client is one process: prepared "
        "requests over kept connections, the same code for every HTTP server (`bench/workloads/http_link.py`); asyncpg "
        f"for pgvector. It takes at most {max(cell.loadgen_cpu for cell in cells):.0%} of a core."
    )
    body.notes.append(
        "(b) A rival's setting is the fastest, under the load of the cell, of those that are the least in their ladder "
        "with recall@10 ≥ 0.95 on 500 tuning queries; pgvector's number of connections is tried as well. Ours has its "
        "default rule and no tuning. A filter passes rows at random, by a number that each has. Of more than "
        f"{LARGE:,} rows only {' and '.join(LARGE_RIVALS)} are asked, which are servers of their own. Who needs "
        f"more than {SLOW_S:g} s for the calls that are in flight at once is told below, and not measured in turns; if "
        "all do, the best one is."
    )
    for name, builds in BUILDS.items():
        said = "; ".join(
            f"{build}: {words if isinstance(words, str) else told(words)}"
            for build, words in builds.items()
        )
        body.notes.append(f"(b) {name}'s builds: {said}.")
    large = f"{PGVECTOR} {' and '.join(pgvector_search.LARGE_BUILDS)}, "
    large += f"{search_servers.CHROMA} {' and '.join(search_servers.LARGE_CHROMA_BUILDS)}"
    body.notes.append(f"(b) Of a million rows there are fewer builds: {large}.")
    worst = min(len(cell.rounds.of(OURS)) for cell in cells)
    if worst < ROUNDS:
        body.notes.append(f"(b) Cells have {worst} rounds and more; the method asks for 300.")
    body.notes += [f"(b) {name} was not measured: {why}" for name, why in kept.absent.items()]
