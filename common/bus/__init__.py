"""The bus: families, lanes, leases, logs, journals, dead letters and requests over Redis Streams."""

from __future__ import annotations

from typing import Any

from common.bus.admission import Admission, JobState, NewJob
from common.bus.connection import BusDown, BusFull
from common.bus.events import Notifications
from common.bus.recovery import Recovery
from common.bus.workers import LaneState
from common.bus.writes import Writes
from common.clock import SystemClock
from common.config import Common
from common.ids import Family
from common.redis.heartbeat import HeartbeatThread
from common.registry.cache_directory import CacheDirectory
from common.registry.deletion import Deletions
from common.registry.sessions import Sessions
from common.supervisor import Supervisor
from common.wire.messages import WorkerRecord
from common.worker.consumer import Consumer as _Consumer
from common.worker.leases import Lease, RunningBatch

__all__ = [
    "Admission",
    "Bus",
    "BusDown",
    "BusFull",
    "Consumer",
    "JobState",
    "LaneState",
    "Lease",
    "NewJob",
    "Notifications",
    "RunningBatch",
]


class Bus(Sessions, Writes, CacheDirectory, Deletions, Recovery):
    """Everything a process may do on the bus; one a process."""

    def __init__(
        self, config: Common, clock: SystemClock, supervisor: Supervisor | None = None
    ) -> None:
        """`supervisor` owns the background tasks of whatever uses this bus."""
        super().__init__(config, clock)
        self.supervisor = supervisor or Supervisor()
        self.heart = HeartbeatThread(self.address)

    @classmethod
    async def open(
        cls,
        config: Common,
        clock: SystemClock,
        *,
        timeout_s: float = 30.0,
        supervisor: Supervisor | None = None,
    ) -> Bus:
        """Connect, waiting up to `timeout_s` for Redis; BusDown after that, ConfigError for a bad address."""
        bus = cls(config, clock, supervisor)
        try:
            await bus.connect(timeout_s)
        except BaseException:
            await bus.close()
            raise
        return bus

    async def close(self) -> None:
        """End the heartbeat thread and every connection."""
        self.heart.stop()
        await super().close()


class Consumer(_Consumer):
    """A worker in one family, its heartbeat renewed by the process' heartbeat thread."""

    bus: Bus

    def __init__(self, bus: Bus, family: Family, record: WorkerRecord, **limits: Any) -> None:
        super().__init__(bus, family, record, heart=bus.heart, supervisor=bus.supervisor, **limits)
