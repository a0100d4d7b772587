"""One replica: applies the writes of its shards, answers their queries, and maintains them in between.

The number of tasks depends on the number of families, not of collections.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from common import log
from common.bus import Bus, BusDown, BusFull
from common.bus.writes import Shard as Key
from common.config import SearchConfig
from common.tasks import stop_or_end, wait
from services.vector_search.applier import Applier
from services.vector_search.collection_quantizer import CollectionQuantizers
from services.vector_search.family_server import FamilyServer
from services.vector_search.holding_reports import HoldingReports
from services.vector_search.maintenance import ShardMaintenance
from services.vector_search.peers import Peers
from services.vector_search.placement_coordinator import PlacementCoordinator
from services.vector_search.quantizer_exchange import QuantizerExchange
from services.vector_search.read_server import ReadServer
from services.vector_search.replica_directory import ReplicaDirectory
from services.vector_search.shard_copies import ShardCopies
from services.vector_search.shard_filler import ShardFiller
from services.vector_search.shard_handle import ShardHandle
from services.vector_search.shard_manager import ShardManager
from services.vector_search.shard_splitter import ShardSplitter
from services.vector_search.tuning_runner import TuningRunner
from services.vector_search.write_log import parse_id

_REFRESH_S = 0.25
_log = log.get("vector_search")


class Replica:
    """Runs the shards of one directory on a bus. `ready` is set once all shards have caught up and take queries."""

    def __init__(
        self,
        directory: ReplicaDirectory,
        bus: Bus,
        config: SearchConfig,
        *,
        name: str,
        cores: int,
        memory_bytes: int = 0,
    ) -> None:
        self.ready = asyncio.Event()
        threads = config.search_threads or cores
        self._bus = bus
        self._config = config
        self._searchers = ThreadPoolExecutor(threads, "search")
        self._writer = ThreadPoolExecutor(1, "write")
        self._stopping = asyncio.Event()
        # The last write of each shard at the start, to catch up with; None until they are known.
        self._targets: dict[Key, str] | None = None
        quantizers = CollectionQuantizers()
        self._shards = ShardManager(
            directory,
            bus,
            config,
            name=name,
            threads=threads,
            writer=self._writer,
            quantizers=quantizers,
            opened=self._opened,
            dropped=self._dropped,
        )
        self._maintenance = ShardMaintenance(
            self._shards,
            bus,
            self._stopping,
            replica=name,
            audit_s=config.audit_s,
            writer=self._writer,
        )
        self._applier = Applier(
            self._shards,
            bus,
            self._stopping,
            replica=name,
            writer=self._writer,
            applied=self._maintenance.wake,
            caught_up=self._check_ready,
        )
        self._copies = ShardCopies(self._shards)
        self._reads = ReadServer(self._shards, self._searchers, bus.clock, self._copies)
        self._peers = Peers(bus, name)
        self._holding = HoldingReports(self._shards, bus, memory_bytes)
        self._splitter = ShardSplitter(self._shards, bus, self._holding.why)
        self._coordinator = PlacementCoordinator(self._shards, bus, name)
        self._tunings = TuningRunner(self._shards, bus, wake=self._maintenance.wake)
        self._quantizers = QuantizerExchange(
            self._shards, quantizers, bus, self._peers, wake=self._maintenance.wake
        )
        self._filler = ShardFiller(self._shards, bus, self._peers, self._holding.why)
        self._servers = [
            FamilyServer(
                family,
                bus,
                config,
                self._shards,
                self._searchers,
                threads=threads,
                reads=self._reads,
                peers=self._peers,
                begun=self._check_ready,
            )
            for family in bus.writes.search_families()
        ]

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping`, then drain; an unexpected error of any part ends it."""
        loop = asyncio.get_running_loop()
        if self._config.reads_host != "none":
            await self._reads.start(self._config.reads_host, self._config.reads_port)
        parts = [
            ("registry", self._follow(stopping)),
            ("writes", self._applier.run()),
            ("maintenance", self._maintenance.run()),
            ("maps", self._maintenance.draw_maps()),
            ("snapshots", self._maintenance.take_snapshots()),
        ]
        for server in self._servers:
            parts.append((f"listen-{server.family}", self._applier.listen(server.family)))
            parts.append((f"query-{server.family}", server.run(self._stopping)))
        tasks = [loop.create_task(part, name=name) for name, part in parts]
        try:
            await stop_or_end(stopping, *tasks)
        finally:
            self._stopping.set()
            self._maintenance.wake()
            self._applier.wake()
            await self._drain(tasks)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def _start(self, stopping: asyncio.Event) -> None:
        attempt = 0
        while not stopping.is_set():
            try:
                await self._shards.start()
                self._targets = {
                    key: await self._bus.writes.last_write(*key) for key in self._shards.handles
                }
                return
            except BusDown:
                attempt += 1
                _log.warning("start_waits_for_bus", attempt=attempt)

    async def _drain(self, tasks: list[asyncio.Task[None]]) -> None:
        await self._reads.drain(self._config.drain_s)
        _, late = await asyncio.wait(tasks, timeout=self._config.drain_s)
        for task in late:
            task.cancel()
        await self._filler.close()
        await self._splitter.close()
        await self._tunings.close()
        with contextlib.suppress(BusDown, BusFull):
            await self._coordinator.release()
            await self._quantizers.close()
        self._peers.close()
        self._copies.close()
        await self._maintenance.finish()
        await self._shards.close()
        self._maintenance.close()
        for pool in (self._searchers, self._writer):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, stopping: asyncio.Event) -> None:
        await self._copies.clear()
        await self._start(stopping)
        while not self._stopping.is_set():
            try:
                await self._shards.refresh()
                await self._applier.catch_up()
                await self._filler.step()
                await self._splitter.step()
                await self._coordinator.step()
                await self._tunings.step()
                await self._quantizers.step()
                await self._holding.publish()
            except BusDown as error:
                _log.warning("registry_unreachable", why=str(error))
            except BusFull as error:
                _log.warning("bus_full", why=str(error))
            await wait(self._stopping, _REFRESH_S)

    def _opened(self, handle: ShardHandle) -> None:
        key = handle.collection, handle.number
        if handle.shard is not None:
            loop, draw = asyncio.get_running_loop(), partial(self._maintenance.draw, key)
            handle.shard.call_when_map_wanted(partial(loop.call_soon_threadsafe, draw))
        self._applier.read_soon([key])
        self._maintenance.wake(key)

    def _dropped(self, handle: ShardHandle) -> None:
        key = handle.collection, handle.number
        if self._targets:
            self._targets.pop(key, None)
        self._applier.forget(key)
        self._maintenance.forget(key)

    def _check_ready(self) -> None:
        if self.ready.is_set() or self._targets is None:
            return
        handles = self._shards.handles
        for key, end in list(self._targets.items()):
            handle = handles.get(key)
            if (
                handle is None
                or handle.shard is None
                or parse_id(handle.shard.applied) >= parse_id(end)
            ):
                self._targets.pop(key)
        if not self._targets and all(server.has_begun for server in self._servers):
            self.ready.set()
