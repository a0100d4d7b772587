"""Inverted lists of codes: against faiss with the same quantizer, against exact search, and what upsets them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.native.finder import open_first
from services.vector_search import snapshot
from services.vector_search.collection_quantizer import CollectionQuantizer
from services.vector_search.explanation import explain
from services.vector_search.index import exact, inverted_lists, search_path
from services.vector_search.index.allowed_rows import AllowedRows
from services.vector_search.index.index import Index
from services.vector_search.index.inverted_lists import Coded, InvertedLists, code, declared
from services.vector_search.index.lists_maintenance import lists_for
from services.vector_search.index.native.sources import SCAN_LISTS, SCAN_LISTS_AVX2
from services.vector_search.index.native_graph import graph_bytes
from services.vector_search.index.quantizer import (
    USUAL,
    CodeBits,
    Coding,
    Quantizer,
    subspaces_of,
    words_of,
)
from services.vector_search.index.quantizer_source import TrainedQuantizer
from services.vector_search.index.quantizer_training import TrainingFailed, TrainingWork, train
from services.vector_search.index.rows import Floats, Metric, RowsView, VectorRows, prepare
from services.vector_search.index.training_room import LEAST_ROWS, sample_rows, training_bytes
from services.vector_search.search_cost import SearchCost
from tests.support import vectors
from tests.support.clock import ManualClock
from tests.support.vectors import DIMENSION, ask, document, shard, write

METRICS: list[Metric] = ["cosine", "dot", "l2"]
BITS: list[CodeBits] = [4, 8]
NONE = np.zeros(0, np.int64)


def clustered(count: int, dimension: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((20, dimension))
    made = centres[rng.integers(0, 20, count)] + 0.4 * rng.standard_normal((count, dimension))
    return made.astype(np.float32)


def view_of(rows: Floats) -> RowsView:
    labels = np.arange(len(rows))
    return RowsView(rows, labels, labels, np.ones(len(rows), np.bool_), len(rows))


def trained(rows: Floats, metric: Metric, lists: int, coding: Coding = USUAL) -> Quantizer:
    work = TrainingWork(
        metric, lists, len(rows), len(rows), rows.shape[1], threads=1, coding=coding
    )
    return train(work, rows)


@cache
def lists_of(metric: Metric, coding: Coding = USUAL) -> tuple[Floats, InvertedLists]:
    rows = prepare(clustered(3000, 30, 1), metric)
    quantizer = trained(rows, metric, 16, coding)
    assert quantizer.coding == coding
    coded = code(quantizer, view_of(rows), np.arange(len(rows)))
    return rows, InvertedLists.empty(quantizer).with_more(coded, len(rows))


@cache
def kernel_by(way: str) -> Any:
    """The kernel for this processor ("kernel"), the one for those without AVX-512 ("avx2"), or none ("numpy")."""
    if way == "numpy":
        return None
    library = open_first([SCAN_LISTS if way == "kernel" else SCAN_LISTS_AVX2])
    if library is None:
        pytest.skip(f"no {'AVX512' if way == 'kernel' else 'AVX2'} or no compiler here")
    return declared(library)


@pytest.fixture(params=["kernel", "avx2", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All ways to scan, where this machine has them."""
    found = kernel_by(request.param)
    monkeypatch.setattr(inverted_lists, "kernel", lambda: found)
    return str(request.param)


# -- faiss as an oracle


def faiss_scores(lists: InvertedLists, rows: Floats, queries: Floats, probes: int) -> list[Any]:
    """What faiss finds with the same quantizer, codes and lists: {row: score} of each query."""
    q = lists.quantizer
    l2 = q.metric != "dot"
    metric = faiss.METRIC_L2 if l2 else faiss.METRIC_INNER_PRODUCT
    coarse = (faiss.IndexFlatL2 if l2 else faiss.IndexFlatIP)(q.width)
    coarse.add(q.centroids)
    index: Any = faiss.IndexIVFPQ(coarse, q.width, q.lists, q.subspaces, q.code_bits, metric)
    faiss.copy_array_to_vector(q.words.ravel(), index.pq.centroids)
    index.is_trained, index.by_residual, index.nprobe = True, True, probes
    rotated = q.rotated(rows)
    names, own = np.arange(len(rows)), q.nearest_lists(rotated)
    pointers = (faiss.swig_ptr(each) for each in (rotated, names, own))
    index.add_core(len(rows), *pointers)
    asked = q.rotated(queries)
    chosen = np.ascontiguousarray(lists.nearest_lists(queries)[:, :probes])
    near = np.einsum("qd,qpd->qp", asked, q.centroids[chosen])
    if l2:
        near = ((asked[:, None] - q.centroids[chosen]) ** 2).sum(axis=2)
    scores, found = index.search_preassigned(
        asked, 2048, Iq=chosen, Dq=np.ascontiguousarray(near, np.float32)
    )
    if l2:  # ours leave out the query's square, and halve
        scores = 0.5 * ((asked**2).sum(axis=1)[:, None] - scores)
    return [
        {int(row): float(score) for row, score in zip(rows_, scores_, strict=True) if row >= 0}
        for rows_, scores_ in zip(found, scores, strict=True)
    ]


def step(lists: InvertedLists, query: Floats) -> float:
    """How far a score by the kernel's tables, rounded to 8 bits, may lie from the sum of products."""
    q = lists.quantizer
    own = q.rotated(query[None])[0].reshape(q.subspaces, -1)
    tables = np.einsum("jwd,jd->jw", q.words, own)
    return float(np.ptp(tables, axis=1).max() / 255 / 2 * q.subspaces) + 1e-4


@pytest.mark.parametrize("coding", [USUAL, Coding(4, rotate=False)])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("probes", [1, 4, 16])
def test_candidates_are_those_of_faiss(
    way: str, metric: Metric, probes: int, coding: Coding
) -> None:
    """The same rows in the same lists have faiss' scores; the kernel rounds tables, and errs by no more than that."""
    rows, lists = lists_of(metric, coding)
    queries = prepare(clustered(12, 30, 2), metric)
    oracle = faiss_scores(lists, rows, queries, probes)
    keep = np.ones(len(rows), np.bool_)
    found = lists.candidates(keep, queries, 100, probes=probes, threads=2)

    for i, scores in enumerate(oracle):
        count = int(found.found[i])
        assert count == min(100, len(scores))
        off = 1e-4 if way == "numpy" else step(lists, queries[i])
        for row, score in zip(found.rows[i, :count], found.scores[i, :count], strict=True):
            assert score == pytest.approx(scores[int(row)], abs=off)
        worst = found.scores[i, count - 1]
        surely = {row for row, score in scores.items() if score > worst + 2 * off}
        assert surely <= set(found.rows[i, :count].tolist())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("metric", METRICS)
def test_a_row_is_in_the_list_and_has_the_code_that_faiss_gives_it(
    metric: Metric, bits: CodeBits
) -> None:
    """Assignment and encoding agree with faiss but for ties by rounding."""
    rows, lists = lists_of(metric, Coding(bits, rotate=True))
    q = lists.quantizer
    coarse = faiss.IndexFlatL2(q.width)
    coarse.add(q.centroids)
    rotated = q.rotated(rows)
    right = coarse.search(rotated, 1)[1].ravel()
    own = q.nearest_lists(rotated)
    assert (own == right).mean() > 0.999
    product = faiss.ProductQuantizer(q.width, q.subspaces, bits)
    faiss.copy_array_to_vector(q.words.ravel(), product.centroids)
    left = q.residuals(rotated, own)
    codes, right_codes = q.codes(left), product.compute_codes(left)
    if bits == 4:  # faiss has the first of two codes in the low half of a byte
        right_codes = np.stack([right_codes & 15, right_codes >> 4], axis=2).reshape(codes.shape)
    assert (codes == right_codes).mean() > 0.999
    assert np.array_equal(lists.list_of_rows(), own)


# -- the kernel's rule in numpy


def by_the_rule(lists: InvertedLists, coded: Coded, query: Floats, probes: int) -> Floats:
    """Score every row of the nearest lists as the kernel does, -inf elsewhere: tables rounded to 8 bits, summed up.

    A table is `low + scale * rounded`, of one scale for all; a score is the sum of the rounded times the scale, with
    the products of query and centroid and the lows, less half the square of what the code stands for.
    """
    q = lists.quantizer
    own = q.rotated(query[None])[0]
    tables = np.einsum("jwd,jd->jw", q.words, own.reshape(q.subspaces, -1)).astype(np.float32)
    lows = tables.min(axis=1, keepdims=True)
    scale = np.float32((tables - lows).max()) / np.float32(255) or np.float32(1)
    rounded = np.rint((tables - lows) * (np.float32(1) / scale)).astype(np.int64)
    sums = rounded[np.arange(q.subspaces), coded.codes].sum(axis=1)
    scores = sums * np.float64(scale) + lows.sum() + (q.centroids @ own)[coded.lists]
    if q.metric != "dot":
        stands = q.decoded(coded.lists, coded.codes)
        scores -= 0.5 * np.einsum("nd,nd->n", stands, stands)
    chosen = lists.nearest_lists(query[None])[0, :probes]
    exact_sums = tables[np.arange(q.subspaces), coded.codes].sum(axis=1)
    off = np.abs(sums * np.float64(scale) + lows.sum() - exact_sums).max(initial=0.0)
    assert off <= 0.5001 * scale * q.subspaces + 1e-4  # half a step for each subspace
    found: Floats = np.where(np.isin(coded.lists, chosen), scores, -np.inf)
    return found


@pytest.mark.parametrize("build", ["kernel", "avx2"])
@settings(max_examples=60, deadline=None)
@given(
    dimension=st.integers(1, 70) | st.just(1040),
    count=st.integers(0, 700),
    lists=st.integers(1, 6),
    probes=st.integers(1, 6),
    most=st.integers(1, 300),
    live=st.floats(0, 1),
    bits=st.sampled_from(BITS),
    metric=st.sampled_from(METRICS),
    seed=st.integers(0, 1000),
)
def test_the_kernel_keeps_to_its_rule(
    build: str,
    dimension: int,
    count: int,
    lists: int,
    probes: int,
    most: int,
    live: float,
    bits: CodeBits,
    metric: Metric,
    seed: int,
) -> None:
    """Any sizes, blocks that are not full, marks of live rows: the same candidates as by numpy, equal scores aside.

    Words and queries are small whole numbers, so that products are exact however they are added up.
    """
    kernel = kernel_by(build)
    rng = np.random.default_rng(seed)
    subspaces, part = subspaces_of(dimension, bits)

    def whole(*shape: int) -> Floats:
        return rng.integers(-9, 10, shape).astype(np.float32)

    rotation = np.eye(subspaces * part, dimension, dtype=np.float32)[:, ::-1]
    quantizer = Quantizer(
        metric,
        max(count, 1),
        np.ascontiguousarray(rotation if rng.random() < 0.5 else rotation[:, ::-1]),
        whole(lists, subspaces * part),
        whole(subspaces, words_of(bits), part),
    )
    coded = Coded(
        np.arange(count),
        rng.integers(0, lists, count),
        rng.integers(0, words_of(bits), (count, subspaces)).astype(np.uint8),
    )
    made = InvertedLists.empty(quantizer).with_more(coded, count)
    keep = rng.random(count) < live
    queries = whole(3, dimension)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inverted_lists, "kernel", lambda: kernel)
        found = made.candidates(keep, queries, most, probes=probes, threads=2)

    for i, query in enumerate(queries):
        right = by_the_rule(made, coded, query, probes)
        right[~keep] = -np.inf
        best = np.sort(right[np.isfinite(right)])[::-1][:most]
        rows, scores = found.rows[i, : found.found[i]], found.scores[i, : found.found[i]]
        assert len(set(rows.tolist())) == found.found[i] == len(best)
        assert scores == pytest.approx(best, rel=1e-5, abs=1e-2)
        assert scores == pytest.approx(right[rows], rel=1e-5, abs=1e-2)


# -- exact search as an oracle


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("dimension", "coding"),
    [
        (1, USUAL),
        (3, Coding(4)),
        (4, USUAL),
        (30, USUAL),
        (30, Coding(4, rotate=False)),
        (130, Coding(8, rotate=False)),
        (130, Coding(4)),
    ],
)
def test_all_lists_and_all_rows_compared_is_exact_search(
    way: str, metric: Metric, dimension: int, coding: Coding
) -> None:
    """Whatever the dimension; dimensions that no subspaces divide are filled up with zeros."""
    rows = prepare(clustered(400, dimension, 1), metric)
    quantizer = trained(rows, metric, 5, coding)
    subspaces, part = subspaces_of(dimension, coding.code_bits)
    assert (quantizer.subspaces, quantizer.width) == (subspaces, subspaces * part)
    lists = InvertedLists.empty(quantizer).with_more(
        code(quantizer, view_of(rows), np.arange(400)), 400
    )
    queries = prepare(clustered(9, dimension, 3), metric)
    keep = np.random.default_rng(4).random(400) < 0.5
    truth, near = exact.top_k(queries, rows, 10, metric, AllowedRows(keep))
    found = lists.query(view_of(rows), keep, queries, 10, probes=99, compared=400, threads=2)

    assert np.allclose(found.scores, near, rtol=1e-5, atol=1e-4)
    assert np.array_equal(lists.scanned(queries, 3)[:, :1], lists.nearest_lists(queries)[:, :1])
    assert (np.sort(lists.scanned(queries, 99)) == np.arange(quantizer.lists)).all()
    if dimension > 1:  # of one dimension many rows of length 1 are equal
        assert np.array_equal(found.rows, truth)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("metric", METRICS)
def test_codes_of_many_dimensions_have_256_bytes_at_most(
    way: str, metric: Metric, bits: CodeBits
) -> None:
    """Whatever a quantizer consists of, comparing all that it covers is exact search."""
    assert [subspaces_of(d) for d in (1, 4, 5, 1024, 1025, 4096)] == [
        (1, 4), (1, 4), (2, 4), (256, 4), (205, 5), (256, 16),
    ]  # fmt: skip
    assert [subspaces_of(d, 4) for d in (1, 4, 17, 1024, 1030, 4096)] == [
        (8, 2), (8, 2), (16, 2), (512, 2), (344, 3), (512, 8),
    ]  # fmt: skip
    rng = np.random.default_rng(1)
    subspaces, part = subspaces_of(1030, bits)
    quantizer = Quantizer(
        metric,
        300,
        np.eye(subspaces * part, 1030, dtype=np.float32),
        rng.standard_normal((3, subspaces * part)).astype(np.float32),
        rng.standard_normal((subspaces, words_of(bits), part)).astype(np.float32),
    )
    rows = prepare(rng.standard_normal((300, 1030)).astype(np.float32), metric)
    view, every = view_of(rows), np.arange(300)
    lists = InvertedLists.empty(quantizer).with_more(code(quantizer, view, every), 300)
    truth, _ = exact.top_k(rows[:5], rows, 10, metric)
    found = lists.query(view, view.live, rows[:5], 10, probes=3, compared=300, threads=1)
    assert np.array_equal(found.rows, truth)


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 130), st.floats(0, 1), st.booleans()), min_size=1, max_size=5
    ),
    metric=st.sampled_from(METRICS),
    bits=st.sampled_from(BITS),
    seed=st.integers(0, 1000),
)
def test_lists_hold_what_was_put_into_them(
    steps: list[tuple[int, float, bool]], metric: Metric, bits: CodeBits, seed: int
) -> None:
    """Rows are added, deleted and renumbered, and lists saved: all that is left, and nothing else, is in its list."""
    rng = np.random.default_rng(seed)
    quantizer = lists_of(metric, Coding(bits))[1].quantizer
    lists, matrix = InvertedLists.empty(quantizer), np.zeros((0, 30), np.float32)
    live = np.zeros(0, np.bool_)
    for count, deleted, renumber in steps:
        fresh = prepare(clustered(count, 30, int(rng.integers(1000))), metric)
        begin = len(matrix)
        matrix, live = np.vstack([matrix, fresh]), np.append(live, np.ones(count, np.bool_))
        added = np.flatnonzero(np.arange(len(matrix)) >= begin)
        lists = lists.with_more(code(quantizer, view_of(matrix), added), len(matrix))
        live &= rng.random(len(live)) >= deleted
        if renumber:
            kept = np.flatnonzero(live)
            lists, matrix, live = lists.renumbered(kept), matrix[kept], live[kept]

    assert (lists.covered, int(lists.sizes.sum())) == (len(matrix), len(matrix))
    whole = code(quantizer, view_of(matrix), np.arange(len(matrix)))
    again = InvertedLists.empty(quantizer).with_more(whole, len(matrix))
    assert np.array_equal(lists.sizes, again.sizes)
    assert np.array_equal(lists.list_of_rows(), whole.lists)
    queries = prepare(clustered(3, 30, 5), metric)
    mine, right = (
        each.candidates(live, queries, 500, probes=99, threads=1) for each in (lists, again)
    )
    assert mine.found.tolist() == right.found.tolist() == [min(500, int(live.sum()))] * 3
    assert np.array_equal(mine.scores, right.scores)


# -- files


@pytest.mark.parametrize("coding", [Coding(4, rotate=False), USUAL])
def test_lists_and_quantizer_are_read_as_they_were_written(tmp_path: Path, coding: Coding) -> None:
    """All metrics; a damaged byte anywhere in a quantizer, or a cut, is noticed."""
    for metric in METRICS:
        rows, lists = lists_of(metric, coding)
        lists.tuned(3, 4).save(str(tmp_path / metric))
        read = InvertedLists.load(tmp_path / metric)
        assert (read.probes, read.depth, read.covered) == (3, 4, len(rows))
        assert read.quantizer.version == lists.quantizer.version
        assert read.quantizer_bytes == lists.quantizer_bytes
        keep = np.ones(len(rows), np.bool_)
        assert np.array_equal(
            read.candidates(keep, rows[:5], 50, probes=4, threads=1).rows,
            lists.candidates(keep, rows[:5], 50, probes=4, threads=1).rows,
        )
    data = lists.quantizer.to_bytes()
    assert Quantizer.from_bytes(data).version == lists.quantizer.version
    for at in range(0, len(data), len(data) // 40):
        wrong = bytearray(data)
        wrong[at] ^= 4
        with pytest.raises(ValueError, match="quantizer"):
            Quantizer.from_bytes(bytes(wrong))
    whole = (tmp_path / "l2").read_bytes()
    for cut in (3, 40, len(data), len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"cut|quantizer"):
            InvertedLists.load(tmp_path / "cut")
    (tmp_path / "cut").write_bytes(b"spillway graph 1\n")
    with pytest.raises(ValueError, match="holds no lists"):
        InvertedLists.load(tmp_path / "cut")


def test_a_quantizer_of_before_there_were_4_bits_is_read() -> None:
    """Its first line says an earlier version, its header nothing of bits, and its hash is what it was."""
    quantizer = lists_of("cosine")[1].quantizer
    magic, header, rest = quantizer.to_bytes().split(b"\n", 2)
    before = header.replace(b',"code_bits":8', b"")
    assert len(before) < len(header)
    data = b"\n".join([magic.replace(b"quantizer 2", b"quantizer 1"), before, rest])
    read = Quantizer.from_bytes(data)
    assert (read.version, read.coding) == (quantizer.version, USUAL)
    assert np.array_equal(read.words, quantizer.words)


# -- the kind


class Room:
    """The memory that an index is told it has."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self) -> int:
        return self.count


FEW = Room(400_000)
ONE = prepare(clustered(1, 16, 9), "cosine")


def made(
    rows: Floats, *, metric: Metric = "cosine", room: Callable[[], int] = FEW, **more: Any
) -> Index:
    """An index whose process has no room for a graph over a few thousand rows."""
    index = Index(
        rows.shape[1], metric, exact_below=300, threads=2, room=room, **{"trainer": train, **more}
    )
    labels = np.arange(len(rows))
    index.publish(prepare(rows, metric), labels, labels, NONE)
    return index


def settle(index: Index) -> Index:
    while index.maintain():
        pass
    return index


def test_lists_are_a_power_of_two_near_the_root_and_never_too_many() -> None:
    """39 rows at least for each, as faiss wants."""
    assert [lists_for(n) for n in (0, 1, 39, 100, 1000, 20_000, 500_000, 10**9)] == [
        1, 1, 1, 2, 25, 256, 1024, 4096,
    ]  # fmt: skip


def test_few_rows_for_many_lists_and_equal_rows_make_fewer(way: str) -> None:
    """The trainer makes as many lists as unlike rows allow; rows that are all equal are one list, and all are found."""
    few = trained(prepare(clustered(100, 8, 1), "cosine"), "cosine", 64)
    assert few.lists == 2
    index = settle(made(np.ones((2000, 8), np.float32)))
    assert index.now.stats().path == "ivfpq"
    assert index.now.search(prepare(np.ones((1, 8), np.float32), "cosine"), 10).path == "ivfpq"
    found = index.now.search(prepare(np.ones((3, 8), np.float32), "cosine"), 2000)
    assert [len(set(row)) for row in found.labels] == [2000] * 3
    assert index.now.stats().recall == 1.0


def test_deleting_all_and_asking_for_more_than_there_is(way: str) -> None:
    """k larger than the rows returns all of them; deleted rows are gone at once; no rows are no hits."""
    rows = clustered(1500, 8, 1)
    index = settle(made(rows))
    query = prepare(rows[:2], "cosine")
    assert [len(row) for row in index.now.search(query, 5000, effort=1).labels] == [1500] * 2
    index.publish(np.zeros((0, 8), np.float32), NONE, NONE, np.arange(1495))
    left = index.now.search(query, 10, effort=1)
    assert [sorted(row) for row in left.labels] == [list(range(1495, 1500))] * 2
    index.publish(np.zeros((0, 8), np.float32), NONE, NONE, np.arange(1495, 1500))
    assert [len(row) for row in index.now.search(query, 10).labels] == [0, 0]
    settle(index)
    assert (index.now.kind, [len(row) for row in index.now.search(query, 10).labels]) == (
        "exact",
        [0, 0],
    )


def test_writes_are_found_at_once_and_enter_the_lists_later() -> None:
    """New rows are compared one by one until they are many, deleted ones are dropped; every search sees the truth."""
    rows = clustered(6000, 16, 1)
    index = settle(made(rows[:2500]))
    version = index.now.snapshot()
    assert version is not None
    for begin in (2500, 3000, 4000):
        end = {2500: 3000, 3000: 4000, 4000: 6000}[begin]
        labels = np.arange(begin, end)
        index.publish(
            prepare(rows[begin:end], "cosine"), labels, labels, np.arange(begin - 900, begin - 100)
        )
        own = index.now.search(prepare(rows[end - 5 : end], "cosine"), 1)
        assert [row[0] for row in own.labels] == list(range(end - 5, end))
        gone = index.now.search(prepare(rows[begin - 900 : begin - 880], "cosine"), 3)
        assert not np.isin(
            np.concatenate(list(gone.labels)), np.arange(begin - 900, begin - 100)
        ).any()
        settle(index)
        assert index.now.stats().newer < 1024
    live = index.rows.view.live[: index.rows.view.size]
    left = index.rows.view.labels[: index.rows.view.size][live]
    truth, _ = exact.top_k(
        prepare(clustered(50, 16, 8), "cosine"), prepare(rows[left], "cosine"), 10, "cosine"
    )
    found = index.now.search(prepare(clustered(50, 16, 8), "cosine"), 10)
    share = [len(set(a) & set(left[b])) / 10 for a, b in zip(found.labels, truth, strict=True)]
    assert np.mean(share) > 0.9


def test_a_filter_that_leaves_few_is_met_exactly() -> None:
    """Whatever it leaves, all of it or k of it are found, though the nearest lists hold none of it."""
    rows = clustered(3000, 16, 1)
    index = settle(made(rows))
    far = np.argsort(prepare(rows, "cosine") @ prepare(rows[:1], "cosine")[0])
    for count in (0, 1, 9, 100, 400, 1500):
        wanted = np.zeros(3000, np.bool_)
        wanted[far[:count]] = True
        found = index.now.search(prepare(rows[:1], "cosine"), 10, effort=1, wanted=wanted)
        assert len(found.labels[0]) == min(10, count)
        assert wanted[found.labels[0]].all()


def test_an_audit_reads_more_lists_where_recall_falls_short() -> None:
    """Queries unlike the rows need more lists than the rows did; the ladder knows the recall of each number."""
    rng = np.random.default_rng(7)
    rows = clustered(6000, 32, 1)
    index = settle(made(rows, room=Room(1_200_000)))
    before = index.now.stats()
    queries = prepare(rng.standard_normal((256, 32)).astype(np.float32), "cosine")
    for query in queries:
        index.now.search(query[None], 10)
    assert index.now.audit_due
    recall = index.now.audit()
    after = index.now.stats()

    assert not index.now.audit_due
    assert recall == after.recall >= 0.95
    assert int(after.effort) > int(before.effort)
    rungs = index.now.ladder()
    assert [rung.effort for rung in rungs] == sorted(rung.effort for rung in rungs)
    assert all(rung.recall is not None for rung in rungs)
    assert index.now.audit() >= 0.95
    assert index.now.stats().effort == after.effort


def test_a_failed_training_leaves_the_old_lists_in_use_and_is_told() -> None:
    """It is tried again a minute later; until then searches go on, and explain says why."""
    rows, clock, broken = clustered(9000, 8, 1), ManualClock(), [False]

    def trainer(work: TrainingWork, sample: Floats, stopped: Callable[[], bool]) -> Quantizer:
        if broken[0]:
            raise TrainingFailed("the disk is on fire")
        return train(work, sample, stopped)

    index = settle(made(rows[:1000], trainer=trainer, clock=clock))
    first = index.now.snapshot()
    broken[0] = True
    labels = np.arange(1000, 9000)
    index.publish(prepare(rows[1000:], "cosine"), labels, labels, NONE)
    settle(index)
    second = index.now.snapshot()
    assert first is not None
    assert second is not None
    assert (second.version, len(second.labels)) == (first.version, 9000)
    why = explain(index, SearchCost(), 10)["why"]
    assert why.endswith("; the last training of lists failed: the disk is on fire")

    broken[0] = False
    settle(index)
    assert index.now.snapshot().version == first.version  # type: ignore[union-attr]
    clock.now_s += 61
    settle(index)
    assert index.now.snapshot().version != first.version  # type: ignore[union-attr]
    assert "failed" not in explain(index, SearchCost(), 10)["why"]


def test_a_change_from_a_graph_leaves_no_search_without_a_structure() -> None:
    """A graph that has outgrown memory answers until the lists are there, and lists until there is a graph again."""
    rows = clustered(3000, 16, 1)
    room = Room(1 << 30)
    index = settle(made(rows, room=room))
    assert index.now.stats().path == "graph"
    paths = []
    query = prepare(rows[:4], "cosine")
    for count, kind in ((100_000, "ivfpq"), (1 << 30, "graph")):
        room.count = count
        stop = threading.Event()
        seen: list[str] = []

        def ask(stop: threading.Event = stop, seen: list[str] = seen) -> None:
            while not stop.is_set():
                found = index.now.search(query, 10, remember=False)
                assert all(len(row) == 10 for row in found.labels)
                seen.append(found.path)

        other = threading.Thread(target=ask)
        other.start()
        while index.maintain():
            paths.append(index.now.search(query, 10).path)
        stop.set()
        other.join()
        assert (index.now.kind, index.now.stats().path) == (kind, kind)
        assert set(seen) <= {"graph", "ivfpq"}
    assert set(paths) <= {"graph", "ivfpq"}
    assert index.now.stats().bytes.keys() == {"rows", "graph"}


def test_a_training_reads_as_many_rows_as_there_is_memory_for() -> None:
    """All that are wanted where that is not known; none where they would be too few to be worth it."""
    assert sample_rows(40_000, 128, None) == 40_000
    assert sample_rows(40_000, 128, training_bytes(40_000, 128)) == 40_000
    assert sample_rows(40_000, 128, training_bytes(20_000, 128)) == 20_000
    assert sample_rows(40_000, 128, training_bytes(LEAST_ROWS, 128)) == LEAST_ROWS
    assert sample_rows(40_000, 128, training_bytes(LEAST_ROWS, 128) - 1) == 0
    assert sample_rows(700, 128, training_bytes(700, 128)) == 700
    assert sample_rows(40_000, 128, -1) == 0
    assert training_bytes(8192, 1024) > training_bytes(8 * 8192, 128)


def test_a_training_without_room_fails_and_is_told_and_a_smaller_one_reads_less() -> None:
    """Rows are compared one by one until memory is found, and no process is begun that memory cannot hold."""
    rows, clock, room = clustered(12_000, 8, 1), ManualClock(), Room(100 << 20)
    samples = []

    def trainer(work: TrainingWork, sample: Floats, stopped: Callable[[], bool]) -> Quantizer:
        samples.append(len(sample))
        return train(work, sample, stopped)

    index = made(rows, room=Room(500_000), trainer=trainer, clock=clock, training_room=room)
    settle(index)
    assert (index.now.kind, index.now.stats().path, samples) == ("ivfpq", "exact", [])
    assert index.problem == "it needs 113 MiB beside the process, which may take 100 more"

    room.count = training_bytes(9000, 8)
    clock.now_s += 61
    settle(index)
    assert (index.now.stats().path, samples, index.problem) == ("ivfpq", [9000], "")


@pytest.mark.parametrize(
    ("spare", "paths"),
    [
        pytest.param(0, {"graph"}, id="room beside the graph"),
        pytest.param(-1, {"exact"}, id="room once it is gone"),
        pytest.param(-(1 << 30), {"graph"}, id="no room at all"),
    ],
)
def test_a_graph_goes_first_only_where_lists_cannot_be_trained_beside_it(
    spare: int, paths: set[str]
) -> None:
    """Rows are compared while they are trained then; a graph that cannot be replaced stays."""
    rows, room, answered = clustered(10_000, 8, 1), Room(1 << 40), set()
    graph, fits = graph_bytes(len(rows), 8), training_bytes(LEAST_ROWS, 8)

    def training_room() -> int:
        return fits + spare + (0 if "graph" in index.now.stats().bytes else graph)

    def trainer(work: TrainingWork, sample: Floats, stopped: Callable[[], bool]) -> Quantizer:
        answered.add(index.now.stats().path)
        return train(work, sample, stopped)

    index = settle(made(rows, room=room, trainer=trainer, training_room=training_room))
    assert index.now.stats().path == "graph"
    room.count = graph
    settle(index)
    possible = spare > -graph
    assert answered == (paths if possible else set())
    assert index.now.stats().path == ("ivfpq" if possible else "graph")


@pytest.mark.parametrize(
    ("share", "waiting"),
    [pytest.param(1.9, False, id="room to grow"), pytest.param(1.2, True, id="no room to grow")],
)
def test_a_graph_that_lists_cannot_replace_takes_new_rows_in(share: float, waiting: bool) -> None:
    """Where memory holds neither another graph nor a training, new rows enter the graph, if it has room to grow."""
    rows, room, training = clustered(12_000, 8, 1), Room(1 << 30), Room(1 << 40)
    index = settle(made(rows[:10_000], room=room, training_room=training))
    room.count, training.count = int(share * graph_bytes(10_000, 8)), 0
    assert index.choice().kind == "ivfpq"

    labels = np.arange(10_000, 12_000)
    index.publish(prepare(rows[10_000:], "cosine"), labels, labels, NONE)
    settle(index)
    assert (index.now.stats().path, index.problem != "") == ("graph", True)
    assert (index.now.stats().newer == 2000) is waiting
    assert waiting or index.now.stats().newer < search_path.LEAST_AUDITED


def test_explain_tells_why_there_are_lists() -> None:
    """The reason, what memory holds, and the efforts with their recall."""
    index = settle(made(clustered(3000, 16, 1)))
    told = explain(index, SearchCost(), 10)
    assert (told["kind"], told["path"]) == ("ivfpq", "ivfpq")
    assert "a graph needs" in told["why"]
    assert told["bytes"].keys() == {"rows", "codes", "quantizer"}
    stats = index.now.stats()
    assert stats.bytes["codes"] < 20 * 3000 + 64 * 12 * lists_for(3000)
    assert told["effort"] in [rung["effort"] for rung in told["efforts"]]
    wanted = np.arange(3000) < 2000
    assert explain(index, SearchCost(), 10, wanted)["filter"]["path"] == "filtered-ivfpq"


def test_a_start_reads_the_lists_and_a_damaged_quantizer_is_built_anew(tmp_path: Path) -> None:
    """What was saved answers as before, though rows were deleted meanwhile; of another collection or damaged it is not
    taken.
    """
    rows = clustered(2000, 16, 1)
    index = settle(made(rows, metric="l2"))
    kept = index.now.snapshot()
    assert kept is not None
    snapshot.save(tmp_path, kept, "1-0")
    read = snapshot.load(tmp_path, 16, "l2", 2)
    assert read is not None
    assert isinstance(read.structure, InvertedLists)
    store = VectorRows(16)
    store.append(rows, np.arange(2000), np.arange(2000))
    store.kill(np.arange(5))
    again = Index(16, "l2", exact_below=300, threads=2, room=FEW, trainer=train)
    again.restore(store, read.structure, len(read.labels), read.recall)
    assert (again.now.kind, again.now.stats()) == (
        "ivfpq",
        index.now.stats()._replace(
            live=1995, deleted_ratio=5 / 2000, bytes=again.now.stats().bytes
        ),
    )
    found = again.now.search(rows[5:20], 1)
    assert [row[0] for row in found.labels] == list(range(5, 20))
    assert not np.isin(np.array(again.now.search(rows[:5], 5).labels), np.arange(5)).any()
    assert not again.maintain()

    assert snapshot.load(tmp_path, 16, "cosine", 2) is None
    assert snapshot.load(tmp_path, 17, "l2", 2) is None
    saved = next(tmp_path.glob("graph.*"))
    data = bytearray(saved.read_bytes())
    data[len(data) // 2] ^= 1
    saved.write_bytes(bytes(data))
    assert snapshot.load(tmp_path, 16, "l2", 2) is None


def test_a_shard_with_lists_reports_explains_and_opens_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches say how many lists they read, within budgets and filters; a start takes the lists as they were saved."""
    narrow = partial(Index, room=Room(400_000), trainer=train)
    monkeypatch.setattr("services.vector_search.shard.Index", narrow)
    rows = clustered(2000, DIMENSION, 1)
    one = shard(tmp_path, exact_below=300)
    one.apply("1-0", write(0, [document(str(i), row, n=i) for i, row in enumerate(rows)]))
    one.sync()
    vectors.settle(one)
    assert one.settled
    plain = one.search(ask(rows[:1]))
    assert plain.report is not None
    assert (plain.path, plain.report.kind) == ("ivfpq", "ivfpq")
    assert plain.report.effort == one.stats()["effort"]
    assert plain.report.scanned == []
    named = one.search(ask(rows[:2], with_lists=True)).report
    assert named is not None
    assert [len(set(lists)) for lists in named.scanned] == [named.lists] * 2
    most = one.search(ask(rows[:1], budget_ms=60_000.0)).report
    assert most is not None
    assert (most.effort, most.fits) == (lists_for(2000 - 256), True)
    assert one.search(ask(rows[:1], effort="exact")).path == "exact"
    assert one.search(ask(rows[:1], filter={"n": {"$lt": 1500}})).path == "filtered-ivfpq"
    assert one.search(ask(rows[:1], filter={"n": {"$lt": 3}})).path == "filtered-exact"
    for row in rows[:256]:
        one.search(ask(row))
    assert one.audit_due
    assert one.audit() > 0.9
    told = one.stats()
    assert (told["index"], told["compared"]) == ("ivfpq", 256)
    assert one.keep_graph()
    assert not one.keep_graph()
    before = [hit.id for hit in one.search(ask(rows[:1])).hits[0]]
    one.close()

    again = shard(tmp_path, exact_below=300)
    assert again.stats()["index"] == "ivfpq"
    assert [hit.id for hit in again.search(ask(rows[:1])).hits[0]] == before
    assert not again.keep_graph()
    again.close()


# -- one quantizer for several shards


def test_shards_share_a_quantizer_that_only_one_may_train() -> None:
    """A shard waits for the right to train, and compares every row; the others take over what it made, untrained."""
    shared, calls = CollectionQuantizer(), [0]

    def trainer(work: TrainingWork, sample: Floats, stopped: Callable[[], bool]) -> Quantizer:
        calls[0] += 1
        return train(work, sample, stopped)

    one = made(clustered(1500, 16, 1), trainer=trainer, quantizers=shared)
    other = made(clustered(1800, 16, 2), trainer=trainer, quantizers=shared)
    for index in (one, other):
        settle(index)
        assert (index.now.kind, index.now.stats().path, calls) == ("ivfpq", "exact", [0])
        assert (index.search(ONE, 1).lists, index.now.stats().quantizer) == (0, "")
    assert (shared.wanted, shared.offered) == (True, None)
    shared.grant()
    for index in (one, other):
        settle(index)
        found = index.search(ONE, 1)
        assert (found.lists > 0, found.quantizer) == (True, shared.named[0])
    assert calls == [1]
    assert shared.offered is not None
    shared.published()

    # Another process' quantizer is taken over without a search by neither; the rows stay found.
    elsewhere = TrainedQuantizer(trained(prepare(clustered(1500, 16, 3), "cosine"), "cosine", 8), 8)
    shared.take(elsewhere)
    assert one.now.stats().quantizer != shared.named[0]
    assert one.search(ONE, 1).quantizer == one.now.stats().quantizer
    for index in (one, other):
        settle(index)
        assert index.now.stats().quantizer == elsewhere.quantizer.version
    assert calls == [1]


def test_lists_of_a_start_give_the_collection_its_quantizer(tmp_path: Path) -> None:
    """Saved lists are not trained anew where the registry knows no quantizer; a lapsed right trains nothing."""
    rows = clustered(2000, 16, 1)
    kept = settle(made(rows, metric="l2")).now.snapshot()
    assert kept is not None
    snapshot.save(tmp_path, kept, "1-0")
    read = snapshot.load(tmp_path, 16, "l2", 2)
    assert read is not None
    store, shared = VectorRows(16), CollectionQuantizer()
    store.append(rows, np.arange(2000), np.arange(2000))

    def never(work: TrainingWork, sample: Floats, stopped: Callable[[], bool]) -> Quantizer:
        raise AssertionError("nothing is to be trained")

    index = Index(16, "l2", exact_below=300, threads=2, room=FEW, trainer=never, quantizers=shared)
    index.restore(store, read.structure, len(read.labels), read.recall)
    settle(index)
    assert (shared.wanted, shared.named) == (True, ("", 0))
    shared.grant()
    settle(index)
    assert shared.offered is not None
    assert shared.named[0] == kept.version == index.now.stats().quantizer
