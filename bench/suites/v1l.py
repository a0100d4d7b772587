"""V1L: the kinds of index in process beside the memory they take, and our scan of inverted lists beside faiss'.

faiss scans in this process, on one thread, the codes of the same quantizers; of 4 bits a row has as many bytes as of 8.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import faiss
import numpy as np

from bench.document import BenchOptions, Body, Rival
from bench.rounds import Rate, Rounds, measure_rounds
from bench.workloads import search_sets
from bench.workloads.search_sets import SearchSet
from common.wire.tuning import IndexPlan, IndexSetting
from services.vector_search.index.index import Index
from services.vector_search.index.inverted_lists import InvertedLists
from services.vector_search.index.lists_maintenance import lists_for
from services.vector_search.index.native_graph import graph_bytes
from services.vector_search.index.port import Kind
from services.vector_search.index.quantizer import USUAL, CodeBits, Coding, Quantizer
from services.vector_search.index.rows import Flags, Floats, Ints

SHAPES = (search_sets.CLUSTERED, search_sets.LATENT)
K, THREADS, MOST = 10, 2, 100
EXACT: Kind = "exact"
GRAPH: Kind = "graph"
LISTS: Kind = "ivfpq"
BITS: tuple[CodeBits, ...] = (8, 4)
CODINGS = {
    f"ivfpq, {bits} bits{', OPQ' if rotate else ''}": Coding(bits, rotate)
    for bits, rotate in itertools.product(BITS, (True, False))
}
OURS_EIGHT, OURS_FOUR, EIGHT, FOUR = (
    "ours, 8 bits",
    "ours, 4 bits",
    "faiss, 8 bits",
    "faiss, 4 bits",
)
# The scan of faiss' that each of ours is compared with.
AGAINST = {OURS_EIGHT: EIGHT, OURS_FOUR: FOUR}
NONE = np.zeros(0, np.int64)
Search = Callable[[Floats], Ints]


class ListCalls(NamedTuple):
    """How queries come: so many in a call, and so many in a round of each kind but exact search."""

    name: str
    per: int
    queries: int


WAYS = (ListCalls("one at a time", 1, 400), ListCalls("256 at once", 256, 1024))


def run(options: BenchOptions) -> Body:
    """Build an index of each kind over each set and search all in turns; then scan the same lists in turns."""
    body = Body()
    kinds: list[list[str]] = []
    scans: list[list[str]] = []
    for shape in (search_sets.QUICK,) if options.quick else SHAPES:
        if options.only not in search_sets.name_of(shape):
            continue
        rows = search_sets.search_set(shape, options.seed, options.setup_dir / "data")
        built: dict[str, _Built] = {kind: _built(rows, kind) for kind in (EXACT, GRAPH)}
        built |= {name: _built(rows, LISTS, coding) for name, coding in CODINGS.items()}
        _kinds(body, rows, built, kinds, options)
        _scans(body, rows, {bits: _lists(built, bits) for bits in BITS}, scans, options)
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
            "it / faiss' of its bits [95 %]",
        ],
        scans,
    )
    least = min((float(row[5]) for row in kinds if row[1] in CODINGS), default=0.0)
    body.met["recall@10 ≥ 0.95"] = "goal" if least >= 0.95 else "missed"
    for ours in AGAINST:
        slowest = min((float(row[6].split()[0]) for row in scans if row[2] == ours), default=0.0)
        body.met[f"scan of {ours.removeprefix('ours, ')} ≥ 1.0"] = (
            "goal" if slowest >= 1.0 else "missed"
        )
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


def _built(rows: SearchSet, kind: Kind, coding: Coding = USUAL) -> _Built:
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
    if coding != USUAL:
        setting = IndexSetting(
            kind, lists_for(len(base)), code_bits=coding.code_bits, rotate=coding.rotate
        )
        index.followed.follow(IndexPlan("bench", setting, index.followed.goal, len(base)))
    labels = np.arange(len(base))
    index.publish(base, labels, labels, NONE)
    began_s = time.perf_counter()
    while index.maintain():
        pass
    if index.followed.now.refused:
        raise RuntimeError(f"{coding}: {index.followed.now.why}")
    print(f"{rows.name}: {kind} built", flush=True)
    return _Built(index, time.perf_counter() - began_s)


def _kinds(
    body: Body,
    rows: SearchSet,
    built: Mapping[str, _Built],
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


def _lists(built: Mapping[str, _Built], bits: int) -> InvertedLists:
    """Return the rotated lists of codes of so many bits."""
    name = next(name for name, coding in CODINGS.items() if coding == (bits, True))
    lists = built[name].made.lists
    assert lists is not None
    return lists


def _scans(
    body: Body,
    rows: SearchSet,
    lists: Mapping[int, InvertedLists],
    table: list[list[str]],
    options: BenchOptions,
) -> None:
    faiss.omp_set_num_threads(1)
    base, queries = np.ascontiguousarray(rows.base), np.ascontiguousarray(rows.queries)
    probes = lists[8].probes
    keep = np.ones(len(base), np.bool_)
    searches: dict[str, Search] = {
        OURS_EIGHT: _ours(lists[8], keep, probes),
        OURS_FOUR: _ours(lists[4], keep, probes),
        EIGHT: _eight(lists[8].quantizer, base, probes),
        FOUR: _four(lists[4].quantizer, base, probes),
    }
    sides = {name: _rate(one, queries, 64, 512) for name, one in searches.items()}
    rounds = asyncio.run(measure_rounds(sides, rounds=options.rounds(12, 2)))
    body.samples[f"{rows.name}/scan"] = rounds.rates
    for name, search in searches.items():
        told = "-"
        if name in AGAINST:
            ratio = rounds.ratio(name, AGAINST[name])
            told = f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        found = f"{_recall(search(queries), rows.truth(None)):.4f}"
        size = str(lists[8 if "8" in name else 4].quantizer.code_bytes)
        table.append(
            [rows.name, str(probes), name, size, found, f"{rounds.median(name):,.0f}", told]
        )


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
        coarse, quantizer.width, quantizer.lists, quantizer.subspaces, 4, faiss.METRIC_L2
    )
    faiss.copy_array_to_vector(quantizer.words.ravel(), index.pq.centroids)
    index.is_trained, index.nprobe = True, probes
    index.precompute_table()
    index.add(quantizer.rotated(base))
    return _faiss_search(index, quantizer, coarse)


def _faiss_search(index: Any, quantizer: Quantizer, _kept: object) -> Search:
    """Return a search of faiss' index; it does not keep its quantizer alive itself."""

    def search(queries: Floats) -> Ints:
        assert _kept is not None
        found: Ints = index.search(quantizer.rotated(queries), MOST)[1]
        return found

    return search
