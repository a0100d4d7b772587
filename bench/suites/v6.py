"""V6: a collection larger than memory, four shards in memory cgroups of 300 MiB, while a writer adds to it.

Inverted lists of codes (Chameleon, sections 4.3 and 4.4) beside an exact scan of the same files under the same limit.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
import uvloop
from spillway_client import ShardExplanation

from bench.document import BenchOptions, Body, origin
from bench.hot_path import digest
from bench.mesh import proc
from bench.mesh.limited_shards import FAILURES, SHARDS, indexed, limited_mesh, reason, used, why_not
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.memory_groups import GroupUse, MemoryGroups
from bench.mesh.search_mesh import COLLECTION, WRITERS, SpillwayServer, fill
from bench.partial import PartialResults
from bench.rivals.search_servers import kept
from bench.suites.v1w import PART, WRITE_RATE, Seen, Writer, fresh_rows, recall
from bench.workloads import search_sets
from bench.workloads.search_sets import K, SearchSet, SetShape, search_set
from loadgen import bodies, stats
from loadgen.bodies import Request
from loadgen.load import LoadRun
from loadgen.target import Target, TargetAnswer

SHAPE = SetShape("clustered", 2_000_000, 128, "clustered")
LIMIT = 300 << 20  # bytes of each process, the page cache among them
QUICK_LIMIT = 200 << 20
CLIENTS = 4
RECALL, FASTER = 0.95, 10.0
FILL_S, START_S = 3600.0, 600.0
LISTS, EXACT = "inverted lists", "exact scan"
# What makes a process choose a kind for a shard of any size that this row has.
KINDS = {LISTS: {"SPILLWAY_EXACT_BELOW": "1000"}, EXACT: {"SPILLWAY_EXACT_BELOW": "1000000000"}}
LOOKED_AT = 800  # answers, by which recall is told
# Rows in no list yet, and their share, a few more than lists let wait.
WAITING, WAITING_SHARE = 1100, 1 / 200
WRITTEN = 0.95  # of the rows that are due must have been acknowledged
SERVED, RATIO = "recall@10 while rows are added", "queries/s beside an exact scan"


class LimitedFound(msgspec.Struct):
    """What four shards of one kind did within their limits, bytes; `why` says what went wrong.

    Latencies are of searches, seconds; `written_per_s` rows a second were acknowledged meanwhile. `own` are bytes that
    the kernel cannot take back, of the four together, `peak` the most that it counted.
    """

    kind: str
    latencies_s: list[float] = []
    seconds: float = 0.0
    failed: int = 0
    recall: float = 0.0
    written_per_s: float = 0.0
    ready_s: float = 0.0
    own: int = 0
    peak: int = 0
    kills: int = 0
    effort: str = ""
    why: str = ""
    commit: str = ""

    @property
    def per_s(self) -> float:
        """Queries answered a second."""
        return len(self.latencies_s) / self.seconds if self.seconds else 0.0

    @property
    def serves(self) -> bool:
        """Whether every search was answered, and nothing was killed."""
        return not (self.why or self.failed or self.kills) and bool(self.latencies_s)


class LargerKept(msgspec.Struct):
    """All that V6 measured, by kind; `filled_s` is the time from an empty collection to lists that serve."""

    set: str = ""
    rows: int = 0
    dimension: int = 0
    limit: int = 0
    filled_s: float = 0.0
    cells: dict[str, LimitedFound] = {}
    absent: str = ""


def run(options: BenchOptions) -> Body:
    """Measure each kind that is not kept yet; nothing is measured where groups cannot be made."""
    partly = PartialResults(options, LargerKept)
    partly.kept.absent = why_not(options.cgroup)
    if not partly.kept.absent:
        uvloop.run(_run(partly, options))
    return describe(partly.kept, partly.left)


async def _run(partly: PartialResults[LargerKept], options: BenchOptions) -> None:
    shape = search_sets.QUICK if options.quick else SHAPE
    rows = await asyncio.to_thread(search_set, shape, options.seed, options.setup_dir / "data")
    found = partly.kept
    found.set, (found.rows, found.dimension) = rows.name, rows.base.shape
    found.limit = QUICK_LIMIT if options.quick else LIMIT
    for kind in KINDS:
        if options.only in kind and kind not in found.cells and partly.begins():
            found.cells[kind] = await measured(rows, kind, found, options)
            partly.save()


async def measured(
    rows: SearchSet, kind: str, about: LargerKept, options: BenchOptions
) -> LimitedFound:
    """Search a copy of the filled shards within the limits while rows are added; what ends it is in `why`."""
    found = LimitedFound(kind, commit=origin().commit)
    groups: Mapping[str, GroupUse] = {}
    try:
        folder = await _filled(rows, about, options)
        with tempfile.TemporaryDirectory(prefix="spillway-v6-") as place:
            data = Path(place) / "mesh"
            await asyncio.to_thread(shutil.copytree, folder, data, ignore=_sockets)
            began = time.monotonic()
            with _limits(about.limit, options) as limits:
                try:
                    async with limited_mesh(data, KINDS[kind], limits) as server:
                        found.effort = await _indexed(server.mesh, kind, START_S)
                        found.ready_s = time.monotonic() - began
                        await _searched(server, rows, found, options)
                        found.own = sum(proc.own_bytes(server.mesh.pid(name)) for name in SHARDS)
                finally:
                    groups = limits.use()
    except FAILURES as error:
        found.why = reason(error)
    used(found, groups)
    return found


def _limits(limit: int, options: BenchOptions) -> MemoryGroups:
    assert options.cgroup is not None  # `why_not` has looked
    return MemoryGroups(options.cgroup, dict.fromkeys(SHARDS, limit))


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_socket()]


async def _filled(rows: SearchSet, about: LargerKept, options: BenchOptions) -> Path:
    """Return the directory of a mesh that was filled within the limits, if this code has filled none yet."""
    folder = kept(rows, f"lists-{about.limit >> 20}-{digest(WRITERS)[:12]}", options)
    if not (folder / "complete").exists():
        for each in folder.parent.glob("lists-*"):
            await asyncio.to_thread(shutil.rmtree, each)
        folder.mkdir(parents=True)
        began = time.monotonic()
        with _limits(about.limit, options) as limits:
            async with limited_mesh(folder, KINDS[LISTS], limits) as server:
                await fill(server.mesh, rows, shards=len(SHARDS))
                await _indexed(server.mesh, LISTS, FILL_S)
        about.filled_s = time.monotonic() - began
        (folder / "complete").write_text(f"{about.filled_s}")
    about.filled_s = float((folder / "complete").read_text())
    return folder


async def _indexed(mesh: LocalMesh, kind: str, timeout_s: float) -> str:
    """Wait until every shard is searched by a kind, and return the efforts (see `indexed`)."""
    told = await indexed(mesh, partial(_built, kind), timeout_s)
    return ", ".join(sorted({f"{each.path} {each.effort}" for each in told}))


def _built(kind: str, shard: ShardExplanation) -> bool:
    """Return whether a shard is searched as its kind is; few rows may get a graph, for which there is memory.

    Lists take in rows once enough wait, so some always do.
    """
    if kind == EXACT or shard.path == "exact":
        return kind == EXACT and shard.path == "exact"
    return shard.newer < max(WAITING, int(WAITING_SHARE * shard.live))


async def _searched(
    server: SpillwayServer, rows: SearchSet, found: LimitedFound, options: BenchOptions
) -> None:
    """Keep some searches of one query open while a writer adds rows, after others that count nowhere."""
    seconds = float(options.rounds(60, 3))
    new = fresh_rows(rows, int(1.2 * seconds * WRITE_RATE), options.seed)
    requests = bodies.search(COLLECTION, rows.queries, queries=1, k=K)
    numbers = {each.body: number for number, each in enumerate(requests)}
    writer, seen = Writer(server, new, len(rows.base)), list[Seen]()

    def look(request: Request, answer: TargetAnswer) -> None:
        if answer.status == 200:
            known = max(0, writer.stored - PART)  # the last part may have come after the search
            seen.append(Seen(numbers[request.body], known, server.ids(answer.body)[0]))

    async with Target([server.mesh.url]) as target:
        await LoadRun(target, requests).closed(CLIENTS, seconds=seconds / 3)
        writing = asyncio.create_task(writer.run())
        done = await LoadRun(target, requests, look).closed(CLIENTS, seconds=seconds)
        found.written_per_s = writer.stored / (time.monotonic() - writer.began)
        await writing
    found.latencies_s = [sample.latency_s for sample in done.samples if sample.ok]
    found.seconds = done.seconds
    found.failed = len(done.samples) - len(found.latencies_s)
    found.recall = recall(rows, new, seen[:: max(1, len(seen) // LOOKED_AT)]) if seen else 0.0


# -- what is said


def describe(found: LargerKept, left: int = 0) -> Body:
    """Turn what was measured into a table and verdicts."""
    body = Body(samples=msgspec.to_builtins(found), left=left)
    lists, exact = found.cells.get(LISTS), found.cells.get(EXACT)
    body.met[SERVED] = body.met[RATIO] = "not measured"
    if found.absent or lists is None:
        body.notes += [f"Not measured: {found.absent}."] if found.absent else []
        return body
    columns = [
        "index", "path and effort", "recall@10", "queries/s", "p50 (ms)", "p99 (ms)", "rows written/s", "failed",
        "ready after (s)", "of their own (MB)", "peak of all (MB)", "killed",
    ]  # fmt: skip
    body.table(
        f"{found.set} ({found.rows * found.dimension * 4 / 1e6:,.0f} MB as float32), {found.limit >> 20} MiB for each "
        f"of four processes: one query a request, {CLIENTS} in flight, over HTTP",
        columns,
        [[name, *_cells(each)] for name, each in found.cells.items()],
    )
    well = lists.recall >= RECALL and lists.written_per_s >= WRITTEN * WRITE_RATE
    body.met[SERVED] = "goal" if lists.serves and well and "ivfpq" in lists.effort else "missed"
    if exact is not None and exact.serves:
        fast = lists.serves and lists.per_s >= FASTER * exact.per_s
        body.met[RATIO] = "goal" if fast else "missed"
        body.notes.append(f"Queries/s, {LISTS} over {EXACT}: {lists.per_s / exact.per_s:.1f}.")
    if found.filled_s:
        body.notes.append(
            f"Filled within the limits, from nothing to lists that serve, in {found.filled_s:.0f} s."
        )
    body.notes += [f"{name}: {each.why}" for name, each in found.cells.items() if each.why]
    return body


def _cells(each: LimitedFound) -> list[str]:
    use = [f"{each.peak / 1e6:,.0f}", str(each.kills)]
    if each.why or not each.latencies_s:
        return [each.effort, *["-"] * 8, *use]
    times = stats.percentiles(each.latencies_s)
    return [
        each.effort, f"{each.recall:.4f}", f"{each.per_s:.3g}", f"{1e3 * times['p50']:.2f}",
        f"{1e3 * times['p99']:.2f}", f"{each.written_per_s:.0f}", str(each.failed), f"{each.ready_s:.0f}",
        f"{each.own / 1e6:,.0f}", *use,
    ]  # fmt: skip
