"""The page eraser: erases a session's pages from Redis and from the disk, and searches again for the proof."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from msgspec import Struct, field

from common.bus import Bus
from common.errors import Unavailable
from common.pages.keys import GROUPS, PageKey
from common.pages.store import EraseRefused, PageStore, TierDown
from services.kv_store.pages.page_keeper import PageKeeper
from services.kv_store.pages.session_pages import session_pages

WAIT_S = 10.0  # seconds to wait for another kv_store to erase its disk
_AT_ONCE = 2000


class ErasedPages(Struct):
    """The proof of an erasure: the number of pages with a copy, the stores searched afterwards, the unsearched ones."""

    pages: int = 0
    stores: list[dict[str, Any]] = field(default_factory=list)
    not_searched: list[str] = field(default_factory=list)


class PageEraser:
    """Erases sessions' pages in the page tiers; `keeper` is this process' keeper, which may lack the lease."""

    def __init__(self, bus: Bus, store: PageStore, keeper: PageKeeper) -> None:
        self._bus, self._store, self._keeper = bus, store, keeper

    async def erase(self, session: str) -> ErasedPages:
        """Erase the pages of a session's turns. Raises BusDown, or Unavailable (to try again) if pages are left."""
        ids = await session_pages(self._bus, session)
        keys = [PageKey(page, group) for page in ids for group in range(GROUPS)]
        done = ErasedPages()
        try:
            for some in _parts(keys):
                done.pages += sum(tier is not None for tier in await self._store.where(some))
                await self._remove(some)
                await self._look(some)
            done.stores.append(_searched("pages", len(ids), "ids", len(keys)))
        except TierDown:
            with contextlib.suppress(TierDown):
                await self._remove(keys)  # from the disk first, in case Redis fails
            done.not_searched.append(
                f"the Redis of KV pages was away: what it holds goes {self._store.ttl_s} s after its last use"
            )
        await self._prove(ids, keys, done)
        return done

    async def _remove(self, keys: list[PageKey]) -> None:
        try:
            if self._keeper.disk is not None:
                await self._keeper.erase(keys)
            if not self._keeper.keeps:
                await self._drop(keys)
        except OSError as error:
            raise Unavailable(
                f"the disk of KV pages failed ({error.strerror}); repeat the deletion",
                code="storage_failed",
                retry_after_s=5,
            ) from error

    async def _drop(self, keys: list[PageKey]) -> None:
        """Ask the keeper to erase pages; while too many requests wait, try again after each erasure."""

        async def accepted() -> bool:
            try:
                await self._store.drop(keys)
            except EraseRefused:
                return False
            return True

        await self._wait(accepted, "too many pages wait to be erased from the disk")

    async def _look(self, keys: list[PageKey]) -> None:
        """Wait until no tier has a copy of these pages; remove copies that workers put meanwhile."""

        async def gone() -> bool:
            tiers = await self._store.where(keys)
            if "redis" in tiers:
                await self._remove(keys)
                tiers = await self._store.where(keys)
            return not any(tiers)

        await self._wait(gone, "pages of the session are still there")

    async def _wait(self, done: Callable[[], Awaitable[bool]], why: str) -> None:
        """Wait until `done` returns True, and call it again after each erasure. Unavailable after WAIT_S."""
        clock = self._store.clock
        until = clock.monotonic() + WAIT_S
        while True:
            seen = await self._store.erasure()
            if await done():
                return
            if clock.monotonic() >= until:
                raise Unavailable(
                    f"{why}; repeat the deletion", code="session_running", retry_after_s=2
                )
            await self._store.await_erasure(seen)

    async def _prove(self, ids: list[bytes], keys: list[PageKey], done: ErasedPages) -> None:
        disk = self._keeper.disk
        if disk is not None:
            read, found = await disk.search(set(keys))
            done.stores.append(_searched("disk", len(ids), "index of all records", read, found))


def _searched(store: str, pages: int, where: str, read: int, found: int = 0) -> dict[str, Any]:
    line = {"pattern": f"{pages} pages of its turns", "in": where, "read": read, "found": found}
    return {"store": store, "servers": 1, "keys": read, "searched": [line]}


def _parts(keys: list[PageKey]) -> Iterator[list[PageKey]]:
    for first in range(0, len(keys), _AT_ONCE):
        yield keys[first : first + _AT_ONCE]
