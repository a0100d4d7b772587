"""/v1/mesh and a request's timeline: what they tell, to whom, and what they never name; the dashboard's files."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from common.bus import Bus
from common.clock import SystemClock
from common.config import Common
from common.registry.api_keys import KeyStore
from services.router.mesh.recent_counts import quantile
from tests.support.mesh import Mesh
from tests.support.waiting import until

TEXT = {"input": "water over the dam"}


@pytest.fixture(scope="module")
def keyed(chatting: Mesh) -> Iterator[str]:
    """The URL of a router that wants keys."""
    router = chatting.add_router("mesh-keyed", "--keys", "on")
    url = chatting.address(router)
    chatting.wait_ready(url)
    yield url
    assert router.stop() == 0


async def _client(mesh: Mesh, url: str, tenant: str) -> aiohttp.ClientSession:
    bus = await Bus.open(Common(redis_url=mesh.redis.url), SystemClock())
    _, secret = await KeyStore(bus).create(tenant)
    await bus.close()
    return aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {secret}"})


async def _mesh(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/v1/mesh") as response:
        assert response.status == 200
        found: dict[str, Any] = await response.json()
    return found


async def _timeline(http: aiohttp.ClientSession, name: str) -> dict[str, Any]:
    async with http.get(f"/v1/requests/{name}/timeline") as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
    return found


async def test_lanes_and_workers(http: aiohttp.ClientSession, name: str) -> None:
    """Every kind of lane is there with its depth, every worker with its model and its last batch."""
    async with http.post("/v1/embeddings", json=TEXT) as response:
        assert response.status == 200
    ran: list[dict[str, Any]] = []

    async def batch_is_told() -> dict[str, Any] | None:
        told = await _mesh(http)
        ran[:] = [w for w in told["workers"] if w["kind"] == "embed" and w["last_batch"]]
        searches = any(lane["kind"] == "search" for lane in told["lanes"])
        return told if ran and searches else None

    told = await until(batch_is_told, "the batch is told with the next heartbeat")
    assert told is not None
    lanes = {lane["lane"]: lane for lane in told["lanes"]}
    assert {"embed", "search", "request"} <= {lane["kind"] for lane in told["lanes"]}
    assert lanes["embed.sim/0:gpu"]["items"]["depth"] > 0
    assert lanes["embed.sim/0:gpu"]["workers"] == 1
    assert (ran[0]["state"], ran[0]["model"], ran[0]["service"]) == ("ready", "sim", "gpu_worker")
    assert ran[0]["last_batch"]["items"] >= 1
    routes = {route["route"]: route for route in told["window"]["routes"]}
    assert routes["/v1/embeddings"]["count"] >= 1
    assert routes["/v1/embeddings"]["p50_s"] <= routes["/v1/embeddings"]["p99_s"]


async def test_a_lost_worker_is_shown(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    """A worker that is killed is lost once its heartbeat has lapsed; one that takes its place is ready."""

    def states(told: dict[str, Any]) -> list[str]:
        return [w["state"] for w in told["workers"] if w["kind"] == "sessions"]

    async def seen(state: str) -> None:
        async def is_seen() -> bool:
            return state in states(await _mesh(http))

        await until(is_seen, f"a worker is {state}")

    store = mesh.add("kv_store", "seen")
    try:
        await seen("ready")
        store.kill()
        await seen("lost")
        store.start()
        await seen("ready")
    finally:
        assert store.stop() == 0


async def test_nothing_of_a_tenant_is_told(chatting: Mesh, keyed: str) -> None:
    """No collection, session or request is named, not even one's own; without a key nothing is told."""
    async with await _client(chatting, keyed, "alice") as alice:
        secret = f"secret{uuid.uuid4().hex[:8]}"
        async with alice.post("/v1/collections", json={"name": secret}) as response:
            collection = (await response.json())["id"]
        async with alice.post(f"/v1/collections/{secret}/search", json={"text": "x"}) as response:
            assert response.status == 200
            request = response.headers["x-request-id"]
        async with alice.post("/v1/sessions", json={"model": "sim-chat"}) as response:
            session = (await response.json())["id"]
        async with await _client(chatting, keyed, "mallory") as mallory:
            told = json.dumps([await _mesh(client) for client in (alice, mallory)])
        async with alice.delete(f"/v1/collections/{secret}") as response:
            assert response.status == 200
    for hidden in (secret, collection, request, session, "alice"):
        assert hidden not in told
    async with aiohttp.ClientSession(keyed) as nobody:
        for path in ("/v1/mesh", "/v1/requests/x/timeline"):
            async with nobody.get(path) as response:
                assert response.status == 401


async def test_the_timeline_of_a_search(http: aiohttp.ClientSession, name: str) -> None:
    """A search by text is three jobs, each admitted, leased by a worker and ended, one after the other."""
    headers = {"Spillway-Resume": "60"}
    url = f"/v1/collections/{name}/search"
    async with http.post(url, json={"text": "dam"}, headers=headers) as response:
        assert response.status == 200
        request = response.headers["x-request-id"]
    jobs = (await _timeline(http, request))["jobs"]

    assert [job["stage"] for job in jobs] == ["request", "embed", "search"]
    for job in jobs:
        assert [event["what"] for event in job["events"]] == ["admitted", "leased", "ended"]
        assert (job["state"], job["attempts"]) == ("result", 1)
        times = [event["at"] for event in job["events"]]
        assert times == sorted(times)
    own, embed, search = ([event["at"] for event in job["events"]] for job in jobs)
    assert own[0] <= embed[0] <= embed[-1] <= search[0] <= search[-1] <= own[-1]
    assert [job["events"][1]["worker"].split("-")[0] for job in jobs] == ["router", "gpu", "search"]


async def test_the_timeline_of_a_grounded_answer(
    chatting: Mesh, http: aiohttp.ClientSession, name: str
) -> None:
    """A grounded answer is the request and three jobs; its generation tells when its first token came."""
    documents = {"documents": [{"id": "a", "text": "water over the dam"}]}
    async with http.post(f"/v1/collections/{name}/documents", json=documents) as response:
        assert response.status == 200
    body = {
        "model": "sim-chat",
        "messages": [{"role": "user", "content": "water"}],
        "max_tokens": 4,
        "retrieval": {"collection": name},
    }
    headers = {"Spillway-Resume": "60"}
    async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        request = response.headers["x-request-id"]
    jobs = (await _timeline(http, request))["jobs"]

    assert [job["stage"] for job in jobs] == ["request", "embed", "search", "generate"]
    assert [e["what"] for e in jobs[-1]["events"]] == ["admitted", "leased", "first", "ended"]


async def test_the_timeline_of_many_parcels(http: aiohttp.ClientSession) -> None:
    """Every parcel of a large embedding is there, in order."""
    many = {"input": [f"text {index}" for index in range(100)], "encoding_format": "base64"}
    async with http.post("/v1/embeddings", json=many, headers={"Spillway-Resume": "60"}) as done:
        assert done.status == 200
        request = done.headers["x-request-id"]
    jobs = (await _timeline(http, request))["jobs"]

    assert [(job["stage"], job["index"]) for job in jobs][1:] == [("part", i) for i in range(4)]
    assert sum(job["items"] for job in jobs[1:]) == 100


async def test_an_unknown_request_has_no_timeline(http: aiohttp.ClientSession) -> None:
    """It is a 404, as of anything that is not there."""
    async with http.get("/v1/requests/request~0~nothing/timeline") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "request_not_found"


async def test_the_pages_are_open_and_strict(chatting: Mesh, keyed: str) -> None:
    """The files need no key, allow nothing inline or from elsewhere, and are not sent twice."""
    async with aiohttp.ClientSession(keyed) as nobody:
        async with nobody.get("/") as response:
            assert response.status == 200
            assert response.content_type == "text/html"
            assert response.headers["Content-Security-Policy"].startswith("default-src 'self';")
            assert "unsafe" not in response.headers["Content-Security-Policy"]
            etag, page = response.headers["ETag"], await response.text()
        async with nobody.get("/", headers={"If-None-Match": etag}) as response:
            assert (response.status, await response.read()) == (304, b"")
        async with nobody.head("/") as response:
            assert response.status == 200
        async with nobody.get("/dashboard/app.js") as response:
            assert response.content_type == "text/javascript"
        async with nobody.get("/dashboard/../pages.py") as response:
            assert response.status in {401, 404}
        async with nobody.post("/", json={}) as response:
            assert response.status == 405
    assert "<script>" not in page
    assert "style=" not in page


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({}, 0.5, None),
        ({1.0: 0.0, float("inf"): 0.0}, 0.5, None),
        ({1.0: 10.0, 2.0: 10.0, float("inf"): 10.0}, 0.5, 0.5),
        ({1.0: 0.0, 2.0: 4.0, float("inf"): 4.0}, 0.5, 1.5),
        ({1.0: 1.0, 2.0: 2.0, float("inf"): 10.0}, 0.99, 2.0),
    ],
)
def test_quantiles(buckets: dict[float, float], share: float, expected: float | None) -> None:
    """A quantile lies within its bucket; above the last bound nothing more is known."""
    assert quantile(buckets, share) == expected
