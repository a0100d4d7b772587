"""A map put together from the parts of shards, a free vector on it, and the statistics of several shards."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.search import MapPart, MapPoint
from services.router.responses.collection_map import collection_map, placed, positions, shares
from services.router.responses.collection_stats import collection_stats
from services.vector_search.index.rows import normalise
from services.vector_search.projection import fit

BASIS = array("f", [0.0] * 6).tobytes()


def part(rows: int, there: int | None = None, **fields: Any) -> MapPart:
    points = [MapPoint(f"{rows}-{i}", 0, float(i), -float(i)) for i in range(there or rows)]
    return MapPart(basis=BASIS, rows=rows, computed_ms=rows * 1000, points=points, **fields)


@given(st.lists(st.integers(0, 10_000), max_size=9), st.integers(1, 5000))
def test_each_shard_gives_its_share(rows: list[int], most: int) -> None:
    """All that fit or exactly as many as asked for, none more than it has, each within one of its exact share."""
    given_ = shares(rows, most)

    assert sum(given_) == min(sum(rows), most)
    for count, share in zip(rows, given_, strict=True):
        assert share <= count
        if sum(rows) > most:
            assert abs(share - count * most / sum(rows)) < 1


def test_parts_become_one_map() -> None:
    """Points by the shards' shares, the oldest drawing's time, and the ranges of what is shown."""
    body = collection_map("docs", [part(300, 40, explained=0.25), part(100, 40)], 40)

    assert [p["id"].split("-")[0] for p in body["points"]] == ["300"] * 30 + ["100"] * 10
    assert body["ranges"] == {"x": [0.0, 29.0], "y": [-29.0, 0.0]}
    assert (body["rows"], body["explained"], body["pending"]) == (400, 0.25, False)
    assert body["computed_at"] == 100.0
    assert base64.urlsafe_b64decode(body["basis"]) == BASIS


def test_a_part_that_is_not_drawn_yet() -> None:
    """The others are shown, and the map says that more will come."""
    body = collection_map("docs", [part(3), MapPart(basis=BASIS, pending=True)], 10)
    assert (len(body["points"]), body["rows"], body["pending"]) == (3, 3, True)
    none = collection_map("docs", [MapPart(pending=True)], 10)
    assert (none["basis"], none["computed_at"], none["points"], none["pending"]) == (
        None,
        None,
        [],
        True,
    )
    assert none["ranges"] == {"x": None, "y": None}
    empty = collection_map("docs", [], 10)
    assert (empty["rows"], empty["pending"], empty["explained"]) == (0, False, None)


@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_a_free_vector_lies_where_a_stored_one_would(metric: str) -> None:
    """The router places a vector as the shards place the same one."""
    rng = np.random.default_rng(4)
    stored = rng.standard_normal((50, 9)).astype("f4") * 3
    prepared = normalise(stored) if metric == "cosine" else stored
    basis, _ = fit(prepared)
    expected = basis.project(prepared)
    for row, (x, y) in zip(stored, expected.tolist(), strict=True):
        found = placed(basis.encode(), row.tobytes(), metric)
        assert (found["x"], found["y"]) == pytest.approx((x, y), abs=1e-5)
    zero = placed(basis.encode(), bytes(36), "l2")
    assert positions(basis.encode(), [zero])["data"] == [zero]


def stats(**fields: Any) -> dict[str, Any]:
    plain = {
        "documents": 10, "chunks": 30, "deleted_ratio": 0.0, "bytes": 100, "log_bytes": 5, "newer": 1,
        "index": "exact", "ef": 0, "recall": 1.0, "audited_at": None, "compared": 0, "searches": {},
    }  # fmt: skip
    return {**plain, **fields}


def test_the_statistics_of_one_shard_are_its_own() -> None:
    """Nothing is left out of what a shard tells, known here or not."""
    only = stats(new="thing")
    assert collection_stats([only]) == only


def test_the_statistics_of_several_shards() -> None:
    """Counts are summed; of recall, audit and ef the worst is told."""
    first = stats(
        index="graph",
        ef=32,
        recall=0.97,
        audited_at=20.0,
        compared=256,
        searches={"graph": 5, "scan": 1},
    )
    second = stats(
        chunks=90, deleted_ratio=0.25, index="graph", ef=48, recall=0.96, audited_at=10.0, compared=100,
        searches={"graph": 5},
    )  # fmt: skip
    found = collection_stats([first, second])

    assert found["searches"] == {"graph": 10, "scan": 1}
    assert (found["documents"], found["chunks"], found["newer"], found["log_bytes"]) == (
        20,
        120,
        2,
        10,
    )
    assert (found["recall"], found["ef"], found["audited_at"], found["compared"]) == (
        0.96,
        48,
        10.0,
        356,
    )
    assert found["deleted_ratio"] == 0.2
    assert collection_stats([first, stats()])["audited_at"] is None
    assert collection_stats([stats(), first])["index"] == "graph"
