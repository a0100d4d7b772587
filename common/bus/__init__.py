"""The bus: families, lanes, leases, logs and notifications over Redis Streams, as one object of small parts."""

from __future__ import annotations

from common.bus.admission import Admission, LaneAdmission, NewJob
from common.bus.connection import BusDown, BusFull, Connection
from common.bus.control import Control
from common.bus.events import Notifications
from common.bus.jobs import Jobs, JobState
from common.bus.lanes import Lanes, LaneState
from common.bus.recovery import Recovery
from common.bus.shard_replicas import ShardReplicas
from common.bus.workers import Workers
from common.bus.writes import Writes
from common.clock import SystemClock
from common.config import Common
from common.redis.heartbeat import HeartbeatThread
from common.tasks import Supervisor

__all__ = [
    "Admission",
    "Bus",
    "BusDown",
    "BusFull",
    "JobState",
    "LaneState",
    "NewJob",
    "Notifications",
]


class Bus:
    """All parts of the bus on one connection; one a process.

    `connection` runs plain commands, for the parts and the registry; `heartbeats` renews this process' workers;
    `supervisor` owns the background tasks of all users of this bus.
    """

    def __init__(
        self, config: Common, clock: SystemClock, supervisor: Supervisor | None = None
    ) -> None:
        self.config, self.clock, self.supervisor = config, clock, supervisor or Supervisor()
        self.connection = redis = Connection(config, clock)
        self.workers = Workers(redis)
        self.lanes = Lanes(redis, self.workers)
        self.jobs = Jobs(redis)
        self.admission = LaneAdmission(redis, self.workers)
        self.control = Control(redis, self.jobs)
        self.recovery = Recovery(redis, self.workers, self.lanes, self.jobs)
        self.writes = Writes(redis)
        self.shard_replicas = ShardReplicas(redis, self.writes)
        self.heartbeats = HeartbeatThread(redis.address)

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
            await bus.connection.connect(timeout_s)
        except BaseException:
            await bus.close()
            raise
        return bus

    async def close(self) -> None:
        """End the heartbeat thread and every connection."""
        self.heartbeats.stop()
        await self.connection.close()
