"""The server of one family of searches: one worker on the bus, for any number of collections."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

import msgspec

from common import log
from common.bus import Bus, BusDown, BusFull
from common.config import SearchConfig
from common.cost.linear import Probe, fit
from common.ids import Family
from common.tasks import HEALTHY_S, RESTARTS, in_pool, wait
from common.wire.registry import WorkerRecord
from common.worker.incarnation import incarnation_name
from common.worker.worker import Worker
from services.vector_search.peers import Peers
from services.vector_search.query_batch import MAX_QUERIES
from services.vector_search.query_loop import QueryLoop
from services.vector_search.read_server import ReadServer
from services.vector_search.shard import Shard
from services.vector_search.shard_manager import ShardManager

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
_LOOK_S = 5.0
_DEPTH_TOKENS = 1 << 30
_PROBES = (1, 32)
_TIMES = 3
_DEPTH_ITEMS = (256, 10_000)
_FEW_CHUNKS = 1000
_log = log.get("vector_search")


class SearchCosts(NamedTuple):
    """Seconds of a batch of n queries, `alpha_s` * n + `beta_s`, in one shard; and the lane's depth.

    The shard had `chunks`, `newer` of them not in its structure yet, and was searched by `path`.
    """

    depth_items: int = _DEPTH_ITEMS[0]
    alpha_s: float = 0.0
    beta_s: float = 0.0
    chunks: int = 0
    newer: int = 0
    path: str = "exact"

    def outdated(self, chunks: int, newer: int, path: str) -> bool:
        """Return whether a shard that stands so is far larger than the measured one, or has been indexed since."""
        grown = chunks > max(2 * self.chunks, self.chunks + _FEW_CHUNKS)
        taken_in = newer < self.newer / 2 and self.newer > _FEW_CHUNKS
        return grown or taken_in or path != self.path


class FamilyServer:
    """Serves the searches of one family; it calls `begun` once its worker is registered, or has failed to register."""

    def __init__(
        self,
        family: Family,
        bus: Bus,
        config: SearchConfig,
        shards: ShardManager,
        pool: Executor,
        *,
        threads: int,
        reads: ReadServer,
        peers: Peers,
        begun: Callable[[], None],
    ) -> None:
        self.family = family
        self.has_begun = False
        self._bus = bus
        self._config = config
        self._shards = shards
        self._pool = pool
        self._threads = threads
        self._reads, self._peers = reads, peers
        self._begun = begun
        self._started_ms = bus.clock.now_ms()
        self._costs = SearchCosts()

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping`; after an error, begin again after a pause that doubles."""
        await wait(self._shards.all_open, _LOOK_S)  # then open shards are served
        clock, pause_s = self._bus.clock, _FIRST_PAUSE_S
        while not stopping.is_set():
            began_s = clock.monotonic()
            try:
                await self._serve(stopping)
            except (BusDown, BusFull) as error:
                _log.warning("query_loop_waits", family=str(self.family), why=str(error))
            except Exception:  # noqa: BLE001 - one family's loop must not end the others
                RESTARTS.inc()
                _log.exception("query_loop_failed", family=str(self.family), again_s=pause_s)
                self._has_begun()  # a failed family keeps no replica from being ready
            if clock.monotonic() - began_s >= HEALTHY_S:
                pause_s = _FIRST_PAUSE_S
            if not stopping.is_set():
                await wait(stopping, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _serve(self, stopping: asyncio.Event) -> None:
        self._costs = await self._measure(self._largest())
        worker = Worker(self._bus, self.family, self._record())
        await worker.start()
        self._has_begun()
        loop = QueryLoop(
            self._shards,
            worker,
            self._pool,
            self._bus.clock,
            threads=self._threads,
            peers=self._peers,
        )
        keep_costs = partial(self._keep_costs, worker, stopping)
        keeping = self._bus.supervisor.scoped(keep_costs, f"costs-{self.family}")
        try:
            await loop.run(stopping, self._config.drain_s)
        finally:
            await self._bus.supervisor.end(keeping)

    def _has_begun(self) -> None:
        self.has_begun = True
        self._begun()

    def _largest(self) -> Shard | None:
        """Return the open shard of this family with the most chunks, whose searches take longest; None without one."""
        handles, writes = self._shards.handles.items(), self._bus.writes
        mine = (each for (name, _), each in handles if writes.search_family(name) == self.family)
        open_ones = (each.shard for each in mine if each.shard is not None)
        return max(open_ones, key=lambda shard: shard.chunks, default=None)

    async def _measure(self, shard: Shard | None) -> SearchCosts:
        """Probe two batch sizes; the line through them and the SLO give the lane's depth.

        A shard that cannot be probed gives the smallest depth and no costs.
        """
        if shard is None:
            return SearchCosts()
        stands = _stands(shard)
        try:
            seconds = [await in_pool(self._pool, _probe, shard, queries) for queries in _PROBES]
        except Exception:  # noqa: BLE001 - a shard's fault must not stop the others from being served
            _log.exception("calibration_failed", collection=shard.record.id)
            return SearchCosts()
        cost = fit([Probe(n, 0, s) for n, s in zip(_PROBES, seconds, strict=True)])
        possible = cost.depth(self._config.search_slo_s, batch_items=MAX_QUERIES, batch_tokens=1)
        depth = min(max(possible.items, _DEPTH_ITEMS[0]), _DEPTH_ITEMS[1])
        return SearchCosts(depth, cost.alpha_items_s, cost.beta_s, *stands)

    async def _keep_costs(self, worker: Worker, stopping: asyncio.Event) -> None:
        """Measure again whenever the largest shard has outgrown the measured one, or was indexed since."""
        while not stopping.is_set():
            await wait(stopping, _LOOK_S)
            shard = self._largest()
            if shard is None or not self._costs.outdated(*_stands(shard)):
                continue
            self._costs = await self._measure(shard)
            with contextlib.suppress(BusDown, BusFull):  # the next heartbeat publishes the record
                await worker.incarnation.publish(self._with_costs(worker.record))

    def _record(self) -> WorkerRecord:
        return self._with_costs(
            WorkerRecord(
                worker=incarnation_name("search"),
                classes=["cpu"],
                device="cpu",
                depth_items=0,
                depth_tokens=_DEPTH_TOKENS,
                started_ms=self._started_ms,
                pid=os.getpid(),
                service="vector_search",
                address=self._reads.address,
                token=self._reads.token,
                replica=self._shards.name,
            )
        )

    def _with_costs(self, record: WorkerRecord) -> WorkerRecord:
        return msgspec.structs.replace(
            record,
            depth_items=self._costs.depth_items,
            alpha_items_s=self._costs.alpha_s,
            beta_s=self._costs.beta_s,
        )


def _stands(shard: Shard) -> tuple[int, int, str]:
    """Return how many chunks a shard has, how many of them its structure lacks, and its kind of index."""
    stats = shard.stats()
    return stats["chunks"], stats["newer"], stats["index"]


def _probe(shard: Shard, queries: int) -> float:
    """Return the median seconds of _TIMES batches of searches."""
    return sorted(shard.probe(queries) for _ in range(_TIMES))[_TIMES // 2]
