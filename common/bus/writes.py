"""Writes to a shard's state: a stream without a group, which every replica reads in order.

Shards are spread over the families `{search/<p>}` by their collection's id. One bounded stream of each family,
`written`, names the shards that were written to, so that a process with many idle shards reads one stream only.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from redis.exceptions import ResponseError

from common.bus import keys, unreadable
from common.bus.connection import BusDown, BusFull, Connection
from common.bus.events import Notifications
from common.bus.keys import COLLECTIONS
from common.errors import ConfigError, Unavailable, rebuild
from common.ids import Family
from common.redis.replies import hash_of
from common.wire.message import BadMessage, decode, encode
from common.wire.results import Event
from common.wire.search import Write

SEARCH = "search"
PARTITIONS = "{collections}:partitions"
CLUSTER_PARTITIONS = 16
MOST_WRITTEN = 8192  # names kept in `written`; a later reader compares every shard
WRITTEN_AT_ONCE = 1000
_STREAMS_AT_ONCE = 128
_ENTRIES_AT_ONCE = 64
START = "0-0"
Shard = tuple[str, int]


class ShardSealed(Exception):
    """A shard was split and takes no more writes; its children do."""


class Written(NamedTuple):
    """The shards written to since the last read of `written`, and the id after which the next read begins.

    `gap` says that other shards may have been written to as well.
    """

    shards: set[Shard]
    after: str
    gap: bool


def id_pair(entry: str) -> tuple[int, int]:
    """Return a stream id as numbers that compare in order."""
    ms, _, seq = entry.partition("-")
    return int(ms), int(seq or 0)


def write_bell(collection: str, shard: int) -> str:
    """Return the id under which routers are notified that a replica has synced writes of a shard."""
    return f"search.{collection}~{shard}~writes"


class Writes:
    """Appends writes to shards for routers, and reads them for replicas."""

    def __init__(self, redis: Connection) -> None:
        self._redis = redis

    @property
    def search_partitions(self) -> int:
        """Number of families over which searches and writes are spread, the same in every process."""
        return self._redis.config.search_partitions or (
            CLUSTER_PARTITIONS if self._redis.cluster else 1
        )

    def search_families(self) -> list[Family]:
        """Return every family of searches and writes."""
        return [Family(SEARCH, number) for number in range(self.search_partitions)]

    def search_family(self, collection: str) -> Family:
        """Return the family in which all shards of a collection (given by its id) are written and searched."""
        return Family(SEARCH, zlib.crc32(collection.encode()) % self.search_partitions)

    async def agree_on_partitions(self) -> None:
        """Store the number of search families in Redis; ConfigError if collections are spread over another number."""
        mine = str(self.search_partitions).encode()
        with contextlib.suppress(BusFull):  # a later start notes the number
            if await self._redis.call("SET", PARTITIONS, mine, "NX"):
                return
        noted = await self._redis.call("GET", PARTITIONS)
        if noted in {None, mine}:
            return
        if await self._redis.call("EXISTS", COLLECTIONS):
            raise ConfigError(
                f"SPILLWAY_SEARCH_PARTITIONS makes {mine.decode()} families of searches, but the collections on this "
                f"Redis lie in {noted.decode()}; set it to {noted.decode()}"
            )
        await self._redis.call("SET", PARTITIONS, mine)

    async def append(self, collection: str, shard: int, write: Write) -> str:
        """Append a write and return its entry id; BusFull if Redis is nearly full, ShardSealed if it takes no more."""
        info = (await self._redis.call("INFO", "memory")) if not self._redis.cluster else b""
        limits = dict(line.split(b":", 1) for line in info.splitlines() if b":" in line)
        maximum = int(limits.get(b"maxmemory", 0))
        if maximum and int(limits[b"used_memory"]) > 0.85 * maximum:
            raise BusFull("the bus is full; writes are refused, try again later", retry_after_s=5)
        family = self.search_family(collection)
        entry = await self._append("write", family, collection, shard, write)
        if entry is None:
            raise ShardSealed(f"shard {shard} of {collection} was split")
        return entry.decode()

    async def seal(self, collection: str, shard: int) -> str:
        """Append the last entry that a shard takes, and return its id; a shard is sealed once."""
        write = Write(request="-", index=0, router="-")
        family = self.search_family(collection)
        entry = await self._append("seal", family, collection, shard, write)
        assert entry is not None
        return entry.decode()

    async def _append(
        self, script: str, family: Family, collection: str, shard: int, write: Write
    ) -> bytes | None:
        names = [
            keys.writes(family, collection, shard),
            keys.written(family),
            keys.sealed(family, collection, shard),
        ]
        args = [encode(write), f"{collection}/{shard}", MOST_WRITTEN]
        entry: bytes | None = await self._redis.script(script, names, args)
        return entry

    async def keep_ids_rising(self, collection: str, shard: int, applied: str) -> None:
        """Make a shard's next write get an id above `applied`, even if Redis was emptied or its clock was set back.

        An entry with the id `applied` that writes nothing is added; Redis refuses it if the stream is further on.
        """
        if applied == START:
            return
        nothing = encode(Write(request="-", index=0, router="-"))
        name = keys.writes(self.search_family(collection), collection, shard)
        try:
            await self._redis.call("XADD", name, applied, "w", nothing)
        except ResponseError as error:  # usually the stream is further on
            if "equal or smaller" not in str(error):
                raise

    async def await_applied(
        self,
        collection: str,
        shard: int,
        entry: str,
        ack: int,
        journal: Notifications,
        deadline_ms: int,
    ) -> bool:
        """Wait until `ack` replicas have applied and synced `entry`; False if the deadline passed first.

        Unavailable (`disk_full`) if too few replicas have applied it, and one has published that it cannot store it.
        """
        bell = journal.bell(write_bell(collection, shard), self.search_family(collection))
        try:
            while True:
                rows = await self.applied(collection, shard)
                if sum(id_pair(at) >= id_pair(entry) for at in rows.values()) >= ack:
                    return True
                left_s = (deadline_ms - self._redis.clock.now_ms()) / 1000
                if left_s <= 0:
                    return False
                await bell.wait(min(left_s, 1.0))
                await self._check_blocked(collection, shard)
        finally:
            bell.close()

    async def _check_blocked(self, collection: str, shard: int) -> None:
        name = keys.blocked(self.search_family(collection), collection, shard)
        code = await self._redis.call("GET", name)
        if code is not None:
            raise rebuild(
                code.decode(),
                "the write is kept and will be applied when vector_search can store again "
                f"({code.decode()}); repeating it is safe",
                status=Unavailable.http_status,
                retry_after_s=5,
            )

    async def publish_blocked(self, collection: str, shard: int, code: str, for_s: float) -> None:
        """Publish for `for_s` seconds, to waiting routers, why a shard's writes are not applied; "" ends it."""
        name = keys.blocked(self.search_family(collection), collection, shard)
        await self._redis.call(
            *(("SET", name, code, "PX", int(for_s * 1000)) if code else ("DEL", name))
        )

    # -- reading writes

    async def last_written(self, family: Family) -> str:
        """Return the id of the newest entry of `written`: a reader that has checked all shards reads on from there."""
        rows = await self._redis.call("XREVRANGE", keys.written(family), "+", "-", "COUNT", 1)
        return rows[0][0].decode() if rows else START

    async def await_written(self, family: Family, after: str, block_ms: int = 1000) -> Written:
        """Wait up to `block_ms` for writes to any shard of a family, and return the written shards.

        If the result has `gap`, the stream has lost names, since more were written than it keeps: the caller must then
        compare every shard.
        """
        name = keys.written(family)
        reply = await self._redis.blocking(
            *("XREAD", "COUNT", WRITTEN_AT_ONCE, "BLOCK", block_ms, "STREAMS", name, after)
        )
        rows = reply[0][1] if reply else []
        shards = {shard for _, flat in rows if (shard := _shard(flat)) is not None}
        last = rows[-1][0].decode() if rows else after
        gap = len(rows) >= WRITTEN_AT_ONCE and await self._trimmed(name, after)
        return Written(shards, last, gap)

    async def _trimmed(self, name: str, after: str) -> bool:
        oldest = await self._redis.call("XRANGE", name, "-", "+", "COUNT", 1)
        return bool(oldest) and id_pair(oldest[0][0].decode()) > id_pair(after)

    async def last_write(self, collection: str, shard: int) -> str:
        """Return the id of a shard's newest write, "0-0" if there is none."""
        name = keys.writes(self.search_family(collection), collection, shard)
        rows = await self._redis.call("XREVRANGE", name, "+", "-", "COUNT", 1)
        return rows[0][0].decode() if rows else START

    async def read(
        self, after: Mapping[Shard, str]
    ) -> list[tuple[str, int, str, Write | BadMessage]]:
        """Return the next writes after an id of each shard, at most 64 of each, in order within a shard.

        A write that cannot be decoded is returned as a BadMessage, so that a replica can skip it.
        """
        groups: defaultdict[Family, list[Shard]] = defaultdict(list)
        for shard in after:
            groups[self.search_family(shard[0])].append(shard)
        asked = [
            (family, shards[first : first + _STREAMS_AT_ONCE])
            for family, shards in groups.items()
            for first in range(0, len(shards), _STREAMS_AT_ONCE)
        ]
        replies = await asyncio.gather(*(self._xread(f, shards, after) for f, shards in asked))
        return [row for reply in replies for row in reply]

    async def _xread(
        self, family: Family, shards: Sequence[Shard], after: Mapping[Shard, str]
    ) -> list[tuple[str, int, str, Write | BadMessage]]:
        names = {keys.writes(family, *shard): shard for shard in shards}
        last = [after[shard] for shard in shards]
        reply = await self._redis.call("XREAD", "COUNT", _ENTRIES_AT_ONCE, "STREAMS", *names, *last)
        return [
            (*names[name.decode()], entry.decode(), _write(flat))
            for name, rows in reply or ()
            for entry, flat in rows
        ]

    async def publish_applied(
        self, collection: str, shard: int, replica: str, entry: str, rings: Sequence[str]
    ) -> None:
        """Publish the id of the last write that a replica has applied and synced, and notify the routers in `rings`."""
        family = self.search_family(collection)
        await self._redis.call("HSET", keys.applied(family, collection, shard), replica, entry)
        event = encode(Event(index=0, kind="progress"))
        for router in set(rings):
            journal = keys.journal(family, router)
            try:
                await self._redis.call(
                    "XADD", journal, "*", "j", write_bell(collection, shard), "i", 0, "e", event
                )
                await self._redis.call("PEXPIRE", journal, 60_000)
            except BusDown:
                return

    async def publish_opened(self, collection: str, shard: int, replica: str, entry: str) -> None:
        """Publish that a replica holds a shard from now on, and wake the routers that wait for a replica."""
        family = self.search_family(collection)
        names = [keys.use(family), keys.applied(family, collection, shard), keys.room(family)]
        await self._redis.script("hold", names, [replica, entry])

    async def applied(self, collection: str, shard: int) -> dict[str, str]:
        """Return replica -> the id of the last write that it has applied and synced."""
        name = keys.applied(self.search_family(collection), collection, shard)
        rows = hash_of(await self._redis.call("HGETALL", name))
        return {name.decode(): entry.decode() for name, entry in rows.items()}

    async def acknowledged(self, collection: str, shard: int) -> str:
        """Return the id of the last write that any replica has applied; "0-0" without one.

        After a stream was lost, a replica may be ahead of it: then the id is that of the stream's newest write, which
        all replicas reach.
        """
        applied, last = await asyncio.gather(
            self.applied(collection, shard), self.last_write(collection, shard)
        )
        return min(max(applied.values(), key=id_pair, default=START), last, key=id_pair)

    async def publish_snapshot(self, collection: str, shard: int, replica: str, entry: str) -> None:
        """Publish the id of the last write in a replica's snapshot, and trim the writes that all snapshots cover."""
        family = self.search_family(collection)
        name = keys.snapshots(family, collection, shard)
        # A full Redis refuses the entry, but needs the trimming most of all.
        with contextlib.suppress(BusFull):
            await self._redis.call("HSET", name, replica, entry)
        replicas = set(await self.applied(collection, shard))
        rows = hash_of(await self._redis.call("HGETALL", name))
        covered = {name.decode(): entry.decode() for name, entry in rows.items()} | {replica: entry}
        if replicas <= set(covered):
            low = min(covered.values(), key=id_pair)
            await self._redis.call("XTRIM", keys.writes(family, collection, shard), "MINID", low)

    async def drop_shard(self, collection: str, shard: int, *, split: bool = False) -> None:
        """Delete a removed shard's stream of writes, and the ids that its replicas published.

        A shard that was `split` still refuses writes of routers that do not know of the split.
        """
        family = self.search_family(collection)
        names = [keys.writes, keys.applied, keys.snapshots, keys.blocked]
        for name in names if split else (*names, keys.sealed):
            await self._redis.call("DEL", name(family, collection, shard))


def _shard(flat: list[bytes]) -> Shard | None:
    """Return the shard that an entry of `written` names; None if the entry names none."""
    try:
        collection, _, number = flat[1].decode().rpartition("/")
        return collection, int(number)
    except (IndexError, ValueError):
        unreadable.note("written", "expected <collection>/<shard>")
        return None


def _write(flat: Sequence[bytes]) -> Write | BadMessage:
    try:
        if flat[0] != b"w":
            raise BadMessage(f"a write has the field 'w', not {flat[0][:80]!r}")
        return decode(flat[1], Write)
    except BadMessage as error:
        unreadable.note("writes", str(error))
        return error
