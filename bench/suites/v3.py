"""V3: delayed-synchronization traversal: cycles of the paper's hardware, simulated, and time of a query on this CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.document import BenchOptions, Body
from bench.partial import PartialResults
from bench.simulation import falcon_published as published
from bench.simulation.delayed_traversal import BloomVisited, ExactVisited, traverse
from bench.simulation.falcon_cycles import FalconHardware, cycles
from bench.suites import v3_tables
from bench.suites.v3_tables import (
    EFS,
    PAIRS,
    UNITS,
    QueryTimes,
    SimulatedPair,
    SubGraphs,
    WalksKept,
)  # fmt: skip
from bench.workloads import walk_graph
from bench.workloads.vectors import nearest, recall
from bench.workloads.walk_graph import DIMENSION, LINKS, QUERIES, WalkGraph
from services.vector_search.index.delayed import Delay

ROWS, QUICK_ROWS = 1_000_000, 20_000
EF, K = 64, 10
SIMULATED = 100  # queries
VECTOR_BYTES = 4 * DIMENSION
LATENCY = {True: 110, False: 80}  # cycles of a read by `streamed`: fitted to the published surfaces
SUB_ROWS, SUB_QUERIES, SUB_GOAL = 40_000, 300, 0.90
HELPED = ((1, 1), (1, 4), (2, 1), (2, 2), (3, 2), (4, 1), (6, 2))
ALONE = ((1, 2), (2, 1), (2, 2), (2, 3))
APART_S, APART_QUERIES = 0.002, 300
PASSES, BATCHES = 3, 20
TOGETHER = (1, 2, 4, 8)


def run(options: BenchOptions) -> Body:
    """Make the graph, simulate walks through it, and time walks (quick: 20,000 rows, few queries)."""
    partly = PartialResults(options, WalksKept)
    kept = partly.kept
    kept.rows = options.pick(ROWS, QUICK_ROWS)
    made = walk_graph.make(kept.rows, options.seed, options.setup_dir / "walks", partly.begins)
    if made is None:
        body = v3_tables.describe(kept, partly.left)
        body.notes.append("Not measured: no kernel for this processor, or no time for the graph.")
        return body
    for pair in PAIRS:
        name = v3_tables.named(pair)
        if name not in kept.simulated and _wanted("simulation", options) and partly.begins():
            kept.simulated[name] = simulate(made, pair, options.pick(SIMULATED, 5))
            partly.save()
    pieces: dict[str, Callable[[], None]] = {
        **{f"cpu/{ef}": partial(_times, kept, made, ef, options) for ef in EFS},
        "filters": partial(_filters, kept, made),
        "sub-graphs": partial(_sub_graphs, kept, options),
    }
    for name, measure in pieces.items():
        if name not in kept.done and _wanted(name, options) and partly.begins():
            measure()
            kept.done.append(name)
            partly.save()
    return v3_tables.describe(kept, partly.left)


def _wanted(name: str, options: BenchOptions) -> bool:
    return options.only in name


def simulate(made: WalkGraph, pair: tuple[int, int], queries: int) -> SimulatedPair:
    """Walk by the rule from a fixed entry of the lowest level, as the hardware does; count its cycles."""
    near, matrix = made.graph._arrays.near, made.rows.view.matrix
    entry, found = int(made.graph._arrays.state[0]), SimulatedPair()
    rows = []

    def links(node: int) -> list[int]:
        linked: list[int] = near[node, 1 : near[node, 0] + 1].tolist()
        return linked

    def away(query: Any, nodes: list[int]) -> list[float]:
        near_first: list[float] = (-(matrix[nodes] @ query)).tolist()
        return near_first

    for query in made.queries[:queries]:
        walk = traverse(
            links, partial(away, query), entry,
            ef=EF, groups=pair[0], candidates=pair[1], visited=ExactVisited(),
        )  # fmt: skip
        rows.append([node for _, node in walk.found[:K]])
        found.hops.append(walk.hops)
        found.visited.append(walk.visited)
        found.waits.append(walk.waits)
        for units in UNITS:
            for streamed, latency in LATENCY.items():
                hardware = FalconHardware(units, VECTOR_BYTES, latency, streamed)
                name = v3_tables.hardware(units, streamed=streamed)
                found.cycles.setdefault(name, []).append(cycles(walk, hardware))
    found.recall = recall(rows, made.truth[:queries])
    return found


def _sides(ef: int) -> dict[str, Delay]:
    """Return the ways to search one query."""
    sides = {v3_tables.BEST_FIRST: Delay()}
    sides |= {f"alone {v3_tables.named(pair)}": Delay(*pair) for pair in ALONE}
    sides["alone 1/1, filter"] = Delay().filtered(ef, 2 * LINKS - 1)
    return sides | {f"helped {v3_tables.named(pair)}": Delay(*pair, helpers=1) for pair in HELPED}


def _times(kept: WalksKept, made: WalkGraph, ef: int, options: BenchOptions) -> None:
    sides = _sides(ef)
    found = QueryTimes()
    for side, delay in sides.items():
        walked = made.graph.walk(made.queries, K, delay, ef)
        found.recall[side] = recall(walked.rows, made.truth)
        found.walked[side] = [
            float(each.mean()) for each in (walked.hops, walked.visited, walked.waits)
        ]
    few = options.pick(QUERIES, 50)
    for _ in range(options.pick(PASSES, 1)):
        _timed(found.after_another, made, ef, sides, made.queries[:few], 0.0)
    shown = [v3_tables.BEST_FIRST, v3_tables.SERVICE, "helped 2/2", "helped 3/2"]
    apart = {side: sides[side] for side in shown}
    _timed(found.apart, made, ef, apart, made.queries[: options.pick(APART_QUERIES, 20)], APART_S)
    for number in range(options.pick(BATCHES, 2)):
        ways = {v3_tables.BEST_FIRST: Delay()}
        ways |= {f"2/2, {many} together": Delay(2, 2, together=many) for many in TOGETHER}
        for side in _turned(list(ways), number):
            began = time.perf_counter()
            made.graph.walk(made.queries, K, ways[side], ef)
            found.batches.setdefault(side, []).append((time.perf_counter() - began) / QUERIES)
    kept.times[ef] = found


def _timed(
    times: dict[str, list[float]], made: WalkGraph, ef: int, sides: dict[str, Delay],
    queries: Any, pause_s: float,
) -> None:  # fmt: skip
    """Time every query on all sides, each of which is at another query, so that none finds its rows in a cache."""
    count, names = len(queries), list(sides)
    taken = {side: [0.0] * count for side in names}
    for number in range(count):
        for side in _turned(names, number):
            at = (number + names.index(side) * count // len(names)) % count
            if pause_s:
                time.sleep(pause_s)
            began = time.perf_counter()
            made.graph.walk(queries[at : at + 1], K, sides[side], ef)
            taken[side][at] = time.perf_counter() - began
    for side in names:
        times.setdefault(side, []).extend(taken[side])


def _turned(names: list[str], number: int) -> list[str]:
    turned = number % len(names)
    return names[turned:] + names[:turned]


def _filters(kept: WalksKept, made: WalkGraph) -> None:
    """Compare a filter with the exact set, and count false positives beside the formula."""
    for pair in ((1, 1), (2, 2), (6, 2)):
        exact = made.graph.walk(made.queries, K, Delay(*pair), EF)
        sized = made.graph.walk(made.queries, K, Delay(*pair).filtered(EF, 2 * LINKS - 1), EF)
        kept.filters[v3_tables.named(pair)] = [
            recall(exact.rows, made.truth), recall(sized.rows, made.truth),
            float(exact.visited.mean()), float(sized.visited.mean()),
        ]  # fmt: skip
    draw = np.random.default_rng(1)
    for bits, hashes in published.FILTERS:
        wrong = asked = 0
        for _ in range(20):
            filled, nodes = BloomVisited(bits, hashes), draw.integers(0, 1 << 31, 6000).tolist()
            for node in nodes[:1000]:
                filled.visit(node)
            wrong += sum(filled.holds(node) for node in nodes[1000:])
            asked += 5000
        kept.false_positives[f"{bits}/{hashes}"] = [wrong, asked]


def _sub_graphs(kept: WalksKept, options: BenchOptions) -> None:
    """Find how many nodes are visited at R@10 of 90 % in one graph and in several over parts of the same rows."""
    count = options.pick(SUB_ROWS, 8000)
    drawn = walk_graph.deep_like(count + SUB_QUERIES, options.seed + 1)
    base, queries = drawn[:count], np.ascontiguousarray(drawn[count:])
    truth = nearest(base, queries)
    for parts in (1, 2, 4, 8):
        size = count // parts
        graphs = [
            walk_graph.build(np.ascontiguousarray(base[at * size : (at + 1) * size]), 2)[0]
            for at in range(parts)
        ]
        for ef in range(10, 129, 1):
            walks = [graph.walk(queries, K, Delay(), ef) for graph in graphs]
            rows = np.concatenate([w.rows + at * size for at, w in enumerate(walks)], axis=1)
            scores = np.concatenate([w.scores for w in walks], axis=1)
            best = np.take_along_axis(rows, np.argsort(-scores, axis=1)[:, :K], axis=1)
            reached = recall(best, truth)
            if reached >= SUB_GOAL:
                break
        visited = float(sum(walk.visited.mean() for walk in walks))
        kept.sub_graphs[parts] = SubGraphs(ef, reached, visited)
