"""Pages under everything at once: several users, a server killed and restarted empty, keepers that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

from common.pages.reconcile import reconcile
from common.pages.server import AGAIN_S
from common.pages.store import PageKey, PageStore, TierDown
from tests.conftest import PROFILE
from tests.integration.kv_store.test_pages import BUDGET, TTL_S, kept, page, put_all, so
from tests.integration.pages.test_store import counted, opened
from tests.support.servers import Server
from tests.support.waiting import until

ACTS = 20_000 if PROFILE == "soak" else 400
PAGES = [page(n) for n in range(400)]


class User:
    """Puts, reads, asks back and drops pages at random; whatever it reads must be what was written."""

    def __init__(self, server: Server, seed: int) -> None:
        self.store = opened(server, budget=BUDGET, timeout_s=1.5)
        self.random = random.Random(seed)
        self.read = self.back = 0

    async def run(self) -> None:
        for _ in range(ACTS):
            try:
                await self._act()
            except TierDown:
                await asyncio.sleep(AGAIN_S / 4)
        await self.store.close()

    async def _act(self) -> None:
        key, value = self.random.choice(PAGES)
        what = self.random.random()
        if what < 0.5:
            await self.store.put(key, value, TTL_S)
        elif what < 0.8:
            found = await self.store.get(key)
            assert found is None or found == value
            self.read += found is not None
        elif what < 0.98:
            some = [key for key, _ in self.random.sample(PAGES, 8)]
            below = [
                key
                for key, tier in zip(some, await self.store.where(some), strict=True)
                if tier == "disk"
            ]
            await self.store.recall(below)
            self.back += len(below)
        else:
            await self.store.drop([key])


async def trouble(server: Server, store: PageStore, tmp_path: Path, over: asyncio.Event) -> None:
    """Restart the server, and the keeper on the same disk, again and again."""
    rng = random.Random(1)
    while not over.is_set():
        async with kept(store, tmp_path):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), rng.uniform(0.3, 1.0))
            await asyncio.to_thread(server.restart)
            await asyncio.sleep(AGAIN_S)


async def test_nothing_wrong_is_ever_read(tmp_path: Path, seed: int) -> None:
    """Every value read is whole and the page's own; in the end what is counted is what is there."""
    server = Server("valkey", appendonly="no").start()
    store, over = opened(server, budget=BUDGET, timeout_s=1.5), asyncio.Event()
    users = [User(server, seed + n) for n in range(3)]
    try:
        troubles = asyncio.create_task(trouble(server, store, tmp_path, over))
        async with asyncio.TaskGroup() as group:
            for user in users:
                group.create_task(user.run())
        over.set()
        await troubles
        assert sum(user.read for user in users) > 0
        async with kept(store, tmp_path) as keeper:
            await until(lambda: so(store.up))
            await put_all(store, PAGES)  # else it may be that no page ever reached the disk
            keys = [key for key, _ in PAGES]
            await until(lambda: found(store, keys))
            await store.recall(keys[:100])
            await reconcile(store, print)
            assert keeper.disk is not None
        usage = await store.usage()
        assert (usage.bytes, usage.pages) == await counted(store)
    finally:
        await store.close()
        await asyncio.to_thread(server.close)


async def found(store: PageStore, keys: list[PageKey]) -> bool:
    """Whether some page is found on disk."""
    return "disk" in await store.where(keys)
