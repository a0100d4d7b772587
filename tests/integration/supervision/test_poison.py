"""No entry that cannot be read, on whatever lane or stream, keeps a service from the work behind it."""

from __future__ import annotations

import urllib.request
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.bus import Bus, keys
from common.clock import SystemClock
from common.config import StoreConfig
from common.registry.dead_letters import DeadLetters
from tests.integration.supervision.poison import (
    STREAM_POISON,
    family_of_key,
    lane_poison,
    streams,
)
from tests.support.mesh import Mesh
from tests.support.waiting import until

COLLECTION = "poisoned"


class Whole(Mesh):
    """A mesh of every service, each on the sim device where it has one."""

    def _start(self) -> None:
        sim = ("--device", "sim", "--threads", "1")
        for service in ("gpu_worker", "cpu_worker"):
            self.add(service, "0", *sim)
        self.add("vector_search", "0")
        self.add("kv_store", "0")
        self.url = self.address(self.add_router("0"))
        self.wait_ready(self.url)
        self.add_generator()

    def bad_entries(self) -> dict[str, float]:
        """Return how many bad entries all processes have counted, by stream."""
        found: dict[str, float] = {}
        for process in self.processes:
            url = f"http://127.0.0.1:{process.ports()['health_port']}/metrics"
            with urllib.request.urlopen(url, timeout=60) as reply:
                text = reply.read().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == "spillway_bad_entries_total":
                        stream = sample.labels["stream"]
                        found[stream] = found.get(stream, 0) + sample.value
        return found


@pytest.fixture(scope="module")
def whole() -> Iterator[Whole]:
    """A running mesh of every service."""
    made = Whole()
    yield made
    made.close()


@pytest.fixture
async def bus(whole: Whole) -> AsyncIterator[Bus]:
    """The mesh's bus, as a service opens it."""
    config = StoreConfig(redis_url=whole.redis.url, data_dir=str(whole.directory))
    made = await Bus.open(config, SystemClock())
    yield made
    await made.close()


@pytest.fixture
async def http(whole: Whole) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose relative URLs are the router's."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(whole.url, timeout=timeout) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
    """Return the JSON of a POST that must succeed."""
    async with http.post(path, json=body) as reply:
        assert reply.status < 300, f"{path}: {reply.status} {await reply.text()}"
        return await reply.json()


async def work(http: aiohttp.ClientSession, round_: int) -> None:
    """Ask every service for something, and have it done: embeddings, writes, searches, chat, sessions."""
    path = f"/v1/collections/{COLLECTION}"
    vectors = await post(http, "/v1/embeddings", {"input": "one text", "model": "sim"})
    assert len(vectors["data"]) == 1
    document = {"id": f"d{round_}", "text": f"the text of round {round_}"}
    await post(http, f"{path}/documents", {"documents": [document]})
    found = await post(http, f"{path}/search", {"text": f"the text of round {round_}", "k": 50})
    assert f"d{round_}" in {hit["id"] for hit in found["data"]}
    messages = [{"role": "user", "content": "hello"}]
    session = (await post(http, "/v1/sessions", {"model": "sim-chat"}))["id"]
    for extra in ({}, {"session": session}, {"retrieval": {"collection": COLLECTION, "k": 1}}):
        answer = await post(
            http,
            "/v1/chat/completions",
            {"model": "sim-chat", "messages": messages, "max_tokens": 4, **extra},
        )
        assert answer["choices"][0]["finish_reason"] == "length"
    async with http.get("/v1/sessions") as reply:
        assert session in {each["id"] for each in (await reply.json())["data"]}
    async with http.delete(f"/v1/sessions/{session}") as reply:
        assert reply.status == 200, await reply.text()


async def test_bad_entries_stop_nothing(
    whole: Whole, bus: Bus, http: aiohttp.ClientSession
) -> None:
    """With every lane and every stream poisoned, all goes on; what was bad is kept, counted and gone from the lanes."""
    await until(lambda: _embeds(http), "the encoders take work")
    await post(http, "/v1/collections", {"name": COLLECTION})
    await work(http, 0)
    put: dict[str, int] = {}
    for name in await streams(bus):
        if ":lane:" in name:
            for fields in lane_poison(family_of_key(name)).values():
                await bus.connection.call("XADD", name, "*", *fields)
                put[name] = put.get(name, 0) + 1
        else:
            for other in STREAM_POISON:
                await bus.connection.call("XADD", name, "*", *other)
    assert {name.split(":lane:")[1][:2] for name in put} >= {"gp", "cp", "kv", "ro", "w."}

    await work(http, 1)
    for name in put:
        await until(partial(_is_empty, bus, name), f"{name} is empty")
    await work(http, 2)

    for family in {family_of_key(name) for name in put}:
        letters = [x for x in await DeadLetters(bus).all(family) if x.code == "bad_entry"]
        here = {name: n for name, n in put.items() if family_of_key(name) == family}
        # Whose payload is none, though its entry is sound, may have been refused as any job is.
        assert len(letters) == sum(here.values()), (family, here)
        assert max(len(x.payload) for x in letters) <= 8192
        use = await bus.lanes.use(family)
        assert {size for cls, size in use.items() if f"{keys.lane(family, cls)}" in put} <= {(0, 0)}
    counted = whole.bad_entries()
    assert {"journal", "writes", "forgets"} <= counted.keys(), counted
    for process in whole.processes:
        assert process.process is not None
        assert process.process.poll() is None, process.log.read_text()[-4000:]


async def _embeds(http: aiohttp.ClientSession) -> bool:
    async with http.post("/v1/embeddings", json={"input": "one text", "model": "sim"}) as reply:
        return reply.status == 200


async def _is_empty(bus: Bus, lane: str) -> bool:
    return not await bus.connection.call("XLEN", lane)
