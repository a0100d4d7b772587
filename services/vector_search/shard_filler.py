"""The filler of shards: copies shards that this process lacks from a process that serves them.

The files are written to a directory beside the shard's own, which is renamed at the end, so a half-filled shard is
never opened. After any failure, a kill included, a fill begins again.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from common import log
from common.bus import Bus, BusDown, BusFull
from common.bus.writes import Shard as Key
from common.bus.writes import id_pair
from common.errors import SpillwayError, Unavailable
from common.ids import ulid
from common.tasks import in_pool
from common.wire.registry import CollectionRecord, PlacedShard
from common.wire.search import CopyFile, CopyWork
from services.vector_search.peers import Peers, missing
from services.vector_search.shard_manager import ShardManager
from services.vector_search.storage_errors import reserve, storage_error

_AGAIN_S = 2.0
_CALL_S = 30.0
_BEGIN_S = 600.0  # a snapshot of a large shard takes minutes
_log = log.get("vector_search")


class ShardFiller:
    """Fills one shard at a time; `why` holds the error of each shard's last failed try."""

    def __init__(self, shards: ShardManager, bus: Bus, peers: Peers, why: dict[Key, str]) -> None:
        self._shards, self._bus, self._peers, self._why = shards, bus, peers, why
        self._pool = ThreadPoolExecutor(1, "fill")
        self._targets: dict[Key, str] = {}  # by filled shard: the last write when it was opened
        self._again: dict[Key, float] = {}
        self._task: asyncio.Task[None] | None = None

    async def step(self) -> None:
        """Let filled shards serve once they have caught up and are settled; fill one more shard at a time."""
        filling = [
            (record, one)
            for record in self._shards.records.values()
            for one in self._shards.filling(record.id)
        ]
        for record, one in filling:
            if record.placed:
                await self._let_serve((record.id, one.number))
        if self._task is not None and not self._task.done():
            return
        now = asyncio.get_running_loop().time()
        for record, one in filling:
            key = record.id, one.number
            if key not in self._shards.handles and self._again.get(key, now) <= now:
                self._task = asyncio.create_task(self._try(record, one))
                return

    async def close(self) -> None:
        """Cancel a fill in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _let_serve(self, key: Key) -> None:
        handle = self._shards.handles.get(key)
        if handle is None or handle.shard is None:
            return
        if key not in self._targets:
            self._targets[key] = await self._bus.writes.last_write(*key)
        if handle.shard.settled and id_pair(handle.shard.applied) >= id_pair(self._targets[key]):
            await self._shards.served(*key)
            del self._targets[key]

    async def _try(self, record: CollectionRecord, one: PlacedShard) -> None:
        key = record.id, one.number
        try:
            await self._fill(record, one)
        except (BusDown, BusFull) as error:
            self._failed(key, str(error))
        except SpillwayError as error:
            self._failed(key, error.message)
        except OSError as error:
            self._failed(key, storage_error(error).message)
        except Exception as error:  # noqa: BLE001 - one shard's fill is tried again, and stops no other
            _log.exception("shard_fill_broke", id=record.id, shard=one.number)
            self._failed(key, f"{type(error).__name__}: {error}")
        else:
            self._why.pop(key, None)
            self._again.pop(key, None)

    def _failed(self, key: Key, why: str) -> None:
        _log.warning("shard_not_filled", id=key[0], shard=key[1], why=why)
        self._why[key] = why
        self._again[key] = asyncio.get_running_loop().time() + _AGAIN_S

    async def _fill(self, record: CollectionRecord, one: PlacedShard) -> None:
        directory, number = self._shards.directory, one.number
        there = number in await in_pool(self._pool, directory.numbers, record.id)
        if there and await self._kept(record.id, one):
            await self._shards.open(record, number)
            return
        sources = await self._peers.holders(record.id, number)
        if not sources:
            raise missing(record.id, number)
        # From now on the stream is kept for this replica, and the snapshot is taken after that.
        await self._bus.shard_replicas.unregister(record.id, number, self._shards.name)
        await self._bus.shard_replicas.register(record.id, number, self._shards.name)
        error: SpillwayError = missing(record.id, number)
        for source in sources:
            try:
                await self._copy(record.id, number, source)
                break
            except Unavailable as failed:
                error = failed
        else:
            raise error
        await self._shards.open(record, number)
        _log.info("shard_filled", id=record.id, shard=number, source=source)

    async def _kept(self, collection: str, one: PlacedShard) -> bool:
        """Return whether the shard's old files can be used: the stream still has all writes that they lack."""
        applied = (await self._bus.writes.applied(collection, one.number)).get(self._shards.name)
        return applied is not None and applied != "0-0" and id_pair(applied) >= id_pair(one.begins)

    async def _copy(self, collection: str, number: int, source: str) -> None:
        name = f"{self._shards.name}-{ulid()[-8:].lower()}"
        work = CopyWork(collection=collection, shard=number, op="begin", name=name)
        directory = self._shards.directory
        begun = await self._peers.copy(source, work, _BEGIN_S)
        try:
            path = await in_pool(self._pool, directory.unfinished, collection, number)
            for file in begun.files:
                await self._receive(source, work, file, path / Path(file.name).name)
            await in_pool(self._pool, directory.finish, collection, number)
        except OSError as error:
            await in_pool(self._pool, directory.remove_shard, collection, number)
            raise storage_error(error) from error
        finally:
            await self._end(source, work)

    async def _receive(self, source: str, work: CopyWork, file: CopyFile, path: Path) -> None:
        """Copy one file piece by piece; check the sum of each piece and of the whole file."""
        whole, at = xxhash.xxh3_64(), 0
        with path.open("wb") as out:
            while at < file.size:
                piece = CopyWork(
                    collection=work.collection,
                    shard=work.shard,
                    op="read",
                    name=work.name,
                    file=file.name,
                    offset=at,
                )
                got = await self._peers.copy(source, piece, _CALL_S)
                if not got.data:
                    raise Unavailable(f"a piece of {file.name} came damaged", code="shard_missing")
                reserve(path.parent)
                await in_pool(self._pool, out.write, got.data)
                whole.update(got.data)
                at += len(got.data)
        if at != file.size or whole.hexdigest() != file.sum:
            raise Unavailable(f"{file.name} came damaged", code="shard_missing")

    async def _end(self, source: str, work: CopyWork) -> None:
        try:
            ended = CopyWork(collection=work.collection, shard=work.shard, op="end", name=work.name)
            await self._peers.copy(source, ended, _CALL_S)
        except SpillwayError as error:  # the other process deletes an unread snapshot by itself
            _log.info("snapshot_not_ended", source=source, why=error.message)
