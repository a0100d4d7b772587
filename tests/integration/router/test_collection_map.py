"""A collection's map over HTTP: drawn when asked for, of one shard and of two, before and after writes."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest

from common.bus import Bus
from common.ids import ulid
from common.registry.collections import Collections
from common.registry.layout import ShardLayout
from common.wire.registry import CollectionRecord
from tests.integration.router.test_collections import call
from tests.support.waiting import until

DIMENSION = 12


def rows(seed: int, count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    spread = np.exp(-np.arange(DIMENSION) / 2)
    vectors = rng.standard_normal((count, DIMENSION)) * spread
    return [
        {"id": f"{seed}/{i} ☃", "vector": vector.tolist(), "metadata": {"title": f"No. {i}"}}
        for i, vector in enumerate(vectors)
    ]


@pytest.fixture(params=[1, 2])
async def path(
    request: pytest.FixtureRequest, http: aiohttp.ClientSession, bus: Bus
) -> AsyncIterator[str]:
    """The path of a collection of vectors on one shard, and on two."""
    name = f"m{ulid().lower()}"
    record = CollectionRecord(
        id=ulid(),
        tenant="default",
        name=name,
        dimension=DIMENSION,
        metric="cosine",
        shards=request.param,
        created_ms=1,
    )
    assert await Collections(bus).create(record)
    made = f"/v1/collections/{name}"
    yield made
    await call(http, "DELETE", made)


async def store(http: aiohttp.ClientSession, path: str, documents: list[dict[str, Any]]) -> None:
    """Store documents."""
    status, body = await call(http, "POST", f"{path}/documents", {"documents": documents})
    assert status == 200, body


async def whole(http: aiohttp.ClientSession, path: str, sample: int = 2000) -> Any:
    """Return the map once nothing of it is being drawn."""

    async def drawn() -> Any:
        status, body = await call(http, "GET", f"{path}/map?sample={sample}")
        assert status in {200, 202}, body
        return None if body["pending"] else body

    return await until(drawn)


async def test_an_empty_collection(http: aiohttp.ClientSession, path: str) -> None:
    """Its map is empty and there is nothing to wait for; what is asked for by id is not there."""
    status, body = await call(http, "GET", f"{path}/map")
    assert (status, body["points"], body["pending"], body["rows"]) == (200, [], False, 0)
    assert (body["basis"], body["computed_at"]) == (None, None)
    status, found = await call(http, "POST", f"{path}/map", {"ids": ["a"]})
    assert (status, found["data"], found["basis"]) == (200, [], None)


async def test_a_map_before_and_after_writes(http: aiohttp.ClientSession, path: str) -> None:
    """Every document lies where PCA puts it; new ones come in, deleted ones go, and the picture does not flip."""
    documents = rows(1, 300)
    await store(http, path, documents)
    status, first = await call(http, "GET", f"{path}/map")
    assert status == 200  # the first question waits until the map is drawn
    body = await whole(http, path)
    assert body["basis"] == first["basis"]
    assert {p["id"] for p in body["points"]} == {d["id"] for d in documents}
    assert body["points"][0]["title"].startswith("No. ")
    assert (body["rows"], body["collection"]) == (300, path.rsplit("/", 1)[1])
    assert_projected(body, documents)
    assert 0.3 < body["explained"] <= 1.0

    more = rows(2, 100)
    await store(http, path, more)
    gone = [d["id"] for d in documents[:50]]
    await call(http, "POST", f"{path}/documents/delete", {"ids": gone})
    status, stale = await call(http, "GET", f"{path}/map")
    assert status == 200  # what there is comes at once
    assert not {p["id"] for p in stale["points"]} & set(gone)
    after = await whole(http, path)
    assert {p["id"] for p in after["points"]} == {d["id"] for d in documents[50:] + more}
    assert_projected(after, documents[50:] + more)
    planes = [plane(found["basis"]) for found in (body, after)]
    assert np.trace(planes[0][1:] @ planes[1][1:].T) > 1.5

    some = await whole(http, path, 20)
    assert len(some["points"]) == 20
    assert {p["id"] for p in some["points"]} <= {p["id"] for p in after["points"]}


def plane(basis: str) -> Any:
    """Return a basis as its three rows."""
    return np.frombuffer(base64.urlsafe_b64decode(basis), "<f4").reshape(3, -1).astype(np.float64)


def assert_projected(body: Any, documents: list[dict[str, Any]]) -> None:
    """Every point is its document's unit vector in the plane, and the ranges are those of the points."""
    mean, *axes = plane(body["basis"])
    vectors = {d["id"]: np.array(d["vector"]) for d in documents}
    for point in body["points"]:
        vector = vectors[point["id"]]
        expected = np.array(axes) @ (vector / np.linalg.norm(vector) - mean)
        assert (point["x"], point["y"]) == pytest.approx(tuple(expected), abs=1e-5)
    xs = [p["x"] for p in body["points"]]
    assert body["ranges"]["x"] == [min(xs), max(xs)]


async def test_hits_lie_on_the_map(http: aiohttp.ClientSession, path: str) -> None:
    """The hits of a search, ids and a free vector have the map's coordinates, in the map that the client has."""
    documents = rows(3, 80)
    await store(http, path, documents)
    halves = ShardLayout(0, (0, 1))
    shards = {halves.shard_of(d["id"]) for d in documents}
    assert shards == {0, 1}  # with two shards both are asked
    drawn = await whole(http, path)
    shown = {p["id"]: p for p in drawn["points"]}

    query = documents[5]["vector"]
    _, found = await call(http, "POST", f"{path}/search", {"vector": query, "k": 4})
    ask = {"hits": found["data"], "basis": drawn["basis"]}
    status, lit = await call(http, "POST", f"{path}/map", ask)
    assert status == 200
    assert [p["id"] for p in lit["data"]] == [hit["id"] for hit in found["data"]]
    for point in lit["data"]:
        same = shown[point["id"]]
        assert (point["x"], point["y"]) == pytest.approx((same["x"], same["y"]), abs=1e-6)
        assert point["title"] == same["title"]

    ids = [documents[9]["id"], "gone", documents[2]["id"]]
    _, by_id = await call(http, "POST", f"{path}/map", {"ids": ids})
    assert [p["id"] for p in by_id["data"]] == [ids[0], ids[2]]
    assert by_id["basis"] == drawn["basis"]

    _, free = await call(http, "POST", f"{path}/map", {"vector": query, "basis": drawn["basis"]})
    same = shown[documents[5]["id"]]
    [point] = free["data"]
    assert (point["x"], point["y"]) == pytest.approx((same["x"], same["y"]), abs=1e-5)


@pytest.mark.parametrize(
    ("method", "query", "body", "param"),
    [
        ("GET", "?sample=0", None, "sample"),
        ("GET", "?sample=5001", None, "sample"),
        ("GET", "?sample=many", None, "sample"),
        ("POST", "", {}, None),
        ("POST", "", {"ids": ["a"], "hits": [{"id": "a"}]}, None),
        ("POST", "", {"ids": []}, "ids"),
        ("POST", "", {"ids": ["\n"]}, "ids"),
        ("POST", "", {"hits": [{"id": "a", "chunk": -1}]}, "hits[0].chunk"),
        ("POST", "", {"ids": ["a"], "basis": "abc"}, "basis"),
        ("POST", "", {"ids": ["a"], "basis": base64.b64encode(b"\xff" * 144).decode()}, "basis"),
        ("POST", "", {"vector": [1.0]}, "vector"),
        ("POST", "", {"vector": [0.0] * DIMENSION}, "vector"),
        ("POST", "", {"texts": ["a"]}, None),
    ],
)
async def test_what_makes_no_sense_is_refused(
    http: aiohttp.ClientSession, path: str, method: str, query: str, body: Any, param: str | None
) -> None:
    """400 that names the place."""
    status, error = await call(http, method, f"{path}/map{query}", body)
    assert (status, error["error"]["param"]) == (400, param)


async def test_a_collection_that_is_not_there(http: aiohttp.ClientSession) -> None:
    """404, whatever is asked."""
    for method, body in (("GET", None), ("POST", {"ids": ["a"]})):
        status, error = await call(http, method, "/v1/collections/nothing/map", body)
        assert (status, error["error"]["code"]) == (404, "collection_not_found")


async def test_statistics_of_several_shards(http: aiohttp.ClientSession, path: str) -> None:
    """Counts, and searches by path, are those of all shards."""
    await store(http, path, rows(4, 30))
    await call(http, "POST", f"{path}/search", {"vector": [1.0] * DIMENSION})
    status, body = await call(http, "GET", path)
    stats = body["stats"]
    assert (status, stats["documents"], stats["chunks"]) == (200, 30, 30)
    assert set(stats["searches"]) == {"exact"}
    assert (stats["audited_at"], stats["compared"], stats["recall"]) == (None, 0, 1.0)
