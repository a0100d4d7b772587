"""The tables and verdicts of V1 (a) from its cells."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import msgspec

from bench.document import Body, Rival
from bench.rivals import environments
from bench.rivals.sweep import distinct, told
from bench.rivals.vector_library import FAISS, HNSWLIB, SVS, USEARCH
from bench.suites.v1_process import (
    LARGE_BUILDS,
    ProcessCell,
    ProcessKept,
    best_other,
    equals,
    reached,
)
from bench.suites.v1_servers import OURS, RECALL, WORDS

VERSIONS = {
    HNSWLIB: importlib.metadata.version(HNSWLIB),
    FAISS: environments.FAISS,
    USEARCH: environments.USEARCH,
    SVS: f"{environments.SVS}, without LVQ and LeanVec, which run on Intel's processors only",
}
OTHERS = "the best of faiss, usearch and svs"
LEVELS = {HNSWLIB: (1.5, 1.0), OTHERS: (1.0, 1.0)}  # goal and must
EXACT = "(a) recall@10 ≥ 0.95"
OF_HNSWLIB, OF_OTHERS = "of hnswlib [95 %]", "of the best other [95 %]"


def against(who: str) -> str:
    """Return the name of a verdict."""
    return f"(a) against {who}"


def describe(kept: ProcessKept, body: Body) -> None:
    """Add what was measured in process."""
    cells = list(kept.cells.values())
    if cells:
        columns = ["data", "queries", "ours per s", "hnswlib per s", OF_HNSWLIB, "best other"]
        columns += ["its per s", OF_OTHERS, "rounds (blocks dropped)", "reached"]
        title = "(a) in process, queries a second at equal recall@10 ≥ 0.95"
        body.table(title, columns, [_ratios(cell) for cell in cells])
        columns = ["data", "queries", "library", "per s", "recall@10", "memory (MB)", "setting"]
        body.table("(a) every library", columns, [row for cell in cells for row in _sides(cell)])
        _judge(cells, body)
        body.notes.append(NOTE)
        peaks = {cell.set: cell.peak_bytes for cell in cells if cell.peak_bytes}
        if peaks:
            said = ", ".join(f"{name}: {each / 1e6:,.0f} MB" for name, each in peaks.items())
            body.notes.append(
                f"(a) The most memory that our process had of its own as it built: {said}."
            )
    body.notes += [f"(a) {name} was not measured: {why}" for name, why in kept.absent.items()]
    body.samples["process"] = msgspec.to_builtins(kept)
    for name, version in VERSIONS.items():
        there = any(name in cell.sides for cell in cells)
        body.rivals.append(Rival(name, version, _tried(kept, name), _best(cells, name), there))


LARGE = "; ".join(f"{name} {' and '.join(made)}" for name, made in LARGE_BUILDS.items())
NOTE = (
    "(a) Our index works in the measuring process, each library in one of its own, where its calls are timed; all "
    "hold the same rows in memory and take turns in every round, in an order that turns, after a pause of 50 ms, in "
    "which the threads of the side before go to sleep. A ratio is the median over rounds. k is 10. A library's "
    "setting is the fastest, as the cell asks and with one or two threads, of those that are the least in their "
    "ladder whose recall on 500 tuning queries, which nobody measures, is 0.95 and at least ours; ours has its "
    "default rule. Of a million rows there are fewer builds: "
    f"{LARGE}; of more than 4 GiB of rows hnswlib is asked alone, with one. Memory is what a process has of its own, "
    "without pages of files, as it searches."
)


def _tried(kept: ProcessKept, name: str) -> list[dict[str, Any]]:
    found = []
    for some in (kept.tried, kept.compared):
        mine = {key: each for key, each in some.items() if key.endswith(f"/{name}")}
        found += [
            {"cell": key, **msgspec.to_builtins(one)} for key, each in mine.items() for one in each
        ]
    return found


def _best(cells: list[ProcessCell], name: str) -> dict[str, str]:
    """Return the settings that a library was measured with, by data set."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        if name in cell.sides:
            found.setdefault(f"{cell.set}:", []).append(cell.sides[name].setting)
    return {key: " or ".join(told(each) for each in distinct(some)) for key, some in found.items()}


def _rivals(cell: ProcessCell) -> dict[str, str]:
    """Return whom a cell is judged against, of each kind that is as exact."""
    names = {HNSWLIB: HNSWLIB if HNSWLIB in equals(cell) else "", OTHERS: best_other(cell)}
    return {who: name for who, name in names.items() if name}


def _words(cell: ProcessCell) -> dict[str, str]:
    return {who: reached(cell, name, *LEVELS[who]) for who, name in _rivals(cell).items()}


def _judge(cells: list[ProcessCell], body: Body) -> None:
    for who in LEVELS:
        words = [found[who] for found in map(_words, cells) if who in found]
        if words:
            body.met[against(who)] = min(words, key=WORDS.index)
    lowest = min(cell.sides[OURS].recall for cell in cells)
    body.met[EXACT] = "goal" if lowest >= RECALL else "missed"


def _ratios(cell: ProcessCell) -> list[str]:
    rivals = _rivals(cell)

    def beside(who: str) -> list[str]:
        if who not in rivals:
            return ["-", "-"]
        found = cell.rounds.ratio(OURS, rivals[who])
        ratio = f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
        return [f"{cell.rounds.median(rivals[who]):,.0f}", ratio]

    row = [cell.set, cell.way, f"{cell.rounds.median(OURS):,.0f}", *beside(HNSWLIB)]
    row += [rivals.get(OTHERS, "-"), *beside(OTHERS)]
    row.append(f"{len(cell.rounds.of(OURS))} ({cell.rounds.dropped})")
    return [*row, " / ".join(_words(cell).values()) or "-"]


def _sides(cell: ProcessCell) -> list[list[str]]:
    counts = (OURS, *equals(cell))
    rows = []
    for name, side in cell.sides.items():
        low = "" if name in counts else " (does not count)"
        speed, recall = f"{cell.rounds.median(name):,.0f}", f"{side.recall:.4f}{low}"
        memory = f"{side.own_bytes / 1e6:,.0f}" if side.own_bytes else "-"
        rows.append([cell.set, cell.way, name, speed, recall, memory, told(side.setting)])
    return rows
