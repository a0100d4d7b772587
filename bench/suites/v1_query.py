"""V1 (c): one query through the mesh, against the same search in process, and where its microseconds go."""

from __future__ import annotations

import dataclasses
import itertools
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench import search_hops
from bench.document import BenchOptions, Body, origin
from bench.hops import Times
from bench.mesh.search_mesh import SpillwayServer, ef, search_mesh, services
from bench.mesh.stamped import Moments, read
from bench.suites.v1_servers import SearchLoad
from bench.workloads import search_sets
from bench.workloads.search_sets import K, SearchSet, search_set
from bench.workloads.vectors import Rows
from loadgen import arrivals, stats
from loadgen.machine import processor
from services.vector_search.index.index import Index

RATE = 50.0
GOAL_MS, MUST_MS = 1.0, 2.0


class QueryFound(msgspec.Struct):
    """What V1 (c) measured: seconds of single searches here and there, of each hop, and CPU seconds by process."""

    set: str
    alone_s: list[float]
    apart_s: list[float]  # one after another
    steady_s: list[float]  # in an open loop
    hops: Times
    cpu_s: dict[str, float]
    commit: str = ""
    processor: str = ""


def measure(index_of: Any, options: BenchOptions, folder: Path) -> QueryFound:
    """Measure on the first data set; `index_of` makes an index of rows."""
    shape = search_sets.QUICK if options.quick else search_sets.SMALL
    rows = search_set(shape, options.seed, options.setup_dir / "data")
    return uvloop.run(_measure(rows, index_of(rows.base), options, folder))


async def _measure(
    rows: SearchSet, index: Index, options: BenchOptions, folder: Path
) -> QueryFound:
    count = options.rounds(3000, 100)
    files = {name: folder / f"{name}.stamps" for name in ("router", "vector_search")}
    stamped = [
        dataclasses.replace(each, stamps=str(files[each.name])) if each.name in files else each
        for each in services()
    ]
    async with search_mesh(rows, options) as server:
        effort = await ef(server.mesh)
        calls = server.calls(rows.queries, 1, None)
        await _asked(server, calls, count // 10)
        before, own = server.mesh.cpu_seconds(), _own_cpu_s()
        apart = await _asked(server, calls, count)
        used = {name: each - before[name] for name, each in server.mesh.cpu_seconds().items()}
        used["client"] = _own_cpu_s() - own
        load = SearchLoad(server, calls)
        await load.open(arrivals.steady(RATE), 2.0)
        steady = await load.open(arrivals.steady(RATE), count / RATE)
    async with search_mesh(rows, options, stamped) as server:
        calls = server.calls(rows.queries, 1, None)
        await _asked(server, calls, count // 10)
        marked = await _asked(server, calls, count)
    moments: Moments = {**read(files["router"]), **read(files["vector_search"])}
    return QueryFound(
        rows.name, _alone(index, rows.queries, effort), [done - sent for sent, done in apart],
        steady.latencies, search_hops.measure(marked, moments), used,
        origin().commit, processor(),
    )  # fmt: skip


async def _asked(
    server: SpillwayServer, calls: Sequence[bytes], count: int
) -> list[tuple[float, float]]:
    """Send calls one after another; return when each was sent and answered."""
    found = []
    for call in itertools.islice(itertools.cycle(calls), count):
        sent = time.monotonic()
        await server.send(call)
        found.append((sent, time.monotonic()))
    return found


def _alone(index: Index, queries: Rows, effort: int) -> list[float]:
    found = []
    for row in queries[:1000]:
        began = time.perf_counter()
        index.search(row[None, :], K, effort=effort)
        found.append(time.perf_counter() - began)
    return found


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def describe(found: QueryFound, body: Body) -> None:
    """Add the tables and the verdict."""
    alone = stats.percentiles(found.alone_s)["p50"]
    rows = []
    for name, seconds in {
        "50 a second": found.steady_s,
        "one after another": found.apart_s,
    }.items():
        added = [1e3 * (each - alone) for each in seconds]
        p50, p99 = stats.interval(added, 50), stats.interval(added, 99)
        rows.append([name, str(len(added)), _cell(p50), _cell(p99), f"{1e3 * alone:.3f}"])
        if seconds is found.steady_s:
            body.met["(c) p50"] = stats.verdict(p50, GOAL_MS, MUST_MS, higher=False)
    body.table(
        f"(c) one query through the mesh, {found.set}: milliseconds added to the search in process",
        ["queries come", "queries", "p50 [95 %]", "p99 [95 %]", "search alone p50 (ms)"],
        rows,
    )
    body.table(
        "(c) where the microseconds of one query go, one after another, all processes stamped",
        ["hop", "what", "mean", "p50", "p99"],
        search_hops.rows(found.hops),
    )
    body.table(
        "(c) microseconds of CPU of one query, one after another, nothing stamped",
        ["process", "CPU"],
        search_hops.cpu_rows(found.cpu_s, len(found.apart_s)),
    )
    body.samples["query"] = msgspec.to_builtins(found)


def _cell(found: dict[str, float]) -> str:
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
