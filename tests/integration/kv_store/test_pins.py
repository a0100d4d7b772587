"""Pinned sessions: their pages outlast any flood, within what their tenant may pin, until they are unpinned or end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.bus import Bus
from common.bus import keys as names
from common.errors import SpillwayError
from common.pages import keys as pages_names
from common.pages.identity import PAGE, Owner, owner_id
from common.pages.keys import PARTITIONS, PageKey
from common.pages.pins import PagePins
from common.pages.store import PageStore
from common.registry.sessions import Sessions
from common.wire.sessions import SessionRecord, SessionWork
from services.kv_store.deletion.session_eraser import SessionEraser
from services.kv_store.pages.page_keeper import PageKeeper
from services.kv_store.pages.session_pins import SessionPins
from services.kv_store.sessions.session_store import SessionStore
from tests.integration.kv_store.test_limits import _quick  # noqa: F401 - a fixture
from tests.integration.kv_store.test_page_eraser import pages, session, store  # noqa: F401 - a fixture
from tests.integration.kv_store.test_pages import DISK, TTL_S, put_all, running
from tests.support.waiting import until

TENANT = owner_id("t")


class Limits:
    """What tenants may have, as the test says."""

    def __init__(self) -> None:
        self.now: Mapping[Owner, int] = {}

    async def __call__(self) -> Mapping[Owner, int]:
        return self.now


@pytest.fixture
def limits() -> Limits:
    """No limits at first."""
    return Limits()


async def pinned(store: PageStore) -> set[PageKey]:  # noqa: F811
    """The pages that are pinned now."""
    found = set()
    for at in range(PARTITIONS):
        for member in await store.server.call("ZRANGE", pages_names.pins(at), 0, -1):
            found.add(pages_names.of_member(member))
    return found


async def asked(bus: Bus, pins: SessionPins | None, op: Any, record: SessionRecord) -> Any:
    """Have kv_store do one job, as the router asks for it."""
    found = SessionStore(bus, SessionEraser(bus), pins)
    work = SessionWork(op=op, tenant=record.tenant, session=record.id)
    await found.perform(work, None, None)  # type: ignore[arg-type]
    return await Sessions(bus).get(record.id)


@pytest.mark.parametrize("place", ["valkey"], indirect=True)
async def test_a_pinned_session_outlasts_a_flood(
    bus: Bus,
    store: PageStore,  # noqa: F811
    limits: Limits,
    tmp_path: Path,
) -> None:
    """Its pages stay in Redis, those on disk come back, and once it is unpinned they go like any others."""
    tokens = [1] * (20 * PAGE)
    record, mine = await session(bus, [tokens]), pages(tokens)
    keys = [key for key, _ in mine]
    pins = SessionPins(bus, store, limits)
    async with running(PageKeeper(store, tmp_path, DISK, limits)):
        await put_all(store, mine)
        await put_all(store, pages([2] * (150 * PAGE)))  # some of it goes to the disk
        await until(lambda: anywhere(store, keys, "disk"))
        assert (await asked(bus, pins, "pin", record)).pinned
        await until(lambda: all_pinned(pins, store, keys))

        await put_all(store, pages([3] * (300 * PAGE)))
        assert await store.where(keys) == ["redis"] * len(keys)
        left_ms = await store.server.call("PTTL", pages_names.value(keys[0]))
        assert left_ms > 1000 * store.ttl_s  # the session's life is longer

        assert not (await asked(bus, pins, "unpin", record)).pinned
        assert await pinned(store) == set()
        await put_all(store, pages([4] * (300 * PAGE)))
        await until(lambda: anywhere(store, keys, "disk"))


@pytest.mark.parametrize("place", ["valkey"], indirect=True)
async def test_pages_that_are_not_in_redis_take_room_too(
    bus: Bus,
    store: PageStore,  # noqa: F811
    limits: Limits,
    tmp_path: Path,
) -> None:
    """A session beyond its tenant's limit is refused when what does not fit is on disk, too, or nowhere."""
    tokens = [1] * (20 * PAGE)
    record, mine = await session(bus, [tokens]), pages(tokens)
    keys = [key for key, _ in mine]
    pins = SessionPins(bus, store, limits)
    for key, value in mine:
        assert await store.put(key, value, TTL_S, TENANT) == "stored"
    limits.now = {TENANT: 60_000}
    async with running(PageKeeper(store, tmp_path, DISK, limits)):
        await until(lambda: within(store, keys, 54_000))
        with pytest.raises(
            SpillwayError, match=r"take \d+ bytes more than the 54000 that can still"
        ):
            await asked(bus, pins, "pin", record)
        below = zip(keys, await store.where(keys), strict=True)
        await store.drop([key for key, tier in below if tier == "disk"])
        with pytest.raises(
            SpillwayError, match=r"take \d+ bytes more than the 54000 that can still"
        ):
            await asked(bus, pins, "pin", record)
    assert await pinned(store) == set()


async def within(store: PageStore, keys: list[PageKey], room: int) -> bool:  # noqa: F811
    """Whether what Redis has of these fits in so many bytes, and some are on disk."""
    sizes = await PagePins(store).sizes(keys)
    return 0 < sum(sizes.values()) <= room and await anywhere(store, keys, "disk")


async def all_pinned(pins: SessionPins, store: PageStore, keys: list[PageKey]) -> bool:  # noqa: F811
    """Whether these are pinned, and no others, by now."""
    await pins.renew()
    return await pinned(store) == set(keys)


async def anywhere(store: PageStore, keys: list[PageKey], tier: str) -> bool:  # noqa: F811
    """Whether a tier has one of these."""
    return tier in await store.where(keys)


@pytest.mark.parametrize("place", ["valkey"], indirect=True)
async def test_what_may_be_pinned(bus: Bus, store: PageStore, limits: Limits) -> None:  # noqa: F811
    """A session beyond its tenant's limit is refused with what it takes and what is left; a smaller one still fits."""
    pins = SessionPins(bus, store, limits)
    large, small = [1] * (20 * PAGE), [2] * (4 * PAGE)
    records = [await session(bus, [tokens]) for tokens in (large, small)]
    await put_all(store, pages(large) + pages(small))
    limits.now = {TENANT: 60_000}
    with pytest.raises(SpillwayError, match=r"take \d+ bytes more than the 54000 that can still"):
        await asked(bus, pins, "pin", records[0])
    refused = await Sessions(bus).get(records[0].id)
    assert refused is not None
    assert not refused.pinned
    assert await Sessions(bus).pinned() == []
    await asked(bus, pins, "pin", records[1])
    assert await pinned(store) == {key for key, _ in pages(small)}

    limits.now = {TENANT: 10_000}  # lowered since: what does not fit is pinned no more
    assert list(await pins.renew()) == [records[1].id]
    assert 0 < len(await pinned(store)) < 8
    limits.now = {}
    await asked(bus, pins, "pin", records[0])
    assert await pinned(store) == {key for key, _ in pages(small) + pages(large)}
    with pytest.raises(SpillwayError, match="no pages are kept below"):
        await asked(bus, None, "pin", records[0])


@pytest.mark.parametrize("place", ["valkey"], indirect=True)
async def test_pins_follow_their_sessions(bus: Bus, store: PageStore, limits: Limits) -> None:  # noqa: F811
    """What a later turn adds is pinned; sessions share pages; what a session that ends leaves is pinned no more."""
    pins = SessionPins(bus, store, limits)
    common, more = [1] * (4 * PAGE), [2] * (4 * PAGE)
    first, second = await session(bus, [common]), await session(bus, [common + more])
    await put_all(store, pages(common))
    for record in (first, second):
        await asked(bus, pins, "pin", record)
    assert len(await pinned(store)) == 8
    await put_all(store, pages(common + more))
    await pins.renew()
    assert len(await pinned(store)) == 16
    await bus.connection.call("DEL", names.session(second.id))
    await pins.renew()
    assert await pinned(store) == {key for key, _ in pages(common)}
    await Sessions(bus).mark_deleted(first.id)
    await pins.renew()
    assert await pinned(store) == set()
    assert await Sessions(bus).pinned() == []
