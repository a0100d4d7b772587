"""The store of KV pages in the pages Redis: puts, finds and reads pages, and requests pages from kv_store's disk.

The pages are a cache and may vanish at any time. Every call raises TierDown, at once or within its timeout, if the
pages Redis is away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from redis.exceptions import OutOfMemoryError, ResponseError

from common.clock import Clock
from common.config import PagesConfig
from common.pages import keys as names
from common.pages.codec import Buffer
from common.pages.identity import Owner
from common.pages.keys import PARTITIONS, PageKey, by_partition
from common.pages.server import TIMEOUT_S, PagesServer, TierDown

__all__ = ["NONE", "EraseRefused", "PageKey", "PageStore", "TierDown", "Usage", "pages_url"]

NONE = "none"
FREE = 0.1  # the share of its budget that kv_store keeps free
# The most waiting requests to kv_store: to bring pages from disk, to erase pages, to make room.
MOST_ASKED, MOST_ERASED, MOST_RUNG = 4096, 65536, 64
_AT_ONCE = 256
_BLOCK_MS = 1000  # shorter than the timeout of a reply
Value = bytes | bytearray
Put = Literal["stored", "exists", "over", "full"]
Tier = Literal["redis", "disk"]


class EraseRefused(TierDown):
    """The error while too many pages wait to be erased from disk; a later try is accepted once some are erased."""


class Usage(Struct, frozen=True):
    """The contents of the tier: bytes by partition, number of pages, and bytes by partition and owner."""

    bytes: list[int]
    pages: int
    shares: list[dict[Owner, int]]


def pages_url(config: PagesConfig) -> str:
    """Return the configured address of the pages Redis, or the instance's own socket; "none" means no such tier."""
    return config.pages_url or f"unix://{Path(config.data_dir).resolve() / 'pages.sock'}"


def sized(told: bytes | None) -> tuple[int, Owner]:
    """Decode a page's entry in `sizes` into its bytes and its owner; 0 and an empty owner without an entry."""
    size, _, owner = (told or b"0").decode().partition(" ")
    return int(size), bytes.fromhex(owner)


def _by_owner(flat: Any) -> dict[Owner, int]:
    fields = flat or []
    return {
        bytes.fromhex(owner.decode()): int(size)
        for owner, size in zip(fields[::2], fields[1::2], strict=True)
    }


class PageStore:
    """Puts, finds and reads pages for one process; a page expires `ttl_s` seconds after its last use."""

    def __init__(self, server: PagesServer, clock: Clock, *, budget_bytes: int, ttl_s: int) -> None:
        self.server, self.clock = server, clock
        self.room = budget_bytes // PARTITIONS
        self.ttl_s = ttl_s

    @classmethod
    def of(
        cls, config: PagesConfig, clock: Clock, *, timeout_s: float = TIMEOUT_S
    ) -> PageStore | None:
        """Return a store, not yet connected, of the config's pages Redis; None without a pages Redis."""
        url = pages_url(config)
        if url == NONE:
            return None
        server = PagesServer(url, clock, cluster=config.pages_cluster, timeout_s=timeout_s)
        return cls(server, clock, budget_bytes=config.pages_bytes, ttl_s=config.pages_ttl_s)

    @property
    def up(self) -> bool:
        """False after a call without an answer, until a later call gets one."""
        return self.server.up

    def now_ms(self) -> int:
        """Return the time in milliseconds since the epoch, as used for uses and expiries in the tiers."""
        return self.clock.now_ms()

    async def put(self, key: PageKey, value: Buffer, ttl_s: float, owner: Owner = b"") -> Put:
        """Store a page, unless Redis has it already, or there is no room in its partition or its owner's limit.

        `owner` is the `owner_id` of the page's tenant; an empty owner has no limit. When little room is left, the
        keeper is asked to make room.
        """
        at = key.partition
        heads = (names.index(at), names.sizes(at), names.use(at), names.shares(at))
        now_ms, ttl_ms = self.clock.now_ms(), max(round(1000 * ttl_s), 1)
        try:
            reply = await self.server.script(
                "put",
                (names.value(key), *heads, names.limits(at)),
                (value, key.member, self.room, ttl_ms, now_ms, owner.hex()),
            )
        except OutOfMemoryError:
            reply = (b"full", self.room, 0, -1)
        found, used, share, limit = reply[0].decode(), *map(int, reply[1:])
        wishes = []
        if found == "full" or used > (1 - FREE) * self.room:
            wishes.append(f"{at}:{len(value)}")
        if 0 <= (1 - FREE) * limit < share or found == "over":
            wishes.append(f"{at}:{len(value)}:{owner.hex()}")
        with contextlib.suppress(TierDown):
            await self._ask(names.ROOM, wishes, MOST_RUNG)
        outcome: Put = found
        return outcome

    async def get(self, key: PageKey) -> Value | None:
        """Return a page's value, unchecked (see `common.pages.codec`), and record its use; None if it is not stored."""
        (found,) = await self.get_many([key])
        return found

    async def get_many(self, keys: Sequence[PageKey]) -> list[Value | None]:
        """Return the values of pages as `get` does, in one round trip."""
        now_ms = self.clock.now_ms()
        asked: list[tuple[object, ...]] = []
        for key in keys:
            asked.append(("GETEX", names.value(key), "PX", 1000 * self.ttl_s))
            asked.append(("ZADD", names.index(key.partition), "XX", now_ms, key.member))
        found: list[Value | None] = (await self.server.values(asked))[::2]
        for value in found:
            if isinstance(value, ResponseError):
                raise value
        return found

    async def where(self, keys: Sequence[PageKey]) -> list[Tier | None]:
        """Return for each page the fastest tier that has it, in one round trip (on a Cluster one per partition)."""
        groups = (
            by_partition(keys).values() if self.server.cluster else [list(keys)] if keys else []
        )
        found: dict[PageKey, int] = {}
        for some, told in zip(
            groups, await asyncio.gather(*(self._where(some) for some in groups)), strict=True
        ):
            found |= zip(some, told, strict=True)
        now_ms = self.clock.now_ms()
        return [
            "redis" if found[key] == 1 else "disk" if found[key] > now_ms else None for key in keys
        ]

    async def _where(self, keys: Sequence[PageKey]) -> list[int]:
        places = [name for key in keys for name in (names.value(key), names.disk(key.partition))]
        told: list[int] = await self.server.script("where", places, [key.member for key in keys])
        return told

    async def recall(self, keys: Sequence[PageKey]) -> None:
        """Ask kv_store to bring pages from its disk; if too many requests wait, the oldest are dropped."""
        await self._ask(names.RECALL, [key.member for key in keys], MOST_ASKED)

    async def drop(self, keys: Sequence[PageKey]) -> int:
        """Remove pages from Redis, ask kv_store to erase them from its disk, and return how many had a copy.

        EraseRefused, without removing any page, if too many pages wait to be erased: the caller tries again.
        """
        copies = sum(tier is not None for tier in await self.where(keys))
        for first in range(0, len(keys), _AT_ONCE):
            members = [key.member for key in keys[first : first + _AT_ONCE]]
            if await self.server.script("erase", (names.ERASE,), (MOST_ERASED, *members)) < 0:
                raise EraseRefused("too many pages wait to be erased from the disk; try again")
        await self.remove(keys)
        return copies

    async def erasure(self) -> str:
        """Return the id of the keeper's last notice of erased pages; "0-0" if there is none."""
        rows = await self.server.call("XREVRANGE", names.ERASED, "+", "-", "COUNT", 1)
        return rows[0][0].decode() if rows else "0-0"

    async def await_erasure(self, after: str) -> None:
        """Wait for a notice of an erasure after `after`, at most a second, since a full server stores no notices."""
        await self.server.call("XREAD", "BLOCK", _BLOCK_MS, "STREAMS", names.ERASED, after)

    async def remove(
        self, keys: Iterable[PageKey], ends_ms: Mapping[PageKey, int] | None = None
    ) -> tuple[int, int]:
        """Remove values with their entries in index, sizes and counts; return their number and bytes.

        `ends_ms` has the expiry of copies that were just written to disk; these pages are added to the disk's catalog.
        """
        ends, gone, freed = ends_ms or {}, 0, 0
        for at, some in by_partition(keys).items():
            heads = (names.index(at), names.sizes(at), names.use(at), names.shares(at))
            for first in range(0, len(some), _AT_ONCE):
                part = some[first : first + _AT_ONCE]
                told = [word for key in part for word in (key.member, ends.get(key, ""))]
                values = (names.value(key) for key in part)
                found = await self.server.script("remove", (*heads, names.disk(at), *values), told)
                gone, freed = gone + found[0], freed + found[1]
        return gone, freed

    async def usage(self) -> Usage:
        """Return the usage of the tier, by the counts in Redis."""
        parts = range(PARTITIONS)
        replies = await self.server.pipeline(
            [("GET", names.use(at)) for at in parts]
            + [("ZCARD", names.index(at)) for at in parts]
            + [("HGETALL", names.shares(at)) for at in parts]
        )
        told = [0 if isinstance(reply, ResponseError) else reply or 0 for reply in replies]
        used, pages, shares = (told[at : at + PARTITIONS] for at in range(0, len(told), PARTITIONS))
        return Usage(
            list(map(int, used)), sum(map(int, pages)), [_by_owner(some) for some in shares]
        )

    async def close(self) -> None:
        """Close the connections to the pages Redis."""
        await self.server.close()

    async def _ask(self, name: str, words: Sequence[str], most: int) -> None:
        if words:
            await self.server.pipeline([("RPUSH", name, *words), ("LTRIM", name, -most, -1)])
