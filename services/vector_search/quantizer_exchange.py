"""The exchange of quantizers: a process publishes the quantizer that it trained, and processes that need it fetch it.

The registry names a collection's quantizer by its hash; the bytes lie in files of the processes that use the quantizer,
and go from process to process by calls. The file is written before its name is published, so a kill in between loses no
published quantizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from common import log
from common.bus import Bus, BusDown, BusFull
from common.bus.writes import Shard as Key
from common.errors import SpillwayError, Unavailable
from common.redis.lock import RedisLock
from common.registry.collections import Collections
from common.registry.quantizers import Quantizers
from common.tasks import cancel, in_pool
from common.wire.registry import QuantizerRecord
from common.wire.search import CopyWork
from services.vector_search.collection_quantizer import CollectionQuantizer, CollectionQuantizers
from services.vector_search.index.quantizer import Quantizer
from services.vector_search.index.quantizer_source import TrainedQuantizer
from services.vector_search.peers import Peers
from services.vector_search.shard_manager import ShardManager

_COMPARE_S = 30.0
_RENEW_S, _ASK_S = 5.0, 0.5  # seconds between calls for the lock: of its holder, of others
_AGAIN_S = 2.0
_CALL_S = 10.0
# Seconds after which a process that may train, and has no result, lets others train.
_TRAINING_S = 600.0
# Seconds without a process that can give the quantizer, after which another one is trained.
_LOST_S = 20.0
_log = log.get("vector_search")


class QuantizerExchange:
    """Keeps this process' quantizers in step with the registry; `wake` starts the maintenance of a shard."""

    def __init__(
        self,
        shards: ShardManager,
        quantizers: CollectionQuantizers,
        bus: Bus,
        peers: Peers,
        *,
        wake: Callable[[Key], None],
    ) -> None:
        self._shards, self._held, self._bus, self._peers = shards, quantizers, bus, peers
        self._wake = wake
        self._registry = Quantizers(bus)
        self._files = ThreadPoolExecutor(1, "quantizers")
        self._named: dict[str, QuantizerRecord] = {}
        self._seen: bytes | None = None
        self._next_s = 0.0
        self._locks: dict[str, RedisLock] = {}
        self._locked_s: dict[str, float] = {}  # when a lock was first taken
        self._locking_s: dict[str, float] = {}  # when to ask for a lock again
        self._again_s: dict[str, float] = {}  # when to try a collection again
        self._missing_s: dict[str, float] = {}  # by hash: when a quantizer was first missing
        self._fetching: dict[str, asyncio.Task[None]] = {}

    async def step(self) -> None:
        """Read the registry if it has changed; then publish, fetch, or let shards train."""
        needed = self._held.needed()
        if not needed:
            return
        now = asyncio.get_running_loop().time()
        changes = await Collections(self._bus).changes()
        if changes != self._seen or now >= self._next_s:
            self._named = await self._registry.all()
            self._seen, self._next_s = changes, now + _COMPARE_S
            await self._forget_removed(needed)
        for collection, held in needed.items():
            if collection in self._shards.records and now >= self._again_s.get(collection, 0.0):
                await self._follow(collection, held, now)

    async def close(self) -> None:
        """Release the locks, so that other processes may train at once, and end the fetches."""
        await cancel(*self._fetching.values())
        self._files.shutdown(wait=False, cancel_futures=True)
        for lock in self._locks.values():
            if lock.held:
                await lock.release()

    async def _forget_removed(self, needed: dict[str, CollectionQuantizer]) -> None:
        """Forget collections that were deleted, or re-embedded: re-embedding gives a collection another id."""
        others = (self._named.keys() | needed.keys()) - self._shards.records.keys()
        removed = await Collections(self._bus).removed() if others else set()
        for name in others & removed:
            await self._registry.remove(name)
            self._held.forget(name)
            self._named.pop(name, None)
            for known in (self._locks, self._locked_s, self._locking_s, self._again_s):
                known.pop(name, None)

    async def _follow(self, collection: str, held: CollectionQuantizer, now: float) -> None:
        record = self._named.get(collection)
        if (made := held.offered) is not None:
            await self._publish(collection, held, record, made)
        elif record is not None and (record.version, record.asked) != held.named:
            self._fetch(held, record)
            if not self._lost(record, now):
                return
        await self._let_train(collection, held, record, now)

    # -- training

    async def _let_train(
        self, collection: str, held: CollectionQuantizer, record: QuantizerRecord | None, now: float
    ) -> None:
        """Hold the lock only while a shard of this process wants to train or is training."""
        lock = self._locks.get(collection)
        if held.granted and now - self._locked_s[collection] > _TRAINING_S:
            held.give_up()
        if not (held.wanted or held.granted):
            if lock is not None and lock.held:
                await lock.release()
            return
        if lock is None:
            lock = self._registry.lock(collection, self._shards.name)
            self._locks[collection] = lock
        if now < self._locking_s.get(collection, 0.0):
            return
        self._locking_s[collection] = now + (_RENEW_S if held.granted else _ASK_S)
        if await lock.acquire() == "other" or held.granted:
            return
        self._locked_s[collection] = now
        newest = await self._registry.get(collection)
        if newest != record:  # another process published one before it freed the lock
            self._seen = None
            return
        held.grant()
        self._wake_shards(collection)

    async def _publish(
        self,
        collection: str,
        held: CollectionQuantizer,
        record: QuantizerRecord | None,
        made: TrainedQuantizer,
    ) -> None:
        """Keep a quantizer that was trained here, and publish it, unless another one was published meanwhile."""
        version, data = made.quantizer.version, made.quantizer.to_bytes()
        directory = self._shards.directory
        try:
            await in_pool(self._files, directory.save_quantizer, collection, version, data)
        except OSError as error:
            _log.warning("quantizer_not_kept", id=collection, why=str(error))
            self._again_s[collection] = asyncio.get_running_loop().time() + _AGAIN_S
            return
        new = QuantizerRecord(collection, version, made.asked, self._shards.name)
        if await self._registry.replace(record, new):
            self._named[collection] = new
            _log.info("quantizer_published", id=collection, version=version, lists=made.asked)
        else:
            self._seen = None  # another one was published: read the registry again
        held.published()
        self._wake_shards(collection)

    # -- fetching

    def _lost(self, record: QuantizerRecord, now: float) -> bool:
        """Return whether a quantizer has been missing for more than _LOST_S seconds, so that another one is trained."""
        return now - self._missing_s.get(record.version, now) > _LOST_S

    def _fetch(self, held: CollectionQuantizer, record: QuantizerRecord) -> None:
        if record.collection in self._fetching:
            return
        task = asyncio.create_task(self._try(held, record))
        self._fetching[record.collection] = task
        task.add_done_callback(lambda _: self._fetching.pop(record.collection, None))

    async def _try(self, held: CollectionQuantizer, record: QuantizerRecord) -> None:
        time = asyncio.get_running_loop().time
        try:
            quantizer = await self._kept(record) or await self._asked(record)
        except (SpillwayError, BusDown, BusFull, OSError) as error:
            self._missing_s.setdefault(record.version, time())
            self._again_s[record.collection] = time() + _AGAIN_S
            why = error.message if isinstance(error, SpillwayError) else str(error)
            _log.warning("quantizer_not_fetched", id=record.collection, why=why)
            return
        self._missing_s.pop(record.version, None)
        held.take(TrainedQuantizer(quantizer, record.asked))
        self._wake_shards(record.collection)

    async def _kept(self, record: QuantizerRecord) -> Quantizer | None:
        """Return the quantizer from this process' files; None if the file is missing or damaged."""
        directory = self._shards.directory
        data = await in_pool(self._files, directory.quantizer, record.collection, record.version)
        return None if data is None else _read(data, record.version)

    async def _asked(self, record: QuantizerRecord) -> Quantizer:
        """Return the quantizer from its trainer, else from another process; Unavailable if none has it."""
        family = self._bus.writes.search_family(record.collection)
        living = {each.replica for each in await self._bus.workers.living(family)}
        names = sorted(living - {self._shards.name}, key=lambda name: name != record.trainer)
        why = "no other process lives"
        for name in names:
            try:
                data = await self._bytes(name, record)
            except SpillwayError as error:
                why = error.message
                continue
            quantizer = _read(data, record.version)
            if quantizer is not None:
                directory = self._shards.directory
                await in_pool(
                    self._files,
                    directory.save_quantizer,
                    record.collection,
                    record.version,
                    data,
                )
                return quantizer
            why = f"what {name} gave is damaged"
        raise Unavailable(f"quantizer {record.version} cannot be had: {why}", code="shard_missing")

    async def _bytes(self, name: str, record: QuantizerRecord) -> bytes:
        """Return the bytes of a quantizer, piece by piece, from the process of a replica."""
        found = bytearray()
        while True:
            work = CopyWork(
                collection=record.collection,
                shard=0,
                op="quantizer",
                name=record.version,
                offset=len(found),
            )
            got = await self._peers.copy(name, work, _CALL_S)
            if not got.data:
                return bytes(found)
            found += got.data

    def _wake_shards(self, collection: str) -> None:
        for key in list(self._shards.handles):
            if key[0] == collection:
                self._wake(key)


def _read(data: bytes, version: str) -> Quantizer | None:
    """Return the quantizer that the bytes hold; None if they are damaged or its hash is not `version`."""
    try:
        quantizer = Quantizer.from_bytes(data)
    except ValueError as error:
        _log.warning("quantizer_damaged", version=version, why=str(error))
        return None
    return quantizer if quantizer.version == version else None
