"""The worker of one family: builds its parts, runs their loops, and shuts down in order."""

from __future__ import annotations

import asyncio

import msgspec

from common import log
from common.bus import Bus, keys, metrics
from common.bus.connection import BusDown
from common.ids import Family
from common.redis.heartbeat import HeartbeatThread
from common.wire.registry import WorkerRecord
from common.worker.incarnation import Incarnation
from common.worker.lane_recovery import LaneRecovery
from common.worker.lease_reader import LeaseReader
from common.worker.leases import HeldLeases
from common.worker.outbox import Outbox

BEAT_S = 1.0
_log = log.get("bus")


class Worker:
    """Reads lanes of one family and ends the jobs it leased; all methods belong to one event loop.

    `reader` reads leases, `leases` holds them, `outbox` writes events and ends, `incarnation` is the registration,
    `recovery` settles the leases of dead workers. After a lost heartbeat the worker hands over its leases, uncharged,
    and continues under a new name with `generation` one higher.
    """

    def __init__(
        self,
        bus: Bus,
        family: Family,
        record: WorkerRecord,
        *,
        heartbeats: HeartbeatThread | None = None,
        largest_items: int = 32,
        largest_tokens: int = 8192,
    ) -> None:
        """`largest_items` and `largest_tokens` are the size of the family's largest job."""
        self.bus, self.family = bus, family
        self.leases = HeldLeases(family)
        self.incarnation = Incarnation(
            bus, family, record, self.leases, heartbeats or bus.heartbeats
        )
        self.outbox = Outbox(bus, family, self.incarnation, self.leases)
        self.reader = LeaseReader(
            bus,
            family,
            self.incarnation,
            self.leases,
            self.outbox,
            largest_items=largest_items,
            largest_tokens=largest_tokens,
        )
        self.recovery = LaneRecovery(
            bus, family, self.incarnation, self.leases, self.reader, self.outbox
        )
        self._former: list[str] = []  # former names with leases that are not handed over yet
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        """The worker's present name."""
        return self.incarnation.name

    @property
    def record(self) -> WorkerRecord:
        """The record last published."""
        return self.incarnation.record

    @property
    def generation(self) -> int:
        """The number of former names; a lease of an earlier generation is lost."""
        return self.incarnation.generation

    async def start(self) -> None:
        """Register the worker, and start the tasks that renew its leases and that recover and reap lanes."""
        metrics.served(self.family, self.record.classes)
        await self.incarnation.register()
        loops = {"turns": self._turns(), "beats": self._beats(), **self.recovery.loops()}
        self._tasks = [
            self.bus.supervisor.process(loop, f"{name} {self.family}")
            for name, loop in loops.items()
        ]

    async def drain(self) -> None:
        """Take no more work, and hand over every lease still held, uncharged."""
        self.reader.stop()
        await self.incarnation.publish(msgspec.structs.replace(self.record, draining=True))
        await self.reader.join()
        held = {lease.cls for lease in self.leases.held.values()}
        for cls in {*self.incarnation.lanes, *held}:
            await self.outbox.hand_over(cls, self.name, None)
        self.leases.drop_all("returned")
        self.reader.clear()

    async def stop(self) -> None:
        """Deregister; other workers reclaim leases that were not handed over once the heartbeat has expired."""
        self.reader.stop()
        await self.bus.supervisor.end(*self._tasks)
        await self.reader.join()
        try:
            await self.incarnation.deregister()
        except BusDown:
            _log.warning("worker_left_unregistered", worker=self.name)

    async def _turns(self) -> None:
        while True:  # the heartbeat thread notices a loop that hangs by its lack of progress
            self.incarnation.heartbeat.turn()
            await asyncio.sleep(BEAT_S)

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if self.incarnation.heartbeat.overdue:
                continue  # the heartbeat thread pauses, too, so that a hung step loses its leases
            try:
                await self.beat_once()
            except BusDown:
                continue
            except Exception:  # noqa: BLE001 - the loop must outlive a bad reply
                _log.exception("beat_failed", worker=self.name)

    async def beat_once(self) -> None:
        """Renew the leases; after a lost heartbeat register under a new name, and hand over the old name's leases."""
        if not await self.incarnation.keep():
            self.leases.drop_all("lease_lost")
            self.reader.clear()
            self._former.append(self.name)
            await self.incarnation.renew()
        # Repeated at each beat until it succeeds, so that no job is charged for a lease lost in an outage.
        while self._former:
            for cls in (keys.own(self._former[0]), *self.record.classes):
                await self.outbox.hand_over(cls, self._former[0], None)
            self._former.pop(0)
