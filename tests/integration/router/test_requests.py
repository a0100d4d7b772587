"""/v1/requests: state, result, events and cancel; idempotency; what a disconnect does; what a killed router leaves."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import aiohttp
import pytest

from common.bus import Bus
from common.ids import Family
from services.router.admission.orphan_reaper import OrphanReaper
from tests.support.bus import Hand, must, new_job, state
from tests.support.mesh import Mesh
from tests.support.waiting import until

MANY = {"input": [f"text {index}" for index in range(600)], "encoding_format": "base64"}


async def state_of(http: aiohttp.ClientSession, name: str) -> dict[str, Any]:
    async with http.get(f"/v1/requests/{name}") as response:
        return {"status": response.status, **(await response.json())}


async def events_of(
    http: aiohttp.ClientSession, name: str, last: int | None = None
) -> list[dict[str, Any]]:
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    async with http.get(f"/v1/requests/{name}/events", headers=headers) as response:
        assert response.status == 200
        lines = (await response.read()).splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]


async def test_a_request_can_be_asked_for(http: aiohttp.ClientSession) -> None:
    """The id of x-request-id gives state, the same result, and the events."""
    headers = {"Spillway-Resume": "60"}
    body = {"input": "hello", "encoding_format": "base64", "dimensions": 8}
    async with http.post("/v1/embeddings", json=body, headers=headers) as response:
        name, answer = response.headers["x-request-id"], await response.json()
    state = await state_of(http, name)

    assert ("result", answer) == (state["state"], state["result"])
    assert [event["kind"] for event in await events_of(http, name)] == ["result"]
    assert await events_of(http, name, last=0) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "hello", "dimensions": 8}),
        ("/v1/embeddings", {"input": ["hello", "you"], "encoding_format": "base64"}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/rerank", {"query": "hello", "texts": ["hello", "you"], "return_text": True}),
    ],
)
async def test_a_result_is_shown_as_it_was_delivered(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> None:
    """Of a request that its client waited for, too: dimensions, encoding and shape are those it asked for."""
    async with http.post(path, json=body) as response:
        name, answer = response.headers["x-request-id"], await response.json()

    assert answer == (await state_of(http, name))["result"]


async def test_a_request_of_many_jobs_logs_its_progress(http: aiohttp.ClientSession) -> None:
    """Events have rising indices without gaps and end with the outcome; a reader can go on after any."""
    async with http.post(
        "/v1/embeddings", json=MANY, headers={"Spillway-Resume": "60"}
    ) as response:
        name, answer = response.headers["x-request-id"], await response.json()
    events = await events_of(http, name)

    assert list(range(len(events))) == [event["index"] for event in events]
    assert events[-1]["kind"] == "result"
    assert events[1:] == await events_of(http, name, last=0)
    assert answer == (await state_of(http, name))["result"]


async def test_an_idempotency_key_attaches(http: aiohttp.ClientSession) -> None:
    """The same body under the same key is the same request; another body is a conflict."""
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    replies = []
    for _ in range(2):
        async with http.post("/v1/embeddings", json=MANY, headers=headers) as response:
            replies.append((response.headers["x-request-id"], await response.json()))
    async with http.post("/v1/embeddings", json={"input": "other"}, headers=headers) as response:
        error = await response.json()

        assert (response.status, error["error"]["code"]) == (409, "idempotency_conflict")
        assert response.headers["x-should-retry"] == "false"
    assert replies[0] == replies[1]


async def test_two_at_once_under_one_key_are_one_request(http: aiohttp.ClientSession) -> None:
    """Attaching while the first still runs waits for the same result."""

    async def one(key: str) -> tuple[str, Any]:
        async with http.post(
            "/v1/embeddings", json=MANY, headers={"Idempotency-Key": key}
        ) as response:
            return response.headers["x-request-id"], await response.json()

    key = uuid.uuid4().hex
    first, second = await asyncio.gather(one(key), one(key))

    assert first == second


async def _left(http: aiohttp.ClientSession, mesh: Mesh, key: str, **headers: str) -> str:
    """Send a request, leave as soon as it runs, and return its id."""
    before = set(await _running(mesh))
    body = {"input": [f"{key} text {index}" for index in range(2000)]}
    asking = asyncio.create_task(_post(http, body, **headers))
    name = await _begun(mesh, before)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return name


async def _begun(mesh: Mesh, before: set[str]) -> str:
    """Return the id of the one request that has begun since then."""

    async def begun() -> set[str]:
        return set(await _running(mesh)) - before

    (name,) = await until(begun, "the request has begun")
    return name


async def _unready(session: aiohttp.ClientSession) -> bool:
    async with session.get("/readyz") as response:
        return response.status == 503


async def _running(mesh: Mesh) -> list[str]:
    with mesh.redis.client() as client:
        return [
            key.decode().split(":job:")[1]
            for key in client.scan_iter("{request/0}:job:*")
            if client.hget(key, "state") in {b"queued", b"running"}
        ]


async def _await_state(http: aiohttp.ClientSession, name: str, wanted: set[str]) -> str:
    async with asyncio.timeout(60):
        while True:
            state = (await state_of(http, name))["state"]
            if state in wanted:
                return str(state)
            await asyncio.sleep(0.05)


async def test_a_disconnect_cancels_an_attached_request(
    http: aiohttp.ClientSession, mesh: Mesh
) -> None:
    """A client that leaves cancels its request, unless it said that it comes back."""
    with mesh.worker.halted():
        attached = await _left(http, mesh, "attached")
        resumable = await _left(http, mesh, "resumable", **{"Spillway-Resume": "60"})
        ended = await _await_state(http, attached, {"cancelled", "result", "error"})

    assert ended == "cancelled"
    assert await _await_state(http, resumable, {"cancelled", "result", "error"}) == "result"


async def test_a_dead_routers_embedding_ends_with_its_grace(mesh: Mesh, bus: Bus) -> None:
    """Of a single job, too, nothing is run or kept for a client that did not come back."""
    family = Family("embed.sim")
    hand = await Hand(bus, family, "idle", "idle").join()
    (job,) = await must(bus, new_job(family), classes=("idle",), router="gone")
    await OrphanReaper(bus, "gone").hold(job.id, 0.1, bus.clock.now_ms() + 60_000)
    await bus.connection.call("ZADD", "routers", 0, "gone")
    with mesh.redis.client() as client:
        async with asyncio.timeout(60):
            while client.exists("{embed.sim/0}:held:gone"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    await hand.die()

    assert await state(bus, job) == "cancelled"


async def test_cancel_ends_a_request(http: aiohttp.ClientSession, mesh: Mesh) -> None:
    """Cancel reaches a request of many jobs wherever it runs, and its waiting client gets 499."""
    body = {"input": [f"cancelled text {index}" for index in range(2000)]}
    with mesh.worker.halted():
        before = set(await _running(mesh))
        waiting = asyncio.create_task(_post(http, body))
        name = await _begun(mesh, before)
        async with http.post(f"/v1/requests/{name}/cancel") as response:
            assert (await response.json())["cancelled"]
        status, error = await waiting

    assert (status, error["error"]["code"]) == (499, "cancelled")
    async with http.delete(f"/v1/requests/{name}") as response:
        assert not (await response.json())["cancelled"]


async def test_a_failed_request_may_be_tried_again_under_its_key(
    http: aiohttp.ClientSession, mesh: Mesh
) -> None:
    """What was cancelled or failed is not what a retry with the same key gets; its id is told with the error."""
    body = {"input": [f"tried again {index}" for index in range(2000)]}
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    with mesh.worker.halted():
        before = set(await _running(mesh))
        asking = asyncio.create_task(http.post("/v1/embeddings", json=body, headers=headers))
        name = await _begun(mesh, before)
        async with http.delete(f"/v1/requests/{name}") as response:
            assert response.status == 200
        async with await asking as response:
            assert (response.status, response.headers["x-request-id"]) == (499, name)
    status, answer = await _post(http, body, **headers)

    assert (status, len(answer["data"])) == (200, 2000)


async def _post(http: aiohttp.ClientSession, body: Any, **headers: str) -> tuple[int, Any]:
    async with http.post("/v1/embeddings", json=body, headers=headers) as response:
        return response.status, await response.json()


async def test_unknown_requests_are_not_found(http: aiohttp.ClientSession) -> None:
    """Ids that are none, and ids nobody has, are 404 on every route of requests."""
    for name in ("nonsense", "request~0~01m7yj0dt5x5hempndvb6y4j6t"):
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/events")):
            async with http.request(method, f"/v1/requests/{name}{path}") as response:
                assert response.status == 404
                assert (await response.json())["error"]["code"] == "request_not_found"


async def test_a_killed_router_loses_no_request(
    mesh: Mesh, http: aiohttp.ClientSession, name: str
) -> None:
    """A write whose router is killed is finished by another router; its idempotency key finds the result."""
    victim = mesh.add_router("victim")
    url = mesh.address(victim)
    mesh.wait_ready(url)
    body = {
        "documents": [{"id": str(i), "text": f"document number {i} " * 20} for i in range(1500)]
    }
    headers = {"Idempotency-Key": uuid.uuid4().hex, "Spillway-Timeout": "60"}
    path = f"/v1/collections/{name}/documents"
    async with aiohttp.ClientSession() as session:
        with mesh.worker.halted():
            before = set(await _running(mesh))
            sent = asyncio.create_task(_send(session, url + path, body, headers))
            await _begun(mesh, before)
            victim.kill()
            assert await sent is None
    async with http.post(path, json=body, headers=headers) as response:
        answer = await response.json()

        assert response.status == 200, answer
    assert len(answer["data"]) == 1500
    assert {"stored"} == {item["status"] for item in answer["data"]}
    async with http.get(f"/v1/collections/{name}") as response:
        assert (await response.json())["stats"]["documents"] == 1500


async def _send(
    session: aiohttp.ClientSession, url: str, body: Any, headers: dict[str, str]
) -> int | None:
    try:
        async with session.post(url, json=body, headers=headers) as response:
            return response.status
    except aiohttp.ClientError:
        return None


async def test_a_stopping_router_finishes_what_it_began(mesh: Mesh) -> None:
    """SIGTERM: unready at once, new work gets 503 draining, running requests end well, exit status 0."""
    leaving = mesh.add_router("leaving")
    url = mesh.address(leaving)
    mesh.wait_ready(url)
    assert leaving.process is not None
    async with aiohttp.ClientSession(url) as session:
        with mesh.worker.halted():
            before = set(await _running(mesh))
            running = asyncio.create_task(_post(session, MANY))
            await _begun(mesh, before)
            leaving.process.terminate()
            await until(lambda: _unready(session), "the router is unready")
            async with session.post("/v1/embeddings", json={"input": "late"}) as response:
                refused = response.status, (await response.json())["error"]["code"]
                assert response.headers["Connection"] == "close"
        status, answer = await running

    assert refused == (503, "draining")
    assert (status, len(answer["data"])) == (200, 600)
    assert leaving.process.wait(timeout=60) == 0
