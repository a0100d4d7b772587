"""Directory of cached pages by worker: a note beside a session's record, and every 8th page of any prompt's prefix.

Every entry is a hint with a time to live: if an entry is out of date, the pages are fetched or computed anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from common.bus import Bus, keys
from common.ids import Family
from common.pages.identity import STRIDE, PageId
from common.wire.message import decode, encode
from common.wire.registry import Held

HELD_S = 600.0
MOST_MARKS = 1 << 16  # marks of a family; the oldest are removed first
MOST_ASKED = 128  # marks looked up for one prompt


class CacheDirectory:
    """Pages on the devices and hosts of workers: published by the workers, looked up by admission."""

    def __init__(self, bus: Bus) -> None:
        self._bus, self._redis = bus, bus.connection

    async def publish_held(self, session: str, held: Held) -> None:
        """Publish the part of a session that a worker holds; one try."""
        name = keys.held(session)
        await self._redis.call("SET", name, encode(held), "PX", int(1000 * HELD_S), timeout_s=0.0)

    async def held(self, session: str) -> Held | None:
        """Return the worker that holds a session's pages, with their part; None without one."""
        raw = await self._redis.call("GET", keys.held(session))
        return None if raw is None else decode(raw, Held)

    async def publish_marks(
        self, family: Family, worker: str, there: Iterable[PageId], gone: Iterable[PageId] = ()
    ) -> None:
        """Publish the marks that a worker has now (`there`), and those that it has no more (`gone`)."""
        name, tail = keys.prefixes(family), worker.encode()
        until = self._bus.clock.now_ms() + int(1000 * HELD_S)
        if dropped := [mark + tail for mark in gone]:
            await self._redis.call("ZREM", name, *dropped)
        if added := [part for mark in there for part in (until, mark + tail)]:
            await self._redis.call("ZADD", name, *added)
            await self._redis.call("PEXPIRE", name, int(1000 * HELD_S))

    async def trim_marks(self, family: Family) -> None:
        """Remove expired marks, and the oldest marks beyond MOST_MARKS."""
        name = keys.prefixes(family)
        await self._redis.call("ZREMRANGEBYSCORE", name, "-inf", self._bus.clock.now_ms())
        await self._redis.call("ZREMRANGEBYRANK", name, 0, -MOST_MARKS - 1)

    async def marked(
        self, family: Family, marks: Sequence[PageId], workers: Sequence[str]
    ) -> dict[str, int]:
        """Return the number of a prompt's pages that each worker has, by its marks among the last MOST_ASKED."""
        asked = [(mark, worker) for mark in marks[-MOST_ASKED:] for worker in workers]
        if not asked:
            return {}
        members = [mark + worker.encode() for mark, worker in asked]
        scores = await self._redis.call("ZMSCORE", keys.prefixes(family), *members)
        now = self._bus.clock.now_ms()
        found: Counter[str] = Counter()
        for (_, worker), score in zip(asked, scores, strict=True):
            if score is not None and float(score) > now:
                found[worker] += STRIDE
        return dict(found)
