"""Snapshots of shards for other processes to copy: the documents' database and the saved graph, as of one moment.

Quantizers are read without a snapshot, since their files never change.

A snapshot is a directory beside the shard's own; it is deleted at the end of a copy, or _IDLE_S after the last read.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from common.errors import InvalidRequest, Unavailable
from common.tasks import in_pool
from common.wire.search import CopyFile, CopyResult, CopyWork
from services.vector_search import snapshot
from services.vector_search.documents import copy_database
from services.vector_search.shard import DATABASE, Shard
from services.vector_search.shard_manager import ShardManager
from services.vector_search.storage_errors import reserve, storage_error

READ_BYTES = 4 * 1024 * 1024
_IDLE_S = 60.0
_SUFFIX = ".copy"


class ShardCopies:
    """Makes snapshots for other processes and reads pieces of them; work on files runs on a thread of its own."""

    def __init__(self, shards: ShardManager) -> None:
        self._shards = shards
        self._pool = ThreadPoolExecutor(1, "copy")
        self._read: dict[Path, float] = {}  # by snapshot: when it was last read

    async def clear(self) -> None:
        """Delete the snapshots and unfinished shards that an earlier process left."""
        await in_pool(self._pool, self._shards.directory.clear, _SUFFIX)

    async def answer(self, work: CopyWork) -> CopyResult:
        """Begin, read or end a copy, as a call asks; Unavailable if the snapshot is gone, or the disk is full."""
        if not (work.name.isascii() and work.name.replace("-", "").isalnum()):
            raise InvalidRequest(f"a copy has the name {work.name[:40]!r}")
        if work.op == "quantizer":
            data = await in_pool(self._pool, self._quantizer, work)
            return CopyResult(data=data, sum=xxhash.xxh3_64_intdigest(data))
        await self._expire()
        path = self._shards.directory.shard(work.collection, work.shard)
        at = path.with_name(f"{work.shard}.{work.name}{_SUFFIX}")
        if work.op == "end":
            self._read.pop(at, None)
            await in_pool(self._pool, _delete, [at])
            return CopyResult()
        if work.op == "begin":
            shard = (await self._shards.find(work.collection, work.shard)).open()
            files = await in_pool(self._pool, _begin, shard, at)
            self._read[at] = asyncio.get_running_loop().time()
            return CopyResult(files=files)
        if at not in self._read:
            raise Unavailable("the snapshot is gone; begin again", code="shard_missing")
        self._read[at] = asyncio.get_running_loop().time()
        data = await in_pool(self._pool, _piece, at / Path(work.file).name, work.offset)
        return CopyResult(data=data, sum=xxhash.xxh3_64_intdigest(data))

    def _quantizer(self, work: CopyWork) -> bytes:
        directory = self._shards.directory
        try:
            data = directory.quantizer(work.collection, work.name, work.offset, READ_BYTES)
        except OSError as error:
            raise storage_error(error) from error
        if data is None:
            raise Unavailable("this process has no such quantizer", code="shard_missing")
        return data

    async def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        idle = [path for path, at in self._read.items() if now - at > _IDLE_S]
        for path in idle:
            del self._read[path]
        if idle:
            await in_pool(self._pool, _delete, idle)

    def close(self) -> None:
        """Let the thread end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _begin(shard: Shard, path: Path) -> list[CopyFile]:
    try:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        reserve(path)
        snapshot.link(shard.directory, path)
        copy_database(shard.directory / DATABASE, path / DATABASE)
        return [
            CopyFile(file.name, file.stat().st_size, snapshot.file_sum(file))
            for file in sorted(path.iterdir())
        ]
    except (OSError, sqlite3.Error) as error:
        shutil.rmtree(path, ignore_errors=True)
        raise storage_error(error) from error


def _piece(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(READ_BYTES)
    except OSError as error:
        raise storage_error(error) from error


def _delete(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
