"""Keys, tenants and quotas: what another tenant cannot see, what a key may spend, what a wrong key gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TypedDict, Unpack

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.bus import Bus
from common.clock import SystemClock
from common.config import Common
from common.errors import NotFound, RateLimited, Unauthenticated
from common.registry.api_keys import ApiKey, KeyStore
from common.registry.quotas import Quotas
from tests.integration.router.test_streams import Told
from tests.support.chat import CHAT, asks
from tests.support.mesh import Mesh, Process
from tests.support.scripted_generator import NAME, Generator, known
from tests.support.servers import Server


@pytest.fixture
async def keys(shared_redis: Server) -> AsyncIterator[KeyStore]:
    bus = await Bus.open(Common(redis_url=shared_redis.url), SystemClock())
    yield KeyStore(bus)
    await bus.close()


async def test_keys_live_and_die(keys: KeyStore) -> None:
    """A key is checked, rotated and revoked; its secret is nowhere in the store."""
    key, secret = await keys.create("acme", name="ci", concurrency=2)
    assert (await keys.check(secret)).tenant == "acme"
    raw = await keys._bus.connection.call("GET", "{key/" + key.id + "}:record")
    assert secret.rsplit("-", 1)[1].encode() not in raw

    _, fresh = await keys.rotate(key.id)
    with pytest.raises(Unauthenticated):
        await keys.check(secret)
    assert (await keys.check(fresh)).name == "ci"
    assert [item.id for item in await keys.list()] == [key.id]

    assert await keys.revoke(key.id)
    assert not await keys.revoke(key.id)
    with pytest.raises(Unauthenticated):
        await keys.check(fresh)
    with pytest.raises(NotFound):
        await keys.rotate(key.id)
    for text in ("", "sk-sw-", "sk-sw-x-y", "Bearer", "sk-sw-aaaaaaaaaaaa-" + "é" * 30):
        with pytest.raises(Unauthenticated):
            await keys.check(text)
    for tenant in ("", "A", "a/b", "x" * 64):
        with pytest.raises(ValueError, match="tenant"):
            await keys.create(tenant)


async def test_concurrency_frees_itself(keys: KeyStore) -> None:
    """No more requests at once than the key may run; a refund, an end or a dead router's lease frees its share."""
    key, _ = await keys.create("acme", concurrency=2)
    now = keys._bus.clock.now_ms()
    await Quotas(keys._bus).charge(key, "a", 1, now + 60_000)
    second = await Quotas(keys._bus).charge(key, "b", 1, now + 60_000)
    with pytest.raises(RateLimited):
        await Quotas(keys._bus).charge(key, "c", 1, now + 60_000)
    await Quotas(keys._bus).refund(second)
    await Quotas(keys._bus).charge(key, "c", 1, now + 150)
    await asyncio.sleep(0.3)
    await Quotas(keys._bus).charge(key, "d", 1, now + 60_000)
    await Quotas(keys._bus).leave(key, "a")
    await Quotas(keys._bus).charge(key, "e", 1, now + 60_000)


async def pass_time(keys: KeyStore, key: ApiKey, wait_ms: int) -> None:
    """Put a key's buckets where they would be `wait_ms` later."""
    for what in ("requests", "tokens"):
        name = "{key/" + key.id + "}:" + what
        left_ms = int(await keys._bus.connection.call("PTTL", name)) - wait_ms
        if left_ms > 0:
            full_us = int(await keys._bus.connection.call("GET", name)) - 1000 * wait_ms
            await keys._bus.connection.call("SET", name, full_us, "PX", left_ms)
        else:
            await keys._bus.connection.call("DEL", name)


async def now_us(keys: KeyStore) -> int:
    """Return Redis' time."""
    seconds, micros = await keys._bus.connection.call("TIME")
    return 1_000_000 * int(seconds) + int(micros)


@given(
    st.integers(1, 50), st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 10)), max_size=60)
)
@settings(deadline=None)
def test_a_bucket_never_gives_more_than_its_rate(
    shared_redis: Server, limit: int, steps: list[tuple[int, int]]
) -> None:
    """In any window a key spends at most a burst of one minute and what flowed in since."""

    async def spend() -> None:
        async with contextlib.AsyncExitStack() as stack:
            bus = await Bus.open(Common(redis_url=shared_redis.url), SystemClock())
            stack.push_async_callback(bus.close)
            await charge_all(KeyStore(bus))

    async def charge_all(keys: KeyStore) -> None:
        key, _ = await keys.create("acme", tokens_per_minute=limit)
        began, passed_us, spent, waits = await now_us(keys), 0, 0, list[float]()
        for wait_ms, cost in steps:
            await pass_time(keys, key, wait_ms)
            passed_us += 1000 * wait_ms
            try:
                await Quotas(keys._bus).charge(key, "r", cost, 0)
            except RateLimited as error:
                waits.append(error.retry_after_s or 0)
            else:
                spent += cost
            flowed = (await now_us(keys) - began + passed_us) * limit / 60e6
            assert spent <= limit + flowed + 0.1  # time passes in whole milliseconds here
            assert all(0 < wait <= 120 for wait in waits)

    asyncio.run(spend())


def between(bus: Any, verb: str, step: Any) -> None:
    """Have another request take a step right after the first command `verb`."""
    call = bus.connection.call

    async def interrupted(*command: Any, **more: Any) -> Any:
        reply = await call(*command, **more)
        if command[0] == verb:
            bus.connection.call = call
            await step()
        return reply

    bus.connection.call = interrupted


async def test_a_refused_charge_takes_nothing(keys: KeyStore) -> None:
    """A request that fits is charged, though another that does not fit is being refused at the same moment."""
    key, _ = await keys.create("acme", tokens_per_minute=10)
    await Quotas(keys._bus).charge(key, "a", 8, 0)
    fits: list[Any] = []

    async def meanwhile() -> None:
        fits.append(await Quotas(keys._bus).charge(key, "c", 2, 0))

    between(keys._bus, "INCRBY", meanwhile)
    with pytest.raises(RateLimited):
        await Quotas(keys._bus).charge(key, "b", 8, 0)
    if not fits:
        await meanwhile()
    with pytest.raises(RateLimited):
        await Quotas(keys._bus).charge(key, "d", 1, 0)


async def test_the_last_place_goes_to_one(keys: KeyStore) -> None:
    """Of two requests that come at once for a key's last place one gets it."""
    key, _ = await keys.create("acme", concurrency=1)
    later = keys._bus.clock.now_ms() + 60_000
    told: list[str] = []

    async def ask(name: str) -> None:
        try:
            await Quotas(keys._bus).charge(key, name, 1, later)
        except RateLimited:
            told.append("refused")
        else:
            told.append("charged")

    between(keys._bus, "ZADD", lambda: ask("b"))
    await ask("a")
    if len(told) < 2:
        await ask("b")
    assert sorted(told) == ["charged", "refused"]


async def test_a_charge_is_whole(keys: KeyStore) -> None:
    """A refusal by one quota charges none; a request that is charged again keeps its one place; a refund gives all."""
    key, _ = await keys.create("acme", requests_per_minute=3, tokens_per_minute=10, concurrency=1)
    later = keys._bus.clock.now_ms() + 60_000
    first = await Quotas(keys._bus).charge(key, "a", 9, later)
    await Quotas(keys._bus).leave(key, "a")
    for _ in range(5):
        with pytest.raises(RateLimited, match="tokens"):
            await Quotas(keys._bus).charge(key, "b", 9, later)
    await Quotas(keys._bus).charge(key, "c", 1, later)
    with pytest.raises(RateLimited, match="at once"):
        await Quotas(keys._bus).charge(key, "d", 0, later)
    await Quotas(keys._bus).charge(key, "c", 0, later)
    await Quotas(keys._bus).leave(key, "c")
    with pytest.raises(RateLimited, match="requests"):
        await Quotas(keys._bus).charge(key, "e", 0, later)
    await Quotas(keys._bus).refund(first)
    await Quotas(keys._bus).charge(key, "e", 9, later)
    for what in ("running", "requests", "tokens"):
        assert await keys._bus.connection.call("PTTL", "{key/" + key.id + "}:" + what) > 0


async def test_many_clients_charge_one_key(shared_redis: Server, keys: KeyStore) -> None:
    """Of many requests over several connections as many are charged as the key may run, and no more."""
    key, _ = await keys.create("acme", concurrency=5, requests_per_minute=1000)
    later = keys._bus.clock.now_ms() + 60_000
    buses = [await Bus.open(Common(redis_url=shared_redis.url), SystemClock()) for _ in range(4)]

    async def ask(number: int) -> bool:
        try:
            await Quotas(buses[number % 4]).charge(key, f"r{number}", 1, later)
        except RateLimited:
            return False
        return True

    told = await asyncio.gather(*(ask(number) for number in range(40)))
    assert sum(told) == 5
    for each in buses:
        await each.close()


# -- over HTTP -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(mesh: Mesh) -> Iterator[str]:
    """The URL of a router that wants keys."""
    router = mesh.add_router("keyed", "--keys", "on")
    url = mesh.address(router)
    mesh.wait_ready(url)
    yield url
    assert router.stop() == 0


class _Quota(TypedDict, total=False):
    """What a key may use."""

    requests_per_minute: int
    tokens_per_minute: int
    concurrency: int


async def _key(mesh: Mesh, tenant: str, **quota: Unpack[_Quota]) -> str:
    bus = await Bus.open(Common(redis_url=mesh.redis.url), SystemClock())
    _, secret = await KeyStore(bus).create(tenant, **quota)
    await bus.close()
    return secret


def _session(url: str, secret: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {secret}"})


async def test_no_key_no_answer(mesh: Mesh, keyed: str) -> None:
    """Without a key, or with a wrong one, every route but health is a 401, known or not."""
    for headers in ({}, {"Authorization": "Bearer sk-sw-x-y"}, {"Authorization": "Basic abc"}):
        async with aiohttp.ClientSession(keyed, headers=headers) as session:
            for method, path in (*ROUTES, ("GET", "/nope")):
                async with session.request(
                    method, path.format(c="x", d="y", r="z", s="0"), json={}
                ) as got:
                    assert got.status == 401, (method, path)
            async with session.get("/livez") as got:
                assert got.status == 200


async def test_on_loopback_a_key_is_not_needed_but_held_to_be_one(mesh: Mesh) -> None:
    """Where no key is needed, a wrong one is a 401, a right one is its tenant, and a placeholder is no key."""
    secret = await _key(mesh, "acme")
    wrong = secret[:-1] + ("0" if secret[-1] != "0" else "1")
    made = {"name": "own", "dimension": 3, "model": None}
    async with _session(mesh.url, secret) as own, own.post("/v1/collections", json=made) as got:
        assert got.status == 201, await got.text()
    expected = {None: 404, "none": 404, secret: 200, wrong: 401, "sk-sw-x-y": 401}
    found = {}
    for key in expected:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(mesh.url, headers=headers) as session,
            session.get("/v1/collections/own") as got,
        ):
            found[key] = got.status

    assert found == expected


async def test_keys_off_are_not_looked_at(mesh: Mesh) -> None:
    """With keys off whatever is sent as a key is ignored: somebody in front of the router has looked at it."""
    router = await asyncio.to_thread(mesh.add_router, "unkeyed", "--keys", "off")
    url = await asyncio.to_thread(mesh.address, router)
    await asyncio.to_thread(mesh.wait_ready, url)
    async with _session(url, "sk-sw-x-y") as session, session.get("/v1/models") as got:
        assert got.status == 200
    assert await asyncio.to_thread(router.stop) == 0


@pytest.mark.parametrize(
    ("keys", "host", "why"),
    [
        ("on", "127.0.0.1", "SPILLWAY_KEYS is on"),
        ("on", "0.0.0.0", "SPILLWAY_KEYS is on"),
        ("auto", "0.0.0.0", "0.0.0.0 can be reached from other machines"),
    ],
)
async def test_the_warning_without_a_key_says_why(
    keys: str, host: str, why: str, mesh_without_keys: str, tmp_path: Path
) -> None:
    """A router that needs keys where there is none says which setting asks for them, and how to make one."""
    process = Process(
        "router", tmp_path, mesh_without_keys, "0", "--port", "0", "--keys", keys, "--host", host
    )
    await asyncio.to_thread(process.start().ports)
    try:
        said = await asyncio.to_thread(_line, process, "no_api_key")
    finally:
        await asyncio.to_thread(process.kill)

    assert said["why"].startswith(why)
    assert said["create"] == "spillway keys create --tenant NAME"


@pytest.fixture
def mesh_without_keys() -> Iterator[str]:
    """The URL of a Redis server that nothing is in."""
    server = Server("valkey").start()
    yield server.url
    server.stop()


def _line(process: Process, event: str) -> dict[str, Any]:
    """Wait for a line of a process' log."""
    while True:
        lines = [json.loads(text) for text in process.log.read_text().splitlines() if event in text]
        if lines:
            found: dict[str, Any] = lines[0]
            return found
        time.sleep(0.05)


ROUTES = (
    ("GET", "/v1/collections/{c}"),
    ("DELETE", "/v1/collections/{c}"),
    ("POST", "/v1/collections/{c}/search"),
    ("POST", "/v1/collections/{c}/reembed"),
    ("GET", "/v1/collections/{c}/explain"),
    ("GET", "/v1/collections/{c}/map"),
    ("POST", "/v1/collections/{c}/map"),
    ("GET", "/v1/collections/{c}/tune"),
    ("POST", "/v1/collections/{c}/tune"),
    ("DELETE", "/v1/collections/{c}/tune"),
    ("GET", "/v1/collections/{c}/shards"),
    ("POST", "/v1/collections/{c}/replicas"),
    ("POST", "/v1/collections/{c}/shards/{s}/split"),
    ("POST", "/v1/collections/{c}/shards/{s}/move"),
    ("POST", "/v1/collections/{c}/shards/{s}/drop"),
    ("POST", "/v1/collections/{c}/shards/{s}/reset"),
    ("GET", "/v1/collections/{c}/documents"),
    ("POST", "/v1/collections/{c}/documents"),
    ("POST", "/v1/collections/{c}/documents/delete"),
    ("GET", "/v1/collections/{c}/documents/{d}"),
    ("DELETE", "/v1/collections/{c}/documents/{d}"),
    ("GET", "/v1/requests/{r}"),
    ("DELETE", "/v1/requests/{r}"),
    ("POST", "/v1/requests/{r}/cancel"),
    ("GET", "/v1/requests/{r}/events"),
    ("GET", "/v1/requests/{r}/timeline"),
    ("GET", "/v1/responses/{r}"),
    ("DELETE", "/v1/responses/{r}"),
    ("GET", "/v1/sessions/{r}"),
    ("POST", "/v1/sessions/{r}"),
    ("DELETE", "/v1/sessions/{r}"),
    ("GET", "/v1/sessions/{r}/export"),
    ("GET", "/v1/sessions/{r}/export/pages"),
    ("POST", "/v1/sessions/{r}/import/pages"),
    ("GET", "/v1/sessions/{r}/pages"),
)
OPEN = {
    "/v1/embeddings",
    "/v2/rerank",
    "/v1/mesh",
    "/v1/rerank",
    "/rerank",
    "/v1/models",
    "/v1/models/{model}",
    "/v1/collections",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/sessions",
    "/v1/sessions/import",
}
BODIES: dict[str, Any] = {
    "search": {"text": "x"},
    "documents": {"documents": [{"text": "x"}]},
    "delete": {"ids": ["y"]},
    "reembed": {},
}


async def test_another_tenant_finds_nothing(mesh: Mesh, keyed: str) -> None:
    """Every route that names a tenant's thing is a 404 for everybody else, and leaves it as it was."""
    owner, other = await _key(mesh, "owner"), await _key(mesh, "other")
    async with _session(keyed, owner) as mine, _session(keyed, other) as theirs:
        async with mine.post("/v1/collections", json={"name": "secret"}) as got:
            assert got.status == 201
        body = {"documents": [{"id": "y", "text": "hello"}]}
        headers = {"Spillway-Resume": "60"}
        async with mine.post("/v1/collections/secret/documents", json=body, headers=headers) as got:
            request = got.headers["x-request-id"]
        for method, path in ROUTES:
            where = path.format(c="secret", d="y", r=request, s="0")
            json = BODIES.get(path.rsplit("/", 1)[1], {}) if method == "POST" else None
            async with theirs.request(method, where, json=json) as got:
                assert got.status == 404, (method, where, await got.text())
        async with theirs.get("/v1/collections") as got:
            assert (await got.json())["data"] == []
        async with theirs.post("/v1/collections", json={"name": "secret"}) as got:
            assert got.status == 201
        for session in (mine, theirs):
            async with session.get("/v1/collections/secret") as got:
                assert (await got.json())["stats"]["documents"] == (1 if session is mine else 0)
            async with session.delete("/v1/collections/secret") as got:
                assert got.status == 200


def test_the_walk_covers_every_route() -> None:
    """No route that names a tenant's thing is missing from the walk."""
    import yaml

    from tests.support.mesh import ROOT

    paths = yaml.safe_load((ROOT / "docs/openapi.yaml").read_text())["paths"]
    named = {
        (method.upper(), path)
        for path, item in paths.items()
        for method in item
        if method in {"get", "post", "delete"}
        and path.startswith(("/v1", "/v2", "/rerank"))
        and path not in OPEN
    }
    places = {"c": "{name}", "d": "{id}", "r": "{id}", "s": "{shard}"}

    assert named == {(method, path.format(**places)) for method, path in ROUTES}


async def test_quotas_are_429_with_the_seconds_to_wait(mesh: Mesh, keyed: str) -> None:
    """Over a key's requests or tokens a minute the official client raises RateLimitError with Retry-After."""
    secret = await _key(mesh, "small", requests_per_minute=3, tokens_per_minute=1000)
    async with openai.AsyncOpenAI(base_url=f"{keyed}/v1", api_key=secret, max_retries=0) as client:
        for _ in range(3):
            await client.embeddings.create(model="sim", input="x")
        with pytest.raises(openai.RateLimitError) as caught:
            await client.embeddings.create(model="sim", input="x")

    assert caught.value.code == "quota"
    assert 1 <= int(caught.value.response.headers["Retry-After"]) <= 60
    secret = await _key(mesh, "small", tokens_per_minute=10)
    async with _session(keyed, secret) as session:
        async with session.post("/v1/embeddings", json={"input": "word " * 50}) as got:
            assert (got.status, (await got.json())["error"]["code"]) == (429, "quota")
        async with session.post("/v1/embeddings", json={"input": "one"}) as got:
            assert got.status == 200


async def test_a_generation_pays_for_what_it_may_say(
    mesh: Mesh, keyed: str, model: Generator
) -> None:
    """Prompt and max_tokens are charged before it runs; a key's concurrency is free again when its stream ends."""
    secret = await _key(mesh, "small", tokens_per_minute=600)
    async with _session(keyed, secret) as session:
        await known(session, NAME)
        codes = []
        for _ in range(2):
            async with session.post(CHAT, json=asks(max_tokens=400, stream=True)) as got:
                codes.append(got.status)
                answer = await got.read()
        assert (codes, json.loads(answer)["error"]["code"]) == ([200, 429], "quota")
    secret = await _key(mesh, "small", concurrency=1)
    told = Told(model)
    async with _session(keyed, secret) as session:
        response = await session.post(CHAT, json=asks(stream=True))
        async with session.post(CHAT, json=asks()) as got:
            assert (got.status, int(got.headers["Retry-After"]) >= 1) == (429, True)
        told.go.set()
        assert b"[DONE]" in await response.read()
        async with session.post(CHAT, json=asks()) as got:
            assert got.status == 200
        told = Told(model)
        response = await session.post(CHAT, json=asks(stream=True))
        response.close()  # a client that leaves frees its share, too
        async with asyncio.timeout(60):
            await told.over.wait()
            told.go.set()
            while (await _status(session)) != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def _status(session: aiohttp.ClientSession) -> int:
    async with session.post(
        CHAT, json=asks(max_tokens=1), headers={"Spillway-Timeout": "5"}
    ) as got:
        return got.status
