"""Collections: documents in and out, search by text and vector, encoders that do not match, re-embedding."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from common.bus import Bus
from common.clock import SystemClock
from common.config import Common
from common.ids import ulid
from common.registry.collections import Collections
from common.wire.registry import CollectionRecord
from tests.support.mesh import Mesh

CAT = {"id": "a/b", "text": "The cat sat on the mat", "metadata": {"n": 1}}
MOON = {"id": "c", "text": "Rockets fly to the moon", "metadata": {"n": 2}}


async def call(
    http: aiohttp.ClientSession, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    async with http.request(method, path, json=body, headers=headers) as response:
        return response.status, json.loads(await response.read())


async def test_documents_are_stored_found_and_deleted(
    http: aiohttp.ClientSession, name: str
) -> None:
    """Store, get, list, search, skip what is unchanged, delete."""
    path = f"/v1/collections/{name}"
    status, stored = await call(http, "POST", f"{path}/documents", {"documents": [CAT, MOON]})
    assert (status, [item["status"] for item in stored["data"]]) == (200, ["stored", "stored"])

    _, again = await call(http, "POST", f"{path}/documents", {"documents": [CAT]})
    assert [item["status"] for item in again["data"]] == ["unchanged"]

    for where in ("a/b", "a%2Fb"):
        status, got = await call(http, "GET", f"{path}/documents/{where}")
        assert (200, CAT["text"], {"n": 1}) == (status, got["text"], got["metadata"])

    question = {"text": CAT["text"], "k": 5, "after": stored["applied"]}
    status, found = await call(http, "POST", f"{path}/search", question)
    assert (status, [hit["id"] for hit in found["data"]]) == (200, ["a/b", "c"])
    assert found["data"][0]["score"] == pytest.approx(1.0, abs=1e-5)

    filtered = {"text": "cat", "filter": {"n": {"$gt": 1}}}
    _, found = await call(http, "POST", f"{path}/search", filtered)
    assert [hit["id"] for hit in found["data"]] == ["c"]

    _, page = await call(http, "GET", f"{path}/documents?limit=1&include=text,vectors")
    assert (len(page["data"]), page["has_more"], len(page["data"][0]["vectors"][0])) == (
        1,
        True,
        384,
    )
    _, rest = await call(http, "GET", f"{path}/documents?limit=10&after={page['next']}")
    assert (len(rest["data"]), rest["has_more"]) == (1, False)

    status, body = await call(http, "GET", path)
    assert (status, body["stats"]["documents"]) == (200, 2)

    assert (await _deleted(http, f"{path}/documents/delete", {"ids": ["c", "x"]})) == (200, 1)
    status, gone = await call(http, "DELETE", f"{path}/documents/a%2Fb")
    assert (status, gone["deleted"]) == (200, True)
    status, error = await call(http, "DELETE", f"{path}/documents/a%2Fb")
    assert (status, error["error"]["code"]) == (404, "document_not_found")


async def _deleted(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, int]:
    status, answer = await call(http, "POST", path, body)
    return status, answer["deleted"]


async def test_many_questions_have_many_lists(http: aiohttp.ClientSession, name: str) -> None:
    """`texts` and `vectors` give one list of hits per query, in order."""
    path = f"/v1/collections/{name}"
    await call(http, "POST", f"{path}/documents", {"documents": [CAT, MOON]})
    _, texts = await call(
        http, "POST", f"{path}/search", {"texts": [MOON["text"], CAT["text"]], "k": 1}
    )
    _, page = await call(http, "GET", f"{path}/documents?include=vectors")
    rows = {doc["id"]: doc["vectors"][0] for doc in page["data"]}
    _, vectors = await call(
        http, "POST", f"{path}/search", {"vectors": [rows["c"], rows["a/b"]], "k": 1}
    )

    assert [item["data"][0]["id"] for item in texts["data"]] == ["c", "a/b"]
    assert [item["data"][0]["id"] for item in vectors["data"]] == ["c", "a/b"]


async def test_long_documents_are_split(http: aiohttp.ClientSession, name: str) -> None:
    """A long text becomes chunks whose offsets point at their text, and each can be found."""
    text = "\n\n".join(f"# Part {i}\n\n" + f"sentence about topic{i}. " * 60 for i in range(5))
    path = f"/v1/collections/{name}"
    _, stored = await call(
        http, "POST", f"{path}/documents", {"documents": [{"id": "long", "text": text}]}
    )
    assert stored["data"][0]["chunks"] > 5

    _, found = await call(http, "POST", f"{path}/search", {"text": "topic3", "k": 3})
    for hit in found["data"]:
        assert text[hit["start"] : hit["end"]] == hit["text"]


async def test_vectors_only(http: aiohttp.ClientSession, name: str) -> None:
    """A collection without an encoder takes vectors, and refuses texts with a sentence that says why."""
    only = f"{name}-v"
    status, _ = await call(
        http,
        "POST",
        "/v1/collections",
        {"name": only, "model": None, "dimension": 2, "metric": "l2"},
    )
    assert status == 201
    path = f"/v1/collections/{only}"
    docs = [{"id": "x", "vector": [0, 1]}, {"id": "y", "vector": [3, 5], "text": "why"}]
    status, _ = await call(http, "POST", f"{path}/documents", {"documents": docs})
    _, found = await call(http, "POST", f"{path}/search", {"vector": [3, 5]})
    assert (status, found["data"][0]["id"], found["data"][0]["score"]) == (200, "y", 0.0)

    for body, code in (
        ({"documents": [{"text": "no"}]}, "vectors_only"),
        ({"documents": [{"vector": [1]}]}, "dimension_mismatch"),
        ({"documents": [{"vector": [1e39, 0]}]}, "invalid_value"),
        ({"documents": [{"metadata": {}}]}, "invalid_value"),
        ({"documents": [{"vector": [1, 2], "unknown": 1}]}, "unknown_field"),
        ({"documents": [{"id": "\x00", "vector": [1, 2]}]}, "invalid_id"),
        ({"documents": [{"id": "a", "vector": [1, 2]}] * 2}, "duplicate_id"),
        ({"documents": []}, "invalid_value"),
    ):
        status, error = await call(http, "POST", f"{path}/documents", body)
        assert (400, code) == (status, error["error"]["code"])
    status, error = await call(http, "POST", f"{path}/search", {"text": "no"})
    assert (status, error["error"]["code"]) == (400, "vectors_only")
    await call(http, "DELETE", path)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"name": "Bad Name"}, 400, "invalid_value"),
        ({"name": "../x"}, 400, "invalid_value"),
        ({"name": "x", "metric": "hamming"}, 400, "invalid_value"),
        ({"name": "x", "colour": 1}, 400, "unknown_field"),
        ({"name": "x", "model": "nobody"}, 404, "model_not_found"),
        ({"name": "x", "model": None}, 400, "invalid_value"),
        ({"name": "x", "dimension": 7}, 400, "dimension_mismatch"),
        ({"name": "x", "chunking": {"max_tokens": 10_000}}, 400, "invalid_chunking"),
        (
            {"name": "x", "chunking": {"max_tokens": 20, "overlap_tokens": 20}},
            400,
            "invalid_chunking",
        ),
        ({}, 400, "invalid_value"),
    ],
)
async def test_collections_that_make_no_sense(
    http: aiohttp.ClientSession, body: Any, status: int, code: str
) -> None:
    """Every wrong definition is refused with what is expected."""
    got, error = await call(http, "POST", "/v1/collections", body)

    assert (status, code) == (got, error["error"]["code"])


async def test_a_name_is_taken_once(http: aiohttp.ClientSession, name: str) -> None:
    """A second collection of the same name is a conflict."""
    status, error = await call(http, "POST", "/v1/collections", {"name": name})

    assert (status, error["error"]["code"]) == (409, "collection_exists")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "a", "vector": [1.0]},
        {"text": ""},
        {"text": "a", "k": 0},
        {"text": "a", "ef": 10_001},
        {"texts": []},
        {"vector": [1.0]},
        {"vector": [0.0] * 384},
        {"text": "a", "filter": {"$nope": 1}},
        {"text": "a", "filter": {"a": {"$gt": []}}},
        {"text": "a", "filter": 3},
        {"text": "a", "unknown": 1},
    ],
)
async def test_searches_that_make_no_sense(
    http: aiohttp.ClientSession, name: str, body: Any
) -> None:
    """Every wrong search is a 400 with a code of its own."""
    status, error = await call(http, "POST", f"/v1/collections/{name}/search", body)

    assert (status, error["error"]["type"]) == (400, "invalid_request_error")
    assert error["error"]["code"] != "invalid_request"


async def test_another_encoder_is_refused_until_reembedded(
    http: aiohttp.ClientSession, mesh: Mesh, name: str
) -> None:
    """Text search with another encoder is a 409 that names the command; that command makes it work again."""
    path = f"/v1/collections/{name}"
    await call(http, "POST", f"{path}/documents", {"documents": [CAT, MOON]})
    await _pretend_old_encoder(mesh, name)

    status, error = await call(http, "POST", f"{path}/search", {"text": "cat"})
    assert (status, error["error"]["code"]) == (409, "encoder_mismatch")
    assert f"spillway reembed {name}" in error["error"]["message"]
    status, error = await call(http, "POST", f"{path}/documents", {"documents": [{"text": "new"}]})
    assert (status, error["error"]["code"]) == (409, "encoder_mismatch")

    status, done = await call(http, "POST", f"{path}/reembed")
    assert (status, done["documents"]) == (200, 2)
    status, found = await call(http, "POST", f"{path}/search", {"text": CAT["text"]})
    assert (status, found["data"][0]["id"]) == (200, "a/b")


async def _pretend_old_encoder(mesh: Mesh, name: str) -> None:
    import msgspec

    from common.wire.message import encode

    bus = await Bus.open(Common(redis_url=mesh.redis.url), SystemClock())
    record = await Collections(bus).get("default", name)
    assert record is not None
    old = msgspec.structs.replace(record, fingerprint="0" * 32)
    await bus.connection.call("HSET", "{collections}:records", f"default/{name}", encode(old))
    await Collections(bus).mark_changed()
    await bus.close()


async def test_a_request_ends_only_its_own_reembedding(bus: Bus) -> None:
    """A request whose lock has lapsed leaves the lock of the next one; a router that takes over renews its own."""
    record = CollectionRecord(id=ulid(), tenant="t", name="c", dimension=1, metric="cosine")
    collections = Collections(bus)
    late = collections.reembed_lock(record, "first", 1)
    assert await late.acquire() == "taken"
    async with asyncio.timeout(30):
        while await collections.reembedding(record):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await collections.reembed_lock(record, "second", 60_000).acquire() == "taken"

    assert await collections.reembed_lock(record, "second", 60_000).acquire() == "renewed"
    assert await late.acquire() == "other"
    assert not await late.release()
    assert await collections.reembedding(record)
