"""The map of a shard: nothing before it is drawn, kept while the shard changes little, gone rows left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import InvalidRequest
from common.wire.search import DocumentsWork, MapPart
from services.vector_search.projection import Basis
from services.vector_search.shard import Shard
from services.vector_search.shard_map import MOST_POINTS
from tests.support.vectors import DIMENSION, document, settle, shard, write


def part(one: Shard, sample: int = 100, **fields: Any) -> MapPart:
    work = DocumentsWork(collection="c1", op="map", sample=sample, **fields)
    found = one.documents(work).map
    assert found is not None
    return found


def fill(one: Shard, first: int, count: int, **metadata: Any) -> None:
    rng = np.random.default_rng(first)
    documents = [
        document(f"d{first + i}", rng.standard_normal(DIMENSION), **metadata) for i in range(count)
    ]
    one.apply(f"{first + 1}-0", write(first, documents))
    one.sync()


def remove(one: Shard, entry: int, *ids: str) -> None:
    one.apply(f"{entry}-0", write(entry, deletes=ids))
    one.sync()


@pytest.fixture
def one(tmp_path: Path) -> Any:
    made = shard(tmp_path)
    yield made
    made.close()


def test_an_empty_shard_has_an_empty_map(one: Shard) -> None:
    """There is nothing to draw, and nothing to wait for."""
    assert part(one) == MapPart()
    assert not one.draw_map()


def test_a_map_is_drawn_when_asked_for(one: Shard) -> None:
    """The first question is told to wait and says what is wanted; then points, ids and titles are there."""
    calls: list[str] = []
    one.call_when_map_wanted(lambda: calls.append("wanted"))
    fill(one, 0, 40, title="Of ships")
    assert (part(one), calls) == (MapPart(pending=True), ["wanted"])
    assert one.draw_map()
    assert not one.draw_map()

    found = part(one)
    assert (found.rows, found.pending, len(found.points)) == (40, False, 40)
    assert {point.id for point in found.points} == {f"d{i}" for i in range(40)}
    assert {point.title for point in found.points} == {"Of ships"}
    assert 0.0 < found.explained < 1.0
    assert found.computed_ms > 0
    assert part(one, 7).points == found.points[:7]
    assert calls == ["wanted"]


def test_a_map_stays_until_much_has_changed(one: Shard) -> None:
    """Up to a twentieth of the rows may be added or deleted; then what is there is shown while a new one is drawn."""
    fill(one, 0, 200)
    part(one)
    one.draw_map()
    before = part(one)

    fill(one, 200, 5)
    remove(one, 300, "d0", "d1", "d2", "d3", "d4")
    assert not part(one).pending
    remove(one, 301, "d5")
    stale = part(one, 200)
    assert (stale.pending, stale.basis, len(stale.points)) == (True, before.basis, 194)

    assert one.draw_map()
    after = part(one, 300)
    assert (after.pending, after.rows) == (False, 199)
    assert {p.id for p in after.points} == {f"d{i}" for i in range(6, 205)}
    axes = Basis.decode(before.basis).rows[1:] @ Basis.decode(after.basis).rows[1:].T
    assert np.trace(axes) > 1.0


def test_what_is_deleted_is_shown_no_more(one: Shard) -> None:
    """A deleted document leaves the map at once, and so do the old chunks of one that was stored again."""
    fill(one, 0, 100)
    part(one)
    one.draw_map()
    remove(one, 200, "d7")
    one.apply("301-0", write(301, [document("d8", np.ones(DIMENSION))]))
    one.sync()
    shown = {point.id for point in part(one).points}
    assert shown == {f"d{i}" for i in range(100)} - {"d7", "d8"}


def test_all_rows_deleted(one: Shard) -> None:
    """A shard that was emptied has an empty map again."""
    fill(one, 0, 3)
    part(one)
    one.draw_map()
    remove(one, 10, "d0", "d1", "d2")
    assert part(one).points == []
    one.draw_map()
    assert part(one) == MapPart()


def test_rows_keep_their_places_when_the_index_is_rebuilt(tmp_path: Path) -> None:
    """A map outlives a compaction, which moves rows."""
    one = shard(tmp_path, exact_below=50)
    fill(one, 0, 600)
    part(one)
    one.draw_map()
    places = {p.id: (p.x, p.y) for p in part(one, 5000).points}
    remove(one, 1000, *(f"d{i}" for i in range(300)))
    settle(one)
    assert one.stats()["index"] == "graph"

    assert {p.id: (p.x, p.y) for p in part(one, 5000).points} == {
        f"d{i}": places[f"d{i}"] for i in range(300, 600)
    }
    one.close()


def test_documents_lie_where_the_map_shows_them(one: Shard) -> None:
    """Asked for by id, a document's chunks have the coordinates of the map; unknown ones are left out."""
    fill(one, 0, 50, name="n")
    one.apply("60-0", write(60, [document("many", np.eye(DIMENSION)[:3], "abc")]))
    one.sync()
    part(one)
    one.draw_map()
    drawn = part(one)
    shown = {(p.id, p.chunk): p for p in drawn.points}

    found = part(one, ids=["many", "d3", "gone"], basis=drawn.basis).points
    assert [(p.id, p.chunk, p.title) for p in found] == [
        ("many", 0, None),
        ("many", 1, None),
        ("many", 2, None),
        ("d3", 0, "n"),
    ]
    for point in found:
        same = shown[point.id, point.chunk]
        assert (point.x, point.y) == pytest.approx((same.x, same.y), abs=1e-6)
    chosen = part(one, ids=["many", "many", "d3"], chunks=[2, 9, 0], basis=drawn.basis).points
    assert [(p.id, p.chunk) for p in chosen] == [("many", 2), ("d3", 0)]


def test_a_shard_draws_in_the_plane_of_another(tmp_path: Path) -> None:
    """Given a plane, a shard projects its rows with it, and keeps that until another one is asked for."""
    first, second = shard(tmp_path / "a"), shard(tmp_path / "b")
    fill(first, 0, 80)
    fill(second, 500, 60)
    part(first)
    first.draw_map()
    basis = part(first).basis
    assert part(second, basis=basis) == MapPart(basis=basis, pending=True)
    second.draw_map()

    found = part(second, basis=basis)
    assert (found.basis, found.rows, len(found.points)) == (basis, 60, 60)
    asked = part(second, ids=["d500"], basis=basis).points
    [same] = [p for p in found.points if p.id == "d500"]
    assert (asked[0].x, asked[0].y) == pytest.approx((same.x, same.y), abs=1e-6)
    assert part(second).pending  # its own plane is another one
    second.draw_map()
    assert part(second).basis not in (b"", basis)
    for made in (first, second):
        made.close()


@pytest.mark.parametrize("fields", [{"basis": b"x"}, {"ids": ["a"]}])
def test_questions_that_make_no_sense(one: Shard, fields: dict[str, Any]) -> None:
    """A plane of another dimension, and ids without a plane."""
    with pytest.raises(InvalidRequest, match="basis"):
        part(one, **fields)


def test_the_sample_is_bounded(tmp_path: Path) -> None:
    """However many rows there are, no more than 5,000 are drawn, however many are asked for."""
    one = shard(tmp_path, dimension=2)
    rng = np.random.default_rng(5)
    for batch in range(4):
        documents = [
            document(f"{batch}-{i}", rng.standard_normal((2, 2)), "ab") for i in range(900)
        ]
        one.apply(f"{batch + 1}-0", write(batch, documents))
    one.sync()
    part(one)
    one.draw_map()
    found = part(one, 10**9)
    assert (found.rows, len(found.points)) == (7200, MOST_POINTS)
    one.close()
