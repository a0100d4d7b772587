"""The graph over rows of 8 bits: what it finds, how near, while it grows, and from a file."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hnswlib
import numpy as np
import pytest

from common.native import library
from common.native.finder import open_first
from services.vector_search.index import exact, native_graph
from services.vector_search.index.allowed_rows import AllowedRows
from services.vector_search.index.graph import Graph
from services.vector_search.index.index import Index
from services.vector_search.index.native.sources import TRAVERSE, TRAVERSE_AVX2
from services.vector_search.index.native_graph import NativeGraph, load_graph, new_graph
from services.vector_search.index.rows import Floats, Ints, Metric, VectorRows, normalise

NONE = np.zeros(0, np.int64)
KERNEL = native_graph.kernel  # without what a test puts there


@pytest.fixture(autouse=True, params=[TRAVERSE, TRAVERSE_AVX2], ids=["avx512", "avx2"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    library = open_first([request.param])
    if library is None:
        needed = "AVX512-VNNI" if request.param is TRAVERSE else "AVX2"
        pytest.skip(f"no {needed} or no compiler here")
    kernel = native_graph.declared(library)
    monkeypatch.setattr(native_graph, "kernel", lambda: kernel)


def _vectors(count: int, dimension: int, seed: int) -> Floats:
    # Rows of lengths far apart: each is rounded by its own scale.
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, dimension)) * rng.uniform(0.1, 10, (count, 1))
    return rows.astype(np.float32)


def _made(vectors: Floats, metric: Metric, threads: int = 2) -> tuple[NativeGraph, VectorRows]:
    rows = _rows(vectors)
    graph = new_graph(rows, metric, len(vectors), threads)
    assert isinstance(graph, NativeGraph)
    graph.add(rows.view, np.arange(len(vectors)))
    return graph, rows


def _rows(vectors: Floats) -> VectorRows:
    rows = VectorRows(vectors.shape[1], len(vectors))
    labels = np.arange(len(vectors))
    rows.append(vectors, labels, labels)
    return rows


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
@pytest.mark.parametrize("dimension", [1, 7, 64, 100, 384])
def test_a_wide_walk_finds_what_exact_search_finds(metric: Metric, dimension: int) -> None:
    """With room for every row the best are the true ones, with their true scores."""
    vectors, queries = _vectors(600, dimension, 1), _vectors(70, dimension, 2)
    if metric == "cosine":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    made, _ = _made(vectors, metric)
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


def _shaped(count: int, seed: int) -> Floats:
    basis = np.random.default_rng(5).standard_normal((12, 96))
    return (np.random.default_rng(seed).standard_normal((count, 12)) @ basis).astype(np.float32)


def _recall(found: Ints, truth: Ints) -> float:
    return float((found[:, :, None] == truth[:, None, :]).any(axis=2).mean())


def test_it_finds_what_hnswlib_finds() -> None:
    """At the same ef it finds as many of the nearest, one query at a time and many at once."""
    vectors, queries = _shaped(4000, 6), _shaped(300, 7)
    made, rows = _made(vectors, "l2")
    graph = Graph(96, "l2", 4000, 2)
    graph.add(rows.view, np.arange(4000))
    truth, _ = exact.top_k(queries, rows.view.matrix, 10, "l2")

    together = made.query(queries, 10, 40)[0]
    assert _recall(together, truth) >= _recall(graph.query(queries, 10, 40)[0], truth) - 0.01
    alone = np.concatenate([made.query(query[None], 10, 40)[0] for query in queries])
    np.testing.assert_array_equal(alone, together)
    queries.setflags(write=False)
    np.testing.assert_array_equal(made.query(queries, 10, 40)[0], together)


@pytest.mark.parametrize("kind", ["own", "hnswlib"])
@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_a_saved_graph_finds_the_same_and_grows_on(
    kind: str, metric: Metric, tmp_path: Path
) -> None:
    """From a file of its own, or of hnswlib with whatever M; without rows yet it finds nothing."""
    vectors, queries = _shaped(3000, 8), _shaped(200, 9)
    made, rows = _made(vectors[:2500], metric)
    saved: NativeGraph | Graph = made
    if kind == "hnswlib":
        old = hnswlib.Index("l2" if metric == "l2" else "ip", 96)
        old.init_index(2500, M=9, ef_construction=100)
        order = np.random.default_rng(1).permutation(2500)
        old.add_items(vectors[order], order)
        old.mark_deleted(7)
        old.save_index(str(tmp_path / "graph"))
    else:
        saved.save(str(tmp_path / "graph"))
    graph = load_graph(tmp_path / "graph", 96, metric, 2500, 2)
    assert isinstance(graph, NativeGraph)
    assert graph.query(queries, 10, 100)[0].shape == (200, 0)
    graph.over(rows)

    found = graph.query(queries, 10, 100)[0]
    if kind == "own":
        np.testing.assert_array_equal(found, made.query(queries, 10, 100)[0])
    assert _recall(found, exact.top_k(queries, vectors[:2500], 10, metric)[0]) >= 0.95
    rows.append(vectors[2500:], np.arange(2500, 3000), np.arange(2500, 3000))
    graph.add(rows.view, np.arange(2500, 3000))
    found = graph.query(queries, 10, 100)[0]
    assert _recall(found, exact.top_k(queries, vectors, 10, metric)[0]) >= 0.95


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    """A file that ends early, or whose first line is none, is not taken."""
    _made(_shaped(100, 1), "dot")[0].save(str(tmp_path / "graph"))
    whole = (tmp_path / "graph").read_bytes()
    head = whole.index(b"\n") + 1
    for damaged in (whole[:-1], whole[: head + 60], whole[:head] + b"x" + whole[head + 1 :]):
        (tmp_path / "graph").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"ends early|malformed|truncated"):
            load_graph(tmp_path / "graph", 96, "dot", 100, 1)


def test_searches_meet_insertions() -> None:
    """Beside a thread that adds, whatever is found is stored and in order; in the end recall is what it would be."""
    vectors, queries = _shaped(6000, 2), _shaped(64, 3)
    rows = VectorRows(96, 16)
    graph = new_graph(rows, "dot", 16, 2)

    def grow() -> None:
        for begin in range(0, 6000, 200):
            labels = np.arange(begin, begin + 200)
            rows.append(vectors[begin : begin + 200], labels, labels)
            graph.add(rows.view, labels)

    with ThreadPoolExecutor(1) as pool:
        growing = pool.submit(grow)
        while not growing.done():
            found, scores = graph.query(queries, 10, 40)
            assert (found < rows.view.size).all()
            assert (np.diff(scores, axis=1) <= 0).all()
            expected = np.einsum("qd,qkd->qk", queries, vectors[found])
            np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-3)
        growing.result()
    truth, _ = exact.top_k(queries, vectors, 10, "dot")
    assert _recall(graph.query(queries, 10, 100)[0], truth) >= 0.97


def test_one_thread_makes_the_same_graph_of_the_same_rows() -> None:
    """Links do not depend on chance; many equal rows among them are found."""
    vectors = normalise(np.repeat(_shaped(50, 4), 20, axis=0))
    one, two = (_made(vectors, "dot", threads=1)[0] for _ in range(2))
    np.testing.assert_array_equal(one._arrays.near, two._arrays.near)
    found, scores = one.query(vectors[::20], 20, 64)
    assert found.shape == (50, 20)
    assert (scores >= 0.999).mean() >= 0.99


def test_extreme_numbers_are_copied_without_complaint() -> None:
    """Rows of zeros, of denormal and of huge numbers have codes, and the nearest is still found."""
    vectors = _vectors(300, 20, 4)
    vectors[0], vectors[1], vectors[2] = 0.0, 2.5e-43, 1e36
    made, _ = _made(vectors, "dot")
    found, scores = made.query(np.ones((1, 20), np.float32), 3, 300)
    assert found[0, 0] == 2
    assert scores[0, 0] == pytest.approx(2e37, rel=1e-4)


def test_deleted_rows_are_walked_over_and_not_found() -> None:
    """What is marked deleted after the copy was made is in no answer; fewer than k remain if fewer live."""
    vectors = _vectors(500, 16, 3)
    made, rows = _made(vectors, "dot")
    rows.kill(np.arange(0, 500, 2))
    found, _ = made.query(vectors[:50], 10, 500)
    assert found.shape == (50, 10)
    assert (found % 2 == 1).all()
    assert len(made) == 250
    rows.kill(np.arange(8, 500))
    found, _ = made.query(vectors[:50], 10, 500)
    assert (np.sort(found, axis=1) == [1, 3, 5, 7]).all()


def test_an_index_sees_what_was_written() -> None:
    """New rows and deletions are seen at once, before the graph knows them and after."""
    vectors, more = _vectors(3000, 24, 7), _vectors(600, 24, 8)
    index = Index(24, "dot", exact_below=500, threads=2)
    labels = np.arange(3000)
    index.publish(vectors, labels, labels, NONE)
    while index.maintain():
        pass

    def check(stored: Floats, gone: int) -> None:
        live = np.arange(len(stored)) >= gone
        queries = _vectors(100, 24, 9)
        truth, _ = exact.top_k(queries, stored, 10, "dot", AllowedRows(live))
        found = index.search(queries, 10)
        pairs = zip(found.labels, truth, strict=True)
        assert all(min(mine) >= gone for mine in found.labels)
        assert np.mean([len(set(mine) & set(right)) for mine, right in pairs]) >= 9.4

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


def test_without_a_kernel_there_is_hnswlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A processor that cannot run the kernel has hnswlib's graph, and no use for the file of the other kind."""
    made, rows = _made(_vectors(50, 8, 1), "dot")
    made.save(str(tmp_path / "graph"))
    monkeypatch.setattr(library, "cpu_flags", lambda: "model flags: sse4_2")
    monkeypatch.setattr(native_graph, "kernel", KERNEL.__wrapped__)
    graph = new_graph(rows, "dot", 50, 1)
    assert isinstance(graph, Graph)
    graph.add(rows.view, np.arange(50))
    assert load_graph(tmp_path / "graph", 8, "dot", 50, 1) is None
    graph.save(str(tmp_path / "graph"))
    assert isinstance(load_graph(tmp_path / "graph", 8, "dot", 50, 1), Graph)
