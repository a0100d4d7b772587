"""The bus: families, lanes, leases, logs, journals, dead letters and requests over Redis Streams."""

from __future__ import annotations

from typing import Any

from common.bus.admission import Admission, JobState, NewJob
from common.bus.connection import BusDown, BusFull
from common.bus.consumer import Consumer as _Consumer
from common.bus.forgetting import Forgetting
from common.bus.holdings import Holdings
from common.bus.journal import Journal
from common.bus.lease import Doing, Lease
from common.bus.recovery import Recovery
from common.bus.roster import LaneState
from common.bus.sessions import Sessions
from common.bus.writes import Writes
from common.clock import SystemClock
from common.config import Common
from common.ids import Family
from common.messages import WorkerRecord
from common.redis.heartbeat import Heart
from common.supervisor import Supervisor

__all__ = [
    "Admission",
    "Bus",
    "BusDown",
    "BusFull",
    "Consumer",
    "Doing",
    "JobState",
    "Journal",
    "LaneState",
    "Lease",
    "NewJob",
]


class Bus(Sessions, Writes, Holdings, Forgetting, Recovery):
    """Everything a process may do on the bus; one a process."""

    def __init__(
        self, config: Common, clock: SystemClock, supervisor: Supervisor | None = None
    ) -> None:
        """`supervisor` owns the background tasks of whatever uses this bus."""
        super().__init__(config, clock)
        self.supervisor = supervisor or Supervisor()
        self.heart = Heart(self.address)

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
