"""V1 (b): queries a second of the mesh and of the servers that people run today, by one client, in turns.

A rival's setting is the fastest, under the load of the cell, of those that are the least in their ladder whose recall
on tuning queries, which nobody measures, is enough; ours is left to its default rule.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, NamedTuple

import msgspec

from bench.document import BenchOptions, origin
from bench.mesh.probe import MeshError
from bench.mesh.search_mesh import search_mesh
from bench.pairs import rounds_within
from bench.partial import PartialResults
from bench.rivals.pgvector_search import pgvector_search
from bench.rivals.search_servers import (
    CHROMA,
    LANCEDB,
    MILVUS_LITE,
    SearchServer,
    chroma,
    kept,
    thin_server,
)
from bench.rounds import Rounds, measure_rounds
from bench.workloads import search_sets, vectors
from bench.workloads.search_sets import BOUNDS, BUCKETS, SearchSet, SetShape, name_of, search_set
from bench.workloads.texts import NoTextsError
from loadgen import stats
from loadgen.loop import LoadLoop
from loadgen.machine import processor

OURS, PGVECTOR = "ours", "pgvector"
RIVALS = (PGVECTOR, CHROMA, LANCEDB, MILVUS_LITE)
SHAPES = (search_sets.CLUSTERED, search_sets.DOCSTRINGS, search_sets.MANUALS, search_sets.MILLION)
LARGE = 100_000  # rows; of more only those are asked that are servers of their own
LARGE_RIVALS = (PGVECTOR, CHROMA)
RECALL, NEAR = 0.95, 0.01  # a rival may be off by what one more draw of queries would move
SLICE_S, QUICK_SLICE_S = 0.3, 0.1
ROUNDS, CELL_S = 300, 1200.0
CHECKED = 1024  # queries by which recall is told
TUNING_PARCEL = 25  # tuning queries a call
TRIED_S = 30.0  # of tuning queries with one setting; what is not asked by then tells nothing
SLOW_S = 3.0  # who needs longer for the calls that are in flight at once is told, and not measured in turns
HOPELESS_S = 60.0  # not even the best rival is, where it needs longer


class Load(NamedTuple):
    """So many requests in flight, each of so many queries."""

    name: str
    clients: int
    queries: int


LOADS = (
    Load("1 in flight", 1, 1), Load("256 a request", 3, 256), Load("8 in flight", 8, 1), Load("64 in flight", 64, 1),
)  # fmt: skip
MANY = LOADS[1]


class Tried(msgspec.Struct, frozen=True):
    """A rival's setting: recall and queries a second on the tuning queries."""

    setting: dict[str, Any]
    recall: float
    per_s: float


class ServedSide(msgspec.Struct, frozen=True):
    """One side of a cell: its setting, its recall, its latencies' percentiles and how many there were."""

    setting: dict[str, Any]
    recall: float
    latency_s: dict[str, float]
    requests: int


class ServersCell(msgspec.Struct):
    """All sides under one load on one data set with one filter."""

    set: str
    load: str
    passes: str
    rounds: Rounds
    sides: dict[str, ServedSide]
    loadgen_cpu: float = 0.0  # its share of one core
    commit: str = ""
    processor: str = ""


class ServersKept(msgspec.Struct):
    """What V1 (b) measured: cells by name, settings by set, filter and rival, and why somebody is absent.

    `tried` are the ladders, on the tuning queries; `compared` are those exact enough, under the load of a cell.
    """

    cells: dict[str, ServersCell] = {}
    tried: dict[str, list[Tried]] = {}
    compared: dict[str, list[Tried]] = {}
    absent: dict[str, str] = {}


def passes(bound: int | None) -> str:
    """Return a filter in words."""
    return "all" if bound is None else f"{100 * bound / BUCKETS:g} %"


def cell_name(shape: SetShape, load: Load, bound: int | None) -> str:
    """Return a cell's name, as `--only` finds it."""
    return f"servers/{name_of(shape)}/{load.name}/{passes(bound)}"


def shapes(options: BenchOptions) -> Sequence[SetShape]:
    """Return the data sets, the most important first."""
    return (search_sets.QUICK,) if options.quick else SHAPES


async def measure(partly: PartialResults[Any], found: ServersKept, options: BenchOptions) -> None:
    """Measure the cells that are asked for and not kept yet, one data set after another."""
    for shape in shapes(options):
        todo = [
            (load, bound)
            for bound in BOUNDS
            for load in LOADS
            if options.only in (name := cell_name(shape, load, bound)) and name not in found.cells
        ]
        if not todo or not partly.begins(len(todo)):
            continue
        rows = await set_of(shape, found.absent, options)
        if rows is None:
            continue
        async with contextlib.AsyncExitStack() as stack:
            servers = await _servers(stack, rows, found, options)
            for number, (load, bound) in enumerate(todo):
                if number and not partly.begins():
                    continue
                name = cell_name(shape, load, bound)
                found.cells[name] = await _cell(servers, rows, load, bound, found, options)
                cell = found.cells[name]
                print(f"{name}: {rates(cell.rounds, cell.sides)}", flush=True)
                partly.save()


async def set_of(
    shape: SetShape, absent: dict[str, str], options: BenchOptions
) -> SearchSet | None:
    """Return a data set; None, with the reason in `absent`, if its texts cannot be had."""
    try:
        return await asyncio.to_thread(search_set, shape, options.seed, options.setup_dir / "data")
    except NoTextsError as error:
        absent[name_of(shape)] = str(error)
        return None


def rates(rounds: Rounds, sides: Iterable[str]) -> str:
    """Return the medians of all sides in words."""
    return ", ".join(f"{side} {rounds.median(side):,.0f}/s" for side in sides)


# -- servers


Start = Callable[[SearchSet, BenchOptions], AbstractAsyncContextManager[SearchServer]]
STARTS: dict[str, Start] = {
    OURS: search_mesh, PGVECTOR: pgvector_search, CHROMA: chroma,
    LANCEDB: partial(thin_server, LANCEDB), MILVUS_LITE: partial(thin_server, MILVUS_LITE),
}  # fmt: skip


async def _servers(
    stack: contextlib.AsyncExitStack, rows: SearchSet, found: ServersKept, options: BenchOptions
) -> dict[str, SearchServer]:
    """Start ours and every rival that is set up; all stay up, and only one is under load at a time."""
    rivals = LARGE_RIVALS if rows.shape.rows > LARGE else RIVALS
    servers = {}
    for name in (OURS, *rivals):
        try:
            servers[name] = await stack.enter_async_context(STARTS[name](rows, options))
        except (FileNotFoundError, MeshError) as error:
            if name == OURS:
                raise
            found.absent[f"{name} on {rows.name}"] = str(error)[-300:]
    return servers


# -- settings


async def tuned(
    server: SearchServer, name: str, rows: SearchSet, bound: int | None, options: BenchOptions
) -> list[Tried]:
    """Return a rival's settings as tried on the tuning queries; they stay beside its index, which they belong to."""
    path = kept(rows, name, options) / f"tried-{bound}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=list[Tried])
    tried = []
    truth = rows.truth(bound, tuning=True)
    for ladder in server.ladders(bound):
        for setting in ladder:
            await server.use(setting)
            calls = server.calls(rows.tuning, TUNING_PARCEL, bound)
            await server.send(calls[0])
            ids: list[list[int]] = []
            began = time.perf_counter()
            while calls and time.perf_counter() - began < TRIED_S:
                ids += server.ids(await server.send(calls.pop(0)))
            took = time.perf_counter() - began
            found = vectors.recall(ids, truth[: len(ids)])
            tried.append(Tried(dict(setting), found, len(ids) / took))
            if tried[-1].recall >= RECALL:
                break
    path.write_bytes(msgspec.json.encode(tried))
    return tried


def candidates(tried: Sequence[Tried], goal: float = RECALL) -> list[Tried]:
    """Return the settings that are exact enough, one of each ladder; if none is, the most exact one."""
    enough = [each for each in tried if each.recall >= goal]
    return enough or [max(tried, key=lambda each: each.recall)]


# -- cells


class CallTimes(msgspec.Struct):
    """What a loop of calls did."""

    latencies: list[float] = []
    seconds: float = 0.0
    cpu_s: float = 0.0


class SearchLoad(LoadLoop[CallTimes]):
    """Sends calls to a server, each when a client is free; a call that fails ends the run with its error."""

    def __init__(self, server: SearchServer, calls: Sequence[Any]) -> None:
        super().__init__(CallTimes())
        self._server, self._calls = server, itertools.cycle(calls)

    def fresh(self) -> CallTimes:
        """Return a run that has done nothing."""
        return CallTimes()

    def full(self, due: float, now: float) -> None:
        """Record nothing: the loop is closed."""

    async def one(self, due: float) -> None:
        """Send the next call."""
        await self._server.send(next(self._calls))
        self.run.latencies.append(self.now() - due)


async def _cell(
    servers: dict[str, SearchServer], rows: SearchSet, load: Load, bound: int | None, found: ServersKept,
    options: BenchOptions,
) -> ServersCell:  # fmt: skip
    slice_s = QUICK_SLICE_S if options.quick else SLICE_S
    where = f"{rows.name}/{passes(bound)}"
    queries = load.clients * load.queries
    best = {}
    for name in (each for each in servers if each != OURS):
        ladders = await tuned(servers[name], name, rows, bound, options)
        found.tried[f"{where}/{name}"] = ladders
        tried = await _compared(servers[name], candidates(ladders), rows, load, bound, slice_s)
        found.compared[f"{where}/{load.name}/{name}"] = tried
        best[name] = max(tried, key=lambda each: each.per_s)
    settings: dict[str, dict[str, Any]] = {OURS: {}}
    for name in in_turns(best, queries):
        settings[name] = best[name].setting
        await servers[name].use(settings[name])
    for name in best.keys() - settings.keys():
        found.absent[f"{name} on {where}, {load.name}"] = f"{best[name].per_s:.1f} queries/s"
    servers = {name: server for name, server in servers.items() if name in settings}
    loads = {
        name: SearchLoad(server, server.calls(rows.queries, load.queries, bound))
        for name, server in servers.items()
    }
    latencies: dict[str, list[float]] = {name: [] for name in servers}
    cpu_s = [0.0]

    async def rate(name: str) -> float:
        run = await loads[name].closed(load.clients, seconds=slice_s)
        latencies[name] += run.latencies
        cpu_s[0] += run.cpu_s
        return len(run.latencies) * load.queries / run.seconds

    began = time.monotonic()
    for name in servers:
        await rate(name)
    count = rounds_within(CELL_S, time.monotonic() - began, options.rounds(ROUNDS, 3))
    for times in latencies.values():
        times.clear()
    cpu_s[0], began = 0.0, time.monotonic()
    measured = await measure_rounds({name: partial(rate, name) for name in servers}, rounds=count)
    share = cpu_s[0] / (time.monotonic() - began)
    sides = {
        name: ServedSide(
            settings[name], await recall(server, rows, bound), stats.percentiles(latencies[name]), len(latencies[name])
        )
        for name, server in servers.items()
    }  # fmt: skip
    made = (origin().commit, processor())
    return ServersCell(rows.name, load.name, passes(bound), measured, sides, share, *made)


def in_turns(best: dict[str, Tried], queries: int) -> set[str]:
    """Return the rivals that are measured in turns with so many queries at once: the quick ones, else the best one.

    The best one is the quickest of those that are exact enough; without a rival a cell would say nothing.
    """
    quick = {name for name, each in best.items() if each.per_s * SLOW_S >= queries}
    fit = [
        name
        for name, each in best.items()
        if each.per_s * HOPELESS_S >= queries and each.recall >= RECALL - NEAR
    ]
    return quick or {*sorted(fit, key=lambda name: best[name].per_s)[-1:]}


async def _compared(
    server: SearchServer, some: Sequence[Tried], rows: SearchSet, load: Load, bound: int | None, slice_s: float
) -> list[Tried]:  # fmt: skip
    """Return each setting with each number of connections, and how much it did a second of this load.

    A setting by which the load would take too long is returned with what it did of the tuning queries.
    """
    compared = []
    for each in some:
        if each.per_s * HOPELESS_S < load.clients * load.queries:
            compared.append(each)
            continue
        for width in server.widths(load.clients):
            setting = {**each.setting, **width}
            await server.use(setting)
            loop = SearchLoad(server, server.calls(rows.queries, load.queries, bound))
            run = await loop.closed(load.clients, count=load.clients)
            if run.seconds >= SLOW_S:  # the first calls may have read an index from the disk
                run = await loop.closed(load.clients, count=load.clients)
            if run.seconds < SLOW_S:  # a connection's first call is slow
                run = await loop.closed(load.clients, seconds=slice_s)
            rate = len(run.latencies) * load.queries / run.seconds
            compared.append(Tried(setting, each.recall, rate))
    return compared


async def recall(server: SearchServer, rows: SearchSet, bound: int | None) -> float:
    """Return recall@10 as a server answers now."""
    ids: list[list[int]] = []
    for call in server.calls(rows.queries[:CHECKED], MANY.queries, bound):
        ids += server.ids(await server.send(call))
    return vectors.recall(ids, rows.truth(bound)[: len(ids)])


# -- what is reached


def word_of(cell: ServersCell, rival: str) -> str:
    """Return the level that a cell reaches against one rival."""
    ratio = cell.rounds.ratio(OURS, rival)
    if cell.load == MANY.name:
        return stats.verdict(ratio, 4.0, 2.0)
    return stats.verdict(ratio, 1.0, 0.4 if rival == PGVECTOR else 1.0)


WORDS = ("missed", "undecided", "must", "goal")


def reached(cell: ServersCell) -> str:
    """Return the level that a cell reaches against the rivals that decide it; missed where ours is not exact enough."""
    if cell.sides[OURS].recall < RECALL:
        return WORDS[0]
    return min(
        (word_of(cell, name) for name in judged(cell)), key=WORDS.index, default="not measured"
    )


def judged(cell: ServersCell) -> list[str]:
    """Return the rivals that decide a cell: the best one; of single queries the best that speaks HTTP, and pgvector.

    Whoever beats the best HTTP server beats a pgvector that is slower.
    """
    best, rivals = best_rival(cell), equals(cell)
    if cell.load == MANY.name or best != PGVECTOR:
        return [best] if best else []
    http = [name for name in rivals if name != PGVECTOR]
    return [PGVECTOR, *sorted(http, key=cell.rounds.median)[-1:]]


def equals(cell: ServersCell) -> list[str]:
    """Return the rivals of a cell whose recall is as asked."""
    return [
        name for name, side in cell.sides.items() if name != OURS and side.recall >= RECALL - NEAR
    ]


def best_rival(cell: ServersCell) -> str:
    """Return the rival that does most at the recall asked; empty if there is none."""
    return max(equals(cell), key=cell.rounds.median, default="")
