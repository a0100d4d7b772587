"""The keeper of KV pages: of several kv_stores the one that makes room in Redis, has the disk, and brings pages back.

Without it nothing breaks: Redis refuses pages when it is full, and what is on the disk is not offered any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from common import log
from common.bus import BusDown
from common.pages import keys as names
from common.pages.keys import PageKey
from common.pages.server import AGAIN_S
from common.pages.store import PageStore, TierDown
from common.redis.lock import RedisLock
from services.kv_store import metrics
from services.kv_store.disk import Disk
from services.kv_store.disk_catalog import DiskCatalog
from services.kv_store.eviction import Asked, Eviction, sound
from services.kv_store.limits import AskLimits, tell
from services.kv_store.page_lists import pages_of, room_of
from services.kv_store.reconcile import reconcile
from services.kv_store.segments import InUse

LEASE_MS = 6_000
TICK_S = 1.0
RECONCILE_S = 60.0
LIMITS_S = 30.0  # after which a change of keys is heard of
OPEN_AGAIN_S = 10.0
EMPTY_AFTER_S = 60.0  # nobody is offered that disk, nor is what it has erased on demand
BLOCK_S = 1  # less than a reply may take
_AT_ONCE = 64
_log = log.get("kv_store")


class Keeper:
    """Keeps the pages of one pages Redis and of one directory; `disk_bytes` 0 is no disk tier."""

    def __init__(
        self, store: PageStore, directory: Path, disk_bytes: int, limits: AskLimits | None = None
    ) -> None:
        """`limits` returns how many bytes some owners may have in a tier."""
        self._store, self._server = store, store.server
        self._directory, self._disk_bytes = directory, disk_bytes
        self._name = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._eviction = Eviction(store)
        self._limits = limits
        self._shelf = DiskCatalog(store, self._name)
        self._lock = RedisLock(self._server.call, names.KEEPER, self._name, LEASE_MS, store.clock)
        self._disk: Disk | None = None
        self._open_at = self._tick_at = self._reconcile_at = self._limits_at = 0.0
        self._empty_at = math.inf
        self._keeps = asyncio.Event()
        self._lost_at: float | None = None
        metrics.PAGE_ROOM.labels("redis").set(store.room * names.PARTITIONS)
        metrics.PAGE_ROOM.labels("disk").set(disk_bytes)

    async def run(self) -> None:
        """Keep the pages for ever, as long as no other process does."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forever(self._keep))
                group.create_task(self._forever(self._bring))
                group.create_task(self._forever(self._expire))
        finally:
            await self._close()

    async def _close(self) -> None:
        try:
            if self._disk is not None:
                await self._disk.close()  # first: who keeps the pages next may open the same one
        finally:
            if self._lock.held:
                with contextlib.suppress(TierDown):
                    await self._lock.release()

    async def _forever(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except TierDown as error:
                self._down(str(error))
                await asyncio.sleep(AGAIN_S)
            except Exception:  # noqa: BLE001 - housekeeping must outlive a bad reply
                _log.exception("pages_upkeep_failed")
                await asyncio.sleep(AGAIN_S)

    def _down(self, why: str) -> None:
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            _log.warning("pages_redis_down", why=why)
        metrics.PAGES_DOWN.set(time.monotonic() - self._lost_at)
        if not self._lock.held:  # another may have it; the disk is given up once that is known
            self._keeps.clear()

    def _up(self) -> None:
        if self._lost_at is not None:
            _log.info("pages_redis_up", after_s=round(time.monotonic() - self._lost_at, 3))
        self._lost_at = None
        metrics.PAGES_DOWN.set(0)

    # -- keeping house ---------------------------------------------------------------------------------

    async def _keep(self) -> None:
        due = time.monotonic() >= self._tick_at
        if due:
            self._tick_at = time.monotonic() + TICK_S
            if await self._hold():
                await self._open_disk()
                self._empty_at = math.inf
                self._keeps.set()
            else:
                await self._leave()
        self._up()
        if not self._keeps.is_set():
            await asyncio.sleep(TICK_S)
            return
        if self._limits is not None and time.monotonic() >= self._limits_at:
            await self._limit(self._limits)
        asked = await self._asked()
        await self._eviction.make_room(self._disk, asked)  # first: all else takes room
        await self._erase_asked()
        if due:
            await self._tidy()

    async def _tidy(self) -> None:
        if time.monotonic() >= self._reconcile_at:
            self._reconcile_at = time.monotonic() + RECONCILE_S
            await reconcile(self._store)
        if self._disk is not None:
            async with self._eviction.lock:
                await self._shelf.renew(self._disk)
        await self._measure()

    async def _limit(self, ask: AskLimits) -> None:
        self._limits_at = time.monotonic() + LIMITS_S
        try:
            self._eviction.limits = await ask()
        except BusDown as error:
            _log.warning("page_limits_not_read", why=str(error))
            return
        await tell(self._store, self._eviction.limits)
        if self._disk is not None:
            await self._disk.limit(self._eviction.limits)

    async def _leave(self) -> None:
        """Another process keeps the pages, so the disk may be its own."""
        self._keeps.clear()
        self._reconcile_at = self._limits_at = 0.0
        async with self._eviction.lock:
            if self._disk is not None:
                await self._disk.close()
            self._disk = None
        now = time.monotonic()
        self._empty_at = min(self._empty_at, now + EMPTY_AFTER_S)
        if now >= self._empty_at:
            await self._empty()
        for tier in ("redis", "disk"):  # the other one tells them
            metrics.PAGES.labels(tier).set(0)
            metrics.PAGE_BYTES.labels(tier).set(0)

    async def _hold(self) -> bool:
        """Take the lease if nobody has it, and renew it if it is ours; return whether it is. Raises TierDown."""
        got = await self._lock.acquire()
        if got == "taken":
            self._reconcile_at = 0.0  # the server may be another than before
            _log.info("pages_kept", keeper=self._name)
        return got != "other"

    async def _open_disk(self) -> None:
        if self._disk is not None or time.monotonic() < self._open_at:
            return
        self._open_at = time.monotonic() + OPEN_AGAIN_S
        if not self._disk_bytes:
            await self._empty()
            return
        try:
            self._disk = await Disk.open(self._directory, self._disk_bytes)
            await self._disk.limit(self._eviction.limits)
        except InUse as error:  # by a kv_store that is about to leave
            _log.warning("disk_not_opened", why=str(error), again_s=OPEN_AGAIN_S)
        except OSError as error:
            _log.error("disk_not_opened", why=str(error), again_s=OPEN_AGAIN_S)

    async def _empty(self) -> None:
        """Remove what an earlier process left in our directory."""
        if any(self._directory.glob("segment.*")):
            with contextlib.suppress(InUse, OSError):
                disk = await Disk.open(self._directory, self._disk_bytes)
                await disk.clear()
                await disk.close()

    async def _asked(self) -> Asked:
        """Wait a little until room is asked for; return the largest page that was refused."""
        rung = await self._server.call("BLPOP", names.ROOM, BLOCK_S)
        if rung is None:
            return {}
        more = await self._server.call("LPOP", names.ROOM, _AT_ONCE)
        return room_of((rung[1], *(more or ())))

    async def _erase_asked(self) -> None:
        """Carry out requests to erase pages; each stays in the list until it is, were it by another process."""
        if self._disk_bytes and self._disk is None:
            return  # until the disk is open
        while members := await self._server.call("LRANGE", names.ERASE, 0, _AT_ONCE - 1):
            await self.erase(pages_of(members))
            await self._server.pipeline([("LREM", names.ERASE, 1, each) for each in members])

    @property
    def disk(self) -> Disk | None:
        """The disk tier, if this process has it now."""
        return self._disk

    async def erase(self, keys: Sequence[PageKey]) -> None:
        """Erase pages from the disk, if it is ours, and from Redis. TierDown, or OSError if the disk fails."""
        async with self._eviction.lock:
            if self._disk is not None:
                await self._disk.erase(keys)
            await self._store.remove(keys)
            if self._disk is not None:
                await self._shelf.withdraw(self._disk)

    async def _expire(self) -> None:
        """Erase what has expired on disk, whether or not Redis is there."""
        await asyncio.sleep(RECONCILE_S)
        if self._disk is not None:
            await self._disk.expire(self._store.now_ms())

    async def _measure(self) -> None:
        usage = await self._store.usage()
        metrics.PAGES.labels("redis").set(usage.pages)
        metrics.PAGE_BYTES.labels("redis").set(sum(usage.bytes))
        if self._disk is not None:
            pages, used = await self._disk.usage()
            metrics.PAGES.labels("disk").set(pages)
            metrics.PAGE_BYTES.labels("disk").set(used)

    # -- bringing pages back ---------------------------------------------------------------------------

    async def _bring(self) -> None:
        await self._keeps.wait()
        rung = await self._server.call("BLPOP", names.RECALL, BLOCK_S)
        if rung is None:
            return
        more = await self._server.call("LPOP", names.RECALL, _AT_ONCE)
        keys = pages_of((rung[1], *(more or ())))
        for key, tier in zip(keys, await self._store.where(keys), strict=True):
            served = tier == "redis" or await self._brought(key)
            metrics.RECALLS.labels("served" if served else "missed").inc()
        async with self._eviction.lock:
            if self._disk is not None:
                await self._shelf.withdraw(self._disk)

    async def _brought(self, key: PageKey) -> bool:
        """Put a page from the disk into Redis, if it is there and sound; make room for it once."""
        disk = self._disk
        for _ in range(2):
            async with self._eviction.lock:
                found = await disk.get(key) if disk is not None else None
                if disk is None or found is None:
                    return False
                value, ends_ms, whose = found
                left_s = (ends_ms - self._store.now_ms()) / 1000
                if left_s <= 0:
                    return False
                if not sound(value, key, "disk"):
                    await disk.erase([key])
                    return False
                outcome = await self._store.put(key, value, left_s, whose)
            if outcome not in ("full", "over"):
                return True
            owner = whose if outcome == "over" else None
            await self._eviction.evict(disk, key.partition, len(value), owner)
        return False
