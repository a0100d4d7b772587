"""Answers the jobs of one family for a replica: registered as one worker, whatever number of collections there are."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

import msgspec

from common import log
from common.bus import Bus, BusDown, BusFull
from common.config import SearchConfig
from common.ids import Family
from common.tasks import wait
from common.wire.registry import WorkerRecord
from common.worker.incarnation import incarnation_name
from common.worker.worker import Worker
from services.vector_search.calibration import Costs, largest, measure, outgrown
from services.vector_search.query_loop import MAX_QUERIES, QueryLoop
from services.vector_search.shard import Shard
from services.vector_search.shard_manager import ShardManager

_RETRY_S = 1.0
_LOOK_S = 5.0
_DEPTH_TOKENS = 1 << 30
T = TypeVar("T")
_log = log.get("vector_search")


class Server:
    """Serves the searches of one family until `stopping`; `begun` is called once it has registered, or failed."""

    def __init__(
        self,
        family: Family,
        bus: Bus,
        config: SearchConfig,
        holdings: ShardManager,
        pool: Executor,
        *,
        threads: int,
        begun: Callable[[], None],
    ) -> None:
        self.family = family
        self.has_begun = False
        self._bus = bus
        self._config = config
        self._holdings = holdings
        self._pool = pool
        self._threads = threads
        self._begun = begun
        self._started_ms = bus.clock.now_ms()
        self._costs = Costs()

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve; what ends it unexpectedly is logged, and it begins again."""
        await wait(self._holdings.all_open, _LOOK_S)  # then those that are open are served
        while not stopping.is_set():
            try:
                await self._serve(stopping)
            except (BusDown, BusFull) as error:
                _log.warning("query_loop_waits", family=str(self.family), why=str(error))
            except Exception:  # noqa: BLE001 - one family's loop must not end the others
                _log.exception("query_loop_failed", family=str(self.family))
                self._has_begun()  # nor hold them up
            if not stopping.is_set():
                await wait(stopping, _RETRY_S)

    async def _serve(self, stopping: asyncio.Event) -> None:
        self._costs = await self._measured(self._largest())
        worker = Worker(self._bus, self.family, self._record())
        await worker.start()
        self._has_begun()
        loop = QueryLoop(self._holdings, worker, self._pool, self._bus.clock, threads=self._threads)
        keeping = asyncio.create_task(self._keep_costs(worker, stopping))
        try:
            await loop.run(stopping, self._config.drain_s)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    def _has_begun(self) -> None:
        self.has_begun = True
        self._begun()

    def _largest(self) -> Shard | None:
        units = self._holdings.units.items()
        mine = (u for (name, _), u in units if self._bus.writes.search_family(name) == self.family)
        return largest(unit.shard for unit in mine if unit.shard is not None)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._pool, function, *args))

    async def _measured(self, shard: Shard | None) -> Costs:
        slo_s = self._config.search_slo_s
        return await measure(shard, self._run, slo_s=slo_s, batch_items=MAX_QUERIES)

    async def _keep_costs(self, worker: Worker, stopping: asyncio.Event) -> None:
        """Measure again whenever the largest shard has outgrown what was measured."""
        while not stopping.is_set():
            await wait(stopping, _LOOK_S)
            shard = self._largest()
            if not outgrown(self._costs, shard):
                continue
            self._costs = await self._measured(shard)
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
            )
        )

    def _with_costs(self, record: WorkerRecord) -> WorkerRecord:
        return msgspec.structs.replace(
            record,
            depth_items=self._costs.depth_items,
            alpha_items_s=self._costs.alpha_s,
            beta_s=self._costs.beta_s,
        )
