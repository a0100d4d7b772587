"""Writes to a shard's state: a stream without a group, which every replica reads in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from common.bus import keys, unreadable
from common.bus.connection import BusDown, BusFull
from common.bus.journal import Journal
from common.bus.registry import Registry
from common.bus.roster import hash_of
from common.errors import Unavailable, rebuild
from common.ids import Family
from common.messages import BadMessage, Event, Write, decode, encode

Shard = tuple[str, int]


def shard_family(collection: str, shard: int) -> Family:
    """Return the family of one shard of a collection (by its id)."""
    return Family(f"search.{collection}", shard)


def id_pair(entry: str) -> tuple[int, int]:
    """Return a stream id as numbers that compare in order."""
    ms, _, seq = entry.partition("-")
    return int(ms), int(seq or 0)


def write_bell(collection: str, shard: int) -> str:
    """Return the id under which a shard's syncs ring a router's journal."""
    return f"search.{collection}~{shard}~writes"


class Writes(Registry):
    """Both sides of a shard's write stream."""

    async def append_write(self, collection: str, shard: int, write: Write) -> str:
        """Append a write; returns its entry id. Raises BusFull above the bus' limit."""
        info = (await self.call("INFO", "memory")) if not self.cluster else b""
        limits = dict(line.split(b":", 1) for line in info.splitlines() if b":" in line)
        maximum = int(limits.get(b"maxmemory", 0))
        if maximum and int(limits[b"used_memory"]) > 0.85 * maximum:
            raise BusFull("the bus is full; writes are refused, try again later", retry_after_s=5)
        name = keys.writes(shard_family(collection, shard))
        entry: bytes = await self.call("XADD", name, "*", "w", encode(write))
        return entry.decode()

    async def await_applied(
        self, collection: str, shard: int, entry: str, ack: int, journal: Journal, deadline_ms: int
    ) -> bool:
        """Wait until `ack` replicas have applied and synced `entry`; False if the deadline passed first.

        Unavailable (`disk_full`) while a replica says that it cannot store and too few others have.
        """
        family = shard_family(collection, shard)
        bell = journal.bell(write_bell(collection, shard), family)
        try:
            while True:
                rows = hash_of(await self.call("HGETALL", keys.applied(family)))
                if sum(id_pair(v.decode()) >= id_pair(entry) for v in rows.values()) >= ack:
                    return True
                left_s = (deadline_ms - self.clock.now_ms()) / 1000
                if left_s <= 0:
                    return False
                await bell.wait(min(left_s, 1.0))
                await self._check_blocked(family)
        finally:
            bell.close()

    async def _check_blocked(self, family: Family) -> None:
        code = await self.call("GET", keys.blocked(family))
        if code is not None:
            raise rebuild(
                code.decode(),
                "the write is kept and will be applied when vector_search can store again "
                f"({code.decode()}); repeating it is safe",
                status=Unavailable.http_status,
                retry_after_s=5,
            )

    async def publish_blocked(self, collection: str, shard: int, code: str, for_s: float) -> None:
        """Tell who waits for writes why they are not applied; holds `for_s` seconds, "" ends it at once."""
        name = keys.blocked(shard_family(collection, shard))
        await self.call(*(("SET", name, code, "PX", int(for_s * 1000)) if code else ("DEL", name)))

    async def read_writes(
        self, after: Mapping[Shard, str], block_ms: int = 1000
    ) -> list[tuple[str, int, str, Write | BadMessage]]:
        """Return the next writes of several shards, in order within each; waits up to `block_ms`.

        A write that cannot be decoded comes as BadMessage, so that a replica can count it and go on.
        """
        shards = {keys.writes(shard_family(*shard)): shard for shard in after}
        groups = [[name] for name in shards] if self.cluster else [list(shards)]
        replies = await asyncio.gather(
            *(self._xread(group, shards, after, block_ms) for group in groups)
        )
        found: list[tuple[str, int, str, Write | BadMessage]] = []
        for reply in replies:
            for name, rows in reply or ():
                collection, number = shards[name.decode()]
                for entry, flat in rows:
                    found.append((collection, number, entry.decode(), _write(flat)))
        return found

    async def _xread(
        self,
        names: Sequence[str],
        shards: Mapping[str, Shard],
        after: Mapping[Shard, str],
        block_ms: int,
    ) -> list[Any]:
        if not names:
            await asyncio.sleep(block_ms / 1000)
            return []
        last = [after[shards[name]] for name in names]
        command = ("XREAD", "COUNT", 64, "BLOCK", block_ms, "STREAMS", *names, *last)
        reply: list[Any] = await self.blocking(*command)
        return reply

    async def publish_applied(
        self, collection: str, shard: int, replica: str, entry: str, rings: Sequence[str]
    ) -> None:
        """Publish what a replica has applied and synced, and ring the routers that wait."""
        family = shard_family(collection, shard)
        await self.call("HSET", keys.applied(family), replica, entry)
        event = encode(Event(index=0, kind="progress"))
        for router in set(rings):
            journal = keys.journal(family, router)
            try:
                await self.call(
                    "XADD", journal, "*", "j", write_bell(collection, shard), "i", 0, "e", event
                )
                await self.call("PEXPIRE", journal, 60_000)
            except BusDown:
                return

    async def applied(self, collection: str, shard: int) -> dict[str, str]:
        """Return replica -> the id it has applied and synced."""
        rows = hash_of(await self.call("HGETALL", keys.applied(shard_family(collection, shard))))
        return {name.decode(): entry.decode() for name, entry in rows.items()}

    async def publish_snapshot(self, collection: str, shard: int, replica: str, entry: str) -> None:
        """Publish what a replica's snapshot covers; trims below what every registered replica's covers."""
        family = shard_family(collection, shard)
        with contextlib.suppress(
            BusFull
        ):  # a full Redis refuses the note, and needs the trimming most
            await self.call("HSET", keys.snapshots(family), replica, entry)
        replicas = set(hash_of(await self.call("HGETALL", keys.applied(family))))
        covered = hash_of(await self.call("HGETALL", keys.snapshots(family)))
        covered[replica.encode()] = entry.encode()
        if replicas <= set(covered):
            low = min((value.decode() for value in covered.values()), key=id_pair)
            await self.call("XTRIM", keys.writes(family), "MINID", low)

    async def drop_shard(self, collection: str, shard: int) -> None:
        """Delete a removed shard's stream and registers (its lanes end with their jobs)."""
        family = shard_family(collection, shard)
        for name in (keys.writes(family), keys.applied(family), keys.snapshots(family)):
            await self.call("DEL", name)


def _write(flat: Sequence[bytes]) -> Write | BadMessage:
    try:
        if flat[0] != b"w":
            raise BadMessage(f"a write has the field 'w', not {flat[0][:80]!r}")
        return decode(flat[1], Write)
    except BadMessage as error:
        unreadable.note("writes", str(error))
        return error
