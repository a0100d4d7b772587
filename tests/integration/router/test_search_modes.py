"""Searches by text, by both and for diversity over HTTP: the same by calls and by jobs, on one shard and on several."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from spillway_client import AsyncSpillway, InvalidInputError

from common import ranking
from common.bus import Bus
from common.ids import ulid
from common.registry.collections import Collections
from tests.integration.router.test_collections import call
from tests.integration.router.test_shard_reads import Calls, without_id
from tests.support.chat import post
from tests.support.mesh import Mesh
from tests.support.scripted_generator import Generator

from .test_grounding import DOCUMENTS, forced, grounded, pages  # noqa: F401 - a fixture

DIMENSION, ROWS, K = 16, 60, 6
WORDS = ["kiwi", "oak", "sun", "zinc", "fern", "loam", "mist"]


@pytest.fixture
def calls(mesh: Mesh) -> Calls:
    """The count of the shared mesh's router."""
    return Calls(mesh)


def points(count: int) -> Any:
    return np.random.default_rng(3).standard_normal((count, DIMENSION)).astype(np.float32)


def texts(count: int) -> list[str]:
    rng = np.random.default_rng(4)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 6))) for _ in range(count)]


@contextlib.asynccontextmanager
async def collection(
    http: aiohttp.ClientSession, bus: Bus, name: str, shards: int
) -> AsyncIterator[str]:
    """A collection of texts with vectors of their own, without an encoder; its path."""
    made = {"name": name, "model": None, "dimension": DIMENSION, "metric": "cosine"}
    status, body = await call(http, "POST", "/v1/collections", made)
    assert status == 201, body
    old = await Collections(bus).get("default", name)
    assert old is not None
    new = msgspec.structs.replace(old, id=f"c{ulid()}", shards=shards)
    assert await Collections(bus).replace(old, new)
    rows = [
        {"id": f"d{i}", "text": text, "vector": row.tolist(), "metadata": {"n": i}}
        for i, (row, text) in enumerate(zip(points(ROWS), texts(ROWS), strict=True))
    ]
    path = f"/v1/collections/{name}"
    status, body = await call(http, "POST", f"{path}/documents", {"documents": rows})
    assert status == 200, body
    yield path
    await call(http, "DELETE", path)


@pytest.mark.parametrize("shards", [1, 3])
async def test_modes_by_calls_and_by_jobs(
    http: aiohttp.ClientSession, bus: Bus, calls: Calls, shards: int
) -> None:
    """By words, by both, and diversified, one query and many: a call finds what a job finds, and says the mode."""
    row = points(ROWS)[7].tolist()
    both = {"text": "kiwi zinc", "vector": row, "mode": "hybrid"}
    bodies: list[dict[str, Any]] = [
        {"text": "kiwi zinc", "mode": "text", "k": K},
        {"texts": ["kiwi", "nowhere", "oak sun"], "mode": "text", "k": 3, "include_text": False},
        {**both, "k": K, "include_scores": True},
        {**both, "k": ROWS, "filter": {"n": {"$lt": 20}}},
        {**both, "k": K, "mmr": {"lambda": 0.3, "candidates": 30}},
        {"vector": row, "k": K, "mmr": {"candidates": 20}, "include_scores": True},
        {"texts": ["oak", "fern"], "vectors": [row, row], "mode": "hybrid", "k": 2},
    ]
    async with collection(http, bus, f"modes-{shards}", shards) as path:
        found = [await calls.search(http, path, body) for body in bodies]
        for number, body in enumerate(bodies):
            key = {"Idempotency-Key": f"modes-{shards}-{number}"}
            status, job = await call(http, "POST", f"{path}/search", body, **key)
            assert status == 200, job
            assert without_id(job) == without_id(found[number])
            assert job["mode"] == body.get("mode", "vector")
        held = [i for i, text in enumerate(texts(ROWS)) if {"kiwi", "zinc"} & set(text.split())]
        assert {hit["id"] for hit in found[0]["data"]} <= {f"d{i}" for i in held}
        assert found[0]["path"] == "text"
        assert [len(row["data"]) for row in found[1]["data"]] == [3, 0, 3]
        scores = [hit["scores"] for hit in found[2]["data"]]
        assert all(-1 <= each["vector"] <= 1 and each.get("text", 1.0) > 0 for each in scores)
        assert found[2]["data"][0]["score"] <= 2 / (ranking.RANK_OFFSET + 1)
        assert len(found[3]["data"]) == 20
        assert {hit["metadata"]["n"] for hit in found[3]["data"]} == set(range(20))
        assert found[4]["data"][0]["id"] == found[2]["data"][0]["id"]
        assert set(found[5]["data"][0]["scores"]) == {"vector"}


async def test_texts_follow_updates_and_deletes(http: aiohttp.ClientSession, name: str) -> None:
    """A text search sees a write that was answered; with an encoder a question is enough for both searches."""
    path = f"/v1/collections/{name}"
    documents = [{"id": "a", "text": "The cat sat on the mat"}, {"id": "b", "text": "Rockets fly"}]
    await call(http, "POST", f"{path}/documents", {"documents": documents})

    async def ids(**body: Any) -> list[str]:
        status, found = await call(http, "POST", f"{path}/search", body)
        assert status == 200, found
        return [hit["id"] for hit in found["data"]]

    assert await ids(text="a rocket", mode="text") == ["b"]
    assert (await ids(text="Rockets fly", mode="hybrid"))[0] == "b"
    changed = {"documents": [{"id": "b", "text": "Trains roll"}]}
    await call(http, "POST", f"{path}/documents", changed)
    assert await ids(text="rockets", mode="text") == []
    assert await ids(text="train", mode="text") == ["b"]
    await call(http, "POST", f"{path}/documents/delete", {"ids": ["b"]})
    assert await ids(text="train", mode="text") == []
    assert await ids(text="train", mode="hybrid") == ["a"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"vector": [1.0], "mode": "text"}, "vector"),
        ({"vector": [1.0], "mode": "hybrid"}, "text"),
        ({"text": "x", "mode": "nearest"}, "mode"),
        ({"text": "x", "mmr": {"lambda": 2}}, "mmr.lambda"),
    ],
)
async def test_bad_modes_are_400(
    http: aiohttp.ClientSession, name: str, body: dict[str, Any], param: str
) -> None:
    """The error names the field."""
    status, found = await call(http, "POST", f"/v1/collections/{name}/search", body)
    assert (status, found["error"]["param"]) == (400, param)


async def test_a_collection_without_texts_says_so(http: aiohttp.ClientSession) -> None:
    """Words cannot be searched for where documents have none: 400 `no_texts`, not an empty list."""
    made = {"name": "bare", "model": None, "dimension": 2, "metric": "cosine"}
    await call(http, "POST", "/v1/collections", made)
    path = "/v1/collections/bare"
    empty = await call(http, "POST", f"{path}/search", {"text": "x", "mode": "text"})
    assert (empty[0], empty[1]["data"]) == (200, [])
    documents = {"documents": [{"id": "a", "vector": [1.0, 0.0]}]}
    await call(http, "POST", f"{path}/documents", documents)
    for body in ({"mode": "text"}, {"mode": "hybrid", "vector": [1.0, 0.0]}):
        status, found = await call(http, "POST", f"{path}/search", {"text": "x", **body})
        assert (status, found["error"]["code"]) == (400, "no_texts")
    await call(http, "DELETE", path)


async def test_the_sdk_searches_in_every_mode(
    http: aiohttp.ClientSession, mesh: Mesh, name: str
) -> None:
    """The SDK passes modes, diversity and scores, and gives back what was said."""
    documents = [{"id": "a", "text": "The cat sat"}, {"id": "b", "text": "Rockets fly"}]
    await call(http, "POST", f"/v1/collections/{name}/documents", {"documents": documents})
    async with AsyncSpillway(mesh.url) as client:
        found = await client.search(name, "rocket", mode="text")
        assert (found.mode, found.path, [hit.id for hit in found.data]) == ("text", "text", ["b"])
        hybrid = await client.search(
            name, "Rockets fly", mode="hybrid", mmr={"lambda": 0.7}, include_scores=True
        )
        assert (hybrid.mode, hybrid.data[0].id) == ("hybrid", "b")
        assert set(hybrid.data[0].scores or ()) == {"vector", "text"}
        many = await client.search_many(name, ["cat", "rocket"], mode="text")
        assert [[hit.id for hit in one.data] for one in many] == [["a"], ["b"]]
        with pytest.raises(InvalidInputError):
            await client.search(name, "x", vector=[1.0])


@pytest.mark.parametrize("retrieval", [{"mode": "text"}, {"mode": "hybrid", "mmr": {}}])
async def test_grounded_answers_search_in_a_mode(
    http: aiohttp.ClientSession,
    model: Generator,
    pages: str,  # noqa: F811 - the fixture
    retrieval: dict[str, Any],
) -> None:
    """`retrieval` takes a mode and diversity; passages are found by the question's words."""
    model.script = forced
    status, answer, _ = await post(
        http, grounded(pages, "What is the capital of Velmora?", retrieval=retrieval)
    )
    assert status == 200, answer
    rows = answer["retrieval"]["passages"]
    assert rows[0]["document_id"] == "velmora.md"
    assert DOCUMENTS["velmora.md"].startswith("The capital")
