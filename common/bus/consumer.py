"""The worker's side of a family: reading within its room, emitting, finishing, failing, and staying alive.

One Consumer is one worker in one family. Its name is an incarnation: when its heartbeat was lost it hands over what it
held, uncharged, and goes on under a new name with `generation` one higher.
"""

from __future__ import annotations

import asyncio
import os
import socket

import msgspec
import structlog
from redis.exceptions import ResponseError

from common.bus import keys
from common.bus.connection import BLOCK_MS, BusDown
from common.bus.heart import TTL_MS, Heart, Pulse
from common.bus.keys import GROUP
from common.bus.lease import Holder, Lease
from common.bus.recovery import Entry, Recovery, entry_of
from common.ids import Family, ulid
from common.messages import WorkerRecord, encode

RECOVER_S = 0.5
BEAT_S = 1.0
REAP_S = 60.0
_log = structlog.get_logger("bus")


class Consumer(Holder):
    """Reads lanes of one family as one worker; all methods belong to one event loop."""

    def __init__(
        self,
        bus: Recovery,
        family: Family,
        record: WorkerRecord,
        *,
        heart: Heart,
        largest_items: int = 32,
        largest_tokens: int = 8192,
    ) -> None:
        super().__init__(bus, family, record)
        self.generation = 0
        self.largest_items, self.largest_tokens = largest_items, largest_tokens
        self.differences = 0
        self._heart = heart
        self._pulse = Pulse(keys.heart(family, record.worker))
        self._strange: set[str] = set()
        self._inbox: list[Lease] = []
        self._arrived = asyncio.Event()
        self._reading: asyncio.Task[list[Lease]] | None = None
        self._room = 0
        self._draining = False
        self._tasks: list[asyncio.Task[None]] = []

    @staticmethod
    def incarnation(service: str) -> str:
        """Return a new worker name, different at every start."""
        return f"{service}-{socket.gethostname().lower()[:20]}-{os.getpid()}-{ulid()[-10:]}"

    # -- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Create the groups, register, and begin to beat, to recover and to reap."""
        await self._register()
        loops = (self._beats(), self._recovers(), self._reaps())
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def _register(self) -> None:
        for cls in (*self.record.classes, keys.own(self.worker)):
            await self.bus.ensure_group(self.family, cls)
        await self._beat("start")
        self._heart.add(self._pulse)
        self.bus.forget_roster(self.family)

    async def _beat(self, mode: str) -> list[str]:
        held = list(self._held.values())
        names = [keys.use(self.family), keys.workers(self.family), self._pulse.key]
        args: list[object] = [mode, self.worker, encode(self.record), TTL_MS, len(held)]
        for lease in held:
            names += [keys.job(lease.job), keys.lane(self.family, lease.cls)]
            args += [lease.job, lease.entry, lease.epoch]
        return [item.decode() for item in await self.bus.script("beat", names, args)]

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                if self._pulse.lost.is_set():
                    await self._reincarnate()
                    continue
                verdict, *revoked = await self._beat("keep")
                if verdict == "gone":
                    await self._reincarnate()
                self._revoked |= set(revoked) & set(self._held)
            except BusDown:
                continue
            except Exception:  # noqa: BLE001 - the loop must outlive a bad reply
                _log.exception("beat_failed", worker=self.worker)

    async def _reincarnate(self) -> None:
        old = self.record.worker
        self._heart.remove(self._pulse)
        self._held.clear()
        self._revoked.clear()
        self._inbox.clear()
        self.generation += 1
        self.record = msgspec.structs.replace(
            self.record, worker=self.incarnation(old.split("-")[0])
        )
        self._pulse = Pulse(keys.heart(self.family, self.worker))
        await self._register()
        for cls in self.record.classes:
            await self.bus.hand_over(self.family, cls, old, None)
        _log.warning("worker_reincarnated", was=old, now=self.worker, generation=self.generation)

    async def publish(self, record: WorkerRecord) -> None:
        """Publish new depth and costs; the name stays the incarnation's."""
        self.record = msgspec.structs.replace(record, worker=self.worker)
        await self._beat("keep")

    def working(self, predicted_s: float) -> None:
        """Tell the heartbeat thread that a step began which should take `predicted_s`."""
        self._pulse.working(predicted_s)

    def idle(self) -> None:
        """Tell the heartbeat thread that no step is running."""
        self._pulse.idle()

    progressed = idle

    async def drain(self) -> None:
        """Take no more work, and hand over every lease still held, uncharged."""
        self._draining = True
        await self.publish(msgspec.structs.replace(self.record, draining=True))
        if self._reading is not None:
            self._inbox += await self._reading
        for cls in self.record.classes:
            await self.bus.hand_over(self.family, cls, self.worker, None)
        self._held.clear()
        self._inbox.clear()

    async def stop(self) -> None:
        """Deregister; leases not handed over are reclaimed by others when the heartbeat lapses."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._heart.remove(self._pulse)
        try:
            await self._beat("stop")
        except BusDown:
            _log.warning("worker_left_unregistered", worker=self.worker)

    # -- reading ---------------------------------------------------------------------------------------

    async def read(self, free_items: int, free_tokens: int) -> list[Lease]:
        """Return new leases, none larger in number than the room given; waits up to a second.

        Own lane first, then the shared ones; work handed over or reclaimed arrives in between.
        """
        room = min(free_items // self.largest_items, free_tokens // self.largest_tokens)
        if room <= 0 and not self._held:
            room = 1  # an idle worker always has room for one parcel
        alone = any(lease.alone for lease in self._held.values())
        if room <= 0 or alone or self._draining:
            await asyncio.sleep(0.005 if not self._draining else 0.1)
            return []
        self._room = room
        if self._reading is None and not self._inbox:
            self._reading = asyncio.create_task(self._read(room))
        if not self._inbox and self._reading is not None:
            arrived = asyncio.create_task(self._arrived.wait())
            await asyncio.wait({self._reading, arrived}, return_when=asyncio.FIRST_COMPLETED)
            arrived.cancel()
        leases, self._inbox = self._inbox, []
        self._arrived.clear()
        if self._reading is not None and self._reading.done():
            task, self._reading = self._reading, None
            leases += task.result()
        self._room = 0
        return leases

    async def _read(self, room: int) -> list[Lease]:
        own, shared = keys.own(self.worker), list(self.record.classes)
        try:
            if room >= 2 * (1 + len(shared)):
                return await self._group_read(
                    [own, *shared], room // 2 // (1 + len(shared)) or 1, BLOCK_MS
                )
            return await self._group_read([own], 1, None) or await self._group_read(
                shared[:1], 1, 100
            )
        except BusDown:
            await asyncio.sleep(0.2)
            return []

    async def _group_read(self, classes: list[str], count: int, block: int | None) -> list[Lease]:
        lanes = {keys.lane(self.family, cls): cls for cls in classes}
        blocking = () if block is None else ("BLOCK", block)
        worker, generation = self.worker, self.generation
        command = ("XREADGROUP", "GROUP", GROUP, worker, "COUNT", count, *blocking, "STREAMS")
        try:
            reply = await self.bus.blocking(*command, *lanes, *([">"] * len(lanes)))
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await self._register()
            return []
        leases: list[Lease] = []
        for name, rows in reply or ():
            cls = lanes[name.decode()]
            for row in rows:
                if not row[1]:
                    continue
                lease = self._lease(entry_of(row), cls, 1, alone=False)
                leases += await self._fresh(lease, entry_of(row).suspicions)
        if generation != self.generation:
            return []
        return leases

    def _lease(self, entry: Entry, cls: str, epoch: int, *, alone: bool) -> Lease:
        size = (entry.items, entry.tokens, entry.deadline_ms, entry.router)
        return Lease(
            entry.job, entry.payload, *size, epoch, alone, cls, entry.id, epoch, self.worker
        )

    async def _fresh(self, lease: Lease, suspicions: int) -> list[Lease]:
        if suspicions >= 2 or self._draining:
            await self.bus.hand_over(self.family, lease.cls, self.worker, [lease.job])
            return []
        self._held[lease.job] = lease
        return [lease]

    # -- recovery --------------------------------------------------------------------------------------

    async def _recovers(self) -> None:
        turn = 0
        while True:
            await asyncio.sleep(RECOVER_S)
            turn += 1
            try:
                await self._settle()
                await self._take()
                if turn % 10 == 0:
                    await self._reconcile()
            except BusDown:
                continue
            except ResponseError as error:
                if "NOGROUP" in str(error):
                    continue  # Redis was emptied: the next read or beat registers anew
                _log.exception("recovery_failed", worker=self.worker)
            except Exception:  # noqa: BLE001 - recovery must outlive a bad reply
                _log.exception("recovery_failed", worker=self.worker)

    async def _settle(self) -> None:
        shared = self.record.classes[0]
        for cls in self.record.classes:
            for done in await self.bus.settle(self.family, cls, self.worker):
                _log.warning("lease_settled", job=done.entry.job, verdict=done.verdict)
        for cls in await self.bus.use(self.family):
            if cls.startswith("w.") and cls != keys.own(self.worker):
                await self.bus.settle_own_lane(self.family, cls[2:], self.worker, shared)

    async def _take(self) -> None:
        """Take handed-over work for the reader that is waiting now, beside what it reads itself."""
        if self._draining or any(lease.alone for lease in self._held.values()):
            return
        room = max(self._room // 2, 0 if self._held else 1) if self._room else 0
        if room == 0:
            return
        for cls in self.record.classes:
            done = await self.bus.take(self.family, cls, self.worker, room, idle=not self._held)
            for entry, verdict in done:
                if not verdict.startswith("taken:"):
                    continue
                _, epoch, alone = verdict.split(":")
                lease = self._lease(entry, cls, int(epoch), alone=alone == "1")
                self._held[lease.job] = lease
                self._inbox.append(lease)
        if self._inbox:
            self._arrived.set()

    async def _reconcile(self) -> None:
        """Hand over leases Redis says are ours but whose delivery was lost with a connection."""
        for cls in self.record.classes:
            count = (await self.bus.pending(self.family, cls)).get(self.worker, 0)
            if count <= sum(lease.cls == cls for lease in self._held.values()):
                continue
            rows = await self.bus._held_by(self.family, cls, self.worker, 1000)
            strange = {entry.job for entry in rows if entry.job not in self._held}
            twice = strange & self._strange
            self._strange = strange
            if twice:
                await self.bus.hand_over(self.family, cls, self.worker, twice)
                _log.warning("lost_deliveries_returned", worker=self.worker, jobs=len(twice))

    async def _reaps(self) -> None:
        while True:
            await asyncio.sleep(REAP_S * (0.5 + (hash(self.worker) % 100) / 100))
            try:
                await self.reap()
            except BusDown:
                continue
            except Exception:  # noqa: BLE001 - housekeeping must outlive a bad reply
                _log.exception("reap_failed", worker=self.worker)

    async def reap(self) -> None:
        """Housekeep the family once; differences of use are bugs and are counted."""
        _, _, wrong = await self.bus.reap(self.family, self.record.classes)
        self.differences += len(wrong)
        for line in wrong:
            _log.error("use_differed", family=str(self.family), lane=line)
