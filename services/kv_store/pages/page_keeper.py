"""The page keeper: the one kv_store that makes room in the pages Redis, owns the disk tier, and brings pages back.

Without a keeper nothing breaks: Redis refuses pages when it is full, and pages on disk are not offered any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from common import log
from common.bus import BusDown, unreadable
from common.pages import keys as names
from common.pages.disk_catalog import DiskCatalog
from common.pages.keeper_client import KeeperClient
from common.pages.keys import PageKey
from common.pages.reconcile import reconcile
from common.pages.server import AGAIN_S
from common.pages.store import PageStore, TierDown
from services.kv_store import metrics
from services.kv_store.disk.disk import Disk
from services.kv_store.disk.segments import InUse
from services.kv_store.pages.eviction import AskLimits, Eviction, sound
from services.kv_store.pages.keeper_lease import KeeperLease, LeaseLost

LEASE_MS = 6_000
TICK_S = 1.0
RECONCILE_S = 60.0
LIMITS_S = 30.0  # seconds between two reads of the limits of API keys
OPEN_AGAIN_S = 10.0
# After another process has been the keeper for this long, the directory is emptied: its pages are not offered, and
# requests to erase pages do not reach it.
EMPTY_AFTER_S = 60.0
BLOCK_S = 1  # shorter than the timeout of a reply
_log = log.get("kv_store")


class PageKeeper:
    """Keeps the pages of one pages Redis and one directory while it has the lease; `disk_bytes` 0: no disk tier.

    A disk is offered only if no erased page can be on it: if another kv_store was the keeper since this disk was last
    offered, the disk is cleared first, and pending requests to erase pages are carried out first.
    """

    def __init__(
        self, store: PageStore, directory: Path, disk_bytes: int, limits: AskLimits | None = None
    ) -> None:
        """`limits` returns the byte limits of some owners in a tier."""
        self._store, self._clock = store, store.clock
        self._directory, self._disk_bytes = directory, disk_bytes
        self._name = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._skipped = partial(unreadable.note, "pages")
        self._client = KeeperClient(store, self._name, LEASE_MS, self._skipped)
        self._lease = KeeperLease(self._client.lock, self._name)
        self._eviction = Eviction(store, self._client, self._lease)
        self._catalog = DiskCatalog(store, self._name)
        self._limits = limits
        self._disk: Disk | None = None
        self._term = 0  # the latest term that was begun
        self._disk_term = 0  # the term in which the disk was last offered
        self._open_at = self._tidy_at = self._reconcile_at = self._limits_at = 0.0
        self._empty_at = math.inf
        self._keeps = asyncio.Event()
        self._lost_at: float | None = None
        metrics.PAGE_ROOM.labels("redis").set(store.room * names.PARTITIONS)
        metrics.PAGE_ROOM.labels("disk").set(disk_bytes)

    @property
    def disk(self) -> Disk | None:
        """The disk tier; None unless this process has it open."""
        return self._disk

    @property
    def keeps(self) -> bool:
        """True while this process is the keeper and offers its disk, so that it carries out erasures itself."""
        return self._lease.held and self._disk is not None

    async def run(self) -> None:
        """Keep the pages whenever no other process does, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for work in (self._renew, self._keep, self._bring, self._expire):
                    group.create_task(self._forever(work))
        finally:
            await self._close()

    async def _close(self) -> None:
        try:
            if self._disk is not None:
                await self._disk.close()  # before the release: the next keeper may open it
        finally:
            with contextlib.suppress(TierDown):
                await self._lease.release()

    async def _forever(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except TierDown as error:
                self._down(str(error))
                await asyncio.sleep(AGAIN_S)
            except LeaseLost as error:
                _log.warning("pages_lease_lost", why=str(error))
            except Exception:  # noqa: BLE001 - housekeeping must outlive a bad reply
                _log.exception("pages_upkeep_failed")
                await asyncio.sleep(AGAIN_S)

    def _down(self, why: str) -> None:
        now = self._clock.monotonic()
        if self._lost_at is None:
            self._lost_at = now
            _log.warning("pages_redis_down", why=why)
        metrics.PAGES_DOWN.set(now - self._lost_at)

    def _up(self) -> None:
        if self._lost_at is not None:
            after_s = self._clock.monotonic() - self._lost_at
            _log.info("pages_redis_up", after_s=round(after_s, 3))
        self._lost_at = None
        metrics.PAGES_DOWN.set(0)

    # -- the lease and the disk ------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Renew the lease, in a task of its own, since a round of other work may take long."""
        await self._lease.renew()
        self._up()
        await asyncio.sleep(TICK_S)

    async def _begin(self) -> None:
        """Begin the lease's term, if it is new, and open the disk."""
        if self._term != self._lease.term:
            self._term = self._lease.term
            self._keeps.clear()
            self._reconcile_at = self._limits_at = 0.0  # the server may have changed
        self._empty_at = math.inf
        if self._disk_bytes:
            await self._open_disk()
        elif not self._keeps.is_set():
            await self._clear_former()
            await self._client.note_keeper(self._name)
        self._keeps.set()

    async def _open_disk(self) -> None:
        """Open the disk, and offer it once it has no page that other kv_stores erased."""
        disk, term = self._disk, self._lease.term
        if disk is not None and self._disk_term == term:
            return
        try:
            if disk is None:
                if self._clock.monotonic() < self._open_at:
                    return
                disk = await Disk.open(self._directory, self._disk_bytes, self._clock)
            await self._catch_up(disk)
        except (InUse, OSError) as error:  # InUse: a kv_store about to leave
            self._open_at = self._clock.monotonic() + OPEN_AGAIN_S
            _log.error("disk_not_opened", why=str(error), again_s=OPEN_AGAIN_S)
        else:
            self._disk, self._disk_term = disk, term
        finally:
            if disk is not None and self._disk is not disk:
                await disk.close()

    async def _catch_up(self, disk: Disk) -> None:
        """Erase the pages from a disk that were erased while this process was not the keeper."""
        async with self._eviction.lock:
            last = await self._client.last_keeper()
            self._lease.require()
            if last is not None and last != disk.identity:
                _log.warning("disk_cleared", why="another kv_store kept the pages meanwhile")
                await disk.clear()
            await self._client.note_keeper(disk.identity)
            await disk.limit(self._eviction.limits)
        await self._erase_asked(disk)

    async def _leave(self) -> None:
        """Close the disk, since another process is the keeper; later empty the directory if that stays so."""
        self._keeps.clear()
        async with self._eviction.lock:
            disk, self._disk = self._disk, None
            if disk is not None:
                await disk.close()
        self._open_at = 0.0
        now = self._clock.monotonic()
        self._empty_at = min(self._empty_at, now + EMPTY_AFTER_S)
        if now >= self._empty_at:
            await self._clear_former()
        for tier in ("redis", "disk"):  # only the keeper reports these gauges
            metrics.PAGES.labels(tier).set(0)
            metrics.PAGE_BYTES.labels(tier).set(0)

    async def _clear_former(self) -> None:
        """Remove the pages that an earlier process left in this directory."""
        if any(self._directory.glob("segment.*")):
            with contextlib.suppress(InUse, OSError):
                disk = await Disk.open(self._directory, self._disk_bytes, self._clock)
                await disk.clear()
                await disk.close()

    # -- keeping house ---------------------------------------------------------------------------------

    async def _keep(self) -> None:
        if not self._lease.held:
            if self._lease.others:
                await self._leave()
            else:  # the disk stays open until another process gets the lease
                self._keeps.clear()
            await self._lease.wait(TICK_S)
            return
        await self._begin()
        if self._limits is not None and self._clock.monotonic() >= self._limits_at:
            await self._read_limits(self._limits)
        asked = await self._client.room(BLOCK_S)
        await self._eviction.make_room(self._disk, asked)  # first, since other work may need room
        if self._disk is not None or not self._disk_bytes:
            await self._erase_asked(self._disk)
        if self._clock.monotonic() >= self._tidy_at:
            self._tidy_at = self._clock.monotonic() + TICK_S
            await self._tidy()

    async def _tidy(self) -> None:
        self._lease.require()
        if self._clock.monotonic() >= self._reconcile_at:
            self._reconcile_at = self._clock.monotonic() + RECONCILE_S
            await self._reconcile()
        if self._disk is not None:
            async with self._eviction.lock:
                self._lease.require()
                await self._catalog.renew(self._disk)
        await self._measure()

    async def _reconcile(self) -> None:
        found = await reconcile(self._store, self._skipped)
        for what in ("expired", "unindexed", "miscounted"):
            metrics.RECONCILED.labels(what).inc(getattr(found, what))
        if found.miscounted or found.forgotten:
            _log.warning("pages_recounted", bytes=found.miscounted, members=found.forgotten)

    async def _read_limits(self, ask: AskLimits) -> None:
        self._limits_at = self._clock.monotonic() + LIMITS_S
        try:
            self._eviction.limits = await ask()
        except BusDown as error:
            _log.warning("page_limits_not_read", why=str(error))
            return
        await self._client.set_limits(self._eviction.limits)
        if self._disk is not None:
            await self._disk.limit(self._eviction.limits)

    async def _erase_asked(self, disk: Disk | None) -> None:
        """Carry out the requests to erase pages; a request leaves the list only after it was carried out."""
        while (asked := await self._client.erasures()).members:
            self._lease.require()
            await self._erase(disk, asked.keys)
            if not await self._client.erased(asked.members):
                raise LeaseLost("the requests to erase pages are another keeper's")
            await self._client.announce_erased()

    async def erase(self, keys: Sequence[PageKey]) -> None:
        """Erase pages from the disk, if it is open, and from Redis. Raises TierDown, or OSError if the disk fails."""
        await self._erase(self._disk, keys)

    async def _erase(self, disk: Disk | None, keys: Sequence[PageKey]) -> None:
        async with self._eviction.lock:
            if disk is not None:
                await disk.erase(keys)
            await self._store.remove(keys)
            if disk is not None:
                await self._catalog.withdraw(disk)

    async def _expire(self) -> None:
        """Erase expired pages on disk, even while Redis is away."""
        await asyncio.sleep(RECONCILE_S)
        async with self._eviction.lock:
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
        if not self._lease.held:
            await self._lease.wait(TICK_S)
            return
        keys = await self._client.recalls(BLOCK_S)
        if not keys:
            return
        for key, tier in zip(keys, await self._store.where(keys), strict=True):
            served = tier == "redis" or await self._brought(key)
            metrics.RECALLS.labels("served" if served else "missed").inc()
        async with self._eviction.lock:
            if self._disk is not None:
                await self._catalog.withdraw(self._disk)

    async def _brought(self, key: PageKey) -> bool:
        """Put a page from the disk into Redis, if the disk has it undamaged; make room once if needed."""
        for _ in range(2):
            async with self._eviction.lock:
                disk = self._disk if self._disk_term == self._lease.term else None
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
                self._lease.require()  # else another keeper may have erased the page
                outcome = await self._store.put(key, value, left_s, whose)
            if outcome not in ("full", "over"):
                return True
            owner = whose if outcome == "over" else None
            await self._eviction.evict(disk, key.partition, len(value), owner)
        return False
