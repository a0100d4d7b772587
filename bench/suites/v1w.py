"""V1W: searches while rows come and go, after a cold start, and within time budgets; and what a vector takes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvloop
from spillway_client import AsyncSpillway

from bench.document import BenchOptions, Body, origin
from bench.mesh.local_mesh import LocalMesh
from bench.mesh.probe import MeshError
from bench.mesh.search_mesh import (
    COLLECTION,
    SpillwayServer,
    documents,
    indexed,
    kept_mesh,
    search_mesh,
    services,
)
from bench.partial import PartialResults
from bench.workloads import search_sets, vectors
from bench.workloads.http_link import HttpError, HttpLinks
from bench.workloads.search_sets import K, SearchSet, search_set
from bench.workloads.vectors import Rows
from loadgen import arrivals, bodies, stats
from loadgen.bodies import Request
from loadgen.load import LoadRun, RequestRun
from loadgen.target import Target, TargetAnswer

WRITE_RATE, PART = 500, 50  # rows a second, rows a request
SEARCH_RATE = 100.0
CHURN = 0.3
RECALL, MOVED = 0.95, 0.01
SEARCHER = "vector_search"
START_S = 600.0
FRESH, CHURNED, COLD = "beside a writer", "after churn", "cold start"
BUDGETS = "time budgets"
BUDGETS_MS = (2.0, 5.0, 10.0, 20.0)
BUDGET_RATE, WITHIN = 50.0, 0.99


class BesideFound(msgspec.Struct):
    """Searches at a steady rate before, and beside, a writer: seconds, failures, recall, and rows a second written."""

    set: str
    before_s: list[float]
    beside_s: list[float]
    failed: int
    recall_before: float
    recall_beside: float
    written_per_s: float
    commit: str = ""


class ChurnFound(msgspec.Struct):
    """Recall of a collection before, and after a share of its rows was deleted and as many others were added."""

    set: str
    changed: int
    before: float
    after: float
    commit: str = ""


class ColdFound(msgspec.Struct):
    """Seconds from the start of vector_search until it answered from its graph, nothing of its files cached; bytes."""

    set: str
    rows: int
    dimension: int
    first_s: float
    cached: bool
    rss: int
    rss_empty: int
    disk: int
    commit: str = ""


class BudgetSeen(msgspec.Struct):
    """Searches with one time budget: milliseconds reported and by the client's clock, and which were to fit, in order.

    `efforts` are those that graphs were asked with.
    """

    took_ms: list[float] = []
    client_ms: list[float] = []
    efforts: list[int] = []
    fits: list[bool] = []
    failed: int = 0
    recall: float = 0.0

    def shares(self, values: Sequence[float], budget_ms: float) -> list[float]:
        """Return values over the budget, of the searches that were to fit."""
        return [each / budget_ms for each, fit in zip(values, self.fits, strict=True) if fit]

    def within(self, values: Sequence[float], budget_ms: float) -> float | None:
        """Return the share of the searches that were to fit whose value is within the budget; None if none was."""
        shares = self.shares(values, budget_ms)
        return sum(each <= 1.0 for each in shares) / len(shares) if shares else None


class BudgetsFound(msgspec.Struct):
    """Searches by their time budget, and what the least and the largest effort are predicted to take; milliseconds."""

    set: str
    seen: dict[float, BudgetSeen]
    ladder_ms: tuple[float, float]
    commit: str = ""


class WritesKept(msgspec.Struct):
    """All that V1W measured."""

    beside: BesideFound | None = None
    churn: ChurnFound | None = None
    cold: dict[str, ColdFound] = {}
    budgets: BudgetsFound | None = None


def run(options: BenchOptions) -> Body:
    """Measure each part that is asked for and not kept yet."""
    partly = PartialResults(options, WritesKept)
    uvloop.run(_run(partly, options))
    return describe(partly.kept, partly.left)


async def _run(partly: PartialResults[WritesKept], options: BenchOptions) -> None:
    kept = partly.kept
    small, large = search_sets.CLUSTERED, search_sets.MILLION
    sizes = [search_sets.QUICK] if options.quick else [small, large]
    if options.only in FRESH and kept.beside is None and partly.begins():
        kept.beside = await _beside(await _rows(sizes[0], options), options)
        partly.save()
    if options.only in CHURNED and kept.churn is None and partly.begins():
        kept.churn = await _churn(await _rows(sizes[0], options), options)
        partly.save()
    if options.only in BUDGETS and kept.budgets is None and partly.begins():
        kept.budgets = await _budgets(await _rows(sizes[0], options), options)
        partly.save()
    for shape in sizes:
        name = f"{COLD}/{search_sets.name_of(shape)}"
        if options.only in name and name not in kept.cold and partly.begins():
            kept.cold[name] = await _cold(await _rows(shape, options), options)
            partly.save()


async def _rows(shape: search_sets.SetShape, options: BenchOptions) -> SearchSet:
    return await asyncio.to_thread(search_set, shape, options.seed, options.setup_dir / "data")


@asynccontextmanager
async def _copy(rows: SearchSet, options: BenchOptions) -> AsyncIterator[SpillwayServer]:
    """Run a mesh on a copy of the rows that are kept for other rows of the table, since this one changes them."""
    async with search_mesh(rows, options):
        pass
    with tempfile.TemporaryDirectory(prefix="spillway-v1w-") as folder:
        data = Path(folder) / "mesh"
        await asyncio.to_thread(shutil.copytree, kept_mesh(rows, options), data, ignore=_sockets)
        async with LocalMesh(data, services()) as mesh, HttpLinks(mesh.url) as links:
            async with AsyncSpillway(mesh.url, timeout_s=300) as client:
                await indexed(client)
            yield SpillwayServer(mesh, links)


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_socket()]


# -- beside a writer


def fresh_rows(rows: SearchSet, count: int, seed: int) -> Rows:
    """Return further rows near those of a set: each one of them, moved."""
    rng = np.random.default_rng(seed + 1)
    some = rows.base[rng.integers(0, len(rows.base), count)]
    noise = rng.standard_normal(some.shape).astype(np.float32)
    return vectors.unit(some + 0.6 * noise / np.sqrt(some.shape[1]))


class Writer:
    """Adds rows at a steady rate; `stored` grows with every acknowledged request."""

    def __init__(self, server: SpillwayServer, rows: Rows, start: int) -> None:
        self._server = server
        self._calls = [
            documents(server.mesh.url, rows[at : at + PART], start + at)
            for at in range(0, len(rows), PART)
        ]
        self.stored = 0
        self.began = self.ended = 0.0

    async def run(self) -> None:
        """Send every request at its time, one after another."""
        self.began = time.monotonic()
        for number, call in enumerate(self._calls):
            due = self.began + number * PART / WRITE_RATE
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._server.send(call)
            self.stored += PART
        self.ended = time.monotonic()

    @property
    def per_s(self) -> float:
        """Return the rows a second that were acknowledged."""
        return self.stored / max(1e-9, self.ended - self.began)


async def _beside(rows: SearchSet, options: BenchOptions) -> BesideFound:
    seconds = float(options.rounds(60, 4))
    new = fresh_rows(rows, int(seconds * WRITE_RATE), options.seed)
    async with _copy(rows, options) as server, Target([server.mesh.url]) as target:
        seen: list[Seen] = []
        writer = Writer(server, new, len(rows.base))

        requests = bodies.search(COLLECTION, rows.queries, queries=1, k=K)
        numbers = {each.body: number for number, each in enumerate(requests)}

        def look(request: Request, answer: TargetAnswer) -> None:
            if answer.status == 200:
                known = max(0, writer.stored - PART)  # the last part may have come after the search
                seen.append(Seen(numbers[request.body], known, server.ids(answer.body)[0]))

        load = LoadRun(target, requests, look)
        await load.open(arrivals.steady(SEARCH_RATE), seconds / 10)
        seen.clear()
        load = LoadRun(target, requests, look)
        before = await load.open(arrivals.steady(SEARCH_RATE), seconds)
        calm = recall(rows, new, seen)
        seen.clear()
        load = LoadRun(target, requests, look)
        writing = asyncio.create_task(writer.run())
        beside = await load.open(arrivals.steady(SEARCH_RATE), seconds)
        await writing
    failed = sum(not sample.ok for run in (before, beside) for sample in run.samples)
    return BesideFound(
        rows.name, _seconds(before), _seconds(beside), failed, calm, recall(rows, new, seen), writer.per_s,
        origin().commit,
    )  # fmt: skip


def _seconds(run: RequestRun) -> list[float]:
    return [sample.latency_s for sample in run.samples if sample.ok]


class Seen(NamedTuple):
    """An answer: the query's number, how many new rows had been acknowledged, and the ids of its hits."""

    query: int
    stored: int
    ids: list[int]


def recall(rows: SearchSet, new: Rows, seen: Sequence[Seen]) -> float:
    """Return recall@10 of answers against all rows acknowledged before each; a later row may stand for one of them."""
    hits = asked = 0
    for each in seen:
        known = len(rows.base) + each.stored
        old = rows.truth(None)[
            each.query
        ]  # of the rows of the set no others can be among the nearest
        names = np.concatenate([old, np.arange(len(rows.base), known)])
        near = np.concatenate([rows.base[old], new[: each.stored]])
        scores = near @ rows.queries[each.query]
        truth = set(names[np.argsort(-scores, kind="stable")[:K]].tolist())
        later = sum(name >= known for name in each.ids)
        hits += min(K, len(truth & set(each.ids)) + later)
        asked += K
    return hits / max(1, asked)


# -- after churn


async def _churn(rows: SearchSet, options: BenchOptions) -> ChurnFound:
    count = int(CHURN * len(rows.base))
    new = fresh_rows(rows, count, options.seed)
    gone = np.random.default_rng(options.seed).permutation(len(rows.base))[:count]
    async with (
        _copy(rows, options) as server,
        AsyncSpillway(server.mesh.url, timeout_s=300) as client,
    ):
        before = await _served(server, rows, rows.truth(None))
        removed = client.documents(COLLECTION)
        for at in range(0, count, 1000):
            await removed.delete([str(each) for each in gone[at : at + 1000]])
            part = new[at : at + 1000]
            await server.send(documents(server.mesh.url, part, len(rows.base) + at))
        await indexed(client)
        every = np.concatenate([rows.base, new])
        left = np.delete(np.arange(len(every)), gone)
        truth = left[vectors.nearest(every[left], rows.queries)]
        after = await _served(server, rows, truth)
    return ChurnFound(rows.name, count, before, after, origin().commit)


async def _served(server: SpillwayServer, rows: SearchSet, truth: Any) -> float:
    ids: list[list[int]] = []
    for call in server.calls(rows.queries, 250, None):
        ids += server.ids(await server.send(call))
    return vectors.recall(ids, truth[: len(ids)])


# -- time budgets


async def _budgets(rows: SearchSet, options: BenchOptions) -> BudgetsFound:
    seconds = float(options.rounds(60, 3))
    async with search_mesh(rows, options) as server:
        seen = {}
        for budget_ms in BUDGETS_MS:
            await _within(server, rows, budget_ms, seconds / 4)
            seen[budget_ms] = await _within(server, rows, budget_ms, seconds)
        async with AsyncSpillway(server.mesh.url, timeout_s=60) as client:
            (shard,) = (await client.collections.explain(COLLECTION)).shards
    predicted = [each.predicted_ms or 0.0 for each in shard.efforts]
    return BudgetsFound(rows.name, seen, (predicted[0], predicted[-1]), origin().commit)


async def _within(
    server: SpillwayServer, rows: SearchSet, budget_ms: float, seconds: float
) -> BudgetSeen:
    """Search with a time budget at a steady rate."""
    seen, found = BudgetSeen(), dict[int, list[int]]()
    requests = bodies.search(COLLECTION, rows.queries, queries=1, k=K, time_budget_ms=budget_ms)
    numbers = {each.body: number for number, each in enumerate(requests)}

    def look(request: Request, answer: TargetAnswer) -> None:
        if answer.status == 200:
            report = msgspec.json.decode(answer.body)["search"]
            seen.took_ms.append(report["took_ms"])
            if isinstance(report["effort"], int):
                seen.efforts.append(report["effort"])
            seen.fits.append(report["fits"])
            sample = load.samples[-1]
            seen.client_ms.append(1e3 * (sample.done_s - sample.sent_s))
            found[numbers[request.body]] = server.ids(answer.body)[0]

    async with Target([server.mesh.url]) as target:
        load = LoadRun(target, requests, look)
        run = await load.open(arrivals.steady(BUDGET_RATE), seconds)
    asked = sorted(found)
    seen.failed = sum(not sample.ok for sample in run.samples)
    seen.recall = (
        vectors.recall([found[n] for n in asked], rows.truth(None)[asked]) if asked else 0.0
    )
    return seen


# -- cold


async def _cold(rows: SearchSet, options: BenchOptions) -> ColdFound:
    """Start on files that the page cache does not hold, where it can be told to forget them."""
    with tempfile.TemporaryDirectory(prefix="spillway-v1w-") as empty:
        async with LocalMesh(Path(empty), services()) as mesh:
            rss_empty = mesh.rss_bytes()[SEARCHER]
    folder = kept_mesh(rows, options) / "search"
    async with search_mesh(rows, options) as server:
        mesh = server.mesh
        mesh.kill(SEARCHER, signal.SIGTERM)
        await mesh.wait_end(SEARCHER)
        forgotten = await asyncio.to_thread(forget, folder)
        call = server.calls(rows.queries[:1], 1, None)[0]
        began = time.monotonic()
        await mesh.restart(SEARCHER, START_S)
        while not await _answered(server, call):  # noqa: ASYNC110 - another process' life has no event
            await asyncio.sleep(0.02)
        first_s = time.monotonic() - began
        async with AsyncSpillway(mesh.url, timeout_s=300) as client:
            await indexed(client)
        await _served(server, rows, rows.truth(None))
        rss = mesh.rss_bytes()[SEARCHER]
    disk = await asyncio.to_thread(lambda: sum(path.stat().st_size for path in files(folder)))
    size, dimension = rows.base.shape
    return ColdFound(
        rows.name, size, dimension, first_s, not forgotten, rss, rss_empty, disk, origin().commit
    )


async def _answered(server: SpillwayServer, call: bytes) -> bool:
    try:
        answer = msgspec.json.decode(await server.send(call))
    except (HttpError, MeshError, OSError):
        return False
    return bool(answer.get("path") == "graph")


def files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder."""
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def forget(folder: Path) -> bool:
    """Have the page cache drop the files below a folder; False where that cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in files(folder):
        place = os.open(path, os.O_RDONLY)
        try:
            os.fsync(place)
            os.posix_fadvise(place, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(place)
    return True


# -- what is said


def describe(kept: WritesKept, left: int = 0) -> Body:
    """Turn what was measured into tables and verdicts."""
    body = Body(samples=msgspec.to_builtins(kept), left=left)
    if (beside := kept.beside) is not None:
        rows = [
            ["nobody", *_times(beside.before_s), f"{beside.recall_before:.4f}", "-"],
            [
                f"a writer of {WRITE_RATE} rows/s", *_times(beside.beside_s), f"{beside.recall_beside:.4f}",
                f"{beside.written_per_s:.0f}",
            ],
        ]  # fmt: skip
        columns = [
            "beside",
            "searches",
            "p50 (ms)",
            "p99 [95 %] (ms)",
            "recall@10",
            "rows/s written",
        ]
        title = f"{beside.set}: {SEARCH_RATE:g} searches a second over HTTP, open loop; {beside.failed} failed"
        body.table(title, columns, rows)
        low = min(beside.recall_before, beside.recall_beside)
        body.met["recall@10 ≥ 0.95 beside a writer"] = "goal" if low >= RECALL else "missed"
    if (churn := kept.churn) is not None:
        body.table(
            f"{churn.set}: recall@10 after {CHURN:.0%} of the rows were deleted and as many others added",
            ["rows changed", "before", "after", "change"],
            [[f"{churn.changed:,}", f"{churn.before:.4f}", f"{churn.after:.4f}", f"{churn.after - churn.before:+.4f}"]],
        )  # fmt: skip
        same = churn.after >= churn.before - MOVED
        body.met["recall within 0.01 after churn"] = "goal" if same else "missed"
    if kept.budgets is not None:
        _describe_budgets(body, kept.budgets)
    if kept.cold:
        columns = [
            "data",
            "seconds to the first answer",
            "files cached",
            "RSS (MB)",
            "RSS bytes a vector",
        ]
        columns += ["disk bytes a vector", "float32 bytes"]
        body.table(
            "vector_search from its start to its first answer from the graph, and bytes of a vector",
            columns,
            [_cold_cells(each) for each in kept.cold.values()],
        )
        body.notes.append(
            "RSS is the whole vector_search process after its first searches; bytes a vector are what it has more than "
            "one without a collection."
        )
    return body


def _describe_budgets(body: Body, found: BudgetsFound) -> None:
    low, high = found.ladder_ms
    columns = [
        "budget (ms)", "searches", "failed", "to fit", "within it", "within it, client's clock", "took / budget: p50",
        "p99", "mean effort", "recall@10",
    ]  # fmt: skip
    body.table(
        f"{found.set}: searches with a time budget, {BUDGET_RATE:g} a second over HTTP, open loop",
        columns,
        [_budget_cells(budget_ms, seen) for budget_ms, seen in found.seen.items()],
    )
    body.notes.append(
        f"Time budgets: the shard's least effort was predicted to take at most {low:.2f} ms, its largest {high:.2f}. "
        "A budget is for the way from the request's arrival to its hits, as `took_ms` is; the client's clock has the "
        "way to the router and back, too. Shares are of the searches that were said to fit."
    )
    kept = [
        share
        for ms, seen in found.seen.items()
        if (share := seen.within(seen.took_ms, ms)) is not None
    ]
    word = "goal" if kept and min(kept) >= WITHIN else "missed"
    body.met["within their time budget"] = word if kept else "not measured"


def _budget_cells(budget_ms: float, seen: BudgetSeen) -> list[str]:
    shares = seen.shares(seen.took_ms, budget_ms)
    count = len(seen.fits)
    head = [f"{budget_ms:g}", str(count + seen.failed), str(seen.failed), str(sum(seen.fits))]
    effort = f"{sum(seen.efforts) / len(seen.efforts):.0f}" if seen.efforts else "exact"
    if not shares:
        return [*head, *["-"] * 4, effort, f"{seen.recall:.4f}"]
    within = [seen.within(each, budget_ms) or 0.0 for each in (seen.took_ms, seen.client_ms)]
    times = stats.percentiles(shares)
    return [
        *head, *(f"{100 * each:.2f} %" for each in within), f"{times['p50']:.2f}", f"{times['p99']:.2f}", effort,
        f"{seen.recall:.4f}",
    ]  # fmt: skip


def _times(seconds: list[float]) -> list[str]:
    p99 = stats.interval([1e3 * each for each in seconds], 99)
    middle = stats.percentiles(seconds)["p50"]
    tail = f"{p99['value']:.2f} [{p99['low']:.2f}, {p99['high']:.2f}]"
    return [str(len(seconds)), f"{1e3 * middle:.2f}", tail]


def _cold_cells(found: ColdFound) -> list[str]:
    each = (found.rss - found.rss_empty) / found.rows
    return [
        found.set, f"{found.first_s:.1f}", "yes" if found.cached else "no", f"{found.rss / 1e6:.0f}", f"{each:.0f}",
        f"{found.disk / found.rows:.0f}", str(4 * found.dimension),
    ]  # fmt: skip
