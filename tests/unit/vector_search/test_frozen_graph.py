"""The frozen copy of a graph: what it finds, how near, and when an index goes by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.native import library
from common.native.finder import find
from services.vector_search.index import exact
from services.vector_search.index.frozen_graph import FrozenGraph
from services.vector_search.index.graph import Graph
from services.vector_search.index.index import Index
from services.vector_search.index.native.sources import TRAVERSE
from services.vector_search.index.rows import Floats, Ints, Metric, VectorRows

NONE = np.zeros(0, np.int64)


@pytest.fixture(autouse=True)
def _kernel() -> None:
    if find(TRAVERSE) is None:
        pytest.skip("no AVX512-VNNI or no compiler here")


def _vectors(count: int, dimension: int, seed: int) -> Floats:
    # Rows of lengths far apart: each is rounded by its own scale.
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, dimension)) * rng.uniform(0.1, 10, (count, 1))
    return rows.astype(np.float32)


def _compact(vectors: Floats, metric: Metric) -> tuple[FrozenGraph, VectorRows]:
    rows = VectorRows(vectors.shape[1], len(vectors))
    labels = np.arange(len(vectors))
    rows.append(vectors, labels, labels)
    graph = Graph(vectors.shape[1], metric, len(vectors), 2)
    graph.add(vectors, labels)
    made = FrozenGraph.of(graph, metric, rows.view, len(vectors))
    assert made is not None
    return made, rows


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
@pytest.mark.parametrize("dimension", [1, 7, 64, 100, 384])
def test_a_wide_walk_finds_what_exact_search_finds(metric: Metric, dimension: int) -> None:
    """With room for every row the best are the true ones, with their true scores."""
    vectors, queries = _vectors(600, dimension, 1), _vectors(70, dimension, 2)
    if metric == "cosine":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    made, _ = _compact(vectors, metric)
    rows, scores = made.query(queries, 10, 2000)

    expected, near = exact.top_k(queries, vectors, 10, metric)
    found = [len(set(a) & set(b)) for a, b in zip(rows.tolist(), expected.tolist(), strict=True)]
    assert np.mean(found) >= (9.5 if dimension > 1 else 0.0)
    assert scores.shape == (70, 10)
    assert (np.diff(scores, axis=1) <= 0).all()
    np.testing.assert_allclose(
        scores,
        np.take_along_axis(exact.score(queries, vectors[None], metric), rows, axis=1),
        rtol=1e-4,
        atol=1e-4,
    )
    assert near.shape == scores.shape


def test_the_copy_answers_like_its_graph() -> None:
    """At the same ef it finds as many of the nearest, one query at a time and many at once."""
    rng = np.random.default_rng(5)
    basis = rng.standard_normal((12, 96))
    vectors = (rng.standard_normal((4000, 12)) @ basis).astype(np.float32)
    queries = (rng.standard_normal((300, 12)) @ basis).astype(np.float32)
    made, rows = _compact(vectors, "l2")
    graph = Graph(96, "l2", 4000, 2)
    graph.add(vectors, np.arange(4000))
    truth, _ = exact.top_k(queries, rows.view.matrix, 10, "l2")

    def recall(found: Ints) -> float:
        return float((found[:, :, None] == truth[:, None, :]).any(axis=2).mean())

    together = made.query(queries, 10, 40)[0]
    assert recall(together) >= recall(graph.query(queries, 10, 40)[0]) - 0.01
    alone = np.concatenate([made.query(query[None], 10, 40)[0] for query in queries])
    np.testing.assert_array_equal(alone, together)
    queries.setflags(write=False)
    np.testing.assert_array_equal(made.query(queries, 10, 40)[0], together)


def test_extreme_numbers_are_copied_without_complaint() -> None:
    """Rows of zeros, of denormal and of huge numbers have codes, and the nearest is still found."""
    vectors = _vectors(300, 20, 4)
    vectors[0], vectors[1], vectors[2] = 0.0, 2.5e-43, 1e36
    made, _ = _compact(vectors, "dot")
    found, scores = made.query(np.ones((1, 20), np.float32), 3, 300)
    assert found[0, 0] == 2
    assert scores[0, 0] == pytest.approx(2e37, rel=1e-4)


def test_deleted_rows_are_walked_over_and_not_found() -> None:
    """What is marked deleted after the copy was made is in no answer; fewer than k remain if fewer live."""
    vectors = _vectors(500, 16, 3)
    made, rows = _compact(vectors, "dot")
    rows.kill(np.arange(0, 500, 2))
    found, _ = made.query(vectors[:50], 10, 500)
    assert found.shape == (50, 10)
    assert (found % 2 == 1).all()
    assert len(made) == 250
    rows.kill(np.arange(8, 500))
    found, _ = made.query(vectors[:50], 10, 500)
    assert (np.sort(found, axis=1) == [1, 3, 5, 7]).all()


def test_an_index_goes_by_a_fresh_copy_only() -> None:
    """New rows and deletions are seen at once; a copy that too many rows are newer than is passed over."""
    vectors, more = _vectors(3000, 24, 7), _vectors(600, 24, 8)
    index = Index(24, "dot", exact_below=500, threads=2)
    labels = np.arange(3000)
    index.publish(vectors, labels, labels, NONE)
    while index.maintain():
        pass

    def check(stored: Floats, gone: int) -> None:
        live = np.arange(len(stored)) >= gone
        queries = _vectors(100, 24, 9)
        truth, _ = exact.top_k(queries, stored, 10, "dot", live)
        found = index.search(queries, 10)
        pairs = zip(found.labels, truth, strict=True)
        assert all(min(mine) >= gone for mine in found.labels)
        assert np.mean([len(set(mine) & set(right)) for mine, right in pairs]) >= 9.4

    frozen = index._state.view.frozen
    assert frozen is not None
    assert frozen.covered == 3000

    check(vectors, 0)
    for number in range(3):
        new = more[number * 200 : number * 200 + 200]
        names = np.arange(3000 + number * 200, 3200 + number * 200)
        removed = np.arange(number * 100, number * 100 + 100)
        index.publish(new, names, names, removed)
        check(np.vstack([vectors, more[: number * 200 + 200]]), number * 100 + 100)
        if number > 0:
            while index.maintain():
                pass
            check(np.vstack([vectors, more[: number * 200 + 200]]), number * 100 + 100)


def test_without_a_kernel_there_is_no_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A processor that cannot run the kernel searches the graph itself."""
    from services.vector_search.index import frozen_graph

    monkeypatch.setattr(library, "cpu_flags", lambda: "model flags: avx2")
    frozen_graph._kernel.cache_clear()
    try:
        graph = Graph(8, "dot", 10, 1)
        graph.add(_vectors(10, 8, 1), np.arange(10))
        rows = VectorRows(8)
        assert FrozenGraph.of(graph, "dot", rows.view, 0) is None
    finally:
        frozen_graph._kernel.cache_clear()
