"""What this kv_store has on its disk, told in the pages Redis to whoever looks for a page.

It is told under a short life, so where this kv_store is gone nobody waits for its disk; and anew where it is missing.
"""

from __future__ import annotations

from common.pages import keys as names
from common.pages.keys import PARTITIONS, PageKey, by_partition
from common.pages.store import PageStore
from services.kv_store.disk import Disk

LIFE_MS = 30_000
_WHO = "@"  # no page's name
_AT_ONCE = 500


class DiskCatalog:
    """One kv_store's pages on disk, as others see them; `name` is this process' own."""

    def __init__(self, store: PageStore, name: str) -> None:
        self._server, self._name = store.server, name.encode()

    async def renew(self, disk: Disk) -> None:
        """Keep alive what was told, tell what was not, and take back what has gone since. Raises TierDown."""
        parts = range(PARTITIONS)
        told = await self._server.pipeline(
            [("HGET", names.disk(at), _WHO) for at in parts]
            + [("PEXPIRE", names.disk(at), LIFE_MS) for at in parts]
        )
        missing = [at for at in parts if told[at] != self._name]
        if missing:
            held = by_partition(ends := await disk.ends())
            for at in missing:
                await self._tell(at, {key: ends[key] for key in held.get(at, ())})
        await self.withdraw(disk)

    async def withdraw(self, disk: Disk) -> None:
        """Take back what has left the disk. Raises TierDown."""
        gone = list(disk.gone)
        await self._server.pipeline(
            [
                ("HDEL", names.disk(at), *(key.member for key in some))
                for at, some in by_partition(gone).items()
            ]
        )
        disk.gone.difference_update(gone)

    async def _tell(self, at: int, ends: dict[PageKey, int]) -> None:
        name = names.disk(at)
        words = [word for key, end in ends.items() for word in (key.member, end)]
        await self._server.call("DEL", name)
        for first in range(0, len(words), 2 * _AT_ONCE):
            await self._server.call("HSET", name, *words[first : first + 2 * _AT_ONCE])
        await self._server.pipeline([("HSET", name, _WHO, self._name), ("PEXPIRE", name, LIFE_MS)])
