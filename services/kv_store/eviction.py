"""Room in the pages Redis, made ahead of need: the pages of least worth go to the disk, or nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from redis.exceptions import ResponseError

from common import log
from common.pages import codec
from common.pages import keys as names
from common.pages.identity import Owner
from common.pages.keys import PARTITIONS, PageKey, of_member
from common.pages.store import FREE, PageStore, sized
from services.kv_store import metrics
from services.kv_store.disk import Disk
from services.kv_store.limits import Limits

_AT_ONCE = 16
_LOOK_AT = 256
AHEAD = 0.05  # of a room, freed beyond need: what looking costs is shared by many pages
NEARLY = 0.97  # of a server's maxmemory
_log = log.get("kv_store")
Asked = Mapping[tuple[int, Owner | None], int]  # by partition and owner, the largest page refused


class Eviction:
    """Keeps a share of the pages Redis free, and a share of what each owner with a limit may have.

    What was used the longest ago goes first; what owners have within their limits goes after everything else, and what
    is pinned never.
    """

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self.limits: Limits = {}
        self.lock = asyncio.Lock()  # held while pages, or what is told of the disk, are on the move

    async def make_room(self, disk: Disk | None, asked: Asked) -> None:
        """Free what each owner and each partition holds beyond its share, and a little more. Raises TierDown."""
        room, usage = self._store.room, await self._store.usage()
        over = [
            (at, owner, need)
            for at, shares in enumerate(usage.shares)
            for owner, share in shares.items()
            if (limit := self.limits.get(owner)) is not None
            and (need := _over(share, limit // PARTITIONS, asked.get((at, owner), 0))) > 0
        ]
        for at, owner, need in over:
            await self.evict(disk, at, need, owner)
        used = (await self._store.usage() if over else usage).bytes
        pressed = await self._pressed() // PARTITIONS
        for at in range(PARTITIONS):
            if (need := max(_over(used[at], room, asked.get((at, None), 0)), pressed)) > 0:
                await self.evict(disk, at, need)

    async def _pressed(self) -> int:
        """Return the bytes by which servers are nearly full, whatever our own count says."""
        over = 0
        for call in await self._store.server.callers():
            told = dict(
                line.split(b":", 1)
                for line in (await call("INFO", "memory")).split()
                if b":" in line
            )
            most = int(told.get(b"maxmemory", 0))
            if most:
                over += max(int(told[b"used_memory"]) - int(NEARLY * most), 0)
        return over

    async def evict(
        self, disk: Disk | None, at: int, need: int, owner: Owner | None = None
    ) -> None:
        """Evict pages of one partition, of any or of one owner, until `need` bytes are free or nothing is left.

        Raises TierDown.
        """
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
        """Return the pages to evict, in order, as many as free `need` bytes, or all there are."""
        found: list[PageKey] = []
        within: list[tuple[PageKey, int]] = []  # limits of others
        start = 0
        while need > 0 and (pages := await self._unpinned(at, start)):
            start += _LOOK_AT
            for key, size, whose in pages:
                if need <= 0:
                    break
                if whose == owner or (owner is None and whose not in self.limits):
                    found.append(key)
                    need -= size
                elif owner is None:
                    within.append((key, size))
        for key, size in within:
            if need <= 0:
                break
            found.append(key)
            need -= size
        return found

    async def _unpinned(self, at: int, start: int) -> list[tuple[PageKey, int, Owner]]:
        """Return some pages of a partition from the `start`th longest unused on: their bytes, and whose they are."""
        call = self._store.server.call
        members = await call("ZRANGE", names.index(at), start, start + _LOOK_AT - 1)
        if not members:
            return []
        sizes, pins = await self._store.server.pipeline(
            [("HMGET", names.sizes(at), *members), ("ZMSCORE", names.pins(at), *members)]
        )
        now_ms, found = self._store.now_ms(), []
        for member, told, pin in zip(members, sizes, pins, strict=True):
            if pin is None or float(pin) <= now_ms:
                size, owner = sized(told)
                found.append((of_member(member), size, owner))
        return found

    async def _move(self, disk: Disk | None, keys: Sequence[PageKey]) -> int:
        ends: dict[PageKey, int] = {}
        if disk is not None:
            told = await self._store.server.pipeline(
                [("PTTL", names.value(key)) for key in keys]
                + [("HGET", names.sizes(key.partition), key.member) for key in keys]
            )
            lives, sizes = told[: len(keys)], told[len(keys) :]
            for key, left_ms, size in zip(keys, lives, sizes, strict=True):
                if isinstance(left_ms, ResponseError) or left_ms <= 0:
                    continue  # expired, or none of ours
                ends_ms = self._store.now_ms() + left_ms
                _, owner = sized(size)
                if await disk.renew(key, ends_ms) or await self._write(disk, key, ends_ms, owner):
                    ends[key] = ends_ms
        gone, freed = await self._store.remove(keys, ends)
        metrics.EVICTED.labels("disk").inc(len(ends))
        metrics.EVICTED.labels("nowhere").inc(max(gone - len(ends), 0))
        return freed

    async def _write(self, disk: Disk, key: PageKey, ends_ms: int, owner: Owner) -> bool:
        value = await self._store.server.call("GET", names.value(key))
        return (
            value is not None
            and sound(value, key, "redis")
            and await disk.put(key, value, ends_ms, owner)
        )


def _over(used: int, room: int, asked: int) -> int:
    """Return the bytes to free of what is beyond its room, less what is kept free or asked for; 0 if it is within."""
    over = used - room + max(int(FREE * room), asked if asked <= room else 0)
    return over + int(AHEAD * room) if over > 0 else 0


def sound(value: bytes, key: PageKey, tier: str) -> bool:
    """Return whether a page of a tier is what was written; one that is not is counted."""
    try:
        bad = codec.check(value, key.id)
        why = f"layers {bad}: their checksums are wrong" if bad else ""
    except codec.CorruptPage as error:
        why = str(error)
    if why:
        metrics.CORRUPT.labels(tier).inc()
        _log.warning("page_corrupt", page=key.member, tier=tier, why=why)
    return not why
