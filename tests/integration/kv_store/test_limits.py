"""Tenants' limits on pages: who is beyond its own makes room among its own, and takes none of what others may have."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.bus import Bus
from common.pages import keys as names
from common.pages.identity import Owner, owner_id
from common.pages.keeper_client import KeeperClient
from common.pages.keys import PARTITIONS, PageKey
from common.pages.reconcile import reconcile
from common.pages.store import FREE, PageStore, sized
from common.registry.api_keys import KeyStore
from services.kv_store.pages import page_keeper as keepers
from services.kv_store.pages.eviction import Eviction, Limits, limits_of
from services.kv_store.pages.keeper_lease import KeeperLease
from services.kv_store.pages.page_keeper import PageKeeper
from tests.integration.kv_store.test_pages import BUDGET, DISK, TTL_S, page, running
from tests.integration.pages.test_store import counted, opened
from tests.support.waiting import until

ONE, OTHER, FREE_ONE = map(owner_id, ("one", "other", "free"))
LIMIT = BUDGET // 4
PAGES = {
    owner: [page(1000 * at + n, partition=n % 2) for n in range(60)]
    for at, owner in enumerate((ONE, OTHER, FREE_ONE), 1)
}


@pytest.fixture
async def store(place: Any) -> AsyncIterator[PageStore]:
    """A store on the bus' server or cluster."""
    made = opened(place[0], budget=BUDGET)
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that looks around more often."""
    for name in ("TICK_S", "BLOCK_S", "LIMITS_S"):
        monkeypatch.setattr(keepers, name, 0.1)


async def put(store: PageStore, owner: Owner, some: slice = slice(None)) -> list[str]:
    """Put an owner's pages in order."""
    return [await store.put(key, value, TTL_S, owner) for key, value in PAGES[owner][some]]


async def held(store: PageStore, owner: Owner) -> int:
    """The bytes that an owner has."""
    return sum(share.get(owner, 0) for share in (await store.usage()).shares)


async def test_what_owners_have(store: PageStore, seed: int) -> None:
    """Whatever is put, put again, removed and expires: shares add up to what is there, by owner."""
    rng = random.Random(seed)
    owners = (ONE, OTHER, b"")
    pages = [(page(n, partition=n % 3), owners[n % 2 if n < 20 else 2]) for n in range(24)]
    for _ in range(60):
        ((key, value), owner), what = rng.choice(pages), rng.random()
        if what < 0.7:
            await store.put(key, value, rng.choice((0.001, TTL_S)), owner)
        else:
            await store.remove([key])
    await asyncio.sleep(0.002)
    keys = [key for (key, _), _ in pages]
    for _ in range(2):
        usage = await store.usage()
        for at, share in enumerate(usage.shares):
            assert sum(share.values()) == usage.bytes[at]
        await reconcile(store, note_nothing)
    there = dict(zip(keys, await store.where(keys), strict=True))
    for owner in owners:
        known = any(there[key] for (key, _), whose in pages if whose == owner)
        assert known == (await held(store, owner) > 0)
    assert (usage.bytes, usage.pages) == await counted(store)


async def test_a_flood_is_refused_at_its_limit(store: PageStore) -> None:
    """Without anyone to make room an owner's pages are taken up to its limit, and others' go on."""
    await client(store).set_limits({ONE: LIMIT})
    outcomes = await put(store, ONE)
    assert set(outcomes) == {"stored", "over"}
    assert await held(store, ONE) <= 1.3 * LIMIT * 2 / PARTITIONS
    assert (await put(store, OTHER, slice(0, 8))) == ["stored"] * 8
    await client(store).set_limits({OTHER: 0})
    assert await store.put(*PAGES[ONE][59], TTL_S, ONE) == "stored"
    assert await store.put(*PAGES[OTHER][59], TTL_S, OTHER) == "over"


@pytest.mark.parametrize("place", ["valkey-cluster"], indirect=True)
async def test_a_flood_takes_nothing_from_others(store: PageStore, tmp_path: Path) -> None:
    """Neither a tenant with a limit nor one without pushes another's pages out of Redis while it is within its own."""
    limits = {ONE: LIMIT, OTHER: LIMIT}
    async with limited(store, tmp_path, limits):
        mine = PAGES[OTHER][:4]
        assert await put(store, OTHER, slice(0, 4)) == ["stored"] * 4
        for owner in (ONE, FREE_ONE, ONE, FREE_ONE):
            for key, value in PAGES[owner]:
                await until(partial(stored, store, key, value, owner))
        assert await store.where([key for key, _ in mine]) == ["redis"] * 4
        await until(lambda: within(store, ONE))
        where = await store.where([key for key, _ in PAGES[ONE]])
        assert where[-1] == "redis"  # its own, the longest unused first
        assert await held(store, FREE_ONE) > await held(store, ONE)

        key, value = PAGES[ONE][where.index("disk")]
        await store.recall([key])  # from the disk it comes back as its owner's
        await until(lambda: there(store, key))
        assert await store.get(key) == value
        await until(lambda: within(store, ONE))

        async def agree() -> bool:
            usage = await store.usage()
            return (usage.bytes, usage.pages) == await counted(store)

        await until(agree)  # pages may still be on their way to the disk between the two looks


@pytest.mark.parametrize("place", ["valkey-cluster"], indirect=True)
async def test_limits_beyond_what_there_is(store: PageStore, tmp_path: Path) -> None:
    """Where limits promise more than the tier has, what was unused for longest goes, and puts go on."""
    async with limited(store, tmp_path, dict.fromkeys((ONE, OTHER), BUDGET)):
        for owner in (ONE, OTHER):
            for key, value in PAGES[owner]:
                await until(partial(stored, store, key, value, owner))
        where = await store.where([key for key, _ in PAGES[ONE]])
        assert where[0] == "disk"


@pytest.mark.parametrize("place", ["valkey"], indirect=True)
async def test_who_goes_first(store: PageStore, seed: int) -> None:
    """Nothing pinned, no limited owner's before all others', the longest unused first, and as much as is needed."""
    rng, eviction = random.Random(seed), eviction_of(store)
    for _ in range(40):
        pages = [(page(n, partition=1), rng.choice((ONE, OTHER, b""))) for n in range(12)]
        for (key, value), owner in pages:
            await store.put(key, value, TTL_S, owner)
        order = rng.sample(pages, len(pages))
        ranks = {key.member: rank for rank, ((key, _), _) in enumerate(order)}
        await store.server.call("ZADD", names.index(1), *_flat(ranks))
        later, past = store.now_ms() + 60_000, store.now_ms() - 1
        pins = {key.member: rng.choice((later, past)) for (key, _), _ in rng.sample(pages, 4)}
        await store.server.call("ZADD", names.pins(1), *_flat(pins))
        eviction.limits = {owner: 1 for owner in (ONE, OTHER) if rng.random() < 0.5}
        only, need = rng.choice((None, ONE)), rng.randrange(1, 120_000)

        free = [(key, owner) for (key, _), owner in order if pins.get(key.member, 0) != later]
        wanted = [key for key, owner in free if only in (None, owner)]
        if only is None:
            owners = dict(free)
            wanted.sort(key=lambda key: owners[key] in eviction.limits)
        sizes = [
            sized(await store.server.call("HGET", names.sizes(1), k.member))[0] for k in wanted
        ]
        enough = next((n for n in range(len(sizes)) if sum(sizes[:n]) >= need), len(sizes))
        assert await eviction._victims(1, need, only) == wanted[:enough]
        await store.remove([key for (key, _), _ in pages])
        await store.server.call("DEL", names.pins(1))


def eviction_of(store: PageStore) -> Eviction:
    """An eviction whose lease nobody renews: it chooses, and moves nothing."""
    asks = client(store)
    return Eviction(store, asks, KeeperLease(asks.lock, "test"))


def client(store: PageStore) -> KeeperClient:
    """The keeper's client of a store, without a keeper."""
    return KeeperClient(store, "test", 6000, note_nothing)


def note_nothing(_: str) -> None:
    """Take no note of what is skipped."""


def _flat(scores: dict[str, int]) -> list[object]:
    return [word for member, score in scores.items() for word in (score, member)]


def limited(store: PageStore, directory: Path, limits: Limits) -> Any:
    """A running keeper under limits."""

    async def ask() -> Limits:
        return limits

    return running(PageKeeper(store, directory, DISK, ask))


async def stored(store: PageStore, key: PageKey, value: bytes, owner: Owner) -> bool:
    """Put a page; return whether there was room."""
    return await store.put(key, value, TTL_S, owner) in ("stored", "exists")


async def there(store: PageStore, key: PageKey) -> bool:
    """Whether Redis has a page."""
    return await store.where([key]) == ["redis"]


async def within(store: PageStore, owner: Owner) -> bool:
    """Whether an owner has what it may have, less what is kept free."""
    shares = [share.get(owner, 0) for share in (await store.usage()).shares]
    return max(shares) <= (1 - FREE) * LIMIT / PARTITIONS


async def test_the_limit_of_a_tenant(bus: Bus) -> None:
    """It is the largest of its keys', and there is none if one of them has none; a key's goes with it."""
    keys = KeyStore(bus)
    first, _ = await keys.create("one", page_bytes=10)
    second, _ = await keys.create("one", page_bytes=30)
    await keys.create("other", page_bytes=5)
    await keys.create("other")
    assert await limits_of(keys) == {ONE: 30}
    await keys.revoke(second.id)
    assert await limits_of(keys) == {ONE: 10}
    await keys.revoke(first.id)
    assert await limits_of(keys) == {}
    with pytest.raises(ValueError, match="negative"):
        await keys.create("one", page_bytes=-1)


async def test_limits_that_go(store: PageStore) -> None:
    """A limit that is not told any more holds no more."""
    await client(store).set_limits({ONE: 160, OTHER: 320})
    await client(store).set_limits({OTHER: 640})
    for at in (0, PARTITIONS - 1):
        found = await store.server.call("HGETALL", names.limits(at))
        assert found == [OTHER.hex().encode(), b"40"]
