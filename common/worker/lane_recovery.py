"""The recovery of a family's lanes by its workers: leases of dead workers, lanes without a worker, lost deliveries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable
from typing import Any

from redis.exceptions import ResponseError

from common import log, tracing
from common.bus import Bus, keys, metrics
from common.bus.connection import BusDown
from common.bus.recovery import Verdict
from common.ids import Family
from common.redis.heartbeat import TTL_MS
from common.worker.incarnation import Incarnation
from common.worker.lease_reader import LeaseReader
from common.worker.leases import HeldLeases
from common.worker.outbox import Outbox

FASTER, SLOWER = "gpu", "cpu"
RELIEF = 16  # lane entries examined at once
RECOVER_S = 0.5
RECONCILE_S = 2.0
REAP_S = 60.0
_STALL_S = TTL_MS / 1000 - 2.0  # a longer standstill may have hit other processes, too
_log = log.get("bus")


class LaneRecovery:
    """One worker's share in the recovery of its family's lanes; `loops` returns the background loops."""

    def __init__(
        self,
        bus: Bus,
        family: Family,
        incarnation: Incarnation,
        leases: HeldLeases,
        reader: LeaseReader,
        outbox: Outbox,
    ) -> None:
        self._bus, self._family, self._incarnation = bus, family, incarnation
        self._leases, self._reader, self._outbox = leases, reader, outbox
        self._orphans: tuple[str, ...] = ()  # lanes that no living worker serves
        self._spilled = False  # True if the overflow lane of the accelerator holds work
        # (class, job) of leases that Redis counts as this worker's, but that this worker does not hold.
        self._unexplained: set[tuple[str, str]] = set()

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the endless loops by name."""
        return {
            "recovers": self._recovers(),
            "reconciles": self._reconciles(),
            "reaps": self._reaps(),
        }

    async def _recovers(self) -> None:
        turn, last_ns = 0, self._bus.clock.unix_ns()
        while True:
            await asyncio.sleep(RECOVER_S)
            turn += 1
            if self._bus.clock.unix_ns() - last_ns > _STALL_S * 1e9:
                # This process or the machine stood still, and other workers may have stood still, too.
                self._bus.connection.policy.suspect()
            try:
                await self._recover(adopt=turn % 2 == 0)
            except BusDown:
                pass
            except ResponseError as error:
                # A lane has lost its group if Redis was emptied: the next beat registers the worker again.
                if "NOGROUP" not in str(error):
                    _log.exception("recovery_failed", worker=self._incarnation.name)
            except Exception:  # noqa: BLE001 - recovery must outlive a bad reply
                _log.exception("recovery_failed", worker=self._incarnation.name)
            finally:
                last_ns = self._bus.clock.unix_ns()

    async def _recover(self, *, adopt: bool) -> None:
        used = await self._bus.lanes.use(self._family)
        if not any(any(size) for size in used.values()):
            self._reader.nothing_handed_over()
            return
        await self._settle(used)
        await self._reader.take(self._orphans)
        if adopt:
            await self._adopt(used)

    async def _settle(self, used: Iterable[str]) -> None:
        classes, worker = self._incarnation.record.classes, self._incarnation.name
        for cls in classes:
            for done in await self._bus.recovery.settle(self._family, cls, worker):
                self._settled(cls, done)
        for cls in used:
            if cls.startswith("w.") and cls != self._incarnation.lanes[0]:
                for done in await self._bus.recovery.settle_own_lane(
                    self._family, cls[2:], worker, classes[0]
                ):
                    self._settled(classes[0], done)

    def _settled(self, cls: str, done: Verdict) -> None:
        entry = done.entry
        if done.verdict == "not" or entry.holder in {"", keys.RETURNED}:
            return
        with tracing.use(tracing.remote(entry.traceparent)):
            _log.warning("lease_settled", job=entry.job, verdict=done.verdict)
        self._leases.spans.lost(cls, entry)
        metrics.LEASES_LOST.labels(metrics.lane_label(self._family, cls)).inc()

    async def _adopt(self, used: Iterable[str]) -> None:
        """When idle, take work from lanes without a living worker, and from the CPU's lane if that ends sooner."""
        served = {cls for w in await self._bus.workers.living(self._family) for cls in w.classes}
        mine = self._incarnation.record.classes
        others = [c for c in used if not c.startswith("w.") and c not in mine]
        self._orphans = tuple(cls for cls in others if cls not in served)
        for cls in self._orphans:
            await self._bus.recovery.settle(self._family, cls, self._incarnation.name)
        self._spilled = SLOWER in others and mine[0] == FASTER
        await self.relieve()
        for cls in self._orphans:
            if not self._reader.takes_more or self._leases.held:
                return
            await self._move(cls, count=1)

    async def relieve(self) -> None:
        """Move jobs from the CPU's lane that would end sooner on the accelerator, if that lane lately held jobs."""
        if self._spilled and self._reader.takes_more:
            await self._move(SLOWER, count=RELIEF, sooner=True)

    async def _move(self, cls: str, *, count: int, sooner: bool = False) -> None:
        target = self._incarnation.record.classes[0]
        moved = await self._bus.recovery.move(
            self._family, cls, target, self._incarnation.name, count=count, sooner=sooner
        )
        if moved:
            _log.info("jobs_moved", source=cls, target=target, jobs=len(moved))

    async def _reconciles(self) -> None:
        while True:
            await asyncio.sleep(RECONCILE_S)
            try:
                await self.reconcile()
            except (BusDown, ResponseError):
                continue
            except Exception:  # noqa: BLE001 - housekeeping must outlive a bad reply
                _log.exception("reconcile_failed", worker=self._incarnation.name)

    async def reconcile(self) -> None:
        """Hand over leases that Redis counts as this worker's, but whose delivery was lost with a connection.

        A lease is handed over if two calls in a row have found it.
        """
        worker, held = self._incarnation.name, self._leases.held
        unexplained: set[tuple[str, str]] = set()
        for cls in {*self._incarnation.lanes, *(lease.cls for lease in held.values())}:
            pending = (await self._bus.lanes.pending(self._family, cls)).get(worker, 0)
            if pending <= sum(lease.cls == cls for lease in held.values()):
                continue
            rows = await self._bus.recovery.held_by(self._family, cls, worker, 1000)
            unexplained |= {(cls, entry.job) for entry in rows if entry.job not in held}
        for cls, job in unexplained & self._unexplained:
            if job not in held:
                await self._outbox.hand_over(cls, worker, [job])
                _log.warning("lost_delivery_returned", worker=worker, job=job)
        self._unexplained = unexplained

    async def _reaps(self) -> None:
        while True:
            await asyncio.sleep(REAP_S * random.uniform(0.5, 1.5))
            try:
                await self.reap()
            except BusDown:
                continue
            except Exception:  # noqa: BLE001 - housekeeping must outlive a bad reply
                _log.exception("reap_failed", worker=self._incarnation.name)

    async def reap(self) -> None:
        """Clean up the family once; miscounts of the lanes' use are bugs, which are logged and counted."""
        classes = self._incarnation.record.classes
        ended, _, wrong = await self._bus.recovery.reap(self._family, classes)
        metrics.ended(self._family, classes[0], "expired", ended)
        for line in wrong:
            _log.error("use_differed", family=str(self._family), lane=line)
            metrics.USE_DIFFERENCES.inc()
