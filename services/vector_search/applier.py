"""The applier of a replica's writes: one listener a family names shards with new writes, and only these are read."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

import msgspec

from common import log
from common.bus import Bus, BusDown, BusFull
from common.bus.writes import Shard as Key
from common.bus.writes import id_pair
from common.errors import SpillwayError
from common.ids import Family
from common.registry.layout import hash_of_document
from common.tasks import in_pool, wait
from common.wire.message import BadMessage
from common.wire.search import Write
from services.vector_search import metrics
from services.vector_search.shard import Shard
from services.vector_search.shard_handle import ShardHandle
from services.vector_search.shard_manager import ShardManager

_BLOCK_MS = 1000
_RETRY_S = 1.0
_LOST_S = 0.2
_IDLE_S = 30.0
_CHECK_LOOKS = 10  # empty reads after which a listener checks that Redis lost no writes
Entry = tuple[str, Write | BadMessage]
_log = log.get("vector_search")


class Applier:
    """Applies the writes of all `shards`; calls `applied` with a shard's key after each batch, `caught_up` after each
    round of reading.
    """

    def __init__(
        self,
        shards: ShardManager,
        bus: Bus,
        stopping: asyncio.Event,
        *,
        replica: str,
        writer: Executor,
        applied: Callable[[Key], None],
        caught_up: Callable[[], None],
    ) -> None:
        self._shards = shards
        self._bus = bus
        self._stopping = stopping
        self._replica = replica
        self._writer = writer
        self._applied = applied
        self._caught_up = caught_up
        self._waiting: set[Key] = set()  # shards that may have writes to read
        self._work = asyncio.Event()
        self._put_off: dict[Key, float] = {}
        self._announced: dict[Key, str] = {}
        self._announcing: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)

    def read_soon(self, keys: Iterable[Key]) -> None:
        """Read the writes of these shards as soon as possible."""
        self._waiting.update(keys)
        self._work.set()

    def wake(self) -> None:
        """Have `run` check whether to stop."""
        self._work.set()

    def forget(self, key: Key) -> None:
        """Forget a shard that is gone."""
        self._waiting.discard(key)
        for memory in (self._put_off, self._announced, self._announcing):
            memory.pop(key, None)

    # -- listening

    async def listen(self, family: Family) -> None:
        """Have the shards of a family that have new writes read, until the stop."""
        after: str | None = None
        empty = 0
        while not self._stopping.is_set():
            try:
                if after is None:
                    after = await self._bus.writes.last_written(family)
                    self.read_soon(self._of(family))
                news = await self._bus.writes.await_written(family, after, _BLOCK_MS)
                self.read_soon(news.shards)
                self.read_soon(
                    child for key in news.shards for child in self._shards.children_of(key)
                )
                after = None if news.gap else news.after
                empty = 0 if news.shards else empty + 1
                if empty >= _CHECK_LOOKS and after is not None:
                    empty = 0
                    after = await self._checked(family, after)
            except BusDown:
                after = None  # Redis may come back older, or empty
                await wait(self._stopping, _LOST_S)

    async def _checked(self, family: Family, after: str) -> str | None:
        """Return `after`; None if Redis lost writes up to that id, as an emptied or restored Redis does."""
        if id_pair(await self._bus.writes.last_written(family)) >= id_pair(after):
            return after
        for key in self._of(family):
            self._announced.pop(key, None)
        return None

    def _of(self, family: Family) -> list[Key]:
        return [
            key for key in self._shards.handles if self._bus.writes.search_family(key[0]) == family
        ]

    # -- applying

    async def run(self) -> None:
        """Read and apply writes until the stop."""
        while not self._stopping.is_set():
            self._work.clear()
            after = self._due()
            if not after:
                self._caught_up()
                await wait(self._work, self._pause_s())
                continue
            self._waiting -= after.keys()
            try:
                entries = await self._read(after)
            except BusDown:
                self._waiting |= after.keys()
                await wait(self._stopping, _LOST_S)
                continue
            batches: dict[Key, list[Entry]] = defaultdict(list)
            for collection, number, entry, write in entries:
                batches[collection, number].append((entry, write))
            self._waiting |= batches.keys()  # there may be more
            for key in after:
                await self._apply(key, batches.get(key, []))
            self._caught_up()

    async def _read(self, after: dict[Key, str]) -> list[tuple[str, int, str, Write | BadMessage]]:
        """Return the next writes of shards; a child of a split reads its parent's stream."""
        sources = {key: self._shards.sources[key] for key in after if key in self._shards.sources}
        own = {key: applied for key, applied in after.items() if key not in sources}
        entries = await self._bus.writes.read(own) if own else []
        for key, source in sources.items():
            entries += [
                (*key, entry, within(write, source.low, source.high))
                for _, _, entry, write in await self._bus.writes.read({source.parent: after[key]})
            ]
        return entries

    def _due(self) -> dict[Key, str]:
        now, due = asyncio.get_running_loop().time(), {}
        for key in list(self._waiting):
            handle = self._shards.handles.get(key)
            if handle is None or handle.shard is None:
                self._waiting.discard(key)  # read when it is opened
            elif self._put_off.get(key, 0.0) <= now:
                due[key] = handle.shard.applied
        return due

    def _pause_s(self) -> float:
        times = [at for key, at in self._put_off.items() if key in self._waiting]
        now = asyncio.get_running_loop().time()
        return min(max(min(times, default=now + _IDLE_S) - now, 0.0), _IDLE_S)

    async def _apply(self, key: Key, batch: list[Entry]) -> None:
        handle = self._shards.handles.get(key)
        if handle is None or handle.shard is None:
            return
        shard = handle.shard
        if batch and not await self._store(key, shard, batch):
            return
        if batch:
            handle.advanced()
            self._applied(key)
        if shard.dropped:
            await self._shards.drop(key[0])
            return
        rings = [write.router for _, write in batch if isinstance(write, Write)]
        if rings or self._announced.get(key) != shard.applied:
            await self._announce(handle, shard, rings)

    async def _store(self, key: Key, shard: Shard, batch: list[Entry]) -> bool:
        """Apply a batch; False if it must be tried again later: then a flag tells routers the reason."""
        try:
            with metrics.APPLY_SECONDS.time():
                await in_pool(self._writer, apply_batch, shard, batch)
        except SpillwayError as error:
            metrics.DISK_FULL.inc()
            _log.error("writes_put_off", collection=key[0], code=error.code, why=error.message)
            self._put_off[key] = asyncio.get_running_loop().time() + _RETRY_S
            await self._flag(key, error.code)
            return False
        if self._put_off.pop(key, None) is not None:
            await self._flag(key, "")
        return True

    # -- telling

    async def catch_up(self) -> None:
        """Publish the applied ids that did not reach the bus."""
        for key, handle in list(self._shards.handles.items()):
            if handle.shard is not None and self._announced.get(key) != handle.shard.applied:
                await self._announce(handle, handle.shard, [])

    async def _announce(self, handle: ShardHandle, shard: Shard, rings: list[str]) -> None:
        """Publish a shard's applied id, one call at a time, so that an older id never overwrites a newer one."""
        key = handle.collection, handle.number
        with contextlib.suppress(BusDown, BusFull):  # `catch_up` tries again
            async with self._announcing[key]:
                applied = shard.applied
                if key not in self._announced:
                    await self._bus.writes.publish_opened(*key, self._replica, applied)
                if rings or key in self._announced:
                    await self._bus.writes.publish_applied(*key, self._replica, applied, rings)
                self._announced[key] = applied

    async def _flag(self, key: Key, code: str) -> None:
        """Publish the reason why a shard's writes are not applied; "" ends it."""
        with contextlib.suppress(BusDown, BusFull):
            await self._bus.writes.publish_blocked(*key, code, 3 * _RETRY_S)


def within(write: Write | BadMessage, low: int, high: int) -> Write | BadMessage:
    """Return the part of a write about documents with hashes from `low` to below `high`."""
    if isinstance(write, BadMessage):
        return write
    return msgspec.structs.replace(
        write,
        upserts=[doc for doc in write.upserts if low <= hash_of_document(doc.id) < high],
        deletes=[name for name in write.deletes if low <= hash_of_document(name) < high],
    )


def apply_batch(shard: Shard, batch: list[Entry]) -> None:
    """Apply entries of one shard in order, with one sync for all."""
    for entry, write in batch:
        shard.apply(entry, None if isinstance(write, BadMessage) else write)
    shard.sync()
