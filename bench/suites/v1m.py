"""V1M: four shards in memory cgroups, the page cache counted: how little memory they serve with, and are filled in."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop
from spillway_client import ShardExplanation

from bench.document import BenchOptions, Body, origin
from bench.hot_path import digest
from bench.mesh import proc
from bench.mesh.limited_shards import FAILURES, SHARDS, indexed, limited_mesh, reason, used, why_not
from bench.mesh.memory_groups import MemoryGroups
from bench.mesh.search_mesh import COLLECTION, WRITERS, SpillwayServer, fill
from bench.partial import PartialResults
from bench.rivals.search_servers import kept
from bench.workloads import search_sets, vectors
from bench.workloads.search_sets import K, SearchSet, SetShape, search_set
from loadgen import bodies, stats
from loadgen.bodies import Request
from loadgen.load import LoadRun
from loadgen.target import Target, TargetAnswer
from services.vector_search.index.search_path import LEAST_AUDITED

SHAPE = SetShape("clustered", 400_000, 1024, "clustered")
OWN = (
    "bench/suites/v1m.py",
    "bench/mesh/limited_shards.py",
)  # what fills the shards, beside the mesh
# The limits of all four together, over the rows' bytes as float32; 0: without limits.
SHARES = (0.0, 1.0, 0.75, 0.6, 0.49)
FILLED_SHARES = (0.49, 0.75, 1.0)
# Of a smoke run: few rows beside what an empty process takes.
QUICK_SHARES, QUICK_FILLED_SHARES = (0.0, 64.0, 16.0), (64.0,)
HALF, RECALL = 0.5, 0.95
NEWER_SHARE = 0.1
STILL_S, QUICK_STILL_S = 5, 1
CLIENTS = 4
START_S, FILL_S = 300.0, 1200.0
SERVED, FILLED = "serves", "is filled"


class LimitFound(msgspec.Struct):
    """What four shards did within a limit each, bytes (0: none).

    `own` and `peak` are bytes of the four together: what the kernel cannot take back, at the end, and the most that it
    counted, the page cache among it. `paths` are the ways of their searches, `newer` the rows that no structure had.
    `why` says what went wrong where nothing was measured.
    """

    share: float
    limit: int
    latencies_s: list[float] = []
    seconds: float = 0.0
    failed: int = 0
    recall: float = 0.0
    ready_s: float = 0.0
    own: int = 0
    peak: int = 0
    kills: int = 0
    why: str = ""
    commit: str = ""
    paths: list[str] = []
    newer: int = 0

    @property
    def serves(self) -> bool:
        """Whether every search was answered, and well enough, and nothing was killed."""
        return not (self.why or self.failed or self.kills) and self.recall >= RECALL


class LimitsKept(msgspec.Struct):
    """All that V1M measured: by what was done and the share of the rows' bytes."""

    set: str = ""
    rows: int = 0
    dimension: int = 0
    cells: dict[str, LimitFound] = {}
    absent: str = ""

    @property
    def bytes(self) -> int:
        """The rows' bytes as float32."""
        return 4 * self.rows * self.dimension


class Searched(NamedTuple):
    """A run of searches: seconds of each, seconds of all, how many failed, and recall@10."""

    latencies_s: list[float]
    seconds: float
    failed: int
    recall: float


def run(options: BenchOptions) -> Body:
    """Serve and fill at each share that is not kept yet; nothing is measured where groups cannot be made."""
    partly = PartialResults(options, LimitsKept)
    partly.kept.absent = why_not(options.cgroup)
    if not partly.kept.absent:
        uvloop.run(_run(partly, options))
    return describe(partly.kept, partly.left)


async def _run(partly: PartialResults[LimitsKept], options: BenchOptions) -> None:
    shape = search_sets.QUICK if options.quick else SHAPE
    rows = await asyncio.to_thread(search_set, shape, options.seed, options.setup_dir / "data")
    found = partly.kept
    found.set, (found.rows, found.dimension) = rows.name, rows.base.shape
    for share in QUICK_SHARES if options.quick else SHARES:
        name = cell_name(SERVED, share)
        if options.only in name and name not in found.cells and partly.begins():
            found.cells[name] = await _serves(rows, share, options)
            partly.save()
    for share in QUICK_FILLED_SHARES if options.quick else FILLED_SHARES:
        name = cell_name(FILLED, share)
        if options.only in name and name not in found.cells and partly.begins():
            found.cells[name] = await _is_filled(rows, share, options)
            partly.save()
        if name in found.cells and found.cells[name].serves:
            break  # more memory will do, too


def cell_name(what: str, share: float) -> str:
    """Return the name of what is measured at a share of the rows' bytes."""
    return f"{what} {f'within {share:g}' if share else 'without limits'}"


def limit_of(rows: SearchSet, share: float) -> int:
    """Return the limit of each process, bytes, so that all together have a share of the rows' bytes; 0: none."""
    return int(share * 4 * rows.base.size) // len(SHARDS)


def _mesh(
    folder: Path, options: BenchOptions, groups: MemoryGroups | None
) -> AbstractAsyncContextManager[SpillwayServer]:
    return limited_mesh(folder, {"SPILLWAY_EXACT_BELOW": "1000"} if options.quick else {}, groups)


# -- serving


async def _serves(rows: SearchSet, share: float, options: BenchOptions) -> LimitFound:
    """Start on files of shards that were filled without limits, and search."""
    folder = await _filled(rows, options)
    return await _within(rows, share, options, folder, empty=False)


async def _is_filled(rows: SearchSet, share: float, options: BenchOptions) -> LimitFound:
    """Fill an empty mesh, wait for its graphs, and search."""
    with tempfile.TemporaryDirectory(prefix="spillway-v1m-") as folder:
        return await _within(rows, share, options, Path(folder), empty=True)


async def _filled(rows: SearchSet, options: BenchOptions) -> Path:
    """Return the directory of a mesh with the rows in four shards, filled if none of this code is kept."""
    folder = kept(rows, f"shards-{digest((*WRITERS, *OWN))[:12]}", options)
    if not (folder / "complete").exists():
        for each in folder.parent.glob("shards-*"):
            await asyncio.to_thread(shutil.rmtree, each)
        folder.mkdir(parents=True)
        async with _mesh(folder, options, None) as server:
            await fill(server.mesh, rows, shards=len(SHARDS))
            await indexed(server.mesh, _built, FILL_S)
        (folder / "complete").touch()
    return folder


async def _within(
    rows: SearchSet, share: float, options: BenchOptions, folder: Path, *, empty: bool
) -> LimitFound:
    """Measure a mesh whose shards have a limit each; what ends it is in `why`."""
    found = LimitFound(share, limit_of(rows, share), commit=origin().commit)
    limits = dict.fromkeys(SHARDS, found.limit) if share else {}
    parent = options.cgroup if share else None
    with MemoryGroups(parent, limits) if parent else nullcontext() as groups:
        began = time.monotonic()
        try:
            async with _mesh(folder, options, groups) as server:
                if empty:
                    await fill(server.mesh, rows, shards=len(SHARDS))
                told = await _settled(server, FILL_S if empty else START_S, options)
                found.paths = sorted({each.path for each in told})
                found.newer = sum(each.newer for each in told)
                found.ready_s = time.monotonic() - began
                searched = await _searched(server, rows, options)
                found.own = sum(proc.own_bytes(server.mesh.pid(name)) for name in SHARDS)
            found.latencies_s, found.seconds, found.failed, found.recall = searched
        except FAILURES as error:
            found.why = reason(error)
        used(found, groups.use() if groups else {})
    return found


def _built(shard: ShardExplanation) -> bool:
    """Return whether a shard has a graph that lacks no more than waits for queries."""
    return shard.path == "graph" and shard.newer < LEAST_AUDITED


async def _settled(
    server: SpillwayServer, timeout_s: float, options: BenchOptions
) -> list[ShardExplanation]:
    """Wait until every shard serves well and takes no more rows into its graph or lists; return how they stand."""
    newer = -1
    while True:
        told = await indexed(server.mesh, _serves_well, timeout_s)
        if newer == (newer := sum(each.newer for each in told)):
            return told
        await asyncio.sleep(options.pick(STILL_S, QUICK_STILL_S))


def _serves_well(shard: ShardExplanation) -> bool:
    """Return whether a graph or lists hold nine tenths of a shard's rows; little memory may let them hold no more."""
    return shard.path != "exact" and shard.newer <= shard.live * NEWER_SHARE


async def _searched(server: SpillwayServer, rows: SearchSet, options: BenchOptions) -> Searched:
    """Keep some searches of one query open for a while, after others that count nowhere."""
    seconds = float(options.rounds(30, 2))
    requests = bodies.search(COLLECTION, rows.queries, queries=1, k=K)
    numbers = {each.body: number for number, each in enumerate(requests)}
    seen: dict[int, list[int]] = {}

    def look(request: Request, answer: TargetAnswer) -> None:
        if answer.status == 200:
            seen[numbers[request.body]] = server.ids(answer.body)[0]

    async with Target([server.mesh.url]) as target:
        await LoadRun(target, requests).closed(CLIENTS, seconds=seconds / 3)
        done = await LoadRun(target, requests, look).closed(CLIENTS, seconds=seconds)
    asked = sorted(seen)
    found = vectors.recall([seen[n] for n in asked], rows.truth(None)[asked]) if asked else 0.0
    well = [sample.latency_s for sample in done.samples if sample.ok]
    return Searched(well, done.seconds, len(done.samples) - len(well), found)


# -- what is said


def describe(found: LimitsKept, left: int = 0) -> Body:
    """Turn what was measured into a table, verdicts and what a vector needs."""
    body = Body(samples=msgspec.to_builtins(found), left=left)
    half, filled = f"served by less than {HALF:g} of the rows' bytes", "filled in less than that"
    if found.absent or not found.cells:
        body.met[half] = body.met[filled] = "not measured"
        if found.absent:
            body.notes.append(f"Not measured: {found.absent}.")
        return body
    columns = [
        "four shards", "bytes a vector", "limit of each (MB)", "recall@10", "queries/s", "p50 (ms)", "p99 (ms)",
        "failed", "searched by", "rows in no index", "ready after (s)", "of their own (bytes a vector)",
        "peak of all (MB)", "killed",
    ]  # fmt: skip
    body.table(
        f"{found.set} ({found.bytes / 1e6:,.0f} MB as float32): one query a request, {CLIENTS} in flight, over HTTP",
        columns,
        [[name, *_cells(found, each)] for name, each in found.cells.items()],
    )
    needs = []
    for what, verdict in ((SERVED, half), (FILLED, filled)):
        cells = [each for name, each in found.cells.items() if name.startswith(what)]
        body.met[verdict] = reached(cells)
        needs.append([what, *_least_cells(found, cells)])
    body.table(
        f"The least limits of those tried at which all is answered at recall@10 ≥ {RECALL:g}",
        ["four shards", "of the rows' bytes", "bytes a vector", "float32 bytes"],
        needs,
    )
    body.notes += [f"{name}: {each.why}" for name, each in found.cells.items() if each.why]
    return body


def reached(cells: Sequence[LimitFound]) -> str:
    """Return whether one of the cells serves within less than half of the rows' bytes."""
    tried = [each for each in cells if each.share]
    if any(each.serves and each.share < HALF for each in tried):
        return "goal"
    return "missed" if tried else "not measured"


def least(cells: Sequence[LimitFound]) -> LimitFound | None:
    """Return the cell of the least memory that serves, None if none with a limit does."""
    served = [each for each in cells if each.share and each.serves]
    return min(served, key=lambda each: each.share, default=None)


def _least_cells(found: LimitsKept, cells: Sequence[LimitFound]) -> list[str]:
    needed, wide = least(cells), str(4 * found.dimension)
    if needed is None:
        return ["-", "-", wide]
    return [f"{needed.share:g}", f"{_each(found, needed.limit):.0f}", wide]


def _each(found: LimitsKept, limit: int) -> float:
    return len(SHARDS) * limit / found.rows


def _cells(found: LimitsKept, each: LimitFound) -> list[str]:
    limits = (
        [f"{_each(found, each.limit):.0f}", f"{each.limit / 1e6:.0f}"] if each.share else ["-", "-"]
    )
    use = [f"{each.peak / 1e6:,.0f}", str(each.kills)] if each.share else ["-", "-"]
    if each.why or not each.latencies_s:
        return [*limits, *["-"] * 9, *use]
    times = stats.percentiles(each.latencies_s)
    return [
        *limits, f"{each.recall:.4f}", f"{len(each.latencies_s) / each.seconds:.0f}", f"{1e3 * times['p50']:.2f}",
        f"{1e3 * times['p99']:.2f}", str(each.failed), " and ".join(each.paths), f"{each.newer:,}",
        f"{each.ready_s:.0f}", f"{each.own / found.rows:.0f}", *use,
    ]  # fmt: skip
