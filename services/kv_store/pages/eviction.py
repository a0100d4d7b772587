"""Eviction in the pages Redis, ahead of need: the least valuable pages move to the disk or are dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from common import log
from common.pages import codec
from common.pages.identity import Owner, owner_id
from common.pages.keeper_client import KeeperClient, Room
from common.pages.keys import PARTITIONS, PageKey
from common.pages.store import FREE, PageStore
from common.registry.api_keys import KeyStore
from services.kv_store import metrics
from services.kv_store.disk.disk import Disk
from services.kv_store.pages.keeper_lease import KeeperLease

_AT_ONCE = 16
_LOOK_AT = 256
AHEAD = 0.05  # share of the room freed beyond need, so that one round serves many pages
_log = log.get("kv_store")


Limits = Mapping[Owner, int]
AskLimits = Callable[[], Awaitable[Limits]]  # BusDown if the keys cannot be read


async def limits_of(keys: KeyStore) -> Limits:
    """Return owners' limits: the largest limit of a tenant's keys, if all its keys have limits. Raises BusDown."""
    found: dict[str, int] = {}
    unlimited: set[str] = set()
    for key in await keys.list():
        found[key.tenant] = max(found.get(key.tenant, 0), key.page_bytes)
        if not key.page_bytes:
            unlimited.add(key.tenant)
    return {owner_id(tenant): most for tenant, most in found.items() if tenant not in unlimited}


class Eviction:
    """Keeps a share of the pages Redis free, and a share of each owner's limit.

    The longest unused page goes first; pages within their owners' limits go after all others, and pinned pages stay.
    Every step that removes pages raises LeaseLost once another process may hold `lease`. TierDown if Redis is away.
    """

    def __init__(self, store: PageStore, client: KeeperClient, lease: KeeperLease) -> None:
        self._store, self._client, self._lease = store, client, lease
        self.limits: Limits = {}
        # Locked while pages, or their entries in the catalog, are moved.
        self.lock = asyncio.Lock()

    async def make_room(self, disk: Disk | None, asked: Room) -> None:
        """Free the bytes that owners and partitions hold beyond their shares, and a little more."""
        room, usage = self._store.room, await self._store.usage()
        over = [
            (at, owner, need)
            for at, shares in enumerate(usage.shares)
            for owner, share in shares.items()
            if (limit := self.limits.get(owner)) is not None
            and (need := _excess(share, limit // PARTITIONS, asked.get((at, owner), 0))) > 0
        ]
        for at, owner, need in over:
            await self.evict(disk, at, need, owner)
        used = (await self._store.usage() if over else usage).bytes
        pressed = await self._client.excess_bytes() // PARTITIONS
        for at in range(PARTITIONS):
            need = max(_excess(used[at], room, asked.get((at, None), 0)), pressed)
            if need > 0:
                await self.evict(disk, at, need)

    async def evict(
        self, disk: Disk | None, at: int, need: int, owner: Owner | None = None
    ) -> None:
        """Evict pages of one partition, of all owners or one, until `need` bytes are free or no page is left."""
        async with self.lock:
            while need > 0:
                freed = 0
                victims = await self._victims(at, need, owner)
                for first in range(0, len(victims), _AT_ONCE):
                    freed += await self._move(disk, victims[first : first + _AT_ONCE])
                if not freed:
                    return
                need -= freed

    async def _victims(self, at: int, need: int, owner: Owner | None) -> list[PageKey]:
        """Return the pages to evict, in order, until they free `need` bytes, or all."""
        found: list[PageKey] = []
        within: list[tuple[PageKey, int]] = []  # pages within their owners' limits
        start, ended, now_ms = 0, False, self._store.now_ms()
        while need > 0 and not ended:
            pages, ended = await self._client.oldest(at, start, _LOOK_AT)
            start += _LOOK_AT
            for page in pages:
                if need <= 0:
                    break
                if page.pinned_ms > now_ms:
                    continue
                if page.owner == owner or (owner is None and page.owner not in self.limits):
                    found.append(page.key)
                    need -= page.size
                elif owner is None:
                    within.append((page.key, page.size))
        for key, size in within:
            if need <= 0:
                break
            found.append(key)
            need -= size
        return found

    async def _move(self, disk: Disk | None, keys: Sequence[PageKey]) -> int:
        """Move pages to the disk, or drop pages that it does not take; return the bytes freed in Redis."""
        ends: dict[PageKey, int] = {}
        if disk is not None:
            for key, (ends_ms, owner) in (await self._client.lives(keys)).items():
                self._lease.require()
                if await disk.renew(key, ends_ms) or await self._write(disk, key, ends_ms, owner):
                    ends[key] = ends_ms
        self._lease.require()
        gone, freed = await self._store.remove(keys, ends)
        metrics.EVICTED.labels("disk").inc(len(ends))
        metrics.EVICTED.labels("nowhere").inc(max(gone - len(ends), 0))
        return freed

    async def _write(self, disk: Disk, key: PageKey, ends_ms: int, owner: Owner) -> bool:
        value = await self._client.value(key)
        return (
            value is not None
            and sound(value, key, "redis")
            and await disk.put(key, value, ends_ms, owner)
        )


def _excess(used: int, room: int, asked: int) -> int:
    """Return the bytes to free for a share of `room`, or the page asked for, and a little more; 0 if it is free."""
    over = used - room + max(int(FREE * room), asked if asked <= room else 0)
    return over + int(AHEAD * room) if over > 0 else 0


def sound(value: bytes, key: PageKey, tier: str) -> bool:
    """Return whether a tier's bytes are an undamaged page; count a damaged page."""
    try:
        bad = codec.check(value, key.id)
        why = f"layers {bad}: their checksums are wrong" if bad else ""
    except codec.CorruptPage as error:
        why = str(error)
    if why:
        metrics.CORRUPT.labels(tier).inc()
        _log.warning("page_corrupt", page=key.member, tier=tier, why=why)
    return not why
