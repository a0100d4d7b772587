"""Erasing a session's pages from Redis and from the disk, with a second look for the proof."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from msgspec import Struct, field

from common.bus import Bus
from common.errors import Unavailable
from common.pages.keys import GROUPS, PageKey
from common.pages.store import EraseRefused, PageStore, TierDown
from services.kv_store.chains import chain
from services.kv_store.keeper import Keeper

_LOOKS = 100
_POLL_S = 0.1  # that another kv_store has erased its disk rings nobody
_AT_ONCE = 2000


class Erased(Struct):
    """How many pages had a copy in Redis or on disk, what was searched for them afterwards, and what could not be."""

    pages: int = 0
    stores: list[dict[str, Any]] = field(default_factory=list)
    not_searched: list[str] = field(default_factory=list)


class PageEraser:
    """Erases what sessions left in the page tiers; `keeper` is this process' own, which may not have the disk."""

    def __init__(self, bus: Bus, store: PageStore, keeper: Keeper) -> None:
        self._bus, self._store, self._keeper = bus, store, keeper

    async def erase(self, session: str) -> Erased:
        """Erase the pages of a session's turns. BusDown; Unavailable if they come back or the disk fails: repeat it."""
        ids = await chain(self._bus, session)
        keys = [PageKey(page, group) for page in ids for group in range(GROUPS)]
        done = Erased()
        try:
            for some in _parts(keys):
                done.pages += sum(tier is not None for tier in await self._store.where(some))
                await self._remove(some)
                await self._look(some)
            done.stores.append(_searched("pages", len(ids), "ids", len(keys)))
        except TierDown:
            with contextlib.suppress(TierDown):
                await self._remove(keys)  # from the disk, which comes first
            done.not_searched.append(
                f"the Redis of KV pages was away: what it holds goes {self._store.ttl_s} s after its last use"
            )
        await self._prove(ids, keys, done)
        return done

    async def _remove(self, keys: list[PageKey]) -> None:
        try:
            if self._keeper.disk is not None:
                await self._keeper.erase(keys)
            else:
                await self._drop(keys)
        except OSError as error:
            raise Unavailable(
                f"the disk of KV pages failed ({error.strerror}); repeat the deletion",
                code="storage_failed",
                retry_after_s=5,
            ) from error

    async def _drop(self, keys: list[PageKey]) -> None:
        """Have the kv_store that keeps the pages erase them, once it has no more to erase than it should."""
        for _ in range(_LOOKS):
            with contextlib.suppress(EraseRefused):
                await self._store.drop(keys)
                return
            await asyncio.sleep(_POLL_S)
        raise Unavailable(
            "too many pages wait to be erased from the disk; repeat the deletion",
            code="session_running",
            retry_after_s=2,
        )

    async def _look(self, keys: list[PageKey]) -> None:
        for _ in range(_LOOKS):
            tiers = await self._store.where(keys)
            if "redis" in tiers:  # a worker has just put it there
                await self._remove(keys)
            elif "disk" not in tiers:
                return
            else:
                await asyncio.sleep(_POLL_S)
        raise Unavailable(
            "pages of the session are still there; repeat the deletion",
            code="session_running",
            retry_after_s=2,
        )

    async def _prove(self, ids: list[bytes], keys: list[PageKey], done: Erased) -> None:
        disk = self._keeper.disk
        if disk is not None:
            read, found = await disk.search(set(keys))
            done.stores.append(_searched("disk", len(ids), "header of each record", read, found))


def _searched(store: str, pages: int, where: str, read: int, found: int = 0) -> dict[str, Any]:
    line = {"pattern": f"{pages} pages of its turns", "in": where, "read": read, "found": found}
    return {"store": store, "servers": 1, "keys": read, "searched": [line]}


def _parts(keys: list[PageKey]) -> Iterator[list[PageKey]]:
    for first in range(0, len(keys), _AT_ONCE):
        yield keys[first : first + _AT_ONCE]
