"""The keeper of pages on real servers: room ahead of need, the disk and back, restarts, damage, several of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from common.pages import keys as names
from common.pages.codec import Header, encode
from common.pages.keys import PARTITIONS
from common.pages.reconcile import reconcile
from common.pages.store import FREE, PageKey, PageStore, TierDown
from services.kv_store.disk.disk import Disk
from services.kv_store.pages import page_keeper
from services.kv_store.pages.keeper_lease import LeaseLost
from services.kv_store.pages.page_keeper import PageKeeper
from tests.conftest import PROFILE
from tests.integration.pages.test_store import counted, opened
from tests.support.mesh import Process
from tests.support.servers import KINDS, Cluster, Server
from tests.support.waiting import until

PAGE = 4000  # bytes of a layer; two a page
BUDGET = 16 * 100_000
DISK = 1 << 22
TTL_S = 60


def page(number: int, partition: int | None = None) -> tuple[PageKey, bytes]:
    """A page that is in order, and its key."""
    first = number % PARTITIONS if partition is None else partition
    key = PageKey(bytes([first]) + number.to_bytes(15, "big"))
    rng = random.Random(number)
    layers = [rng.randbytes(PAGE) for _ in range(2)]
    head = Header(id=key.id, parent=bytes(16), depth=number, layers=2, layer_bytes=PAGE)
    return key, encode(head, layers)


def metric(name: str, **labels: str) -> float:
    """A metric's value now."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def kept(store: PageStore, directory: Path, disk: int = DISK) -> AsyncIterator[PageKeeper]:
    """A running keeper."""
    async with running(PageKeeper(store, directory, disk)) as made:
        yield made


@contextlib.asynccontextmanager
async def running(made: PageKeeper) -> AsyncIterator[PageKeeper]:
    """A keeper while it runs."""
    task = asyncio.create_task(made.run())
    try:
        await asyncio.wait_for(made._keeps.wait(), 60)
        yield made
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


PLACES = ("redis6", "redis7", "valkey", "valkey-cluster")
every_place = pytest.mark.parametrize("place", PLACES, indirect=True)


@pytest.fixture(params=PLACES if PROFILE == "soak" else PLACES[-1:])
def place(request: pytest.FixtureRequest, _shared_servers: dict[str, Any]) -> Any:
    """An empty cluster that tests share; in soak runs, and for @every_place, a server of each kind too."""
    kind, _, cluster = request.param.partition("-")
    name = f"cluster-{kind}" if cluster else kind
    if name not in _shared_servers:
        _shared_servers[name] = Cluster.build(kind) if cluster else Server(kind).start()
    _shared_servers[name].flush()
    return _shared_servers[name]


@pytest.fixture
async def store(place: Any) -> AsyncIterator[PageStore]:
    """A store on every place."""
    made = opened(place, budget=BUDGET)
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that looks around more often than once a second."""
    for name in ("TICK_S", "BLOCK_S"):
        monkeypatch.setattr(page_keeper, name, 0.1)


async def put_all(store: PageStore, pages: list[tuple[PageKey, bytes]]) -> None:
    """Put pages one after the other, each until there is room for it."""
    for key, value in pages:
        await until(partial(taken, store, key, value))


async def taken(store: PageStore, key: PageKey, value: bytes) -> bool:
    """Put a page; return whether there was room."""
    return await store.put(key, value, TTL_S) != "full"


async def brought(store: PageStore, key: PageKey) -> bytes:
    """Ask a page back from disk, as turns do, again and again, and return it once it is there."""

    async def back() -> bool:  # what a keeper takes from the queue as it leaves is lost
        await store.recall([key])
        await asyncio.sleep(0.2)
        return await in_redis(store, key)

    await until(back)
    return bytes(await store.get(key) or b"")


@every_place
async def test_room_ahead_and_back(store: PageStore, tmp_path: Path) -> None:
    """What Redis has no room for goes to disk, the last used stays, and what is asked back is as it was written."""
    pages = [page(n, partition=n % 2) for n in range(60)]
    async with kept(store, tmp_path):
        await put_all(store, pages)
        for _ in range(3):
            await store.get(pages[-1][0])
        await until(lambda: has_room(store))
        keys = [key for key, _ in pages]
        where = await store.where(keys)
        assert set(where) == {"redis", "disk"}
        assert where[:20] == ["disk"] * 20
        assert where[-5:] == ["redis"] * 5
        usage = await store.usage()
        assert (usage.bytes, usage.pages) == await counted(store)

        served = metric("spillway_page_recalls_total", outcome="served")
        for key, value in pages[:3]:
            assert await brought(store, key) == value
        assert await store.where(keys[:3]) == ["redis"] * 3
        await until(
            lambda: so(metric("spillway_page_recalls_total", outcome="served") >= served + 3)
        )
        missed = metric("spillway_page_recalls_total", outcome="missed")
        await store.recall([page(99)[0]])
        await until(lambda: so(metric("spillway_page_recalls_total", outcome="missed") > missed))


async def has_room(store: PageStore) -> bool:
    """Whether every partition has the share free that is kept free."""
    return max((await store.usage()).bytes) <= (1 - FREE) * store.room


async def so(what: bool) -> bool:
    """What is so."""
    return what


async def test_a_page_larger_than_what_is_kept_free(store: PageStore, tmp_path: Path) -> None:
    """A page that no free share would hold is refused at first, room is made for it, and it is stored."""
    async with kept(store, tmp_path):
        await put_all(store, [page(n, partition=1) for n in range(10)])
        key = page(50, partition=1)[0]
        head = Header(id=key.id, parent=bytes(16), depth=0, layers=1, layer_bytes=80_000)
        await put_all(store, [(key, encode(head, [bytes(80_000)]))])
        assert await store.put(page(51, partition=1)[0], bytes(store.room + 1), TTL_S) == "full"


async def test_without_a_disk(store: PageStore, tmp_path: Path) -> None:
    """Without a disk tier what there is no room for is dropped, and counted so."""
    before = metric("spillway_page_evictions_total", to="nowhere")
    async with kept(store, tmp_path, disk=0):
        pages = [page(n, partition=3) for n in range(20)]
        await put_all(store, pages)
        assert set(await store.where([key for key, _ in pages])) == {None, "redis"}
        assert metric("spillway_page_evictions_total", to="nowhere") >= before + 5
    assert written(tmp_path) == b""
    tmp_path.joinpath("segment.0000000001").write_bytes(b"of a time when there was one")
    async with kept(store, tmp_path, disk=0):
        await until(lambda: so(written(tmp_path) == b""))


async def test_an_empty_redis(place: Any, store: PageStore, tmp_path: Path) -> None:
    """After the server restarted empty the disk is offered anew, and pages come back from it."""
    pages = [page(n, partition=4) for n in range(30)]
    async with kept(store, tmp_path):
        await put_all(store, pages)
        place.flush()
        key, value = pages[0]
        await until(lambda: on_disk(store, key))
        assert await brought(store, key) == value
        usage = await store.usage()
        assert (usage.bytes, usage.pages) == await counted(store)


async def in_redis(store: PageStore, key: PageKey) -> bool:
    """Whether a page is found in Redis."""
    return await store.where([key]) == ["redis"]


async def on_disk(store: PageStore, key: PageKey) -> bool:
    """Whether a page is found on disk."""
    return await store.where([key]) == ["disk"]


@every_place
async def test_old_data_is_put_right(store: PageStore) -> None:
    """Entries without values, values without entries, sizes of nothing and a wrong sum are mended, as they happen."""
    pages = [page(n, partition=n % 3) for n in range(12)]
    await put_all(store, pages)
    call = store.server.call
    lost, stray, unsized = (key for key, _ in pages[:3])
    await call("DEL", names.value(lost))
    await call("ZREM", names.index(stray.partition), stray.member)
    await call("HDEL", names.sizes(unsized.partition), unsized.member)
    await call("HSET", names.sizes(0), page(77, partition=0)[0].member, 12345)
    await call("INCRBY", names.use(2), 999_999)

    first = await reconcile(store, print)
    await reconcile(store, print)  # what lost its entry at first is a value without one

    usage = await store.usage()
    assert (usage.bytes, usage.pages) == await counted(store)
    assert usage.pages == 9
    assert [await store.get(key) for key in (lost, stray, unsized)] == [None] * 3
    assert [await store.get(key) for key, _ in pages[3:]] == [value for _, value in pages[3:]]
    assert first.miscounted > 0
    assert first.forgotten > 0


async def test_damaged_pages(store: PageStore, tmp_path: Path) -> None:
    """A page damaged in Redis never reaches the disk; one damaged on disk never comes back; both are counted."""
    pages = [page(n, partition=5) for n in range(30)]
    bad = bytearray(pages[0][1])
    bad[1000] ^= 4
    before = [metric("spillway_corrupt_pages_total", tier=t) for t in ("redis", "disk")]
    async with kept(store, tmp_path):
        await put_all(store, [(pages[0][0], bytes(bad)), *pages[1:]])
        await until(lambda: on_disk(store, pages[1][0]))
        assert await store.where([pages[0][0]]) == [None]
        assert metric("spillway_corrupt_pages_total", tier="redis") == before[0] + 1
        spoil(tmp_path, pages[1][1][64:200])
        await store.recall([pages[1][0]])
        await until(lambda: so(metric("spillway_corrupt_pages_total", tier="disk") > before[1]))
        assert await store.get(pages[1][0]) is None
        await until(lambda: nowhere(store, pages[1][0]))


def written(directory: Path) -> bytes:
    """All bytes of all segments."""
    return b"".join(path.read_bytes() for path in sorted(directory.glob("segment.*")))


def spoil(directory: Path, some: bytes) -> None:
    """Flip a bit of bytes that are in a segment."""
    (segment,) = directory.glob("segment.*")
    with segment.open("r+b") as file:
        file.seek(written(directory).index(some))
        file.write(bytes([some[0] ^ 1]))


async def nowhere(store: PageStore, key: PageKey) -> bool:
    """Whether no tier has a page."""
    return await store.where([key]) == [None]


async def test_dropped_is_off_the_disk(store: PageStore, tmp_path: Path) -> None:
    """A page that is dropped leaves Redis at once and the disk soon, to the last byte."""
    pages = [page(n, partition=6) for n in range(30)]
    async with kept(store, tmp_path):
        await put_all(store, pages)
        await until(lambda: on_disk(store, pages[1][0]))
        assert await store.drop([key for key, _ in pages]) == 30
        for key, _ in pages:
            await until(partial(nowhere, store, key))
        data = written(tmp_path)
        assert data
        assert not any(value[100:200] in data or key.id in data for key, value in pages)
        assert (await store.usage()).pages == 0


async def test_nonsense_in_the_lists(store: PageStore, tmp_path: Path) -> None:
    """Names of no pages, among what is asked of the keeper, keep nobody else from being served; they are counted."""
    nonsense = [
        "",
        "no page",
        "zz:0",
        "ab:0",
        f"{16 * 'ab'}:99",
        b"\xff\xfe",
        "1:x",
        "99:5",
        "1:5:zz",
        "1:5:" + 20 * "ab",
    ]
    (key, value), (other, more) = page(1), page(2)
    before = metric("spillway_bad_entries_total", stream="pages")
    async with kept(store, tmp_path):
        await put_all(store, [(key, value), (other, more)])
        for name in (names.ERASE, names.RECALL, names.ROOM):
            await store.server.call("RPUSH", name, *nonsense)
        await store.server.call("RPUSH", names.ERASE, key.member)

        await until(lambda: so_far(store, names.ERASE))
        await until(lambda: so_far(store, names.RECALL))
        await until(lambda: so_far(store, names.ROOM))

        assert await store.where([key, other]) == [None, "redis"]
        await until(
            lambda: so(
                metric("spillway_bad_entries_total", stream="pages") >= before + 3 * len(nonsense)
            )
        )


async def test_nonsense_in_the_index(store: PageStore, tmp_path: Path) -> None:
    """Members of an index that name no page, and sizes that are none, stop neither eviction nor counting."""
    nonsense: list[str | bytes] = ["no page", "zz:0", f"{16 * 'ab'}:0", b"\xff\xfe"]
    pages = [page(n, partition=1) for n in range(40)]
    await store.server.call("ZADD", names.index(1), *flat(nonsense))
    await store.server.call("ZADD", names.pins(1), *flat(nonsense))
    await store.put(*pages[0], TTL_S)
    await store.server.call("HSET", names.sizes(1), pages[0][0].member, "nonsense")
    before = metric("spillway_bad_entries_total", stream="pages")
    async with kept(store, tmp_path):
        await put_all(store, pages[1:])
        await until(lambda: on_disk(store, pages[1][0]))
        await until(lambda: no_member(store, nonsense))
        assert metric("spillway_bad_entries_total", stream="pages") >= before + len(nonsense)
        await until(lambda: so_sound(store))


def flat(members: list[str | bytes]) -> list[object]:
    """Members with scores, as ZADD takes them."""
    return [word for score, member in enumerate(members) for word in (score, member)]


async def no_member(store: PageStore, members: list[str | bytes]) -> bool:
    """Whether an index has none of these members."""
    return set(await store.server.call("ZMSCORE", names.index(1), *members)) == {None}


async def so_sound(store: PageStore) -> bool:
    """Whether what is counted is what is there."""
    usage = await store.usage()
    return (usage.bytes, usage.pages) == await counted(store)


async def so_far(store: PageStore, name: str) -> bool:
    """Return whether a list is empty."""
    return not await store.server.call("LLEN", name)


async def test_several_keepers(store: PageStore, place: Any, tmp_path: Path) -> None:
    """Of two kv_stores one keeps the pages; when it leaves, the other does, with the same disk or its own."""
    other = opened(place, budget=BUDGET)
    second = PageKeeper(other, tmp_path / "one", DISK)
    running: asyncio.Task[None] | None = None
    pages = [page(n, partition=7) for n in range(30)]
    try:
        async with kept(store, tmp_path / "one") as first:
            running = asyncio.create_task(second.run())
            await put_all(store, pages)
            await until(lambda: on_disk(store, pages[0][0]))
            assert first._keeps.is_set()
            assert not second._keeps.is_set()
        await asyncio.wait_for(second._keeps.wait(), 60)
        assert await brought(store, pages[0][0]) == pages[0][1]
        assert (
            0 < await store.server.call("PTTL", names.disk(7)) <= 30_000
        )  # nobody waits for the dead
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await other.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_one_keeper_of_a_full_server(kind: str, tmp_path: Path) -> None:
    """A server that is full gives its pages to one kv_store, which makes room, and to no other."""
    server = Server(kind, appendonly="no").start()
    store = opened(server, budget=BUDGET)
    try:
        keepers = [PageKeeper(store, tmp_path / str(n), DISK) for n in range(3)]
        server.config_set("maxmemory", 1)
        for _ in range(2):
            assert sorted([await hold(each) for each in keepers]) == [False, False, True]
        server.command("DEL", names.KEEPER)  # as when it lapses: whoever comes first has it
        assert [await hold(each) for each in reversed(keepers)] == [True, False, False]
    finally:
        await store.close()
        await asyncio.to_thread(server.close)


async def hold(keeper: PageKeeper) -> bool:
    """Take the lease for a keeper that does not run, or renew it; return whether that one has it."""
    await keeper._lease.renew()
    return keeper._lease.held


async def test_who_leaves_late_deletes_nothing(store: PageStore, tmp_path: Path) -> None:
    """A kv_store whose lease has lapsed and is another's by now leaves that one alone when it ends."""
    late, next_ = (PageKeeper(store, tmp_path / name, DISK) for name in ("late", "next"))
    assert await hold(late)
    await store.server.call("DEL", names.KEEPER)  # as when it lapses
    assert await hold(next_)
    await late._close()
    assert await store.server.call("EXISTS", names.KEEPER) == 1
    assert await hold(next_)
    await next_._close()
    assert await store.server.call("EXISTS", names.KEEPER) == 0


async def test_erase_requests_beyond_the_bound(
    store: PageStore, tmp_path: Path, monkeypatch: Any
) -> None:
    """However many pages are dropped while nobody erases them, each is off the disk once somebody does."""
    monkeypatch.setattr("common.pages.store.MOST_ERASED", 8)
    pages = [page(n, partition=9) for n in range(30)]
    async with kept(store, tmp_path):
        await put_all(store, pages)
        await until(lambda: on_disk(store, pages[1][0]))
        await until(lambda: has_room(store))
    async with asyncio.TaskGroup() as group:
        group.create_task(dropped(store, [key for key, _ in pages]))
        await until(lambda: asked_to_erase(store, 8))
        group.create_task(erased(store, tmp_path, pages))


async def erased(store: PageStore, directory: Path, pages: list[tuple[PageKey, bytes]]) -> None:
    """Keep the pages until no byte of these is on disk."""
    async with kept(store, directory):
        for key, _ in pages:
            await until(partial(nowhere, store, key))
        await until(lambda: asked_to_erase(store, 0, at_most=True))
        data = written(directory)
        assert data
        assert not any(value[100:200] in data or key.id in data for key, value in pages)


async def dropped(store: PageStore, keys: list[PageKey]) -> None:
    """Drop pages one by one, each again until it is accepted."""
    for key in keys:
        while True:
            try:
                await store.drop([key])
                break
            except TierDown:
                await asyncio.sleep(0.02)


async def asked_to_erase(store: PageStore, count: int, *, at_most: bool = False) -> bool:
    """Whether so many pages, or more, wait to be erased."""
    waiting: int = await store.server.call("LLEN", names.ERASE)
    return waiting <= count if at_most else waiting >= count


async def test_erase_requests_of_two_keepers(store: PageStore, tmp_path: Path) -> None:
    """A kv_store that is done with requests another has carried out meanwhile takes none that nobody has."""
    keeper_ = PageKeeper(store, tmp_path, 0)
    pages = [page(n, partition=10) for n in range(8)]
    await put_all(store, pages)
    first, rest = pages[:4], pages[4:]
    await store.server.call("RPUSH", names.ERASE, *(key.member for key, _ in first))
    assert await hold(keeper_)
    async with keeper_._eviction.lock:
        erasing = asyncio.create_task(keeper_._erase_asked(None))
        await until(lambda: so(bool(keeper_._eviction.lock._waiters)))
        await store.server.call("DEL", names.ERASE)  # as another does when it is done with them
        await store.server.call("RPUSH", names.ERASE, *(key.member for key, _ in rest))
    await erasing
    assert await store.where([key for key, _ in pages]) == [None] * 8
    assert await asked_to_erase(store, 0, at_most=True)


async def test_erase_requests_wait_for_the_disk(store: PageStore, tmp_path: Path) -> None:
    """A keeper that cannot open its disk yet leaves requests to erase pages from there where they are."""
    pages = [page(n, partition=11) for n in range(30)]
    async with kept(store, tmp_path):
        await put_all(store, pages)
        await until(lambda: on_disk(store, pages[1][0]))
    await store.drop([key for key, _ in pages])
    held = await Disk.open(
        tmp_path, DISK, store.clock
    )  # another process has it, so the next keeper has none
    try:
        next_ = PageKeeper(store, tmp_path, DISK)
        assert await hold(next_)
        await next_._keep()
        assert next_.disk is None
        assert await asked_to_erase(store, len(pages))
    finally:
        await held.close()
    next_._open_at = 0.0
    await next_._keep()
    try:
        assert await asked_to_erase(store, 0, at_most=True)
        data = written(tmp_path)
        assert data
        assert not any(value[100:200] in data for _, value in pages)
    finally:
        await next_._close()


async def test_a_round_longer_than_the_lease(
    store: PageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is renewed while one round of making room goes on and on: no other kv_store takes over meanwhile."""
    monkeypatch.setattr(page_keeper, "LEASE_MS", 1000)
    async with kept(store, tmp_path / "one") as first:
        second = PageKeeper(store, tmp_path / "two", DISK)
        async with first._eviction.lock:  # which a round that moves many pages holds as long
            waiting = first._eviction.lock._waiters
            full = put_all(store, [page(n, partition=12) for n in range(30)])
            filling = asyncio.create_task(full)
            await until(lambda: so(bool(waiting or first._eviction.lock._waiters)))
            ends_ms = await moment(store) + 3000
            while await moment(store) < ends_ms:
                assert not await hold(second)
                await asyncio.sleep(0.05)
        await filling
        assert first._keeps.is_set()


async def moment(store: PageStore) -> int:
    """The server's own time in ms."""
    seconds, micros = await store.server.call("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def test_who_lost_the_lease_moves_nothing(store: PageStore, tmp_path: Path) -> None:
    """A keeper whose lease another has taken in mid-round removes no page, from Redis or from requests to erase."""
    late, next_ = (PageKeeper(store, tmp_path / name, DISK) for name in ("late", "next"))
    pages = [page(n, partition=13) for n in range(8)]
    await put_all(store, pages)
    assert await hold(late)
    async with late._eviction.lock:
        evicting = asyncio.create_task(late._eviction.evict(None, 13, 1 << 30))
        await until(lambda: so(bool(late._eviction.lock._waiters)))
        await store.server.call("DEL", names.KEEPER)  # as when it lapses
        assert await hold(next_)
        assert not await hold(late)
    with pytest.raises(LeaseLost):
        await evicting
    await store.drop([pages[0][0]])
    with pytest.raises(LeaseLost):
        await late._erase_asked(None)
    assert await store.where([key for key, _ in pages]) == [None, *["redis"] * 7]
    assert await asked_to_erase(store, 1)
    await next_._close()


async def test_erased_while_another_kept_the_pages(store: PageStore, tmp_path: Path) -> None:
    """A keeper that comes back soon after another's term offers no page that was erased in between."""
    pages = [page(n, partition=14) for n in range(30)]
    async with kept(store, tmp_path / "one"):
        await put_all(store, pages)
        await until(lambda: on_disk(store, pages[1][0]))
    async with kept(store, tmp_path / "two"):
        await store.drop([key for key, _ in pages])
        await until(lambda: asked_to_erase(store, 0, at_most=True))
    assert any(value[100:200] in written(tmp_path / "one") for _, value in pages)
    async with kept(store, tmp_path / "one") as back:
        await store.recall([key for key, _ in pages])
        await until(lambda: so_far(store, names.RECALL))
        await until(lambda: so(back.disk is not None))
        assert await store.where([key for key, _ in pages]) == [None] * len(pages)
        data = written(tmp_path / "one")
        assert not any(value[100:200] in data for _, value in pages)


async def test_its_own_disk_is_kept(store: PageStore, tmp_path: Path) -> None:
    """A keeper that comes back, with no other's term in between, has the pages that it had on disk."""
    pages = [page(n, partition=15) for n in range(30)]
    async with kept(store, tmp_path):
        await put_all(store, pages)
        await until(lambda: on_disk(store, pages[0][0]))
    async with kept(store, tmp_path):
        assert await brought(store, pages[0][0]) == pages[0][1]


async def test_a_disk_that_is_not_offered_is_emptied(
    store: PageStore, tmp_path: Path, monkeypatch: Any
) -> None:
    """Where another kv_store keeps the pages for long, this one's disk gives up what nobody could erase on demand."""
    monkeypatch.setattr(page_keeper, "EMPTY_AFTER_S", 0.1)
    async with kept(store, tmp_path / "one"):
        await put_all(store, [page(n, partition=8) for n in range(30)])
        await until(lambda: on_disk(store, page(0, partition=8)[0]))
    async with kept(store, tmp_path / "two"):
        first = PageKeeper(store, tmp_path / "one", DISK)
        assert written(tmp_path / "one")
        running = asyncio.create_task(first.run())
        await until(lambda: so(written(tmp_path / "one") == b""))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_server_that_goes_and_comes(tmp_path: Path, caplog: Any) -> None:
    """While the pages Redis is away the keeper waits, and goes on when it is back; a full server gets room."""
    server = Server("valkey", appendonly="no").start()
    store = opened(server, budget=BUDGET)
    pages = [page(n, partition=n) for n in range(100)]
    try:
        async with kept(store, tmp_path):
            await until(lambda: so(metric("spillway_pages_down_seconds") == 0))
            await asyncio.to_thread(server.kill)
            await until(lambda: so(metric("spillway_pages_down_seconds") > 0))
            await asyncio.to_thread(server.start)
            await until(lambda: so(metric("spillway_pages_down_seconds") == 0))
            await until(lambda: so(store.up))
            await put_all(store, pages)
            used = server.command("INFO", "memory")["used_memory"]
            server.config_set("maxmemory", used - 50_000)
            await until(lambda: on_disk(store, pages[0][0]))
            await put_all(store, [page(n) for n in range(200, 205)])
            await until(lambda: so(metric("spillway_stored_pages", tier="disk") > 0))
    finally:
        await store.close()
        await asyncio.to_thread(server.close)


async def test_a_process_killed_as_it_moves_pages(
    tmp_path: Path, monkeypatch: Any, seed: int
) -> None:
    """kill -9 of kv_store while it moves pages: the next one finds what was moved, and every page it has is whole."""
    bus, server = Server("valkey").start(), Server("valkey", appendonly="no").start()
    monkeypatch.setenv("SPILLWAY_PAGES_URL", server.url)
    monkeypatch.setenv("SPILLWAY_PAGES_BYTES", str(BUDGET))
    store, rng = opened(server, budget=BUDGET), random.Random(seed)
    pages = [page(n) for n in range(1500)]
    try:
        at = 0
        for round_ in range(3):
            process = Process("kv_store", tmp_path, bus.url, str(round_)).start()
            await until(lambda: so_kept(store))
            until_ = at + rng.randrange(250, 400)
            await put_all(store, pages[at:until_])
            process.kill()
            await store.server.call("DEL", names.KEEPER)  # which would lapse in 6 s
            at = until_
        process = Process("kv_store", tmp_path, bus.url, "last").start()
        keys = [key for key, _ in pages[:at]]
        await until(lambda: all_told(store, keys))
        where = await store.where(keys)
        assert where.count("disk") + where.count("redis") == at
        for number in rng.sample(range(at), 40):
            key, value = pages[number]
            assert await brought(store, key) == value
        assert process.stop() == 0
        assert await store.server.call("EXISTS", names.KEEPER) == 0
        usage = await store.usage()
        assert (usage.bytes, usage.pages) == await counted(store)
    finally:
        await store.close()
        for made in (bus, server):
            await asyncio.to_thread(made.close)


async def so_kept(store: PageStore) -> bool:
    """Whether somebody keeps the pages."""
    return bool(await store.server.call("EXISTS", names.KEEPER))


async def all_told(store: PageStore, keys: list[PageKey]) -> bool:
    """Whether every page is found somewhere."""
    return None not in await store.where(keys)
