"""The plane of a map: as good as numpy's, the same for the same sample, and turned as little as possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.vector_search.index.rows import Floats, VectorRows
from services.vector_search.projection import Basis, fit, sampled


def _vectors(seed: int, count: int, dimension: int, decay: float = 3.0) -> Floats:
    """Rows whose numbers differ less and less from dimension to dimension, about a point that is not the origin."""
    rng = np.random.default_rng(seed)
    spread = np.exp(-np.arange(dimension) / decay)
    return (rng.standard_normal((count, dimension)) * spread + rng.random(dimension)).astype("f4")


def _variances(vectors: Floats) -> Floats:
    centred = vectors.astype(np.float64) - vectors.astype(np.float64).mean(axis=0)
    found: Floats = np.square(np.linalg.svd(centred, compute_uv=False))
    return found


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 40), st.floats(0.5, 50.0))
def test_the_plane_holds_as_much_as_that_of_an_svd(
    seed: int, count: int, dimension: int, decay: float
) -> None:
    """The variance along the two axes is that of numpy's two largest singular values; the axes are orthonormal."""
    vectors = _vectors(seed, count, dimension, decay)
    expected = _variances(vectors)

    basis, explained = fit(vectors)
    places = basis.project(vectors)

    held = np.square(places).sum()
    assert held >= 0.98 * expected[:2].sum() - 1e-6
    assert held <= expected[:2].sum() * (1 + 1e-3) + 1e-6
    if expected.sum() > 1e-6:
        assert explained == pytest.approx(held / expected.sum(), abs=1e-3)
    axes = basis.rows[1 : 1 + min(2, dimension)]
    assert np.allclose(axes @ axes.T, np.eye(len(axes)), atol=1e-5)
    assert np.allclose(places.mean(axis=0), 0.0, atol=1e-4)


def test_the_axes_are_those_of_an_svd() -> None:
    """Where two directions stand out, each axis is numpy's, up to its sign."""
    vectors = _vectors(1, 3000, 64, decay=2.0)
    centred = vectors.astype(np.float64) - vectors.mean(axis=0)
    expected = np.linalg.svd(centred, full_matrices=False)[2][:2]

    basis, _ = fit(vectors)

    assert np.abs((basis.rows[1:] * expected).sum(axis=1)) == pytest.approx([1.0, 1.0], abs=1e-4)


def test_the_same_sample_has_the_same_plane() -> None:
    """Computing again changes no bit, and the bytes that other shards get say the same."""
    vectors = _vectors(2, 500, 32)
    first, again = fit(vectors)[0], fit(vectors)[0]

    assert first.encode() == again.encode()
    copy = Basis.decode(first.encode())
    assert (copy.project(vectors) == first.project(vectors)).all()


@given(st.integers(0, 10_000), st.floats(0.5, 50.0))
def test_a_map_does_not_flip(seed: int, decay: float) -> None:
    """Drawn anew after some rows changed, points stay near: no axis is mirrored or exchanged for the other."""
    vectors = _vectors(seed, 400, 24, decay)
    changed = np.vstack([vectors[20:], _vectors(seed + 1, 20, 24, decay)])
    before, _ = fit(vectors)
    for start in (before, Basis(before.rows * np.array([[1], [-1], [1]], np.float32))):
        after, _ = fit(changed, start)
        old, new = start.rows[1:], after.rows[1:]
        towards = old @ new.T
        # Of all turns within the new plane this one has its axes nearest to the old ones.
        assert np.allclose(towards, towards.T, atol=1e-4)
        assert np.trace(towards) >= 0


@pytest.mark.parametrize(
    "vectors",
    [
        np.ones((1, 5)),
        np.ones((40, 5)),
        np.zeros((3, 2)),
        np.array([[1.0], [2.0], [4.0]]),
        np.vstack([np.full((9, 6), 3e38), np.full((1, 6), -3e38)]),
        np.full((4, 3), 1e-38),
    ],
)
def test_odd_samples_have_finite_places(vectors: Floats) -> None:
    """One row, equal rows, zeros, one dimension, and numbers at the ends of float32."""
    sample = vectors.astype("f4")
    basis, explained = fit(sample)

    assert np.isfinite(basis.rows).all()
    assert np.isfinite(basis.project(sample)).all()
    assert 0.0 <= explained <= 1.0
    assert len(basis.encode()) == 12 * sample.shape[1]


@pytest.mark.parametrize("raw", [b"", b"1234", b"x" * 13])
def test_bytes_that_are_no_basis(raw: bytes) -> None:
    """Three rows of float32, or an error that says so."""
    with pytest.raises(ValueError, match="expected three rows"):
        Basis.decode(raw)


def _rows(labels: int, dead: set[int]) -> VectorRows:
    rows = VectorRows(1)
    names = np.arange(1, labels + 1)
    rows.append(np.zeros((labels, 1), np.float32), names, names)
    rows.kill(np.array(sorted(dead), np.int64))
    return rows


@given(st.integers(0, 300), st.sets(st.integers(1, 300)), st.integers(1, 100))
def test_a_sample_is_of_live_rows_and_stays(count: int, dead: set[int], most: int) -> None:
    """As many live rows as asked for, each once; a smaller sample begins a larger one, and rows that stay are in it."""
    dead = {label for label in dead if label <= count}
    view = _rows(count, dead).view
    found = view.labels[sampled(view, most)].tolist()

    assert len(found) == len(set(found)) == min(most, count - len(dead))
    assert not dead & set(found)
    assert found[: most // 2] == view.labels[sampled(view, max(most // 2, 1))].tolist()[: most // 2]
    whole = view.labels[sampled(_rows(count, set()).view, most)].tolist()
    assert [label for label in whole if label not in dead] == found[: len(set(whole) - dead)]


def test_a_sample_is_spread_over_all_rows() -> None:
    """Rows of every age are as likely: each tenth of 100,000 has about a tenth of 5,000."""
    view = _rows(100_000, set()).view
    tenths = np.bincount((sampled(view, 5000) // 10_000).astype(int), minlength=10)

    assert tenths.min() > 400
    assert tenths.max() < 600
