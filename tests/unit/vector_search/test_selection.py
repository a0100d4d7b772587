"""Selections of the nearest: equal to sorting, the queues to their definition, lengths to the paper's figure."""

from __future__ import annotations

import heapq
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from services.vector_search.index import selection
from services.vector_search.index.rows import Floats
from services.vector_search.index.selection import ExactWay, queue_length, select, select_by_queues

WAYS: tuple[ExactWay, ...] = ("reservoir", "heap")
QUEUES = (1, 2, 4, 8, 16, 32, 64)


def by_sorting(distances: Floats, k: int, queues: int = 1, length: int = 1 << 30) -> Any:
    """Return (numbers, distances) of each row by the definition, one candidate after the other."""
    found = []
    for row in distances.tolist():
        pairs = [(value, number) for number, value in enumerate(row) if value < math.inf]
        kept = [
            heapq.nsmallest(length, (pair for pair in pairs if pair[1] % queues == queue))
            for queue in range(queues)
        ]
        best = sorted(pair for queue in kept for pair in queue)[:k]
        found.append(best + [(math.inf, -1)] * (k - len(best)))
    return [[number for _, number in row] for row in found], [[d for d, _ in row] for row in found]


# Few values, so that many are equal; every kind of number that a distance can be.
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 2.0, -1.0, math.inf, -math.inf, math.nan]),
    st.floats(width=32, allow_nan=False),
)
SHAPES = st.tuples(st.integers(1, 3), st.integers(0, 300))


@pytest.fixture(params=["kernel", "plain"])
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, and what stands in for it where it cannot run."""
    if request.param == "plain":
        monkeypatch.setattr(selection, "kernel", lambda: None)
    elif selection.kernel() is None:
        pytest.skip("no AVX512 or no compiler here")


@pytest.mark.usefixtures("without")
def test_a_selection_is_what_sorting_finds() -> None:
    """Reservoir, heap and queues give the numbers and distances of the definition, ties by number."""

    @given(
        arrays.arrays(np.float32, SHAPES, elements=VALUES), st.integers(1, 70),
        st.sampled_from(QUEUES), st.integers(1, 20),
    )  # fmt: skip
    def equal(distances: Floats, k: int, queues: int, length: int) -> None:
        exact = by_sorting(distances, k)
        for way in WAYS:
            found = select(distances, k, way)
            assert (found.numbers.tolist(), found.distances.tolist()) == exact
        found = select_by_queues(distances, k, queues, length)
        assert (found.numbers.tolist(), found.distances.tolist()) == by_sorting(
            distances, k, queues, length
        )
        whole = select_by_queues(distances, k, queues, k)
        assert (whole.numbers.tolist(), whole.distances.tolist()) == exact

    equal()


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("order", ["falling", "rising", "random", "equal"])
@pytest.mark.parametrize("k", [1, 10, 100, 1000])
def test_long_streams_in_any_order(order: str, k: int) -> None:
    """The bound of a reservoir and the places of a queue are right after many thinnings, in the worst order too."""
    distances = np.random.default_rng(k).standard_normal((2, 20_011)).astype(np.float32)
    if order in {"falling", "rising"}:
        distances = np.sort(distances, axis=1)[:, :: -1 if order == "falling" else 1].copy()
    elif order == "equal":
        distances = np.round(distances)
    exact = np.argsort(distances, axis=1, kind="stable")[:, :k]

    for found in (
        select(distances, k),
        select(distances, k, "heap"),
        select_by_queues(distances, k, 16, k),
    ):
        assert np.array_equal(found.numbers, exact)
        assert np.array_equal(found.distances, np.take_along_axis(distances, exact, axis=1))


def test_lengths_of_the_paper() -> None:
    """K = 100: 23, 15, 10 and 8 for 8, 16, 32 and 64 queues (figure 4.5); bad numbers are refused."""
    assert [queue_length(100, queues) for queues in (1, 2, 4, 8, 16, 32, 64)] == [
        100, 63, 38, 23, 15, 10, 8,
    ]  # fmt: skip
    assert [queue_length(10, queues) for queues in (1, 8, 16, 32, 64)] == [10, 5, 4, 3, 3]
    assert queue_length(1, 64) == 1
    assert queue_length(100_000, 64) < 2000  # no number on the way is too large
    for k, queues, identical in ((0, 8, 0.99), (10, 0, 0.99), (10, 8, 1.0), (10, 8, -0.1)):
        with pytest.raises(ValueError, match="expected k and queues from 1, and a share below 1"):
            queue_length(k, queues, identical)
    for queues, length in ((3, 5), (128, 5), (0, 5), (8, 0)):
        with pytest.raises(ValueError, match="expected a power of two up to 64"):
            select_by_queues(np.zeros((1, 9), np.float32), 3, queues, length)


@given(st.integers(1, 400), st.integers(1, 200), st.floats(0.0, 0.9999))
def test_a_length_is_the_least_that_is_sure_enough(k: int, queues: int, identical: float) -> None:
    """The union bound of the binomial tail, summed exactly, holds at the length and not at one less."""
    length = queue_length(k, queues, identical)

    def bound(size: int) -> float:
        ways = (math.comb(k, n) * int(queues - 1) ** (k - n) for n in range(size + 1, k + 1))
        return float(1 - queues * (sum(ways) / queues**k))

    assert 1 <= length <= k
    assert bound(length) >= identical - 1e-9
    assert length == 1 or bound(length - 1) < identical + 1e-9


def _clustered(queries: int, rng: np.random.Generator) -> Floats:
    """Distances of 32 lists of 500, one list after the other, the near ones first: their members are near, too."""
    lists = np.sort(rng.gamma(20, 0.05, (queries, 32)), axis=1)
    inner = rng.gamma(20, 0.05, (queries, 32, 500))
    return (lists[:, :, None] + inner).reshape(queries, -1).astype(np.float32)


@pytest.mark.parametrize("k", [10, 100])
def test_candidates_must_be_interleaved(k: int) -> None:
    """By number modulo the queues nearly no answer changes; one run of numbers a queue changes nearly all."""
    distances = _clustered(300, np.random.default_rng(7))
    exact = select(distances, k).numbers
    for queues in (8, 16, 32, 64):
        length = queue_length(k, queues)
        same = partial(np.array_equal, equal_nan=False)
        found = select_by_queues(distances, k, queues, length).numbers
        kept = sum(map(same, found, exact))
        # Candidate i of the shuffled row is in queue i mod queues, and was in run i // (n / queues).
        runs = np.ascontiguousarray(
            distances.reshape(300, queues, -1).transpose(0, 2, 1).reshape(300, -1)
        )
        lost = select_by_queues(runs, k, queues, length).distances
        best = np.take_along_axis(distances, exact, axis=1)
        assert kept >= 0.97 * 300  # 99 % expected, of 300 drawn once
        assert sum(map(same, lost, best)) <= 0.5 * 300
