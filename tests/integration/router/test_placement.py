"""Collections whose shards are placed on several processes: each opens its own, and searches find all of them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.integration.router.test_collections import call
from tests.integration.router.test_shard_reads import DIMENSION, ROWS, points
from tests.support.mesh import Mesh
from tests.support.waiting import until

PROCESSES = 3


@pytest.fixture(scope="module")
def spread() -> Iterator[Mesh]:
    """A mesh with three vector_search processes."""
    made = Mesh()
    try:
        for number in range(1, PROCESSES):
            made.add("vector_search", str(number)).ports()
        asyncio.run(_all_there(made.url))
        yield made
    finally:
        made.close()


async def _all_there(url: str) -> None:
    """Wait until the router can place something on every process."""
    async with (
        aiohttp.ClientSession(url) as http,
        placed(http, "everywhere", 1, PROCESSES, count=1),
    ):
        pass


@pytest.fixture
async def http(spread: Mesh) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose relative URLs are the router's."""
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(spread.url, timeout=timeout) as session:
        yield session


@contextlib.asynccontextmanager
async def placed(
    http: aiohttp.ClientSession, name: str, shards: int, replicas: int = 1, count: int = ROWS
) -> AsyncIterator[str]:
    """A placed collection of vectors; its path."""
    made = {"name": name, "model": None, "dimension": DIMENSION}
    created = made | {"shards": shards, "replicas": replicas}

    async def enough() -> bool:
        status, body = await call(http, "POST", "/v1/collections", created)
        assert status in {201, 422}, body
        return status == 201

    await until(enough, "as many processes as replicas")
    path = f"/v1/collections/{name}"
    await store(http, path, count)
    yield path
    await call(http, "DELETE", path)


async def store(http: aiohttp.ClientSession, path: str, count: int, first: int = 0) -> Any:
    rows = points(first + count)
    documents = [{"id": f"d{i}", "vector": rows[i].tolist()} for i in range(first, first + count)]
    status, body = await call(http, "POST", f"{path}/documents", {"documents": documents})
    assert status == 200, body
    return body["applied"]


def nearest(number: int, count: int = ROWS, k: int = 5) -> list[str]:
    rows = points(count)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return [f"d{i}" for i in np.argsort(-(unit @ unit[number]))[:k]]


async def search(http: aiohttp.ClientSession, path: str, number: int, **more: Any) -> Any:
    body = {"vector": points(number + 1)[number].tolist(), "k": 5, **more}
    return await call(http, "POST", f"{path}/search", body)


def ids(found: Any) -> list[str]:
    return [hit["id"] for hit in found["data"]]


async def shards_of(http: aiohttp.ClientSession, path: str) -> Any:
    status, body = await call(http, "GET", f"{path}/shards")
    assert status == 200, body
    return body


async def test_shards_are_spread_and_searched_as_one(
    spread: Mesh, http: aiohttp.ClientSession
) -> None:
    """Six shards on three processes, two each, which open no others; search, list and delete find every document."""
    async with placed(http, "spread", 6) as path:
        listed = await shards_of(http, path)
        assert listed["placed"]
        assert listed["missing"] == []
        holders = [one["replicas"][0]["name"] for one in listed["data"]]
        assert sorted(holders.count(name) for name in set(holders)) == [2, 2, 2]
        collection = (await call(http, "GET", path))[1]
        assert collection["stats"]["documents"] == ROWS
        here = sorted(
            int(found.name)
            for found in spread.directory.glob(f"search/*/{collection['id']}/[0-9]*")
        )
        assert here == list(range(6))
        for number in range(0, ROWS, 7):
            status, found = await search(http, path, number)
            assert (status, ids(found)) == (200, nearest(number))
            key = {"Idempotency-Key": f"spread-{number}"}
            body = {"vector": points(ROWS)[number].tolist(), "k": 5}
            status, job = await call(http, "POST", f"{path}/search", body, **key)
            assert (status, ids(job)) == (200, nearest(number))
        seen: list[str] = []
        after = ""
        while True:
            _, page = await call(http, "GET", f"{path}/documents?limit=25&after={after}")
            seen += [doc["id"] for doc in page["data"]]
            after = page["next"]
            if after is None:
                break
        assert sorted(seen) == sorted(f"d{i}" for i in range(ROWS))
        status, gone = await call(http, "POST", f"{path}/documents/delete", {"ids": nearest(3)[:2]})
        assert (status, gone["deleted"]) == (200, 2)
        status, found = await search(http, path, 3, after=gone["applied"])
        assert (status, ids(found)) == (200, nearest(3, k=7)[2:])


async def test_a_dead_shard_is_named_and_a_partial_search_answers_without_it(
    spread: Mesh, http: aiohttp.ClientSession
) -> None:
    """With one of three processes killed: 503 names the shard, a partial search lists it, and it comes back."""
    async with placed(http, "dead", 3) as path:
        await search(http, path, 0)
        spread.search.kill()

        async def missing() -> Any:
            return (await shards_of(http, path))["missing"]

        lost = await until(missing, "a missing shard")
        status, error = await search(http, path, 1)
        assert (status, error["error"]["code"]) == (503, "shard_missing")
        assert any(f"shard {n} " in error["error"]["message"] for n in lost)
        for key in ({}, {"Idempotency-Key": "partial"}):
            body = {"vector": points(2)[1].tolist(), "k": ROWS, "partial": True}
            status, found = await call(http, "POST", f"{path}/search", body, **key)
            assert status == 200, found
            assert [one["shard"] for one in found["missing"]] == lost
            assert 0 < len(found["data"]) < ROWS
        spread.search.start()

        async def whole() -> bool:
            status, found = await search(http, path, 1, partial=True)
            return status == 200 and found["missing"] == [] and ids(found) == nearest(1)

        await until(whole, "all shards")


async def test_a_stopped_replica_is_hedged(spread: Mesh, http: aiohttp.ClientSession) -> None:
    """With two replicas of each shard and one process stopped, every search is answered whole by the other replicas."""
    async with placed(http, "hedged", 3, replicas=2) as path:

        async def both() -> bool:
            listed = await shards_of(http, path)
            return all(
                [each["state"] for each in one["replicas"]] == ["serving", "serving"]
                for one in listed["data"]
            )

        await until(both, "two serving replicas of each shard")
        await search(http, path, 0)
        process = spread.search.process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            for number in range(20):
                status, found = await search(http, path, number)
                assert (status, ids(found)) == (200, nearest(number))
        finally:
            process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0)


async def test_bad_requests_are_named(http: aiohttp.ClientSession) -> None:
    """Too many replicas, and numbers out of bounds."""
    body = {"name": "bad", "model": None, "dimension": 4, "replicas": 9}
    status, error = await call(http, "POST", "/v1/collections", body)
    assert (status, error["error"]["code"]) == (422, "too_few_processes")
    status, error = await call(http, "POST", "/v1/collections", body | {"shards": 0})
    assert status == 400
    status, error = await call(http, "GET", "/v1/collections/nothing/shards")
    assert (status, error["error"]["code"]) == (404, "collection_not_found")
