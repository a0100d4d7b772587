"""Which shards a replica holds: opened, kept in step with the registry, dropped."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from common import log
from common.bus import Bus
from common.config import SearchConfig
from common.errors import SpillwayError
from common.messages import CollectionRecord, Write, encode
from services.vector_search import metrics
from services.vector_search.records import save_record, stored_records
from services.vector_search.shard import Shard
from services.vector_search.unit import Unit

Key = tuple[str, int]
_AGAIN_S = 60.0
T = TypeVar("T")
_log = log.get("vector_search")


class Holdings:
    """The units of one replica under `root`; `opened` and `dropped` are called as they come and go."""

    def __init__(
        self,
        root: Path,
        bus: Bus,
        config: SearchConfig,
        *,
        threads: int,
        writer: Executor,
        opened: Callable[[Unit], None],
        dropped: Callable[[Unit], None],
    ) -> None:
        self.units: dict[Key, Unit] = {}
        self.records: dict[str, CollectionRecord] = {}
        self._root = root
        self._bus = bus
        self._config = config
        self._threads = threads
        self._writer = writer
        self._opened = opened
        self._dropped = dropped
        self._seen: Any = None
        self._again: dict[Key, float] = {}

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._writer, function, *args))

    async def start(self) -> None:
        """Open what the disk holds and the registry knows; put back what the registry lost."""
        for record in await self._run(stored_records, self._root):
            self.records[record.id] = record
        await self.refresh()

    async def refresh(self) -> None:
        """Follow the registry: open what is new, drop what was removed, register what was lost with Redis."""
        await self._open_again()
        raw = await self._bus.call("HGETALL", "{collections}:records")
        if raw == self._seen and not self._unopened():
            return
        registered = {record.id: record for record in await self._bus.collections(None)}
        lost = [record for name, record in self.records.items() if name not in registered]
        removed = await self._bus.removed_collections() if lost else set()
        for record in lost:
            await self._settle_lost(record, removed)
        for record in registered.values():
            if self.records.get(record.id) != record or (record.id, 0) not in self.units:
                await self._hold(record)
        self._seen = raw

    def _unopened(self) -> bool:
        return any((name, 0) not in self.units for name in self.records)

    async def _settle_lost(self, record: CollectionRecord, removed: set[str]) -> None:
        # A name with a dot is the copy of a re-embedding that ended without taking its place.
        if record.id in removed or record.name.startswith("."):
            await self.drop(record.id)
            return
        if not await self._bus.create_collection(record):
            _log.error("collection_name_taken", id=record.id, name=record.name)
            await self.drop(record.id)
            return
        _log.warning("collection_registered_again", id=record.id, name=record.name)
        await self._hold(record)

    async def _hold(self, record: CollectionRecord) -> None:
        directory = self._root / record.id
        if self.records.get(record.id) != record or not directory.exists():
            try:
                await self._run(save_record, directory, record)
            except OSError as error:
                _log.error("record_not_saved", id=record.id, why=str(error))
                return
        self.records[record.id] = record
        for number in range(record.shards):
            if (record.id, number) not in self.units:
                await self._open(record, number)

    async def _open(self, record: CollectionRecord, number: int) -> None:
        shard = await self._loaded(record, number)
        unit = Unit(record.id, number, shard)
        if isinstance(shard, Shard):
            await self._keep_ids_rising(unit, shard)
            _log.info("shard_opened", id=record.id, shard=number, **shard.stats())
        self.units[record.id, number] = unit
        self._opened(unit)
        metrics.SHARDS.labels(state="open").set(
            sum(u.shard is not None for u in self.units.values())
        )
        metrics.SHARDS.labels(state="damaged").set(
            sum(u.shard is None for u in self.units.values())
        )

    async def _loaded(self, record: CollectionRecord, number: int) -> Shard | SpillwayError:
        directory = self._root / record.id / str(number)
        try:
            return await self._run(self._load, directory, record)
        except SpillwayError as error:
            _log.error("shard_not_opened", path=str(directory), why=error.message)
            metrics.DAMAGED.labels(what="shard").inc()
            wait_s = error.retry_after_s or _AGAIN_S
            self._again[record.id, number] = asyncio.get_running_loop().time() + wait_s
            return error

    async def _open_again(self) -> None:
        """Try shards that could not be opened once more, as often as their error says."""
        now = asyncio.get_running_loop().time()
        for key, at in list(self._again.items()):
            unit, record = self.units.get(key), self.records.get(key[0])
            if unit is None or record is None or unit.shard is not None:
                del self._again[key]
            elif now >= at:
                shard = await self._loaded(record, key[1])
                if isinstance(shard, Shard):
                    await self._keep_ids_rising(unit, shard)
                    unit.restore(shard)

    def _load(self, directory: Path, record: CollectionRecord) -> Shard:
        return Shard(directory, record, self._config, threads=self._threads)

    async def _keep_ids_rising(self, unit: Unit, shard: Shard) -> None:
        """Make sure that the stream's next id is above what is applied, if Redis was emptied or its clock set back.

        The entry is refused by Redis where the stream is further on, and changes nothing where it is not.
        """
        if shard.applied == "0-0":
            return
        nothing = encode(Write(request="-", index=0, router="-"))
        name = f"{{search.{unit.collection}/{unit.number}}}:writes"
        try:
            await self._bus.call("XADD", name, shard.applied, "w", nothing)
        except ResponseError as error:  # the usual answer: an id not above the last
            if "equal or smaller" not in str(error):
                raise

    async def drop(self, collection: str) -> None:
        """Forget a collection and delete its files and its streams."""
        record = self.records.pop(collection, None)
        for key in [key for key in self.units if key[0] == collection]:
            unit = self.units.pop(key)
            shard = unit.drop()
            self._dropped(unit)
            if shard is not None:
                await self._run(shard.close)
            await self._bus.drop_shard(*key)
        if record is not None:
            await self._run(_remove_tree, self._root / collection)
            _log.info("collection_dropped", id=collection, name=record.name)

    async def close(self) -> None:
        """Close every shard."""
        for unit in self.units.values():
            if unit.shard is not None:
                await self._run(unit.shard.close)


def _remove_tree(directory: Path) -> None:
    gone = directory.with_name(f".{directory.name}.gone")
    try:
        directory.replace(gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)
