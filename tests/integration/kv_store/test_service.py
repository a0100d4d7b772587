"""kv_store as a process behind a router: sessions listed, exported, imported, deleted; and killed in mid-delete."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.bus import Bus, keys
from common.clock import SystemClock
from common.config import Common
from common.ids import unique_of
from common.registry.idempotency import Idempotency
from common.registry.sessions import Sessions
from tests.support.mesh import Mesh, Process
from tests.support.scripted_generator import FINGERPRINT, NAME, Generator, Scene, generator
from tests.support.servers import Server
from tests.support.session_traces import holding

CHAT = "/v1/chat/completions"


class Small:
    """Valkey, one router, and kv_stores; the generator runs in the test."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="spillway-kv-"))
        self.redis = Server("valkey").start()
        self.router = self.start("router", "0", "--port", "0", "--drain-s", "3")
        self.store = self.start("kv_store", "0", "--sweep-s", "1")
        self.url = Mesh.address(self.router)
        self.store.ports()

    def start(self, service: str, instance: str, *flags: str) -> Process:
        return Process(service, self.directory, self.redis.url, instance, *flags).start()

    async def bus(self) -> Bus:
        config = Common(data_dir=str(self.directory), redis_url=self.redis.url)
        return await Bus.open(config, SystemClock())

    def close(self) -> None:
        for process in (self.router, self.store):
            if process.process is not None and process.process.poll() is None:
                process.kill()
        self.redis.close()
        shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture(scope="module")
def small() -> Any:
    """Processes that the tests of this file share."""
    made = Small()
    yield made
    made.close()


@pytest.fixture
async def model(small: Small) -> AsyncIterator[Generator]:
    """A generator that says what it is told, or says back."""
    async with generator(small.redis.url, small.directory) as made:
        made.consumer.incarnation.record = type(made.consumer.record)(
            **{
                **{
                    n: getattr(made.consumer.record, n)
                    for n in made.consumer.record.__struct_fields__
                },
                "fingerprint": FINGERPRINT,
            }
        )
        yield made


@pytest.fixture
async def http(small: Small, model: Generator) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the router."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(small.url, timeout=timeout) as session:
        while NAME not in str(await ask(session, "GET", "/v1/models")):  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # a router reads the cards once a second
        yield session


async def ask(
    http: aiohttp.ClientSession, verb: str, path: str, body: Any = None, status: int = 200
) -> Any:
    """Send one request whose answer must have a status."""
    async with http.request(verb, path, json=body) as response:
        found = await response.json()
        assert response.status == status, found
        return found


async def say(http: aiohttp.ClientSession, name: str, text: str) -> str:
    """Have one turn and return the answer."""
    body = {"session": name, "messages": [{"role": "user", "content": text}]}
    found = await ask(http, "POST", CHAT, body)
    answer: str = found["choices"][0]["message"]["content"]
    return answer


async def created(http: aiohttp.ClientSession, **body: Any) -> Any:
    """Create a session."""
    return await ask(http, "POST", "/v1/sessions", body, 201)


async def test_life(http: aiohttp.ClientSession, small: Small) -> None:
    """A session is created, talked to, read, changed, exported, imported, and deleted without a trace."""
    made = await created(http, ttl_s=600, metadata={"who": "us"})
    name = made["id"]
    assert (made["model"], made["version"], made["ttl_s"]) == (NAME, 0, 600)
    for text in ("rosebud one", "rosebud two"):
        assert await say(http, name, text) == text
    found = await ask(http, "GET", f"/v1/sessions/{name}?include=messages")
    assert [m["content"] for m in found["messages"]] == ["rosebud one"] * 2 + ["rosebud two"] * 2
    assert (found["version"], found["turns"], found["running"]) == (2, 2, None)
    assert found["tokens"] > 20
    changed = await ask(http, "PATCH", f"/v1/sessions/{name}", {"metadata": {"who": "you"}})
    assert (changed["metadata"], changed["ttl_s"]) == ({"who": "you"}, 600)

    document = await ask(http, "GET", f"/v1/sessions/{name}/export")
    copy = await ask(http, "POST", "/v1/sessions/import", document, 201)
    assert copy["id"] != name
    assert copy["tokens_kept"]
    kept = ("model", "version", "turns", "tokens", "ttl_s", "metadata")
    assert {k: copy[k] for k in kept} == {k: changed[k] for k in kept}
    again = await ask(http, "GET", f"/v1/sessions/{copy['id']}/export")
    moments = dict.fromkeys(("id", "created", "updated"))
    assert document | moments == again | moments
    other = await ask(
        http, "POST", "/v1/sessions/import", document | {"fingerprint": "another"}, 201
    )
    assert (other["tokens_kept"], other["tokens"], other["version"]) == (False, 0, 2)
    for one in (copy["id"], other["id"]):
        assert await say(http, one, "and then") == "and then"
    same = [await ask(http, "GET", f"/v1/sessions/{n}") for n in (copy["id"], other["id"])]
    assert same[0]["tokens"] == same[1]["tokens"]  # rendered anew, and the same

    for one in (copy["id"], other["id"], name):
        proof = await ask(http, "DELETE", f"/v1/sessions/{one}")
        assert proof["deleted"]
        assert {line["found"] for line in proof["proof"]["stores"][0]["searched"]} == {0}
        await ask(http, "GET", f"/v1/sessions/{one}", status=404)
    await ask(http, "DELETE", f"/v1/sessions/{name}", status=404)
    bus = await small.bus()
    assert await holding(bus, "rosebud") == []
    await bus.close()


async def test_an_imports_life(http: aiohttp.ClientSession) -> None:
    """It is the router's where the document names none, and is set once: a retry leaves what was changed since."""
    document = {"format": "spillway.session/1", "model": NAME, "turns": []}
    for change in ({"ttl_s": 60}, {}):
        async with http.post(
            "/v1/sessions/import", json=document, headers={"Idempotency-Key": "a life"}
        ) as response:
            made = await response.json()
        assert made["ttl_s"] == 7 * 24 * 3600
        found = await ask(http, "PATCH", f"/v1/sessions/{made['id']}", change)
        assert found["ttl_s"] == 60
    await ask(http, "DELETE", f"/v1/sessions/{made['id']}")


async def test_pages(http: aiohttp.ClientSession) -> None:
    """Pages of a list hold every session once, last used first."""
    names = [(await created(http))["id"] for _ in range(5)]
    await say(http, names[1], "x")
    seen, after = list[str](), ""
    while True:
        page = await ask(http, "GET", f"/v1/sessions?limit=2{after}")
        seen += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            break
        after = f"&after={page['next']}"
    assert seen[0] == names[1]
    assert sorted(seen) == sorted(names)
    for name in names:
        await ask(http, "DELETE", f"/v1/sessions/{name}")
    assert (await ask(http, "GET", "/v1/sessions"))["data"] == []


REFUSALS: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/v1/sessions", {"ttl_s": 0}, 400, "invalid_value"),
    ("POST", "/v1/sessions", {"model": "none"}, 404, "model_not_found"),
    ("POST", "/v1/sessions", {"metadata": {"a": "x" * 70_000}}, 413, "too_large"),
    ("GET", "/v1/sessions?limit=0", None, 400, "invalid_value"),
    ("GET", "/v1/sessions?after=what", None, 400, "invalid_cursor"),
    ("GET", "/v1/sessions/what", None, 404, "session_not_found"),
    ("GET", "/v1/sessions/what/export", None, 404, "session_not_found"),
    ("DELETE", "/v1/sessions/embed.m~0~" + "0" * 26, None, 404, "session_not_found"),
    ("POST", "/v1/sessions/import", {"format": "x"}, 400, "invalid_value"),
    (
        "POST",
        "/v1/sessions/import",
        {"format": "spillway.session/1", "model": NAME, "turns": [{}]},
        400,
        "invalid_session",
    ),
    (
        "POST",
        "/v1/sessions/import",
        {"format": "spillway.session/1", "model": "none", "turns": []},
        404,
        "model_not_found",
    ),
]


async def test_refusals(http: aiohttp.ClientSession) -> None:
    """What makes no sense is a clear error."""
    for verb, path, body, status, code in REFUSALS:
        found = await ask(http, verb, path, body, status)
        assert found["error"]["code"] == code
        assert found["error"]["message"]


async def test_same_key_same_session(http: aiohttp.ClientSession) -> None:
    """Creating under one Idempotency-Key again, as after a lost answer, is the same session."""
    found = []
    for _ in range(2):
        async with http.post("/v1/sessions", headers={"Idempotency-Key": "once"}) as response:
            found.append((await response.json())["id"])
    assert found[0] == found[1]
    await ask(http, "DELETE", f"/v1/sessions/{found[0]}")


async def test_killed_in_mid_delete(
    http: aiohttp.ClientSession, small: Small, model: Generator
) -> None:
    """kill -9 of kv_store while it deletes: another goes on, and the waiting client gets the proof."""
    name = (await created(http))["id"]
    assert await say(http, name, "rosebud") == "rosebud"
    running, release = asyncio.Event(), asyncio.Event()

    async def slow(scene: Scene) -> None:
        await scene.text("rosebud")
        running.set()
        await release.wait()
        await scene.text("rosebud")  # here it learns that it was cancelled
        await scene.end()

    model.script = slow
    turn = asyncio.create_task(
        ask(http, "POST", CHAT, {"session": name, "messages": [{"role": "user", "content": "rosebud"}]}, 499)
    )  # fmt: skip
    await running.wait()
    shown = await ask(http, "GET", f"/v1/sessions/{name}")
    delete = asyncio.create_task(ask(http, "DELETE", f"/v1/sessions/{name}"))
    bus = await small.bus()
    while not await bus.connection.call("HGET", keys.job(shown["running"]), "cancelled"):  # noqa: ASYNC110 - the bus rings nobody
        await asyncio.sleep(0.02)
    small.store.kill()
    await ask(http, "GET", f"/v1/sessions/{name}", status=404)
    small.store = small.start("kv_store", "1", "--sweep-s", "1")
    release.set()
    proof = await delete
    await turn
    assert proof["deleted"]
    assert await holding(bus, "rosebud") == []
    left = await holding(bus, unique_of(name))
    assert {key.partition(":")[0] for key in left} <= {
        "{sessions/0}"
    }  # the proof names the session
    assert small.store.stop() == 0
    small.store = small.start("kv_store", "2", "--sweep-s", "1")
    await bus.close()


async def test_a_grounded_conversation(http: aiohttp.ClientSession, small: Small) -> None:
    """The question of a grounded turn is in three families, a view and a claim; a deletion finds all of it."""
    helpers = [
        small.start("gpu_worker", "0", "--device", "sim", "--threads", "1"),
        small.start("vector_search", "0", "--search-threads", "1"),
    ]
    try:
        while "sim" not in str(await ask(http, "GET", "/v1/models")):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        helpers[1].ports()
        await ask(http, "POST", "/v1/collections", {"name": "pages"}, 201)
        page = {"documents": [{"id": "a", "text": "xanadu is far"}]}
        await ask(http, "POST", "/v1/collections/pages/documents", page)
        name = (await created(http))["id"]
        body = {
            "session": name,
            "messages": [{"role": "user", "content": "rosebud?"}],
            "retrieval": {"collection": "pages"},
        }
        headers = {"Idempotency-Key": "grounded", "Spillway-Resume": "60"}
        async with http.post(CHAT, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            mark = unique_of(response.headers["x-request-id"])
        bus = await small.bus()
        families = {key.partition(":")[0].split(".")[0] for key in await holding(bus, mark)}
        assert {"{request/0}", "{embed", "{search/0}", "{chat", "idem"} <= families
        assert (await ask(http, "GET", f"/v1/sessions/{name}"))["version"] == 1
        proof = await ask(http, "DELETE", f"/v1/sessions/{name}")
        assert proof["removed"]["claims"] == 1
        assert (
            proof["removed"]["job"] >= 4
        )  # the request, its embedding, its search, its generation
        left = {key.partition(":")[0] for key in await holding(bus, "rosebud", mark)}
        assert left <= {"{sessions/0}"}  # the proof
        assert await Idempotency(bus).claimed("default", "grounded") is None
        await bus.close()
    finally:
        for helper in helpers:
            helper.kill()


async def test_abandoned_delete(http: aiohttp.ClientSession, small: Small) -> None:
    """A deletion whose store was killed and whose client left is finished by the sweep."""
    name = (await created(http))["id"]
    assert await say(http, name, "rosebud") == "rosebud"
    bus = await small.bus()
    await Sessions(bus).mark_deleted(name)  # as far as the killed one had come
    while await holding(bus, "rosebud", unique_of(name)):  # noqa: ASYNC110 - a sweep rings nobody
        await asyncio.sleep(0.1)
    await ask(http, "GET", f"/v1/sessions/{name}", status=404)
    await bus.close()
