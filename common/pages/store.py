"""KV pages in the pages Redis: put once, found, read, asked back from disk; a cache that may be gone at any time.

All of it raises TierDown, at once or within its timeout, where that server is away.
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
MOST_ASKED, MOST_ERASED, MOST_RUNG = 4096, 65536, 64
_AT_ONCE = 256
_BLOCK_MS = 1000  # less than a reply may take
Put = Literal["stored", "exists", "over", "full"]
Tier = Literal["redis", "disk"]


class EraseRefused(TierDown):
    """Too many pages wait to be erased from disk; the same request is accepted once kv_store has erased some."""


class Usage(Struct, frozen=True):
    """Contents of the tier: bytes by partition, number of pages, and bytes by partition and owner."""

    bytes: list[int]
    pages: int
    shares: list[dict[Owner, int]]


def pages_url(config: PagesConfig) -> str:
    """Return the configured address, or the instance's own socket; "none" if there is no such tier."""
    return config.pages_url or f"unix://{Path(config.data_dir).resolve() / 'pages.sock'}"


def sized(told: bytes | None) -> tuple[int, Owner]:
    """Return a page's bytes and its owner, of what the server keeps for it; none where that is nothing."""
    size, _, owner = (told or b"0").decode().partition(" ")
    return int(size), bytes.fromhex(owner)


def _by_owner(flat: Any) -> dict[Owner, int]:
    fields = flat or []
    return {
        bytes.fromhex(owner.decode()): int(size)
        for owner, size in zip(fields[::2], fields[1::2], strict=True)
    }


class PageStore:
    """One process' pages in Redis; `ttl_s` is how long a page outlives its last use."""

    def __init__(self, server: PagesServer, clock: Clock, *, budget_bytes: int, ttl_s: int) -> None:
        self.server, self.clock = server, clock
        self.room = budget_bytes // PARTITIONS
        self.ttl_s = ttl_s

    @classmethod
    def of(
        cls, config: PagesConfig, clock: Clock, *, timeout_s: float = TIMEOUT_S
    ) -> PageStore | None:
        """Return the store that a config names, which need not be there yet; None if it says there is none."""
        url = pages_url(config)
        if url == NONE:
            return None
        server = PagesServer(url, clock, cluster=config.pages_cluster, timeout_s=timeout_s)
        return cls(server, clock, budget_bytes=config.pages_bytes, ttl_s=config.pages_ttl_s)

    @property
    def up(self) -> bool:
        """False from a call that got no answer until one that did."""
        return self.server.up

    def now_ms(self) -> int:
        """Milliseconds since the epoch, as the tiers count them."""
        return self.clock.now_ms()

    async def put(self, key: PageKey, value: Buffer, ttl_s: float, owner: Owner = b"") -> Put:
        """Store a page unless it is there (the first writer wins), or its owner's limit or its partition has no room.

        `owner` is its tenant's `owner_id`; empty, it is nobody's, and no limit holds.
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

    async def get(self, key: PageKey) -> bytes | None:
        """Return a page's value, unchecked (see `common.pages.codec`), and note its use; None if it is not there."""
        (found,) = await self.get_many([key])
        return found

    async def get_many(self, keys: Sequence[PageKey]) -> list[bytes | None]:
        """Return the values of pages in one round trip, as `get` does."""
        now_ms = self.clock.now_ms()
        asked: list[tuple[object, ...]] = []
        for key in keys:
            asked.append(("GETEX", names.value(key), "PX", 1000 * self.ttl_s))
            asked.append(("ZADD", names.index(key.partition), "XX", now_ms, key.member))
        found: list[bytes | None] = (await self.server.pipeline(asked))[::2]
        for value in found:
            if isinstance(value, ResponseError):
                raise value
        return found

    async def where(self, keys: Sequence[PageKey]) -> list[Tier | None]:
        """Return for each page the best tier that has it, in one round trip (in a Cluster one a partition)."""
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
        """Ask kv_store to bring pages from its disk; the oldest wishes are forgotten where there are too many."""
        await self._ask(names.RECALL, [key.member for key in keys], MOST_ASKED)

    async def drop(self, keys: Sequence[PageKey]) -> int:
        """Remove pages from Redis, ask kv_store to erase them from its disk, and return how many had a copy.

        EraseRefused while too many wait to be erased: nothing is removed from Redis, and the call is to be repeated.
        """
        copies = sum(tier is not None for tier in await self.where(keys))
        for first in range(0, len(keys), _AT_ONCE):
            members = [key.member for key in keys[first : first + _AT_ONCE]]
            if await self.server.script("erase", (names.ERASE,), (MOST_ERASED, *members)) < 0:
                raise EraseRefused("too many pages wait to be erased from the disk; try again")
        await self.remove(keys)
        return copies

    async def erasure(self) -> str:
        """Return the id of the keeper's last notice that it has erased pages; "0-0" if there is none."""
        rows = await self.server.call("XREVRANGE", names.ERASED, "+", "-", "COUNT", 1)
        return rows[0][0].decode() if rows else "0-0"

    async def await_erasure(self, after: str) -> None:
        """Return when the keeper notes an erasure after `after`, or after a second: a full server takes no note."""
        await self.server.call("XREAD", "BLOCK", _BLOCK_MS, "STREAMS", names.ERASED, after)

    async def remove(
        self, keys: Iterable[PageKey], ends_ms: Mapping[PageKey, int] | None = None
    ) -> tuple[int, int]:
        """Remove values with all that names them; return how many there were, and their bytes.

        `ends_ms` says when copies on disk expire that have just been made.
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
        """Return what the tier holds by its own count."""
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
        """Close its connections."""
        await self.server.close()

    async def _ask(self, name: str, words: Sequence[str], most: int) -> None:
        if words:
            await self.server.pipeline([("RPUSH", name, *words), ("LTRIM", name, -most, -1)])
