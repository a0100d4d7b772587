"""A deletion takes a session's pages from every tier, proves it, and harms no other session's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from common.bus import Bus
from common.ids import job_id, ulid
from common.pages.codec import Header, encode
from common.pages.identity import PAGE, page_ids, root_id
from common.pages.keys import PageKey
from common.pages.store import PageStore
from common.registry.sessions import SessionEnds, Sessions
from common.wire.sessions import SessionRecord, Turn
from services.kv_store.deletion.page_eraser import PageEraser
from services.kv_store.deletion.session_eraser import PAGES_NOT_SEARCHED, SessionEraser
from services.kv_store.pages.page_keeper import PageKeeper
from services.kv_store.pages.session_pages import session_pages
from tests.integration.kv_store.test_pages import (
    BUDGET,
    DISK,
    kept,
    on_disk,
    put_all,
    so,
    written,
)
from tests.integration.pages.test_store import opened
from tests.support.servers import Server
from tests.support.session_traces import FAMILY
from tests.support.turns import made, turn_of
from tests.support.waiting import until

ROOT = root_id("f", "t")


@pytest.fixture
async def store() -> AsyncIterator[PageStore]:
    """A pages Redis of this test's own."""
    server = Server("valkey", appendonly="no").start()
    made_ = opened(server, budget=BUDGET)
    yield made_
    await made_.close()
    await asyncio.to_thread(server.close)


async def session(bus: Bus, tokens: list[list[int]]) -> SessionRecord:
    """A session with these turns' tokens, half of each the prompt."""
    turns, held = list[Turn](), 0
    for said in tokens:
        half = len(said) // 2
        turn = turn_of(job_id(FAMILY, ulid()), held)
        turns.append(replace(turn, prompt=said[:half], output=said[half:]))
        held += len(said)
    return await with_turns(bus, turns)


async def with_turns(bus: Bus, turns: list[Turn]) -> SessionRecord:
    """A session with these turns."""
    record = replace(await made(bus, FAMILY), id=job_id(FAMILY, ulid()))
    await Sessions(bus).create(record, turns)
    return record


def pages(tokens: list[int], size: int = 3000) -> list[tuple[PageKey, bytes]]:
    """The pages of a chain of tokens, in two layer groups."""
    found = []
    for depth, page in enumerate(page_ids(ROOT, tokens)):
        for group in range(2):
            head = Header(
                id=page, parent=page, depth=depth, layers=1, layer_bytes=size, group=group
            )
            data = random.Random(page + bytes([group])).randbytes(size)
            found.append((PageKey(page, group), encode(head, [data])))
    return found


async def test_which_pages_a_session_has(bus: Bus) -> None:
    """They are those of its turns one after the other, and of what was before the history was made anew."""
    first, second, third = ([n] * (3 * PAGE // 2 + n) for n in (1, 2, 3))
    record = await session(bus, [first, second])
    assert await session_pages(bus, record.id) == page_ids(ROOT, first + second)
    turns = await Sessions(bus).turns(record.id)
    other = await with_turns(bus, [*turns, replace(turns[0], prompt=third, output=[])])
    assert await session_pages(bus, other.id) == [
        *page_ids(ROOT, first + second),
        *page_ids(ROOT, third),
    ]
    assert await session_pages(bus, job_id(FAMILY, ulid())) == []


async def test_its_pages_go(bus: Bus, store: PageStore, tmp_path: Path) -> None:
    """No tier has a byte of the session's pages, the proof says so, and another session's pages stay."""
    ours, theirs = ([n] * (40 * PAGE) for n in (1, 2))
    record, other = await session(bus, [ours[:700], ours[700:]]), await session(bus, [theirs])
    mine, others = pages(ours), pages(theirs)
    async with kept(store, tmp_path) as keeper:
        await put_all(store, mine + others + pages([3] * (200 * PAGE)))
        await until(lambda: on_disk(store, mine[0][0]))
        eraser = SessionEraser(bus, PageEraser(bus, store, keeper))
        (proof,) = await eraser.erase([(record.id, "t")], bus.clock.now_ms() + 10_000, prove=True)

        assert await store.where([key for key, _ in mine]) == [None] * len(mine)
        assert None not in await store.where([key for key, _ in others])
        assert proof["removed"]["pages"] == len(mine)
        assert [one["store"] for one in proof["proof"]["stores"]] == ["bus", "pages", "disk"]
        disk = proof["proof"]["stores"][2]
        assert keeper.disk is not None
        assert 0 < disk["keys"] == (await keeper.disk.usage())[0]
        assert disk["searched"][0]["found"] == 0
        assert PAGES_NOT_SEARCHED in proof["proof"]["not_searched"]
        data = written(tmp_path)
        assert not any(value[500:600] in data or key.id in data for key, value in mine)
        assert any(value[500:600] in data for _, value in others)
        await SessionEnds(bus).forget(record.id, "t")
        assert await session_pages(bus, other.id)


async def test_another_has_the_disk(bus: Bus, store: PageStore, tmp_path: Path) -> None:
    """A kv_store that does not keep the pages has the one that does erase its disk, and waits until it has."""
    tokens = [1] * (40 * PAGE)
    record, mine = await session(bus, [tokens]), pages(tokens)
    async with kept(store, tmp_path / "one"):
        await put_all(store, mine + pages([3] * (200 * PAGE)))
        await until(lambda: on_disk(store, mine[0][0]))
        second = PageEraser(bus, store, PageKeeper(store, tmp_path / "two", DISK))
        done = await second.erase(record.id)
        assert done.pages == len(mine)
        assert [one["store"] for one in done.stores] == ["pages"]
        data = written(tmp_path / "one")
        assert not any(value[500:600] in data for _, value in mine)


async def test_while_redis_is_away(bus: Bus, tmp_path: Path) -> None:
    """Without the pages Redis the disk is erased all the same, and the proof says what could not be looked at."""
    server = Server("valkey", appendonly="no").start()
    store = opened(server, budget=BUDGET)
    tokens = [1] * (40 * PAGE)
    record, mine = await session(bus, [tokens]), pages(tokens)
    try:
        async with kept(store, tmp_path) as keeper:
            await put_all(store, mine + pages([3] * (200 * PAGE)))
            await until(lambda: on_disk(store, mine[0][0]))
            await asyncio.to_thread(server.kill)
            await until(lambda: so(not store.up))
            done = await PageEraser(bus, store, keeper).erase(record.id)
            assert [one["store"] for one in done.stores] == ["disk"]
            assert "was away" in done.not_searched[0]
            data = written(tmp_path)
            assert not any(value[500:600] in data for _, value in mine)
            assert data
    finally:
        await store.close()
        await asyncio.to_thread(server.close)
