"""The disk catalog: lists in the pages Redis, for workers, which pages are on one kv_store's disk.

The catalog expires soon unless its writer renews it, so that no worker waits for the disk of a kv_store that has gone.
A missing partition, after Redis restarted empty or another kv_store wrote it, is written again.
"""

from __future__ import annotations

from typing import Protocol

from common.pages import keys as names
from common.pages.keys import PARTITIONS, PageKey, by_partition
from common.pages.store import PageStore

LIFE_MS = 30_000
_WRITER = "@"  # the field of the writer's name; no page has this name
_AT_ONCE = 500


class Shelf(Protocol):
    """A disk whose pages the catalog lists."""

    gone: set[PageKey]  # pages that left since the set was last emptied

    async def ends(self) -> dict[PageKey, int]:
        """Return the expiry (ms) of every page."""


class DiskCatalog:
    """The catalog of one disk's pages; `name` is this process' name. Every call may raise TierDown."""

    def __init__(self, store: PageStore, name: str) -> None:
        self._server, self._name = store.server, name.encode()

    async def renew(self, disk: Shelf) -> None:
        """Renew the catalog, write its missing partitions, and remove pages that have left the disk."""
        parts = range(PARTITIONS)
        told = await self._server.pipeline(
            [("HGET", names.disk(at), _WRITER) for at in parts]
            + [("PEXPIRE", names.disk(at), LIFE_MS) for at in parts]
        )
        missing = [at for at in parts if told[at] != self._name]
        if missing:
            ends = await disk.ends()
            held = by_partition(ends)
            for at in missing:
                await self._write(at, {key: ends[key] for key in held.get(at, ())})
        await self.withdraw(disk)

    async def withdraw(self, disk: Shelf) -> None:
        """Remove the pages that have left the disk."""
        gone = list(disk.gone)
        await self._server.pipeline(
            [
                ("HDEL", names.disk(at), *(key.member for key in some))
                for at, some in by_partition(gone).items()
            ]
        )
        disk.gone.difference_update(gone)

    async def _write(self, partition: int, ends_ms: dict[PageKey, int]) -> None:
        name = names.disk(partition)
        words = [word for key, end in ends_ms.items() for word in (key.member, end)]
        await self._server.call("DEL", name)
        for first in range(0, len(words), 2 * _AT_ONCE):
            await self._server.call("HSET", name, *words[first : first + 2 * _AT_ONCE])
        await self._server.pipeline(
            [("HSET", name, _WRITER, self._name), ("PEXPIRE", name, LIFE_MS)]
        )
