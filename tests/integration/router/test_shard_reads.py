"""Searches by calls: answered straight from the shards, equal to those by jobs, and never lost with a process."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from spillway_client import AsyncSpillway

from common.bus import Bus
from common.ids import ulid
from common.registry.collections import Collections
from common.wire.search import Write
from tests.integration.router.test_collections import call
from tests.support.mesh import Mesh
from tests.support.waiting import until

DIMENSION, ROWS, K = 16, 60, 5


def points(count: int, seed: int = 3) -> Any:
    return np.random.default_rng(seed).standard_normal((count, DIMENSION)).astype(np.float32)


@contextlib.asynccontextmanager
async def collection(
    http: aiohttp.ClientSession,
    name: str,
    count: int = ROWS,
    shards: int = 1,
    bus: Bus | None = None,
) -> AsyncIterator[str]:
    """A collection of vectors; its path. Over HTTP a collection has one shard: with more the test registers it."""
    made = {"name": name, "model": None, "dimension": DIMENSION, "metric": "cosine"}
    status, body = await call(http, "POST", "/v1/collections", made)
    assert status == 201, body
    if bus is not None:
        old = await Collections(bus).get("default", name)
        assert old is not None
        assert await Collections(bus).replace(
            old, msgspec.structs.replace(old, id=f"c{ulid()}", shards=shards)
        )
    rows = [
        {"id": f"d{i}", "vector": row.tolist(), "metadata": {"n": i}}
        for i, row in enumerate(points(count))
    ]
    path = f"/v1/collections/{name}"
    status, body = await call(http, "POST", f"{path}/documents", {"documents": rows})
    assert status == 200, body
    yield path
    await call(http, "DELETE", path)


class Calls:
    """Counts the searches that a router sent straight to a process, by its metrics."""

    def __init__(self, mesh: Mesh) -> None:
        self._url = f"http://127.0.0.1:{mesh.router.ports()['health_port']}/metrics"

    async def count(self, http: aiohttp.ClientSession) -> int:
        async with http.get(self._url) as response:
            told = await response.text()
        found = re.search(
            r'^spillway_admitted_total\{lane="search:call"\} (\S+)$', told, re.MULTILINE
        )
        return int(float(found[1])) if found else 0

    async def search(self, http: aiohttp.ClientSession, path: str, body: Any) -> dict[str, Any]:
        """Search until the answer came by a call: the router has to reach the process first."""
        async with asyncio.timeout(60):
            while True:
                before = await self.count(http)
                status, found = await call(http, "POST", f"{path}/search", body)
                assert status == 200, found
                if await self.count(http) > before:
                    return dict(found)
                await asyncio.sleep(0.05)


@pytest.fixture
def calls(mesh: Mesh) -> Calls:
    """The count of the shared mesh's router."""
    return Calls(mesh)


def without_id(found: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs between two that are alike: its id and the time it took."""
    report = {key: value for key, value in found.get("search", {}).items() if key != "took_ms"}
    return {key: value for key, value in found.items() if key != "request_id"} | {"search": report}


@pytest.mark.parametrize("shards", [1, 3])
async def test_a_call_finds_what_a_job_finds(
    http: aiohttp.ClientSession, bus: Bus, calls: Calls, shards: int
) -> None:
    """One query and many, filtered and not, with and without parts of a hit; an Idempotency-Key makes a job."""
    rows = points(ROWS)
    async with collection(http, f"calls-{shards}", shards=shards, bus=bus) as path:
        bodies: list[dict[str, Any]] = [
            {"vector": rows[7].tolist(), "k": K},
            {
                "vectors": rows[:9].tolist(),
                "k": K,
                "include_text": False,
                "include_metadata": False,
            },
            {"vector": rows[7].tolist(), "k": ROWS, "filter": {"n": {"$lt": 20}}},
            {"vector": rows[7].tolist(), "k": 3, "min_score": 0.5, "include_text": False},
            {"vector": rows[7].tolist(), "k": 3, "exact": True},
        ]
        for number, body in enumerate(bodies):
            found = await calls.search(http, path, body)
            before = await calls.count(http)
            key = {"Idempotency-Key": f"calls-{shards}-{number}"}
            status, job = await call(http, "POST", f"{path}/search", body, **key)
            assert (status, await calls.count(http)) == (200, before), job
            assert without_id(found) == without_id(job)
        truth = np.argsort(-(rows @ rows[7] / np.linalg.norm(rows, axis=1)))[:K]
        found = await calls.search(http, path, bodies[0])
        assert [hit["id"] for hit in found["data"]] == [f"d{i}" for i in truth]


async def test_a_call_by_text_embeds_first(
    http: aiohttp.ClientSession, calls: Calls, name: str
) -> None:
    """A question is embedded by a job, whose id the answer carries, and searched by a call."""
    path = f"/v1/collections/{name}"
    documents = [{"id": "a", "text": "The cat sat on the mat"}, {"id": "b", "text": "Rockets fly"}]
    await call(http, "POST", f"{path}/documents", {"documents": documents})
    found = await calls.search(http, path, {"text": "The cat sat on the mat", "k": 1})
    assert [hit["id"] for hit in found["data"]] == ["a"]
    assert found["request_id"].startswith("embed")


async def test_the_sdk_searches_by_calls(
    http: aiohttp.ClientSession, mesh: Mesh, calls: Calls
) -> None:
    """A search of the SDK goes straight to the shard, as one without any header does."""
    async with (
        collection(http, "calls-sdk", count=3) as path,
        AsyncSpillway(mesh.url) as client,
    ):
        one = points(3)[1].tolist()
        await calls.search(http, path, {"vector": one, "k": 1})
        before = await calls.count(http)
        found = await client.search("calls-sdk", vector=one, k=1)

        assert ([hit.id for hit in found.data], await calls.count(http)) == (["d1"], before + 1)


async def test_errors_are_those_of_a_job(http: aiohttp.ClientSession, calls: Calls) -> None:
    """A bad filter, a write that does not exist, a deleted collection: the same answers as by a job."""
    async with collection(http, "calls-errors", count=3) as path:
        one = points(3)[0].tolist()
        await calls.search(http, path, {"vector": one, "k": 1})
        for body in (
            {"vector": one, "k": 1, "filter": {"$nonsense": 1}},
            {"vector": one, "k": 1, "after": "no entry"},
            {"vector": [*one, 1.0], "k": 1},
        ):
            direct = await call(http, "POST", f"{path}/search", body)
            key = {"Idempotency-Key": f"calls-errors-{len(str(body))}"}
            assert direct == await call(http, "POST", f"{path}/search", body, **key)
            assert direct[0] == 400
    status, error = await call(http, "POST", f"{path}/search", {"vector": one, "k": 1})
    assert (status, error["error"]["code"]) == (404, "collection_not_found")


async def test_no_search_is_lost_with_its_process() -> None:
    """vector_search is killed under searches and comes back: each is answered, and rightly, by a call or by a job."""
    mesh = Mesh()
    timeout = aiohttp.ClientTimeout(total=100)
    try:
        async with (
            aiohttp.ClientSession(mesh.url, timeout=timeout) as http,
            collection(http, "killed") as path,
        ):
            rows = points(ROWS)
            calls, done = Calls(mesh), 0
            await calls.search(http, path, {"vector": rows[0].tolist(), "k": 1})
            stop = asyncio.Event()

            async def searches(start: int) -> None:
                nonlocal done
                number = start
                while not stop.is_set():
                    number += 7
                    body = {"vector": rows[number % ROWS].tolist(), "k": 1}
                    status, found = await call(http, "POST", f"{path}/search", body)
                    if status == 503:  # no process serves searches now: nothing was accepted
                        await asyncio.sleep(0.05)
                        continue
                    assert status == 200, found
                    assert [hit["id"] for hit in found["data"]] == [f"d{number % ROWS}"]
                    done += 1

            running = [asyncio.create_task(searches(start)) for start in range(6)]

            async def by_calls_again() -> None:
                before = await calls.count(http)

                async def more() -> bool:
                    return await calls.count(http) >= before + 20

                await until(more, "searches by calls")

            for _ in range(2):
                await by_calls_again()
                await asyncio.to_thread(mesh.search.kill)
                await asyncio.to_thread(mesh.search.start)
            await by_calls_again()
            stop.set()
            await asyncio.gather(*running)
            assert done >= 60
    finally:
        mesh.close()


async def test_a_collection_replaced_elsewhere_is_found(
    mesh: Mesh, http: aiohttp.ClientSession, bus: Bus
) -> None:
    """A router that still has the record of a former collection looks again when the shards refuse it."""
    calls = Calls(mesh)
    async with collection(http, "replaced") as path:
        await calls.search(http, path, {"vector": points(1)[0].tolist(), "k": 1})
        for _ in range(5):
            old = await Collections(bus).get("default", "replaced")
            assert old is not None
            fresh = msgspec.structs.replace(old, id=f"c{ulid()}")
            body = {"vector": points(1)[0].tolist(), "k": K}
            status, found = await call(http, "POST", f"{path}/search", body)  # now it is remembered
            assert status == 200
            assert await Collections(bus).replace(old, fresh)
            await bus.writes.append(old.id, 0, Write("drop", 0, "r", drop=True))
            await until(partial(gone, bus, old.id))
            status, found = await call(http, "POST", f"{path}/search", body)
            assert (status, found["data"]) == (200, [])


async def gone(bus: Bus, collection: str) -> bool:
    """Return whether every replica has dropped a collection's shard."""
    return not await bus.writes.applied(collection, 0)


async def test_a_deleted_collection_is_not_found_at_once(
    mesh: Mesh, http: aiohttp.ClientSession
) -> None:
    """The router that deletes a collection does not search it again, though it had its record a moment ago."""
    body = {"vector": points(1)[0].tolist(), "k": 1}
    for turn in range(5):
        async with collection(http, f"brief{turn}") as path:
            assert (await call(http, "POST", f"{path}/search", body))[0] == 200
            assert (await call(http, "DELETE", path))[0] == 200
            assert (await call(http, "POST", f"{path}/search", body))[0] == 404
