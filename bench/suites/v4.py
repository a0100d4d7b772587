"""V4: the approximate hierarchical priority queue beside exact selections: what it changes, and what it costs here."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.document import BenchOptions, Body
from bench.pairs import LEAST
from bench.peak import as_samples
from bench.rounds import Rounds, measure_rounds
from bench.workloads import search_sets, vectors
from bench.workloads.quantised import quantised
from bench.workloads.search_sets import SearchSet, search_set
from bench.workloads.vectors import Ids, Rows
from common.errors import ConfigError
from services.vector_search.index import selection
from services.vector_search.index.selection import queue_length, select, select_by_queues

QUEUES = (8, 16, 32, 64)
KS = (10, 100)
IDENTICAL, MOST_LOST = 0.99, 0.001
PROBES, LISTS, INSIDE = 32, 224, 500
DIMENSIONS_A_PART = 8
NOT_INTERLEAVED = 500  # queries that also go to queues by runs of candidates
STREAMS = (2_000, 10_000, 100_000, 1_000_000)  # candidates a query, in the cells of speed
ORDERS = ("near lists first", "far lists first")
A_CALL = 1_000_000  # candidates that a timed call selects from, at least
EXACT = ("heap", "reservoir")
# Table 4.4: recall in percent with queues of 8, 16 and 32, after the exact one's; by data set, R1@100 and R@100.
PAPER = {
    "Deep (paper)": ((92.88, 92.85, 92.84, 92.84), (45.54, 45.49, 45.49, 45.48)),
    "SIFT (paper)": ((94.21, 94.20, 94.21, 94.21), (48.68, 48.66, 48.67, 48.67)),
}
TABLE_LENGTHS, TABLE_QUEUES = (8, 16, 32), (16, 64)


@dataclass(frozen=True, slots=True)
class SelectionSet:
    """Distances and rows of each query's candidates, (queries, candidates) each, +inf behind a query's last.

    `truth` are the rows that are truly nearest, nearest first; None where the distances are true themselves.
    """

    name: str
    distances: Rows
    rows: Ids
    truth: Ids | None


def run(options: BenchOptions) -> Body:
    """Compare on synthetic lists and on two sets of real vectors, then time every way (quick: few queries)."""
    if selection.kernel() is None:
        raise ConfigError(
            "V4: there is no compiled kernel here; expected AVX-512 and a C++ compiler"
        )
    body = Body()
    sets = [_synthetic(options), *map(partial(_real, options=options), _shapes(options))]
    _identical(body, sets)
    _table_4_4(body, sets[1:])
    _lengths(body)
    _speed(body, options)
    return body


def _shapes(options: BenchOptions) -> list[search_sets.SetShape]:
    return [search_sets.QUICK] if options.quick else [search_sets.DOCSTRINGS, search_sets.MANUALS]


# -- distances ------------------------------------------------------------------------------------


def lists_of(queries: int, inside: int, rng: np.random.Generator) -> Rows:
    """Return distances of 32 lists, the near lists first: whoever is in one of them is near, too."""
    lists = np.sort(rng.gamma(20, 0.05, (queries, PROBES)), axis=1)
    spread = rng.standard_gamma(20, (queries, PROBES, inside), np.float32) * np.float32(0.05)
    return (lists[:, :, None].astype(np.float32) + spread).reshape(queries, -1)


def _synthetic(options: BenchOptions) -> SelectionSet:
    rng = np.random.default_rng(options.seed)
    many = options.pick(5_000, 300)
    distances = np.concatenate([lists_of(100, INSIDE, rng) for _ in range(many // 100)])
    rows = np.broadcast_to(np.arange(distances.shape[1]), distances.shape)
    name = f"{PROBES} lists of {INSIDE:,}, synthetic"
    return SelectionSet(name, distances, rows, None)


def _real(shape: search_sets.SetShape, *, options: BenchOptions) -> SelectionSet:
    found: SearchSet = search_set(shape, options.seed, options.setup_dir / "data")
    base = np.ascontiguousarray(found.base)
    queries = np.concatenate([found.tuning, found.queries])[: options.pick(1 << 30, 300)]
    parts = base.shape[1] // DIMENSIONS_A_PART
    index = quantised(base, LISTS, parts, np.random.default_rng(options.seed))
    lists = index.nearest_lists(queries, PROBES)
    scans = [index.scan(query, probed) for query, probed in zip(queries, lists, strict=True)]
    shaped = (len(queries), max(len(scan.rows) for scan in scans))
    distances, rows = np.full(shaped, np.inf, np.float32), np.full(shaped, -1)
    for number, scan in enumerate(scans):
        distances[number, : len(scan.rows)] = scan.distances
        rows[number, : len(scan.rows)] = scan.rows
    return SelectionSet(found.name, distances, rows, vectors.nearest(base, queries, max(KS)))


def _recall(each: SelectionSet, numbers: Ids, truth: Ids) -> float:
    """Return the share of the true nearest that the rows of these numbers are."""
    found = np.take_along_axis(each.rows, numbers, axis=1)
    hits = sum(len(np.intersect1d(a, b)) for a, b in zip(found, truth, strict=True))
    return hits / truth.size


def _runs(distances: Rows, queues: int) -> Rows:
    """Return the candidates in an order in which queue i gets the i-th run of them, not every i-th."""
    whole = distances.shape[1] // queues * queues
    turned = distances[:, :whole].reshape(len(distances), queues, -1).transpose(0, 2, 1)
    return np.ascontiguousarray(turned.reshape(len(distances), -1))


# -- what is changed ------------------------------------------------------------------------------


def _identical(body: Body, sets: list[SelectionSet]) -> None:
    rows, worst, lost = [], 1.0, 0.0
    for each in sets:
        for k in KS:
            exact = select(each.distances, k)
            truth = exact.numbers if each.truth is None else each.truth[:, :k]
            true_recall = 1.0 if each.truth is None else _recall(each, exact.numbers, truth)
            for queues in QUEUES:
                length = queue_length(k, queues)
                found = select_by_queues(each.distances, k, queues, length)
                same = (found.numbers == exact.numbers).all(1)
                recall = _recall(each, found.numbers, truth)
                runs = _runs(each.distances[:NOT_INTERLEAVED], queues)
                apart = select_by_queues(runs, k, queues, length).distances
                unlike = (apart == select(runs, k).distances).all(1)
                share, less = float(same.mean()), true_recall - recall
                worst, lost = min(worst, share), max(lost, less)
                rows.append([
                    each.name, str(k), str(queues), str(length), f"{len(same):,}",
                    f"{share:.2%} {_interval(same)}", f"{100 * true_recall:.2f}", f"{100 * less:+.3f}",
                    f"{unlike.mean():.1%}",
                ])  # fmt: skip
                body.samples[f"identical/{each.name}/{k}/{queues}"] = [share, true_recall, recall]
    columns = ["distances", "K", "queues", "length of each", "queries", "identical [95 %]"]
    columns += ["R@K, exact selection", "points lost", "identical, not interleaved"]
    body.table("What the queues change", columns, rows)
    body.met["identical"] = "goal" if worst >= IDENTICAL else "missed"
    body.met["recall"] = "goal" if lost <= MOST_LOST else "missed"
    body.notes.append(
        "Identical: the same candidates in the same order as by an exact selection of the same distances. R@K is "
        "recall against the true nearest, which the product quantiser's own error limits; of the synthetic distances "
        "against the exact selection. Not interleaved: queue i takes the i-th run of candidates instead of every i-th, "
        f"as when each list had a queue ({NOT_INTERLEAVED} queries)."
    )


def _interval(same: Any) -> str:
    """Return Wilson's 95 % interval of a share."""
    many, z = len(same), 1.96
    share = float(same.mean())
    middle = (share + z * z / (2 * many)) / (1 + z * z / many)
    half = z * math.sqrt(share * (1 - share) / many + (z / (2 * many)) ** 2) / (1 + z * z / many)
    return f"[{middle - half:.2%}, {middle + half:.2%}]"


def _table_4_4(body: Body, sets: list[SelectionSet]) -> None:
    rows = []
    for name, (first, whole) in PAPER.items():
        rows.append([name, "R1@100", *(f"{each:.2f}" for each in first)])
        rows.append([name, "R@100", *(f"{each:.2f}" for each in whole)])
    for each in sets:
        if each.truth is None:
            continue
        exact = select(each.distances, 100).numbers
        for queues in TABLE_QUEUES:
            ways = [exact] + [
                select_by_queues(each.distances, 100, queues, length).numbers
                for length in TABLE_LENGTHS
            ]
            for what, truth in (("R1@100", each.truth[:, :1]), ("R@100", each.truth)):
                cells = [f"{100 * _recall(each, numbers, truth):.2f}" for numbers in ways]
                rows.append([f"{each.name}, {queues} queues", what, *cells])
    columns = ["data", "recall, %", "exact", *(f"queues of {length}" for length in TABLE_LENGTHS)]
    body.table("Table 4.4 of the thesis, which names no number of queues, and ours", columns, rows)


def _lengths(body: Body) -> None:
    rows = []
    for queues in (1, 2, 4, *QUEUES):
        lengths = [queue_length(k, queues) for k in KS]
        rows.append([
            str(queues), *map(str, lengths), f"{queues * lengths[1]:,}", f"{queues * 100:,}",
            f"{100 / lengths[1]:.1f}",
        ])  # fmt: skip
    columns = ["queues", "length, K = 10", "length, K = 100", "places in all", "exact would need"]
    body.table("Figure 4.5 of the thesis, by the formula", [*columns, "times less"], rows)


# -- what it costs --------------------------------------------------------------------------------


def _speed(body: Body, options: BenchOptions) -> None:
    rng, rows = np.random.default_rng(options.seed), []
    for stream in STREAMS[:1] if options.quick else STREAMS:
        near = lists_of(max(A_CALL // stream, 2), stream // PROBES, rng)
        for order in ORDERS:
            distances = near if order == ORDERS[0] else np.ascontiguousarray(near[:, ::-1])
            for k in KS:
                found = _timed(distances, k, options)
                rows.append([order, f"{distances.shape[1]:,}", str(k), *_speeds(found)])
                body.samples[f"speed/{stream}/{order}/{k}"] = {
                    "per_second": found.rates,
                    **as_samples(found.speeds),
                    "dropped": found.dropped,
                }
    names = [*EXACT, *(f"{queues} queues" for queues in QUEUES)]
    columns = ["order", "candidates a query", "K", *names, "best exact"]
    columns += [f"{queues} queues / best [95 %]" for queues in QUEUES]
    body.table(
        "CPU microseconds for a million candidates, one thread, and speed by the best exact's",
        columns,
        rows,
    )
    body.notes.append(
        "All ways compare 16 candidates at once with a bound and do more only where one is below it. Distances are "
        f"those of the synthetic lists; {A_CALL:,} of them a call or more, ways in turn; medians. An inverted file is "
        "scanned near lists first; far lists first is the worst order, in which every list lowers every bound. Each "
        "queue has a bound of its own, looser than the one bound of an exact selection, and puts a candidate in "
        "its place at once, where a reservoir only appends it. Below 1 the queues are slower."
    )


def _speeds(found: Rounds) -> list[str]:
    """Return what each way takes, who is the best exact one, and the queues' speed by that one's."""
    best = max(EXACT, key=found.median)
    cells = [f"{1e12 / found.median(name):.0f}" for name in found.rates]
    for queues in QUEUES:
        ratio = found.ratio(f"{queues} queues", best)
        cells.append(f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]")
    return [*cells[: len(found.rates)], best, *cells[len(found.rates) :]]


def _ways(distances: Rows, k: int) -> dict[str, Callable[[], object]]:
    ways: dict[str, Callable[[], object]] = {
        "heap": partial(select, distances, k, "heap"),
        "reservoir": partial(select, distances, k, "reservoir"),
    }
    for queues in QUEUES:
        length = queue_length(k, queues)
        ways[f"{queues} queues"] = partial(select_by_queues, distances, k, queues, length)
    return ways


def _timed(distances: Rows, k: int, options: BenchOptions) -> Rounds:
    def side(call: Callable[[], object]) -> Callable[[], Any]:
        async def rate() -> float:
            began = time.thread_time()
            call()
            return distances.size / (time.thread_time() - began)

        return rate

    sides = {name: side(call) for name, call in _ways(distances, k).items()}
    return asyncio.run(measure_rounds(sides, rounds=options.rounds(300, LEAST)))
