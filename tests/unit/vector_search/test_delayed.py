"""Delayed synchronization in the graph: the rule's own walk whichever threads do the work, and a filter's sizes."""

from __future__ import annotations

import heapq
import os
import random
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation.delayed_traversal import (
    BloomVisited,
    ExactVisited,
    Traversal,
    traverse,
)
from services.vector_search.index.delayed import Delay, false_positive_rate, filter_bits
from services.vector_search.index.native_graph import NativeGraph, kernel
from services.vector_search.index.rows import Floats, Ints, VectorRows
from tests.conftest import PROFILE

QUERIES = 2000 if PROFILE == "soak" else 300
EF, K, LINKS = 24, 10, 31
SEEDED = random.Random(7).choice([(mg, mc) for mg in range(2, 8) for mc in range(2, 5)])
PAIRS = ((1, 1), (1, 4), (4, 1), (6, 2), SEEDED)


def _shaped(count: int, seed: int) -> Floats:
    basis = np.random.default_rng(5).standard_normal((12, 96))
    return (np.random.default_rng(seed).standard_normal((count, 12)) @ basis).astype(np.float32)


class Small(NamedTuple):
    """A graph, what it is made of, and queries with the scores of every node as the kernel counts them."""

    graph: NativeGraph
    links: list[list[int]]
    queries: Floats
    entries: list[int]
    scores: Floats


@pytest.fixture(autouse=True)
def _kernel() -> None:
    if kernel() is None:
        pytest.skip("no AVX2 or no compiler here")


@cache
def _small() -> Small:
    return _made(_shaped(4000, 1), _shaped(QUERIES, 2))


def _made(vectors: Floats, queries: Floats) -> Small:
    rows, labels = VectorRows(96, len(vectors)), np.arange(len(vectors))
    rows.append(vectors, labels, labels)
    graph = NativeGraph(rows, "l2", len(vectors), 1)
    graph.add(rows.view, labels)
    scores = np.stack([_scores(graph, query) for query in queries])
    near = graph._arrays.near
    links = [near[node, 1 : near[node, 0] + 1].tolist() for node in labels]
    entries = [_descended(graph, each) for each in scores]
    return Small(graph, links, queries, entries, scores)


def _scores(graph: NativeGraph, query: Floats) -> Floats:
    """Return the score of every node as traverse.cpp rounds it."""
    largest, arrays = np.abs(query).max(), graph._arrays
    code = np.rint(query * (np.float32(127) / largest)).astype(np.int32)
    dots = (arrays.codes[: len(graph), :96].astype(np.int32) - 128) @ code
    scale, begin = arrays.weights[: len(graph)].T
    return np.asarray(begin + scale * (largest / np.float32(127)) * dots.astype(np.float32))


def _descended(graph: NativeGraph, scores: Floats) -> int:
    arrays = graph._arrays
    at, levels = int(arrays.state[0]), int(arrays.state[1])
    for level in range(levels, 0, -1):
        moved = True
        while moved:
            count, *links = arrays.upper[int(arrays.upper_at[at]) + level - 1].tolist()
            best = max(links[:count], key=lambda node: scores[node], default=at)
            moved = bool(scores[best] > scores[at])
            at = best if moved else at
    return at


def _by_rule(small: Small, number: int, pair: tuple[int, int], visited: Any) -> Traversal:
    scores = -small.scores[number].astype(np.float64)
    return traverse(
        small.links.__getitem__, lambda nodes: scores[nodes].tolist(), small.entries[number],
        ef=EF, groups=pair[0], candidates=pair[1], visited=visited,
    )  # fmt: skip


def _ranked(small: Small, number: int, walk: Traversal) -> list[int]:
    """Return the nearest by their own rows of what the walk kept and the kernel scores exactly."""
    kept = [node for _, node in walk.found[: K + 10]]
    gaps = small.graph._rows.view.matrix[kept] - small.queries[number]
    order = np.argsort((gaps.astype(np.float64) ** 2).sum(1))
    return [kept[place] for place in order[:K]]


def _as_the_specification_has_it(
    small: Small, number: int, pair: tuple[int, int]
) -> tuple[list[int], int, int]:
    """Return ids, hops and visited nodes by the lines of the specification, where ties are left to the heaps."""
    distance = (-small.scores[number].astype(np.float64)).tolist()
    entry, hops = small.entries[number], 0
    visited, queue, flying = {entry}, [], deque()  # type: ignore[var-annotated]
    best = [(-distance[entry], entry)]

    def launch(group: list[int]) -> None:
        nonlocal hops
        found = []
        for node in group:
            hops += 1
            fresh = [each for each in small.links[node] if each not in visited]
            visited.update(fresh)
            found += [(distance[each], each) for each in fresh]
        flying.append(found)

    launch([entry])
    while flying:
        for near in flying.popleft():
            heapq.heappush(queue, near)
            heapq.heappush(best, (-near[0], near[1]))
        while len(best) > EF:
            heapq.heappop(best)
        while len(flying) < pair[0]:
            group: list[int] = []
            while queue and len(group) < pair[1] and queue[0][0] <= -best[0][0]:
                group.append(heapq.heappop(queue)[1])
            if not group:
                break
            launch(group)
    return [node for _, node in sorted((-near, node) for near, node in best)], hops, len(visited)


@pytest.mark.parametrize("pair", PAIRS)
def test_every_way_walks_by_the_rule(pair: tuple[int, int]) -> None:
    """Alone, helped and beside other queries: rows, hops, visited nodes and waits are the rule's own."""
    small = _small()
    ways = {
        "alone": Delay(*pair),
        "helped": Delay(*pair, helpers=1),
        "beside others": Delay(*pair, together=5),
    }
    made = {way: small.graph.walk(small.queries, K, delay, EF) for way, delay in ways.items()}
    for number in range(QUERIES):
        walk = _by_rule(small, number, pair, ExactVisited())
        found = [node for _, node in walk.found]
        said = _as_the_specification_has_it(small, number, pair)
        assert said == (found, walk.hops, walk.visited)
        expected = (_ranked(small, number, walk), walk.hops, walk.visited, walk.waits)
        for way, each in made.items():
            got = (
                each.rows[number].tolist(), int(each.hops[number]), int(each.visited[number]),
                int(each.waits[number]),
            )  # fmt: skip
            assert got == expected, way


def test_a_search_has_two_groups_of_two_candidates() -> None:
    """A search finds what that walk finds, one query at a time, many at once, and with any number of threads."""
    small = _small()
    expected = small.graph.walk(small.queries, K, Delay(2, 2), EF)
    for threads in (1, 2, 5):
        rows, scores = small.graph.query(small.queries, K, EF, threads)
        np.testing.assert_array_equal(rows, expected.rows)
        np.testing.assert_array_equal(scores, expected.scores)
    for number in range(50):
        rows, _ = small.graph.query(small.queries[number : number + 1], K, EF)
        np.testing.assert_array_equal(rows[0], expected.rows[number])


def _with_less_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, 10)  # on Linux: of this thread only


@pytest.mark.parametrize("nice", [False, True])
def test_many_callers_share_the_crew(nice: bool) -> None:
    """Batches of several threads at once, of any priority, find what they find one after the other."""
    small = _small()
    expected = small.graph.walk(small.queries, K, Delay(2, 2), EF)

    def again(number: int) -> bool:
        begin = 7 * number % 100
        rows, _ = small.graph.query(small.queries[begin:], K, EF, 2 + number % 3)
        return np.array_equal(rows, expected.rows[begin:])

    with ThreadPoolExecutor(4, initializer=_with_less_priority if nice else None) as pool:
        assert all(pool.map(again, range(100 if PROFILE == "soak" else 24)))


def test_equal_distances_have_one_order() -> None:
    """Among rows many of which are equal, as much is followed and visited by the rule as by the kernel."""
    small = _made(np.repeat(_shaped(100, 4), 10, axis=0), _shaped(30, 5))
    made = small.graph.walk(small.queries, K, Delay(3, 2), EF)
    for number in range(30):
        walk = _by_rule(small, number, (3, 2), ExactVisited())
        expected = (walk.hops, walk.visited, walk.waits)
        assert (made.hops[number], made.visited[number], made.waits[number]) == expected


def test_many_callers_share_the_helper() -> None:
    """Queries of several threads at once find what they find one after the other."""
    small = _small()
    delay = Delay(3, 2, helpers=1)
    expected = small.graph.walk(small.queries, K, delay._replace(helpers=0), EF)

    def again(_: int) -> Ints:
        return small.graph.walk(small.queries, K, delay, EF).rows

    with ThreadPoolExecutor(4) as pool:
        for rows in pool.map(again, range(12)):
            np.testing.assert_array_equal(rows, expected.rows)


@pytest.mark.parametrize("pair", [(1, 1), (6, 2)])
def test_a_filter_of_the_right_size_costs_no_recall(pair: tuple[int, int]) -> None:
    """Sized by the rule it finds what an exact set finds; a filter far too small walks by the rule as well."""
    small = _small()
    truth = np.argsort(
        ((small.graph._rows.view.matrix[None] - small.queries[:100, None]) ** 2).sum(2), axis=1
    )[:, :K]

    def recall(rows: Ints) -> float:
        return float((rows[:100, :, None] == truth[:, None, :]).any(axis=2).mean())

    exact = small.graph.walk(small.queries, K, Delay(*pair), EF)
    sized = small.graph.walk(small.queries, K, Delay(*pair).filtered(EF, LINKS), EF)
    assert abs(recall(sized.rows) - recall(exact.rows)) <= 0.001
    few = Delay(*pair, bits=1024, hashes=2)
    made = small.graph.walk(small.queries, K, few, EF)
    assert made.visited.sum() < exact.visited.sum()
    for number in range(50):
        walk = _by_rule(small, number, pair, BloomVisited(few.bits, few.hashes))
        assert made.rows[number].tolist() == _ranked(small, number, walk)
        assert (made.hops[number], made.visited[number]) == (walk.hops, walk.visited)


@pytest.mark.parametrize(("bits", "hashes", "rate"), [(32768, 1, 0.0301), (32768, 3, 0.00072)])
def test_false_positives_are_as_many_as_the_formula_says(
    bits: int, hashes: int, rate: float
) -> None:
    """The paper's figures for 1,000 nodes in 32 Kbit; what is counted is within twice of them."""
    assert false_positive_rate(bits, hashes, 1000) == pytest.approx(rate, rel=0.08)
    draw, wrong = random.Random(3), 0
    for _ in range(5):
        filled = BloomVisited(bits, hashes)
        nodes = draw.sample(range(1 << 24), 5000)
        for node in nodes[:1000]:
            filled.visit(node)
        wrong += sum(filled.holds(node) for node in nodes[1000:])
    assert rate / 2 <= wrong / 20_000 <= 2 * rate


@given(st.integers(1, 100_000), st.floats(1e-7, 0.5), st.integers(1, 8))
def test_a_filter_is_the_least_that_does(most: int, rate: float, hashes: int) -> None:
    """So many nodes have at most the rate of false positives, and in half the bits they would have more."""
    bits = filter_bits(most, rate, hashes)
    assert false_positive_rate(bits, hashes, most) <= rate * (1 + 1e-9)
    assert bits == 64 or false_positive_rate(bits // 2, hashes, most) > rate * (1 - 1e-9)
    assert filter_bits(1000, 1 / 632_000) == 256 * 1024


@pytest.mark.parametrize(
    "delay",
    [
        Delay(0), Delay(17), Delay(1, 0), Delay(together=0), Delay(bits=63), Delay(bits=96),
        Delay(bits=64, hashes=0), Delay(helpers=-1), Delay(helpers=1, together=2),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(delay: Delay) -> None:
    """A delay outside its bounds is an error that says what is expected, and so is a deleted row."""
    with pytest.raises(ValueError, match="expected"):
        _small().graph.walk(_shaped(1, 1), K, delay, EF)


def test_rows_that_are_deleted_are_refused() -> None:
    """A graph with deleted rows has no such walk; one without rows finds nothing."""
    rows = VectorRows(96, 10)
    graph = NativeGraph(rows, "dot", 10, 1)
    assert graph.walk(_shaped(3, 1), 5, Delay()).rows.shape == (3, 0)
    rows.append(_shaped(10, 1), np.arange(10), np.arange(10))
    graph.add(rows.view, np.arange(10))
    assert graph.walk(_shaped(3, 1), 5, Delay(2, 2)).rows.shape == (3, 5)
    rows.kill(np.arange(2))
    with pytest.raises(ValueError, match="2 rows are deleted"):
        graph.walk(_shaped(3, 1), 5, Delay())
