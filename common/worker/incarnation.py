"""The incarnation of a worker: its registration in one family, with its name, published record and heartbeat."""

from __future__ import annotations

import os
import socket

import msgspec

from common import log, process_identity
from common.bus import Bus, keys
from common.ids import Family, ulid
from common.redis.heartbeat import TTL_MS, Heartbeat, HeartbeatThread
from common.wire.message import encode
from common.wire.registry import WorkerRecord
from common.worker.leases import HeldLeases

_log = log.get("bus")


def incarnation_name(service: str) -> str:
    """Return a new worker name, which differs at every start."""
    return f"{service}-{socket.gethostname().lower()[:20]}-{os.getpid()}-{ulid()[-10:]}"


class Incarnation:
    """The present incarnation of a worker; `generation` grows by one with every new name.

    `busy_s` counts the seconds of all batches since the start.
    """

    def __init__(
        self,
        bus: Bus,
        family: Family,
        record: WorkerRecord,
        leases: HeldLeases,
        heartbeats: HeartbeatThread,
    ) -> None:
        self.record = msgspec.structs.replace(record, place=process_identity.here())
        self.generation = 0
        self.heartbeat = Heartbeat(keys.heart(family, record.worker))
        self.busy_s = 0.0
        self._bus, self._family, self._leases, self._heartbeats = bus, family, leases, heartbeats
        self._ran = (0, 0, 0, 0, 0.0)

    @property
    def name(self) -> str:
        """The worker's present name."""
        return self.record.worker

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes that this worker reads, its own lane first."""
        return (keys.own(self.name), *self.record.classes)

    async def register(self) -> None:
        """Create the groups of the lanes, publish the record, and add the heartbeat to the heartbeat thread."""
        await self.beat("start")
        self._heartbeats.add(self.heartbeat)
        self._bus.workers.forget(self._family)

    async def deregister(self) -> None:
        """End the heartbeat and remove the record; BusDown if Redis cannot be reached."""
        self._heartbeats.remove(self.heartbeat)
        await self.beat("stop")

    async def renew(self) -> None:
        """Register under a new name after the heartbeat was lost; the caller has dropped the old name's leases."""
        old = self.name
        self._heartbeats.remove(self.heartbeat)
        self.generation += 1
        self.record = msgspec.structs.replace(
            self.record, worker=incarnation_name(old.split("-")[0])
        )
        self.heartbeat = Heartbeat(keys.heart(self._family, self.name))
        await self.register()
        _log.warning("worker_reincarnated", was=old, now=self.name, generation=self.generation)

    async def keep(self) -> bool:
        """Renew the registration once; False if the heartbeat was lost."""
        if not self.heartbeat.lost.is_set():
            verdict, *_ = await self.beat("keep")
            if verdict == "gone":
                self.lose()
        return not self.heartbeat.lost.is_set()

    def lose(self) -> None:
        """Mark the heartbeat as lost, so that the next beat begins a new incarnation."""
        self.heartbeat.lost.set()

    async def beat(self, mode: str) -> list[str]:
        """Publish the record and renew every held lease; `mode` is start, keep or stop.

        Returns the verdict and the jobs whose leases were revoked.
        """
        held = list(self._leases.held.values())
        names = [keys.use(self._family), keys.workers(self._family), self.heartbeat.key]
        lanes = {"start": self.lanes, "stop": self.lanes[:1]}.get(mode, ())
        names += [keys.lane(self._family, cls) for cls in lanes]
        batches, total, items, tokens, seconds = self._ran
        self.record = msgspec.structs.replace(
            self.record,
            batches=batches,
            tokens=total,
            batch_items=items,
            batch_tokens=tokens,
            batch_s=seconds,
        )
        record = encode(self.record)
        args: list[object] = [mode, self.name, record, TTL_MS, self.lanes[0], len(lanes)]
        args.append(len(held))
        for lease in held:
            names += [keys.job(lease.job), keys.lane(self._family, lease.cls)]
            args += [lease.job, lease.entry, lease.epoch]
        names.append(keys.room(self._family))
        return [item.decode() for item in await self._bus.connection.script("beat", names, args)]

    async def publish(self, record: WorkerRecord) -> None:
        """Publish a record with new depth and costs; its name and place are set to the incarnation's."""
        self.record = msgspec.structs.replace(record, worker=self.name, place=self.record.place)
        await self.beat("keep")

    def ran(self, items: int, tokens: int, seconds: float) -> None:
        """Count a batch that ran; the next heartbeat publishes the counts."""
        batches, total, *_ = self._ran
        self._ran = (batches + 1, total + tokens, items, tokens, seconds)
        self.busy_s += seconds
