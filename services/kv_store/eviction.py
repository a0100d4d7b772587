"""Room in the pages Redis, made ahead of need: the pages of least worth go to the disk, or nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from redis.exceptions import ResponseError

from common import log
from common.pages import codec
from common.pages import keys as names
from common.pages.keys import PARTITIONS, PageKey, of_member
from common.pages.store import FREE, PageStore
from services.kv_store import metrics
from services.kv_store.disk import Disk

_AT_ONCE = 16
_LOOK_AT = 256
NEARLY = 0.97  # of a server's maxmemory
_log = log.get("kv_store")
# (store, partition, bytes to free) to the pages to evict, the least worth first.
Choose = Callable[[PageStore, int, int], Awaitable[list[PageKey]]]


async def least_recent(store: PageStore, at: int, need: int) -> list[PageKey]:
    """Choose the pages of a partition that were used the longest ago."""
    members = await store.server.call("ZRANGE", names.index(at), 0, _LOOK_AT - 1)
    if not members:
        return []
    sizes = await store.server.call("HMGET", names.sizes(at), *members)
    chosen = []
    for member, size in zip(members, sizes, strict=True):
        if need <= 0:
            break
        chosen.append(of_member(member))
        need -= int(size or 0)
    return chosen


class Eviction:
    """Keeps a share of the pages Redis free."""

    def __init__(self, store: PageStore, choose: Choose = least_recent) -> None:
        self._store, self._choose = store, choose
        self.lock = asyncio.Lock()  # held while pages, or what is told of the disk, are on the move

    async def make_room(self, disk: Disk | None, asked: dict[int, int]) -> None:
        """Free what each partition holds beyond its share; `asked` says for which page a partition had no room (bytes).

        Raises TierDown.
        """
        used, room = (await self._store.usage()).bytes, self._store.room
        pressed = await self._pressed() // PARTITIONS
        for at in range(PARTITIONS):
            largest = asked.get(at, 0) if asked.get(at, 0) <= room else 0
            over = used[at] - room + max(int(FREE * room), largest)
            if (need := max(over, pressed)) > 0:
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

    async def evict(self, disk: Disk | None, at: int, need: int) -> None:
        """Evict pages of one partition until `need` bytes are free or nothing is left. Raises TierDown."""
        async with self.lock:
            while need > 0:
                freed = 0
                victims = await self._choose(self._store, at, need)
                for first in range(0, len(victims), _AT_ONCE):
                    freed += await self._move(disk, victims[first : first + _AT_ONCE])
                if not freed:
                    return
                need -= freed

    async def _move(self, disk: Disk | None, keys: Sequence[PageKey]) -> int:
        ends: dict[PageKey, int] = {}
        if disk is not None:
            lives = await self._store.server.pipeline([("PTTL", names.value(key)) for key in keys])
            for key, left_ms in zip(keys, lives, strict=True):
                if isinstance(left_ms, ResponseError) or left_ms <= 0:
                    continue  # expired, or none of ours
                ends_ms = self._store.now_ms() + left_ms
                if await disk.renew(key, ends_ms) or await self._write(disk, key, ends_ms):
                    ends[key] = ends_ms
        gone, freed = await self._store.remove(keys, ends)
        metrics.EVICTED.labels("disk").inc(len(ends))
        metrics.EVICTED.labels("nowhere").inc(max(gone - len(ends), 0))
        return freed

    async def _write(self, disk: Disk, key: PageKey, ends_ms: int) -> bool:
        value = await self._store.server.call("GET", names.value(key))
        return (
            value is not None and sound(value, key, "redis") and await disk.put(key, value, ends_ms)
        )


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
