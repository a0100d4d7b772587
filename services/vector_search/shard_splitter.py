"""The splitter of shards: makes both children of each shard that a placement says to split, in every replica.

The two children are made from the parent's documents, and then follow its stream: each applies the part of every write
that falls into its range of hashes. Searches and writes go to the parent until the coordinator has sealed its stream
and put the children in its place.
"""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import log
from common.bus import Bus, BusDown, BusFull
from common.bus.writes import Shard as Key
from common.bus.writes import id_pair
from common.errors import SpillwayError
from common.registry.layout import hash_of_document
from common.tasks import in_pool
from common.wire.registry import CollectionRecord, PlacedShard, ShardSplit
from services.vector_search.documents import SCHEMA, connect
from services.vector_search.replica_directory import ReplicaDirectory
from services.vector_search.shard import DATABASE, Shard
from services.vector_search.shard_manager import ShardManager, Source
from services.vector_search.storage_errors import reserve, storage_error

_AGAIN_S = 2.0
_TABLES = (
    "INSERT INTO main.document SELECT * FROM parent.document WHERE hashed(id) >= ?1 AND hashed(id) < ?2",
    "INSERT INTO main.chunk SELECT * FROM parent.chunk WHERE document IN (SELECT number FROM main.document)",
    "INSERT INTO main.attribute SELECT * FROM parent.attribute WHERE document IN (SELECT number FROM main.document)",
    "INSERT INTO main.seen SELECT * FROM parent.seen",
    # The index of texts and the record of its progress are not copied: the child builds its own.
    "INSERT INTO main.state SELECT * FROM parent.state WHERE name NOT IN ('text_done', 'text_last')",
)
_log = log.get("vector_search")


class ShardSplitter:
    """Makes the children of one shard at a time; `why` holds the error of each shard's last failed try."""

    def __init__(self, shards: ShardManager, bus: Bus, why: dict[Key, str]) -> None:
        self._shards, self._bus, self._why = shards, bus, why
        self._pool = ThreadPoolExecutor(1, "split")
        self._again: dict[Key, float] = {}
        self._task: asyncio.Task[None] | None = None

    async def step(self) -> None:
        """Register shards whose children are in step; begin to make children of one shard if none are being made."""
        splitting = [
            (record, one, one.split)
            for record in self._shards.records.values()
            if record.placed
            for one in self._shards.serving(record.id)
            if one.split is not None
        ]
        for record, one, split in splitting:
            if self._shards.name not in split.ready and await self._in_step(record.id, one, split):
                await self._shards.ready_to_split(record.id, one.number)
        if self._task is not None and not self._task.done():
            return
        now = asyncio.get_running_loop().time()
        for record, one, split in splitting:
            key = record.id, one.number
            lacks = any((record.id, number) not in self._shards.handles for number in split.numbers)
            if lacks and self._again.get(key, now) <= now and key in self._shards.handles:
                self._task = asyncio.create_task(self._try(record, one, split))
                return

    async def close(self) -> None:
        """Cancel the children in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _in_step(self, collection: str, one: PlacedShard, split: ShardSplit) -> bool:
        """Return whether both children have their graphs and text indexes, and all writes of the parent."""
        children = [self._shards.handles.get((collection, number)) for number in split.numbers]
        parent = self._shards.handles.get((collection, one.number))
        if parent is None or parent.shard is None:
            return False
        applied = id_pair(parent.shard.applied)
        return all(
            child is not None
            and child.shard is not None
            and child.shard.settled
            and id_pair(child.shard.applied) >= applied
            for child in children
        )

    async def _try(self, record: CollectionRecord, one: PlacedShard, split: ShardSplit) -> None:
        key = record.id, one.number
        try:
            await self._make(record, one, split)
        except (BusDown, BusFull) as error:
            self._failed(key, str(error))
        except SpillwayError as error:
            self._failed(key, error.message)
        except Exception as error:  # noqa: BLE001 - one shard's split is tried again, and stops no other
            _log.exception("shard_split_broke", id=record.id, shard=one.number)
            self._failed(key, f"{type(error).__name__}: {error}")
        else:
            self._why.pop(key, None)

    def _failed(self, key: Key, why: str) -> None:
        _log.warning("shard_not_split", id=key[0], shard=key[1], why=why)
        self._why[key] = f"not split yet: {why}"
        self._again[key] = asyncio.get_running_loop().time() + _AGAIN_S

    async def _make(self, record: CollectionRecord, one: PlacedShard, split: ShardSplit) -> None:
        parent = self._shards.handles[record.id, one.number].open()
        directory = self._shards.directory
        ranges = ((one.low, split.at), (split.at, one.high))
        there = await in_pool(self._pool, directory.numbers, record.id)
        for number, (low, high) in zip(split.numbers, ranges, strict=True):
            if (record.id, number) in self._shards.handles:
                continue
            if number not in there:
                await in_pool(
                    self._pool, _make_files, directory, parent, record.id, number, (low, high)
                )
            source = Source((record.id, one.number), low, high)
            await self._shards.open(record, number, source)
            _log.info("child_made", id=record.id, shard=one.number, child=number)


def _make_files(
    directory: ReplicaDirectory,
    parent: Shard,
    collection: str,
    number: int,
    hashes: tuple[int, int],
) -> None:
    try:
        path: Path = directory.unfinished(collection, number)
        reserve(path)
        make_child(parent.directory / DATABASE, path / DATABASE, *hashes)
        directory.finish(collection, number)
    except (OSError, sqlite3.Error) as error:
        directory.remove_shard(collection, number)
        raise storage_error(error) from error


def make_child(parent: Path, child: Path, low: int, high: int) -> None:
    """Copy the documents with hashes from `low` to below `high` to a new database, as of one moment.

    Labels, numbers, the applied id and the record of seen writes are the parent's, so the child can go on with its
    stream.
    """
    connection = connect(child)
    try:
        connection.create_function("hashed", 1, hash_of_document, deterministic=True)
        connection.executescript(SCHEMA)
        connection.execute("ATTACH DATABASE ? AS parent", (str(parent),))
        connection.execute("BEGIN")
        for statement in _TABLES:
            connection.execute(statement, (low, high) if "?1" in statement else ())
        connection.execute("COMMIT")
        connection.execute("DETACH DATABASE parent")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    finally:
        connection.close()
