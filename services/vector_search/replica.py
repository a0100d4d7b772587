"""One replica of every shard: applies the writes of all, serves the queries of each, tidies up in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from common import log
from common.bus import Bus, BusDown, BusFull, Consumer
from common.config import SearchConfig
from common.cost.linear import Probe, fit
from common.errors import SpillwayError
from common.ids import Family
from common.messages import BadMessage, WorkerRecord, Write
from common.waiting import wait
from services.vector_search import metrics
from services.vector_search.holdings import Holdings, Key
from services.vector_search.log import parse_id
from services.vector_search.loop import MAX_QUERIES, QueryLoop
from services.vector_search.shard import Shard
from services.vector_search.tidy import Tidier
from services.vector_search.unit import Unit

_REFRESH_S = 0.25
_BLOCK_MS = 250
_RETRY_S = 1.0
_GONE_S = 2.0
_PROBES = (1, 32)
_DEPTH_ITEMS = (256, 10_000)
_DEPTH_TOKENS = 1 << 30
Entry = tuple[str, Write | BadMessage]
T = TypeVar("T")
_log = log.get("vector_search")


class Replica:
    """Runs the shards under `root` on a bus. `ready` is set once all have caught up and take queries."""

    def __init__(
        self, root: Path, bus: Bus, config: SearchConfig, *, name: str, cores: int
    ) -> None:
        self.ready = asyncio.Event()
        self._bus = bus
        self._config = config
        self._name = name
        self._searchers = ThreadPoolExecutor(config.search_threads or cores, "search")
        self._writer = ThreadPoolExecutor(1, "write")
        self._holdings = Holdings(
            root,
            bus,
            config,
            threads=config.search_threads or cores,
            writer=self._writer,
            opened=self._serve,
            dropped=self._retire,
        )
        self._loops: dict[Key, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self._begun: set[Key] = set()  # whose query loop has registered, or failed
        self._retired: set[asyncio.Task[None]] = set()
        self._put_off: dict[Key, float] = {}
        # What there is to catch up on; None until that is known.
        self._targets: dict[Key, str] | None = None
        self._announced: dict[Key, str] = {}
        self._announcing: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._stopping = asyncio.Event()
        self._started_ms = bus.clock.now_ms()
        self._tidier = Tidier(
            self._holdings,
            bus,
            self._stopping,
            replica=name,
            audit_s=config.audit_s,
            writer=self._writer,
        )

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping`, then drain; an unexpected error of any part ends it."""
        loop = asyncio.get_running_loop()
        for attempt in range(1_000_000):
            try:
                await self._holdings.start()
                self._targets = await self._ends()
                break
            except BusDown:
                _log.warning("start_waits_for_bus", attempt=attempt)
        tasks = [
            loop.create_task(part, name=name)
            for name, part in (
                ("registry", self._follow()),
                ("writes", self._apply_writes()),
                ("tidy", self._tidier.run()),
                ("snapshots", self._tidier.take_snapshots()),
            )
        ]
        stop = loop.create_task(stopping.wait())
        try:
            await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopping.set()
            self._tidier.wake()
            stop.cancel()
            await self._drain(tasks)
        for task in tasks:
            task.result()

    async def _drain(self, tasks: list[asyncio.Task[None]]) -> None:
        for _, event in self._loops.values():
            event.set()
        loops = [task for task, _ in self._loops.values()]
        await asyncio.wait([*loops, *tasks, *self._retired], timeout=self._config.drain_s)
        await self._tidier.finish()
        await self._holdings.close()
        self._tidier.close()
        for pool in (self._searchers, self._writer):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(pool, function, *args))

    async def _pause(self, seconds: float) -> None:
        await wait(self._stopping, seconds)

    # -- shards that come and go

    async def _follow(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._holdings.refresh()
                await self._catch_up_announcements()
            except BusDown as error:
                _log.warning("registry_unreachable", why=str(error))
            except BusFull as error:
                _log.warning("bus_full", why=str(error))
            await self._pause(_REFRESH_S)

    async def _ends(self) -> dict[Key, str]:
        """Return the last entry of each stream: what to reach before being ready."""
        ends = {}
        for key in self._holdings.units:
            name = f"{{search.{key[0]}/{key[1]}}}:writes"
            rows = await self._bus.call("XREVRANGE", name, "+", "-", "COUNT", 1)
            ends[key] = rows[0][0].decode() if rows else "0-0"
        return ends

    def _serve(self, unit: Unit) -> None:
        stop = asyncio.Event()
        task = asyncio.create_task(self._query(unit, stop), name=f"query-{unit.collection}")
        self._loops[unit.collection, unit.number] = task, stop

    def _retire(self, unit: Unit) -> None:
        """Let a dropped shard's loop tell what is queued that the collection is gone, then end it."""
        key = unit.collection, unit.number
        if self._targets:
            self._targets.pop(key, None)
        self._put_off.pop(key, None)
        self._announced.pop(key, None)
        self._announcing.pop(key, None)
        self._tidier.forget(key)
        self._begun.discard(key)
        task, stop = self._loops.pop(key)

        async def end() -> None:
            await self._pause(_GONE_S)
            stop.set()
            await asyncio.wait({task}, timeout=self._config.drain_s)

        retiring = asyncio.create_task(end())
        self._retired.add(retiring)
        retiring.add_done_callback(self._retired.discard)

    async def _query(self, unit: Unit, stop: asyncio.Event) -> None:
        key = unit.collection, unit.number
        family = Family(f"search.{unit.collection}", unit.number)
        while not stop.is_set():
            try:
                record = await self._worker_record(unit)
                consumer = Consumer(self._bus, family, record)
                if unit.shard is not None:
                    await self._announce(unit, unit.shard, [])
                await consumer.start()
                self._begun.add(key)
                self._check_ready()
                loop = QueryLoop(unit, consumer, self._searchers, self._bus.clock)
                await loop.run(stop, self._config.drain_s)
            except (BusDown, BusFull) as error:
                _log.warning("query_loop_waits", family=str(family), why=str(error))
            except Exception:  # noqa: BLE001 - one shard's loop must not end the others
                _log.exception("query_loop_failed", family=str(family))
                self._begun.add(key)  # nor hold them up
            if not stop.is_set():
                await self._pause(_RETRY_S)

    async def _worker_record(self, unit: Unit) -> WorkerRecord:
        """Calibrate: probe two batch sizes, a line through them, and what the deadline allows."""
        depth, alpha, beta = _DEPTH_ITEMS[0], 0.0, 0.0
        if unit.shard is not None:
            seconds = [await self._run(self._searchers, _probe, unit.shard, n) for n in _PROBES]
            cost = fit([Probe(n, 0, s) for n, s in zip(_PROBES, seconds, strict=True)])
            alpha, beta = cost.alpha_items_s, cost.beta_s
            possible = cost.depth(
                self._config.search_slo_s, batch_items=MAX_QUERIES, batch_tokens=1
            )
            depth = min(max(possible.items, _DEPTH_ITEMS[0]), _DEPTH_ITEMS[1])
        return WorkerRecord(
            worker=Consumer.incarnation("search"),
            classes=["cpu"],
            device="cpu",
            depth_items=depth,
            depth_tokens=_DEPTH_TOKENS,
            alpha_items_s=alpha,
            beta_s=beta,
            started_ms=self._started_ms,
            pid=os.getpid(),
            service="vector_search",
        )

    # -- writes

    async def _apply_writes(self) -> None:
        while not self._stopping.is_set():
            after = self._positions()
            self._check_ready()
            if not after:
                await self._pause(_REFRESH_S)
                continue
            try:
                entries = await self._bus.read_writes(after, _BLOCK_MS)
            except BusDown:
                await self._pause(0.2)
                continue
            batches: dict[Key, list[Entry]] = defaultdict(list)
            for collection, number, entry, write in entries:
                batches[collection, number].append((entry, write))
            for key, batch in batches.items():
                await self._apply(key, batch)

    def _positions(self) -> dict[Key, str]:
        now = asyncio.get_running_loop().time()
        return {
            key: unit.shard.applied
            for key, unit in self._holdings.units.items()
            if unit.shard is not None and self._put_off.get(key, 0.0) <= now
        }

    def _check_ready(self) -> None:
        if self.ready.is_set() or self._targets is None:
            return
        units = self._holdings.units
        for key, end in list(self._targets.items()):
            unit = units.get(key)
            if unit is None or unit.shard is None or parse_id(unit.shard.applied) >= parse_id(end):
                self._targets.pop(key)
        if not self._targets and units.keys() <= self._begun:
            self.ready.set()

    async def _apply(self, key: Key, batch: list[Entry]) -> None:
        unit = self._holdings.units.get(key)
        if unit is None or unit.shard is None:
            return
        shard = unit.shard
        try:
            with metrics.APPLY_SECONDS.time():
                await self._run(self._writer, apply_batch, shard, batch)
        except SpillwayError as error:
            metrics.DISK_FULL.inc()
            _log.error("writes_put_off", collection=key[0], code=error.code, why=error.message)
            self._put_off[key] = asyncio.get_running_loop().time() + _RETRY_S
            await self._flag(key, error.code)
            return
        if self._put_off.pop(key, None) is not None:
            await self._flag(key, "")
        unit.advanced()
        self._tidier.wake()
        if shard.dropped:
            await self._holdings.drop(key[0])
            return
        rings = [write.router for _, write in batch if isinstance(write, Write)]
        await self._announce(unit, shard, rings)

    async def _announce(self, unit: Unit, shard: Shard, rings: list[str]) -> None:
        """Publish what is applied; one at a time a shard, so that an older id never overwrites a newer one."""
        key = unit.collection, unit.number
        with contextlib.suppress(BusDown, BusFull):  # `_follow` tries again
            async with self._announcing[key]:
                applied = shard.applied
                await self._bus.publish_applied(*key, self._name, applied, rings)
                self._announced[key] = applied

    async def _catch_up_announcements(self) -> None:
        """Publish again what did not reach the bus."""
        for key, unit in list(self._holdings.units.items()):
            if unit.shard is not None and self._announced.get(key) != unit.shard.applied:
                await self._announce(unit, unit.shard, [])

    async def _flag(self, key: Key, code: str) -> None:
        """Tell routers why writes are not applied, for as long as that is so."""
        with contextlib.suppress(BusDown, BusFull):
            await self._bus.publish_blocked(*key, code, 3 * _RETRY_S)


def apply_batch(shard: Shard, batch: list[Entry]) -> None:
    """Apply entries of one shard in order, with one sync for all."""
    for entry, write in batch:
        if isinstance(write, BadMessage):
            shard.skip(entry)
        else:
            shard.apply(entry, write)
    shard.sync()


def _probe(shard: Shard, queries: int) -> float:
    return sorted(shard.probe(queries) for _ in range(3))[1]
