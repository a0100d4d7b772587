"""The pages Redis through PageStore, on every server and on a cluster: put, get, where, budget, and a server gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.clock import SystemClock
from common.config import PagesConfig
from common.errors import ConfigError
from common.pages import keys as names
from common.pages.keys import PARTITIONS
from common.pages.server import AGAIN_S, PagesServer
from common.pages.store import PageKey, PageStore, TierDown
from tests.support.servers import KINDS, Cluster, Server

BUDGET = 16 * 100_000  # bytes: 100,000 a partition
TTL_S = 60


@pytest.fixture(params=(*KINDS, "valkey-cluster"))
def place(request: pytest.FixtureRequest, _shared_servers: dict[str, Any]) -> Any:
    """An empty server of each kind, and a cluster, that tests share."""
    kind, _, cluster = request.param.partition("-")
    name = f"cluster-{kind}" if cluster else kind
    if name not in _shared_servers:
        _shared_servers[name] = Cluster.build(kind) if cluster else Server(kind).start()
    _shared_servers[name].flush()
    return _shared_servers[name]


def opened(place: Any, *, budget: int = BUDGET, timeout_s: float = 20.0) -> PageStore:
    """A store on a place."""
    config = PagesConfig(
        pages_url=place.url,
        pages_cluster=isinstance(place, Cluster),
        pages_bytes=budget,
        pages_ttl_s=TTL_S,
    )
    made = PageStore.of(config, SystemClock(), timeout_s=timeout_s)
    assert made is not None
    return made


@pytest.fixture
async def store(place: Any) -> AsyncIterator[PageStore]:
    """A store on every place."""
    made = opened(place)
    yield made
    await made.close()


def key(number: int, partition: int | None = None, group: int = 0) -> PageKey:
    """The key of some page."""
    first = number % PARTITIONS if partition is None else partition
    return PageKey(bytes([first]) + number.to_bytes(15, "big"), group)


async def counted(store: PageStore) -> tuple[list[int], int]:
    """What the server really holds: bytes by partition, and pages; and check that the index says the same."""
    held, pages = [0] * PARTITIONS, 0
    for at in range(PARTITIONS):
        index = {m.decode() for m in await store.server.call("ZRANGE", names.index(at), 0, -1)}
        sizes = await store.server.call("HGETALL", names.sizes(at))
        assert {m.decode() for m in sizes[::2]} == index
        for member in index:
            name = names.value(names.of_member(member.encode()))
            held[at] += await store.server.call("MEMORY", "USAGE", name)
            assert 0 < await store.server.call("PTTL", name) <= 1000 * TTL_S
        pages += len(index)
    return held, pages


async def test_put_get_where(store: PageStore) -> None:
    """A page is stored once, read by whoever asks, found where it is, and dropped with all that names it."""
    one, other, missing = key(1), key(1, group=1), key(2)
    assert await store.put(one, b"first", TTL_S) == "stored"
    assert await store.put(one, b"second", TTL_S) == "exists"
    assert await store.put(other, memoryview(b"third"), TTL_S) == "stored"

    assert [await store.get(k) for k in (one, other, missing)] == [b"first", b"third", None]
    assert await store.where([missing, one, other]) == [None, "redis", "redis"]
    usage = await store.usage()
    assert (usage.bytes, usage.pages) == await counted(store)
    assert usage.pages == 2

    assert await store.drop([one, missing]) == 1
    assert await store.where([one, other]) == [None, "redis"]
    assert await store.drop([other]) == 1
    assert await counted(store) == ([0] * PARTITIONS, 0)
    assert sum((await store.usage()).bytes) == 0


async def test_use_is_noted(store: PageStore) -> None:
    """Reading a page, or putting it again, makes it the last used and renews its time to live."""
    pages = [key(number, partition=3) for number in range(3)]
    for page in pages:
        await store.put(page, b"x", 1)
    await asyncio.sleep(0.01)
    await store.get(pages[0])
    await store.put(pages[1], b"y", TTL_S)
    order = await store.server.call("ZRANGE", names.index(3), 0, -1)

    assert order[0].decode() == pages[2].member
    ttl = [await store.server.call("PTTL", names.value(page)) for page in pages]
    assert [left > 1000 for left in ttl] == [True, True, False]


async def test_the_budget_holds(store: PageStore) -> None:
    """A partition takes what its share of the budget holds, and refuses the next page; the others still take."""
    outcomes = [await store.put(key(n, partition=5), bytes(30_000), TTL_S) for n in range(5)]
    assert outcomes == ["stored"] * outcomes.count("stored") + ["full"] * outcomes.count("full")
    assert 2 <= outcomes.count("stored") <= 3
    assert await store.put(key(0, partition=5), bytes(30_000), TTL_S) == "exists"
    assert await store.put(key(9, partition=6), bytes(30_000), TTL_S) == "stored"
    assert await store.put(key(10, partition=7), bytes(100_001), TTL_S) == "full"
    usage = await store.usage()
    assert (usage.bytes, usage.pages) == await counted(store)


async def test_what_expired_is_counted_out(store: PageStore) -> None:
    """A value that expired leaves its count, until it is put again or counted anew."""
    page = key(1)
    await store.put(page, bytes(50_000), 0.02)
    await asyncio.sleep(0.05)
    assert await store.where([page]) == [None]
    assert await store.put(page, bytes(70_000), TTL_S) == "stored"
    usage = await store.usage()
    assert (usage.bytes, usage.pages) == await counted(store)


async def test_disk_and_wishes(store: PageStore) -> None:
    """What kv_store says it has on disk is found until it expires, and wishes and erasures reach its lists."""
    pages = [key(number) for number in range(3)]
    now_ms = SystemClock().now_ms()
    for page, ends in zip(pages, (now_ms + 60_000, now_ms - 1), strict=False):
        await store.server.call("HSET", names.disk(page.partition), page.member, ends)
    assert await store.where(pages) == ["disk", None, None]
    await store.recall(pages[:1])
    assert await store.drop(pages) == 1
    assert await store.where([]) == []
    members = [page.member.encode() for page in pages]
    assert await store.server.call("LRANGE", names.RECALL, 0, -1) == members[:1]
    assert await store.server.call("LRANGE", names.ERASE, 0, -1) == members


async def test_random_use(store: PageStore, seed: int) -> None:
    """Whatever is put, read, dropped and left to expire at once: what is counted is what is there."""
    rng = random.Random(seed)
    pages = [key(number, partition=rng.randrange(3)) for number in range(12)]
    model: dict[PageKey, bytes] = {}

    async def act(page: PageKey) -> None:
        what = rng.random()
        if what < 0.5:
            value = bytes([rng.randrange(256)]) * rng.randrange(1, 40_000)
            known = model.get(page)
            outcome = await store.put(page, value, TTL_S)
            if outcome == "stored":
                assert known is None
                model[page] = value
        elif what < 0.8:
            assert await store.get(page) == model.get(page)
        else:
            assert await store.drop([page]) == (page in model)
            model.pop(page, None)

    for _ in range(30):
        await asyncio.gather(*(act(page) for page in rng.sample(pages, 6)))
    usage = await store.usage()
    assert (usage.bytes, usage.pages) == await counted(store)
    assert usage.pages == len(model)
    assert max(usage.bytes) < 1.3 * BUDGET / PARTITIONS


async def test_the_first_of_many_writers_wins(store: PageStore) -> None:
    """Of many who put one page at once one stores it, and its value is whole."""
    values = [bytes([n]) * 1000 for n in range(20)]
    outcomes = await asyncio.gather(*(store.put(key(1), value, TTL_S) for value in values))
    assert sorted(outcomes) == ["exists"] * 19 + ["stored"]
    assert await store.get(key(1)) == values[outcomes.index("stored")]


async def test_a_reader_that_leaves(store: PageStore) -> None:
    """Cancelled reads leave the connection in order: the next ones get their own replies."""
    pages = [key(number) for number in range(8)]
    for page in pages:
        await store.put(page, page.id * 5000, TTL_S)
    for _ in range(20):
        reads = [asyncio.create_task(store.get(page)) for page in pages]
        await asyncio.sleep(0)
        for read in reads[::2]:
            read.cancel()
        found = await asyncio.gather(*reads, return_exceptions=True)
        assert [f for f in found if isinstance(f, bytearray | bytes)] == [
            p.id * 5000 for p in pages[1::2]
        ]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_full_server_refuses_puts(kind: str) -> None:
    """Where the server itself is full before the budget is, a put says so; reading and erasing go on."""
    server = Server(kind, appendonly="no").start()
    store = opened(server, budget=1 << 30)
    try:
        assert await store.put(key(1), bytes(1000), TTL_S) == "stored"
        server.config_set("maxmemory", 1)
        assert await store.put(key(2), bytes(1000), TTL_S) == "full"
        assert await store.get(key(1)) == bytes(1000)
        assert await store.where([key(1), key(2)]) == ["redis", None]
        assert await store.drop([key(1)]) == 1
        assert await store.server.call("LRANGE", names.ERASE, 0, -1) == [key(1).member.encode()]
        assert (await store.usage()).pages == 0
    finally:
        await store.close()
        await asyncio.to_thread(server.close)


async def test_a_server_that_is_gone_or_hangs() -> None:
    """Whoever asks a server that hangs is told so within the timeout, the others at once; and all is well after."""
    server = Server("valkey").start()
    store = opened(server, timeout_s=0.3)
    try:
        await store.put(key(1), b"x", TTL_S)
        server.pause()
        found = await asyncio.gather(
            *(store.get(key(n)) for n in range(40)), return_exceptions=True
        )
        assert {type(f) for f in found} == {TierDown}
        assert not store.up
        asked = store.server._client._tasks.copy()
        with pytest.raises(TierDown):
            await store.put(key(2), b"x", TTL_S)
        assert store.server._client._tasks == asked  # it was not even tried
        server.resume()
        await asyncio.sleep(AGAIN_S)
        assert await store.get(key(1)) == b"x"
        assert store.up
        await asyncio.to_thread(server.kill)
        with pytest.raises(TierDown, match="away"):
            await store.where([key(1)])
        await asyncio.to_thread(server.start)
        await asyncio.sleep(AGAIN_S)
        assert await store.where([key(1)]) == ["redis"]  # its file is on, in tests
    finally:
        await store.close()
        await asyncio.to_thread(server.close)


async def test_closing(place: Any) -> None:
    """Who waits while the store is closed is told so."""
    store = opened(place)
    await store.usage()
    waiting = asyncio.create_task(store.server.call("BLPOP", names.ROOM, 1))
    await asyncio.sleep(0.05)
    await store.close()
    with pytest.raises(TierDown, match="closed"):
        await waiting


async def test_a_server_with_a_password(redis_server: Server) -> None:
    """Values are read with the password and in the database that the address names, over a socket and over TCP."""
    redis_server.config_set("requirepass", "secret")
    for url in (
        f"unix://:secret@{redis_server.socket}?db=2",
        f"redis://:secret@127.0.0.1:{redis_server.port}/2",
    ):
        made = PageStore.of(PagesConfig(pages_url=url), SystemClock())
        assert made is not None
        assert await made.put(key(1), b"x" * 100_000, TTL_S) in {"stored", "exists"}
        assert await made.get(key(1)) == b"x" * 100_000
        await made.close()
    wrong = PageStore.of(
        PagesConfig(pages_url=f"unix://:wrong@{redis_server.socket}"), SystemClock()
    )
    assert wrong is not None
    with pytest.raises(TierDown, match="WRONGPASS"):
        await wrong.get(key(1))
    await wrong.close()


async def test_addresses(tmp_path: Any) -> None:
    """No address is the instance's own socket, none is no tier, and one that cannot be is refused."""
    clock = SystemClock()
    assert PageStore.of(PagesConfig(pages_url="none"), clock) is None
    own = PageStore.of(PagesConfig(data_dir=str(tmp_path)), clock)
    assert own is not None
    with pytest.raises(TierDown, match=r"pages\.sock"):
        await own.get(key(1))
    await own.close()
    with pytest.raises(ConfigError, match="SPILLWAY_PAGES_URL is 'http://x'"):
        PagesServer("http://x", clock)
