"""V1 (a): our index in process, and hnswlib, faiss, usearch and svs each in a process of its own, in turns.

A library's setting is the fastest, as it is asked in the cell, of those that are the least in their ladder whose recall
on tuning queries, which nobody measures, is 0.95 and at least ours; ours is left to its own rule.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench import ROOT
from bench.document import BenchOptions, origin
from bench.mesh import proc
from bench.pairs import rounds_within
from bench.partial import PartialResults
from bench.rivals import environments
from bench.rivals.engine_process import EngineError, EngineProcess
from bench.rivals.search_servers import builds_of, kept
from bench.rivals.sweep import told
from bench.rivals.vector_library import (
    BATCH,
    BUILDS,
    FAISS,
    HNSWLIB,
    SVS,
    THREADS,
    USEARCH,
    K,
    ladders,
    recall_of,
    search_s,
)
from bench.rounds import Rounds, measure_rounds
from bench.suites import v1_servers
from bench.suites.v1_servers import (
    CELL_S,
    OURS,
    RECALL,
    ROUNDS,
    WORDS,
    Tried,
    candidates,
    rates,
    set_of,
)
from bench.workloads import search_sets
from bench.workloads.search_sets import TUNING, SearchSet, SetShape, name_of
from bench.workloads.vectors import TEST, Rows
from loadgen import stats
from loadgen.machine import processor
from services.vector_search.index.index import Index

# The set of which nothing is near anything, then those that servers are asked, then the large one.
SHAPES = (search_sets.GAUSSIAN, *v1_servers.SHAPES, search_sets.LARGE)
SCRIPT = str(ROOT / "bench" / "rivals" / "vector_library.py")
LARGE_BUILDS = {  # usearch's of 8 bits were never its fastest at equal recall on the smaller sets
    HNSWLIB: ("m24", "m32"), FAISS: ("hnsw32", "ivf-pq"), USEARCH: ("bf16-m32",), SVS: ("float16-r64",),
}  # fmt: skip
WIDEST_BYTES = 1 << 32  # of rows; of more hnswlib alone is asked, with one build, which takes long
WIDEST_BUILDS = {HNSWLIB: ("m16",)}
PAUSE_S = 0.05  # the threads of the side before may spin for so long
REPEATS = 3  # of a candidate's searches; the best counts


class QueryCalls(NamedTuple):
    """How queries come: so many in a call, and so many in a round."""

    name: str
    per: int
    queries: int


WAYS = (QueryCalls("one at a time", 1, 500), QueryCalls("256 at once", BATCH, 4 * BATCH))


class LibrarySide(msgspec.Struct, frozen=True):
    """One side of a cell: its setting, its recall on the queries that are measured, and its process' own bytes."""

    setting: dict[str, Any]
    recall: float
    own_bytes: int = 0


class ProcessCell(msgspec.Struct):
    """All sides on one data set, asked in one way; `peak_bytes` is the most our process had of its own as it built."""

    set: str
    way: str
    rounds: Rounds
    sides: dict[str, LibrarySide]
    commit: str = ""
    processor: str = ""
    peak_bytes: int = 0


class ProcessKept(msgspec.Struct):
    """What V1 (a) measured: cells by name, settings by set and library, and why somebody is absent.

    `tried` are the ladders, on the tuning queries; `compared` are those exact enough, as they are asked in a cell.
    """

    cells: dict[str, ProcessCell] = {}
    tried: dict[str, list[Tried]] = {}
    compared: dict[str, list[Tried]] = {}
    absent: dict[str, str] = {}


def cell_name(shape: SetShape, way: QueryCalls) -> str:
    """Return the name that `--only` asks for."""
    return f"process/{name_of(shape)}/{way.name}"


def shapes(options: BenchOptions) -> Sequence[SetShape]:
    """Return the data sets, the smallest first."""
    return (search_sets.QUICK,) if options.quick else SHAPES


async def measure(partly: PartialResults[Any], found: ProcessKept, options: BenchOptions) -> None:
    """Measure the cells that are asked for and not kept yet, one data set after another."""
    for shape in shapes(options):
        todo = [
            way
            for way in WAYS
            if options.only in (name := cell_name(shape, way)) and name not in found.cells
        ]
        if not todo or not partly.begins(len(todo)):
            continue
        rows = await set_of(shape, found.absent, options)
        if rows is None:
            continue
        async with contextlib.AsyncExitStack() as stack:
            libraries = await _libraries(stack, rows, found, options)
            with proc.own_peak() as peak:
                index = build(rows.base)
            for number, way in enumerate(todo):
                if number and not partly.begins():
                    continue
                cell = await _cell(index, libraries, rows, way, found, options)
                cell.peak_bytes = peak[0]
                found.cells[cell_name(shape, way)] = cell
                print(f"{cell_name(shape, way)}: {rates(cell.rounds, cell.sides)}", flush=True)
                partly.save()


def build(base: Rows) -> Index:
    """Fill our index and let its maintenance finish, as the service does."""
    index = Index(base.shape[1], "dot", exact_below=10_000, threads=THREADS)
    for start in range(0, len(base), 5000):
        part = np.asarray(base[start : start + 5000])
        labels = np.arange(start, start + len(part), dtype=np.int64)
        index.publish(part, labels, labels, np.zeros(0, np.int64))
    while index.maintain():
        pass
    return index


# -- libraries


async def _libraries(
    stack: contextlib.AsyncExitStack, rows: SearchSet, found: ProcessKept, options: BenchOptions
) -> dict[str, EngineProcess]:
    """Start every library that is set up, its indexes built where they are not; only one works at a time."""
    started = {}
    for library in BUILDS:
        if not builds(library, rows.shape, options):
            continue
        python = environments.python(library, options.setup_dir)
        if python is None:
            found.absent[library] = f"{library} is not set up"
            continue
        try:
            folder = await indexes(str(python), library, rows, options)
            argv = [str(python), "-P", SCRIPT, "serve", library, str(rows.folder), str(folder)]
            started[library] = await stack.enter_async_context(EngineProcess(argv))
            found.absent.pop(library, None)
        except EngineError as error:
            found.absent[library] = str(error)[-300:]
    return started


async def indexes(python: str, library: str, rows: SearchSet, options: BenchOptions) -> Path:
    """Return the directory with a library's indexes of a set, after building those that are not there."""
    folder = kept(rows, library, options)
    folder.mkdir(parents=True, exist_ok=True)
    for name in builds(library, rows.shape, options):
        path = folder / name
        if path.exists():
            continue
        print(f"{rows.name}: {library} builds {name}", flush=True)
        fresh = folder / f"{name}.new"
        argv = [python, "-P", SCRIPT, "build", library, name, str(rows.folder), str(fresh)]
        process = await asyncio.create_subprocess_exec(*argv, preexec_fn=proc.die_with_parent)
        if await process.wait():
            raise EngineError(f"{library}: {name} was not built")
        fresh.rename(path)
    return folder


def builds(library: str, shape: SetShape, options: BenchOptions) -> Sequence[str]:
    """Return what is built: in a smoke run the first alone, of very many rows a few."""
    if options.quick:
        return tuple(BUILDS[library])[:1]
    if 4 * shape.rows * shape.dimension > WIDEST_BYTES:
        return WIDEST_BUILDS.get(library, ())
    return builds_of(shape, BUILDS[library], LARGE_BUILDS[library])


# -- settings


async def tuned(
    process: EngineProcess, library: str, rows: SearchSet, goal: float, options: BenchOptions
) -> list[Tried]:
    """Return a library's ladders, each climbed to the recall asked; what was tried before is not tried again.

    It stays beside the indexes, which it belongs to.
    """
    path = kept(rows, library, options) / "tried.json"
    known = dict[str, Tried]()
    if path.exists():
        before = msgspec.json.decode(path.read_bytes(), type=list[Tried])
        known = {told(each.setting): each for each in before}
    tried = []
    for ladder in ladders(library, builds(library, rows.shape, options)):
        for setting in ladder:
            name = told(setting)
            if name not in known:
                known[name] = await _try(process, setting)
            tried.append(known[name])
            if known[name].recall >= goal:
                break
    path.write_bytes(msgspec.json.encode(list(known.values())))
    return tried


async def _try(process: EngineProcess, setting: Mapping[str, Any]) -> Tried:
    await process.ask("use", setting={**setting, "threads": THREADS})
    answer = await process.answer("recall", start=0, count=TUNING)
    return Tried(dict(setting), answer["recall"], TUNING / answer["seconds"])


async def _compared(process: EngineProcess, some: Sequence[Tried], way: QueryCalls) -> list[Tried]:
    """Return each setting with each number of threads, and how much it did a second when asked in this way."""
    compared = []
    for each, threads in itertools.product(some, range(1, THREADS + 1)):
        setting = {**each.setting, "threads": threads}
        await process.ask("use", setting=setting)
        times = [
            await process.ask("search", start=0, count=TUNING, per=way.per) for _ in range(REPEATS)
        ]
        compared.append(Tried(setting, each.recall, TUNING / min(times)))
    return compared


# -- cells


async def _cell(
    index: Index, libraries: Mapping[str, EngineProcess], rows: SearchSet, way: QueryCalls, found: ProcessKept,
    options: BenchOptions,
) -> ProcessCell:  # fmt: skip
    def search(queries: Rows) -> Any:
        return index.search(queries, K).labels

    goal = max(RECALL, recall_of(search, rows.tuning, rows.truth(None, tuning=True)))
    effort = {"ef": index.now.stats().effort}
    own = proc.own_bytes(os.getpid())
    sides = {OURS: LibrarySide(effort, recall_of(search, rows.queries, rows.truth(None)), own)}
    for name, process in libraries.items():
        tried = await tuned(process, name, rows, goal, options)
        found.tried[f"{rows.name}/{name}"] = tried
        compared = await _compared(process, candidates(tried, goal), way)
        found.compared[f"{rows.name}/{way.name}/{name}"] = compared
        best = max(compared, key=lambda each: each.per_s).setting
        await process.ask("use", setting=best)
        answer = await process.answer("recall", start=TUNING, count=TEST)
        sides[name] = LibrarySide(best, answer["recall"], process.own_bytes())
    turns = {name: itertools.count() for name in sides}

    async def rate(name: str) -> float:
        start = next(turns[name]) * way.queries % (TEST - way.queries)
        await asyncio.sleep(PAUSE_S)
        if name == OURS:
            seconds = search_s(search, rows.queries[start : start + way.queries], way.per)
        else:
            asked = {"start": TUNING + start, "count": way.queries, "per": way.per}
            seconds = await libraries[name].ask("search", **asked)
        return way.queries / seconds

    began = time.monotonic()
    for name in sides:
        await rate(name)
    count = rounds_within(CELL_S, time.monotonic() - began, options.rounds(ROUNDS, 3))
    measured = await measure_rounds({name: partial(rate, name) for name in sides}, rounds=count)
    return ProcessCell(rows.name, way.name, measured, sides, origin().commit, processor())


# -- what is reached


def equals(cell: ProcessCell) -> list[str]:
    """Return the libraries whose recall is as asked and ours; within what one more draw of queries would move."""
    least = max(RECALL, cell.sides[OURS].recall) - 0.01
    return [name for name, side in cell.sides.items() if name != OURS and side.recall >= least]


def best_other(cell: ProcessCell) -> str:
    """Return which of those that are not hnswlib does most; empty if there is none."""
    others = [name for name in equals(cell) if name != HNSWLIB]
    return max(others, key=cell.rounds.median, default="")


def reached(cell: ProcessCell, rival: str, goal: float, must: float) -> str:
    """Return the level that a cell reaches against a library; missed where ours is not exact enough."""
    if cell.sides[OURS].recall < RECALL:
        return WORDS[0]
    return stats.verdict(cell.rounds.ratio(OURS, rival), goal, must)
