"""Pins in the pages Redis, which protect pages from eviction until a given time. Every call may raise TierDown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.pages import keys as names
from common.pages.keys import PARTITIONS, PageKey, by_partition
from common.pages.store import PageStore, sized


class PagePins:
    """Reads the sizes of pages, and writes the times until which pages are pinned."""

    def __init__(self, store: PageStore) -> None:
        self._store = store

    async def sizes(self, keys: Iterable[PageKey]) -> dict[PageKey, int]:
        """Return the sizes in bytes of the pages that Redis has, in the order of `keys`."""
        keys = list(keys)
        groups = by_partition(keys)
        told = await self._store.server.pipeline(
            [
                ("HMGET", names.sizes(at), *(key.member for key in some))
                for at, some in groups.items()
            ]
        )
        sizes = {
            key: sized(size)[0]
            for some, replies in zip(groups.values(), told, strict=True)
            for key, size in zip(some, replies, strict=True)
            if size is not None
        }
        return {key: sizes[key] for key in keys if key in sizes}

    async def replace(self, ends_ms: Mapping[PageKey, int]) -> None:
        """Pin exactly these pages, until the given times (ms); no pinned page expires before its pin ends."""
        parts, groups = range(PARTITIONS), by_partition(ends_ms)
        used_ms = self._store.now_ms() + 1000 * self._store.ttl_s
        told = await self._store.server.pipeline(
            [("ZRANGE", names.pins(at), 0, -1) for at in parts]
        )
        commands: list[tuple[object, ...]] = []
        for at, pinned in zip(parts, told, strict=True):
            members = {key.member: key for key in groups.get(at, ())}
            gone = [member for member in pinned if member.decode(errors="replace") not in members]
            if gone:
                commands.append(("ZREM", names.pins(at), *gone))
            if members:
                words = [word for name, key in members.items() for word in (ends_ms[key], name)]
                commands.append(("ZADD", names.pins(at), *words))
            commands += [
                ("PEXPIREAT", names.value(key), max(ends_ms[key], used_ms))
                for key in members.values()
            ]
        await self._store.server.pipeline(commands)
