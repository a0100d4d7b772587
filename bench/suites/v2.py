"""V2: filtered search through the mesh: k results whenever k match, and the right ones."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import uvloop

from bench.document import BenchOptions, Body, origin
from bench.mesh.search_mesh import COLLECTION, SpillwayServer, search_mesh
from bench.partial import PartialResults
from bench.workloads import search_sets
from bench.workloads.http_link import post
from bench.workloads.search_sets import BUCKETS, K, SearchSet, nearest_below, search_set
from loadgen import bodies

SHARES = (0.5, 0.1, 0.01, 0.001)
# Documents of a filter by place lie together, and mostly far from the query: the hard case.
FILTERS = {"random": "bucket", "together": "place"}
PARCEL = 50
RECALL = 0.95


class FilterFound(msgspec.Struct):
    """What one filter gave: documents that pass, queries, those with fewer than k hits, recall, and the index' ways."""

    documents: int
    queries: int
    short: int
    recall: float
    ways: list[str]
    commit: str = ""


class FiltersKept(msgspec.Struct):
    """All that V2 measured: filters by name."""

    set: str = ""
    filters: dict[str, FilterFound] = {}


def run(options: BenchOptions) -> Body:
    """Ask filtered queries whose truth is known, for filters at random and along the clusters."""
    partly = PartialResults(options, FiltersKept)
    uvloop.run(_run(partly, options))
    return describe(partly.kept, partly.left)


async def _run(partly: PartialResults[FiltersKept], options: BenchOptions) -> None:
    todo = [
        (name, kind, share)
        for kind in FILTERS
        for share in SHARES
        if (name := f"{kind}/{share * 100:g} %") not in partly.kept.filters and options.only in name
    ]
    if not todo or not partly.begins(len(todo)):
        return
    shape = search_sets.QUICK if options.quick else search_sets.MILLION
    cache = options.setup_dir / "data"
    rows = await asyncio.to_thread(search_set, shape, options.seed, cache)
    partly.kept.set = rows.name
    async with search_mesh(rows, options) as server:
        for number, (name, kind, share) in enumerate(todo):
            if number and not partly.begins():
                continue
            partly.kept.filters[name] = await _filtered(server, rows, kind, share, options)
            partly.save()


async def _filtered(
    server: SpillwayServer, rows: SearchSet, kind: str, share: float, options: BenchOptions
) -> FilterFound:
    numbers = rows.buckets if kind == "random" else rows.places
    bound = int(share * BUCKETS)
    queries = rows.queries[: options.pick(1000, 100)]
    truth = await asyncio.to_thread(nearest_below, rows.base, numbers, queries, bound)
    condition = {FILTERS[kind]: {"$lt": bound}}
    found, ways = list[list[int]](), set[str]()
    for each in bodies.search(COLLECTION, queries, queries=PARCEL, k=K, filter=condition):
        answer = await server.send(post(server.mesh.url, each.path, each.body))
        ways.add(msgspec.json.decode(answer)["path"])
        found += server.ids(answer)
    passed = int((numbers < bound).sum())
    short = sum(len(each) < min(K, passed) for each in found)
    hits = sum(len(set(f) & set(t)) for f, t in zip(found, truth.tolist(), strict=True))
    return FilterFound(
        passed, len(queries), short, hits / truth.size, sorted(ways), origin().commit
    )


def describe(kept: FiltersKept, left: int = 0) -> Body:
    """Turn what was measured into the table and the verdicts."""
    body = Body(samples=msgspec.to_builtins(kept), left=left)
    cells = []
    for name, each in kept.filters.items():
        kind, _, share = name.partition("/")
        counts = [str(each.documents), str(each.queries), str(each.short)]
        cells.append([kind, share, *counts, f"{each.recall:.4f}", "/".join(each.ways)])
    columns = ["filter", "passes", "documents", "queries", "fewer than k", "recall@10", "way"]
    body.table(f"{kept.set}, k = {K}, through the mesh", columns, cells)
    if kept.filters:
        found: Any = kept.filters.values()
        body.met["k whenever k match"] = "missed" if any(each.short for each in found) else "goal"
        enough = np.min([each.recall for each in found]) >= RECALL
        body.met["recall@10"] = "goal" if enough else "missed"
    return body
