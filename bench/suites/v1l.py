"""V1L: the kinds of index in process beside the memory they take, and our scan of inverted lists beside faiss'.

faiss scans in this process, on one thread, with the quantizer that it trained for ours; its scan of 4-bit codes has one
of its own, of as many bytes a row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import faiss
import numpy as np

from bench.document import BenchOptions, Body, Rival
from bench.rounds import Rate, Rounds, measure_rounds
from bench.workloads import search_sets
from bench.workloads.search_sets import SearchSet
from services.vector_search.index.index import Index
from services.vector_search.index.inverted_lists import InvertedLists
from services.vector_search.index.native_graph import graph_bytes
from services.vector_search.index.port import Kind
from services.vector_search.index.quantizer import Quantizer
from services.vector_search.index.rows import Flags, Floats, Ints

SHAPES = tuple(
    shape for shape in search_sets.SHAPES if (shape.rows, shape.dimension) == (200_000, 128)
)
K, THREADS, MOST = 10, 2, 100
EXACT: Kind = "exact"
GRAPH: Kind = "graph"
LISTS: Kind = "ivfpq"
OURS, EIGHT, FOUR = "ours, 8 bits", "faiss, 8 bits", "faiss, 4 bits"
NONE = np.zeros(0, np.int64)
Search = Callable[[Floats], Ints]


class Asked(NamedTuple):
    """How queries come: so many in a call, and so many in a round of each kind but exact search."""

    name: str
    per: int
    queries: int


WAYS = (Asked("one at a time", 1, 400), Asked("256 at once", 256, 1024))


def run(options: BenchOptions) -> Body:
    """Build an index of each kind over each set and search all in turns; then scan the same lists in turns."""
    body = Body()
    kinds: list[list[str]] = []
    scans: list[list[str]] = []
    for shape in (search_sets.QUICK,) if options.quick else SHAPES:
        if options.only not in search_sets.name_of(shape):
            continue
        rows = search_sets.search_set(shape, options.seed, options.setup_dir / "data")
        built = {kind: _built(rows, kind) for kind in (EXACT, GRAPH, LISTS)}
        _kinds(body, rows, built, kinds, options)
        lists = built[LISTS].made.lists
        assert lists is not None
        _scans(body, rows, lists, scans, options)
    columns = ["data", "kind", "built, s", "beside the rows, MiB", "effort", "recall@10"]
    columns += [f"{way.name}, per s" for way in WAYS]
    body.table("kinds of index, each with the effort that it chose", columns, kinds)
    body.table(
        "scan of the lists that a search reads, one thread",
        [
            "data",
            "lists read",
            "scan",
            "bytes a row",
            f"true 10 among {MOST}",
            "queries/s",
            "ours / it [95 %]",
        ],
        scans,
    )
    least = min((float(row[5]) for row in kinds if row[1] == LISTS), default=0.0)
    slowest = min((float(row[6].split()[0]) for row in scans if row[2] == EIGHT), default=0.0)
    body.met["recall@10 ≥ 0.95"] = "goal" if least >= 0.95 else "missed"
    body.met["scan ≥ 1.0"] = "goal" if slowest >= 1.0 else "missed"
    body.rivals.append(
        Rival(
            "faiss",
            faiss.__version__,
            settings_tried=[{"scan": EIGHT}, {"scan": FOUR}],
            measured=True,
        )
    )
    body.notes.append(
        "Unit rows, which are in memory for every kind; recall on queries that nobody tuned with. Rates are medians of "
        "rounds in an order that turns. An index of lists was told that memory has no room for a graph."
    )
    return body


# -- kinds


class _Built(NamedTuple):
    made: Index
    seconds: float


def _built(rows: SearchSet, kind: Kind) -> _Built:
    base = np.ascontiguousarray(rows.base)
    below = len(base) + 1 if kind == EXACT else 10_000
    short = 2 * graph_bytes(*base.shape)
    index = Index(
        base.shape[1],
        "cosine",
        exact_below=below,
        threads=THREADS,
        room=(lambda: short) if kind == LISTS else (lambda: None),
    )
    labels = np.arange(len(base))
    index.publish(base, labels, labels, NONE)
    began_s = time.perf_counter()
    while index.maintain():
        pass
    print(f"{rows.name}: {kind} built", flush=True)
    return _Built(index, time.perf_counter() - began_s)


def _kinds(
    body: Body,
    rows: SearchSet,
    built: Mapping[Kind, _Built],
    table: list[list[str]],
    options: BenchOptions,
) -> None:
    queries = np.ascontiguousarray(rows.queries)
    found: dict[str, Rounds] = {}
    for way in WAYS:
        sides: dict[str, Rate] = {
            kind: _rate(
                _search(one.made), queries, way.per, way.queries // (20 if kind == EXACT else 1)
            )
            for kind, one in built.items()
        }
        found[way.name] = asyncio.run(measure_rounds(sides, rounds=options.rounds(12, 2)))
        body.samples[f"{rows.name}/{way.name}"] = found[way.name].rates
    for kind, one in built.items():
        stats = one.made.now.stats()
        beside = sum(size for what, size in stats.bytes.items() if what != "rows")
        recall = _recall(_search(one.made)(queries), rows.truth(None))
        table.append(
            [
                rows.name, kind, f"{one.seconds:.1f}", f"{beside / 2**20:.1f}", str(stats.effort), f"{recall:.4f}",
                *(f"{found[way.name].median(kind):,.0f}" for way in WAYS),
            ]
        )  # fmt: skip


def _search(index: Index) -> Search:
    return lambda queries: np.array(index.search(queries, K).labels)


def _rate(search: Search, queries: Floats, per: int, count: int) -> Rate:
    """Return a side: so many queries, so many in a call, as queries a second."""
    count = max(per, count // per * per)
    asked = np.resize(queries, (count, queries.shape[1]))

    async def rate() -> float:
        began_s = time.perf_counter()
        for at in range(0, count, per):
            search(asked[at : at + per])
        return count / (time.perf_counter() - began_s)

    return rate


def _recall(found: Ints, truth: Any) -> float:
    return float((truth[:, :, None] == found[:, None, :]).any(axis=2).mean())


# -- scans


def _scans(
    body: Body,
    rows: SearchSet,
    lists: InvertedLists,
    table: list[list[str]],
    options: BenchOptions,
) -> None:
    faiss.omp_set_num_threads(1)
    base, queries = np.ascontiguousarray(rows.base), np.ascontiguousarray(rows.queries)
    quantizer, probes = lists.quantizer, lists.probes
    keep = np.ones(len(base), np.bool_)
    searches: dict[str, Search] = {
        OURS: _ours(lists, keep, probes),
        EIGHT: _eight(quantizer, base, probes),
        FOUR: _four(quantizer, base, probes),
    }
    sides = {name: _rate(one, queries, 64, 512) for name, one in searches.items()}
    rounds = asyncio.run(measure_rounds(sides, rounds=options.rounds(12, 2)))
    body.samples[f"{rows.name}/scan"] = rounds.rates
    for name, search in searches.items():
        ratio = rounds.ratio(OURS, name)
        table.append(
            [
                rows.name, str(probes), name, str(quantizer.subspaces),
                f"{_recall(search(queries), rows.truth(None)):.4f}", f"{rounds.median(name):,.0f}",
                "-" if name == OURS else f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]",
            ]
        )  # fmt: skip


def _ours(lists: InvertedLists, keep: Flags, probes: int) -> Search:
    return lambda queries: lists.candidates(keep, queries, MOST, probes=probes, threads=1).rows


def _coarse(quantizer: Quantizer) -> Any:
    """Return the lists' centroids as faiss' quantizer."""
    found = faiss.IndexFlatL2(quantizer.width)
    found.add(quantizer.centroids)
    return found


def _eight(quantizer: Quantizer, base: Floats, probes: int) -> Search:
    coarse = _coarse(quantizer)
    index: Any = faiss.IndexIVFPQ(
        coarse, quantizer.width, quantizer.lists, quantizer.subspaces, 8, faiss.METRIC_L2
    )
    faiss.copy_array_to_vector(quantizer.words.ravel(), index.pq.centroids)
    index.is_trained, index.nprobe = True, probes
    index.precompute_table()
    index.add(quantizer.rotated(base))
    return _faiss_search(index, quantizer, coarse)


def _four(quantizer: Quantizer, base: Floats, probes: int) -> Search:
    coarse = _coarse(quantizer)
    index: Any = faiss.IndexIVFPQFastScan(
        coarse, quantizer.width, quantizer.lists, 2 * quantizer.subspaces, 4, faiss.METRIC_L2
    )
    rotated = quantizer.rotated(base)
    index.train(rotated[:: max(1, len(base) // 40_000)])
    index.add(rotated)
    index.nprobe = probes
    return _faiss_search(index, quantizer, coarse)


def _faiss_search(index: Any, quantizer: Quantizer, _kept: object) -> Search:
    """Return a search of faiss' index; it does not keep its quantizer alive itself."""

    def search(queries: Floats) -> Ints:
        assert _kept is not None
        found: Ints = index.search(quantizer.rotated(queries), MOST)[1]
        return found

    return search
