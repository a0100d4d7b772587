"""How a worker comes by its leases: reading within its room, taking what was handed over, finding what got lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

from redis.exceptions import ResponseError

from common import log
from common.bus import Bus, keys, metrics
from common.bus.connection import BLOCK_MS, BusDown
from common.bus.keys import GROUP, RETURNED
from common.bus.recovery import Entry
from common.errors import DeadlineExceeded
from common.ids import Family
from common.redis.heartbeat import Heartbeat
from common.tasks import wait
from common.wire.registry import WorkerRecord
from common.wire.results import error_event
from common.worker.leases import HeldLeases, Lease

FASTER, SLOWER = "gpu", "cpu"
FULL_S = (
    1.0  # a full worker is woken; should a wake be missed, its reader looks again after so long
)
RELIEF = 16  # entries looked at in one go
_log = log.get("bus")


class LeaseReader(HeldLeases):
    """Reads the lanes of one family for one worker; `generation` grows with every new incarnation."""

    def __init__(
        self,
        bus: Bus,
        family: Family,
        record: WorkerRecord,
        *,
        largest_items: int,
        largest_tokens: int,
    ) -> None:
        super().__init__(bus, family, record)
        self.generation = 0
        self.largest_items, self.largest_tokens = largest_items, largest_tokens
        self._pulse = Heartbeat(keys.heart(family, record.worker))
        self._strange: set[tuple[str, str]] = set()
        self._inbox: list[Lease] = []
        self._arrived = asyncio.Event()
        self._reading: asyncio.Task[list[Lease]] | None = None
        self._asked = 0  # how much of what the read in flight brings is kept
        self._in_redis = False  # the read in flight has not been answered
        self._awaited = False  # somebody waits in `read` for arrivals
        self._room = 0  # how much the waiting reader would take beside it
        self._want_take = False  # one room, and something was handed over: take before reading on
        self._orphans: tuple[str, ...] = ()  # lanes nobody living serves
        self._spilled = False  # the accelerator's overflow holds work
        self._quiet = False  # a job waits to run alone: read nothing until idle, then take it
        self._draining = False

    @property
    def lanes(self) -> tuple[str, ...]:
        """Classes this worker reads: its own lane first."""
        return (keys.own(self.worker), *self.record.classes)

    async def read(self, free_items: int, free_tokens: int) -> list[Lease]:
        """Return new leases, none larger in number than the room given; waits up to a second.

        Own lane first, then the shared ones; work handed over or reclaimed arrives in between. Without room the read
        waits for the end of a lease, or for `wake`, and returns nothing: the caller then looks at its room again.
        """
        room = min(free_items // self.largest_items, free_tokens // self.largest_tokens)
        if room <= 0 and not self._held:
            room = 1  # an idle worker always has room for one parcel
        if room <= 0 or not self._may_read():
            await wait(self._changed, FULL_S)
            self._changed.clear()  # after the wait: what changed since the last read ends this one at once
            return []
        self._changed.clear()
        only_take = self._quiet or (self._want_take and room == 1)
        if self._reading is None and not self._inbox and not only_take:
            self._asked = max(1, room // 2)
            self._reading = asyncio.create_task(self._read(room))
        elif self._reading is not None and self._asked == 0 and not self._inbox:
            self._asked = max(1, room // 2)  # handed-over work had its room; there is room anew
        self._room = room - (self._asked if self._reading is not None else 0)
        self._awaited = True
        try:
            if not self._inbox or self._room <= 0:
                await self._await_arrivals()
        finally:
            self._awaited = False
            self._room = 0  # nothing is taken for a reader that has left
        return self._collected(room)

    def _may_read(self) -> bool:
        """Whether a worker with room may read now; who could not is woken when that changes."""
        blocked = self._quiet and bool(self._held) and self._reading is None
        return not (blocked or self._draining or self._runs_alone())

    def _collected(self, room: int) -> list[Lease]:
        """Return what has arrived and fits in the room, leaving there what the read in flight may bring."""
        if self._reading is not None and self._reading.done():
            task, self._reading = self._reading, None
            self._inbox = task.result() + self._inbox
        spare = max(0, room - (self._asked if self._reading is not None else 0))
        leases, self._inbox = self._inbox[:spare], self._inbox[spare:]
        self._arrived.clear()
        return [lease for lease in leases if self._held.get(lease.job) == lease]

    def _runs_alone(self) -> bool:
        return any(lease.alone for lease in self._held.values())

    async def _await_arrivals(self) -> None:
        arrived = asyncio.create_task(self._arrived.wait())
        try:
            waits = {arrived} | ({self._reading} if self._reading is not None else set())
            await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        finally:
            arrived.cancel()

    async def _read(self, room: int) -> list[Lease]:
        """Read at most what was asked for; waits for an entry on any lane, the worker's own among them.

        With little room the lanes are asked one by one, the own one first. Only when all are empty one read waits on
        all of them: Redis counts per stream, so that read may bring an entry from each lane where several come at
        once. A wait on one lane alone would see the entries of the others late; what exceeds the room is handed back.
        """
        lanes = self.lanes
        try:
            if room >= 2 * len(lanes):
                return await self._group_read(lanes, room // 2 // len(lanes) or 1, BLOCK_MS)
            for cls in lanes:
                if leases := await self._group_read([cls], 1, None):
                    return leases
            return await self._group_read(lanes, 1, BLOCK_MS)
        except BusDown:
            await asyncio.sleep(0.2)
            return []

    async def _group_read(
        self, classes: Sequence[str], count: int, block: int | None
    ) -> list[Lease]:
        lanes = {keys.lane(self.family, cls): cls for cls in classes}
        blocking = () if block is None else ("BLOCK", block)
        worker, generation = self.worker, self.generation
        command = ("XREADGROUP", "GROUP", GROUP, worker, "COUNT", count, *blocking, "STREAMS")
        self._in_redis = True
        try:
            reply = await self.bus.connection.blocking(*command, *lanes, *([">"] * len(lanes)))
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self._pulse.lost.set()  # Redis was emptied: begin anew at the next beat
            await asyncio.sleep(0.2)
            return []
        finally:
            self._in_redis = False
        found = [
            (self._lease(entry, lanes[name.decode()], 1, worker), entry.suspicions)
            for name, rows in reply or ()
            for entry in await self.bus.recovery.sound(self.family, lanes[name.decode()], rows)
        ]
        gone = self._draining or generation != self.generation or self._runs_alone()
        fit = [lease for lease, suspicions in found if not gone and suspicions < 2]
        if self._reading is not None:
            fit = fit[: self._asked]
        unfit = [lease for lease, _ in found if lease not in fit]
        for lease in fit:
            self._hold(lease)
        with contextlib.suppress(BusDown):  # then they are found as lost deliveries
            await self.give_back(unfit)
        return await self._unexpired(fit)

    def _lease(
        self, entry: Entry, cls: str, epoch: int, worker: str, *, alone: bool = False
    ) -> Lease:
        metrics.JOB_ATTEMPTS.labels(metrics.lane_label(self.family, cls)).observe(epoch)
        return Lease(
            entry.job,
            entry.payload,
            entry.items,
            entry.tokens,
            entry.deadline_ms,
            entry.router,
            epoch,
            alone,
            cls,
            entry.id,
            epoch,
            worker,
            entry.traceparent,
            entry.due_ms,
            entry.batch,
            entry.finish_ms,
        )

    async def _unexpired(self, leases: list[Lease]) -> list[Lease]:
        """End what expired in the queue: it is dropped before it runs."""
        now = self.bus.clock.now_ms()
        for lease in leases:
            if lease.deadline_ms < now:
                error = DeadlineExceeded("the deadline passed before the job ran")
                event = error_event(0, "expired", error)
                try:
                    await self._end(lease, event, timeout_s=2.0)
                except BusDown:
                    self._forget(lease)  # found as a lost delivery
        return [lease for lease in leases if lease.deadline_ms >= now]

    # -- taking ----------------------------------------------------------------------------------------

    async def _take(self) -> None:
        """Take handed-over work for the reader that is waiting now, beside what it reads itself."""
        waits = False
        for cls in (*self.lanes, *self._orphans):
            if self._draining or self._runs_alone():
                return
            if self._room <= 0:
                pending = await self.bus.lanes.pending(self.family, cls)
                self._want_take = self._want_take or RETURNED in pending
                if not (RETURNED in pending and self._claims_room()):
                    continue
            waits = await self._take_from(cls) or waits
            self._want_take = False
        if self._room > 0 and self._reading is not None and self._asked == 0:
            self._room, self._asked = self._room - 1, 1  # nothing needed the room that was claimed
        if self._room > 0:
            self._hush(quiet=waits and not self._runs_alone())
            if self._reading is None:
                self._arrived.set()  # the reader waited for this alone

    def _hush(self, *, quiet: bool) -> None:
        """Read nothing until idle, so that a job can run alone; or read on."""
        if self._quiet and not quiet:
            self.wake()
        self._quiet = quiet

    def _claims_room(self) -> bool:
        """Let handed-over work have the one room of a read that waits in Redis: what that still brings goes back."""
        if not (self._awaited and self._in_redis and self._asked > 0):
            return False
        self._room, self._asked = self._room + self._asked, 0
        return self._room > 0

    async def _take_from(self, cls: str) -> bool:
        """Take from one lane's handed-over work; True if a job there waits to run alone."""
        worker, generation = self.worker, self.generation
        idle = self._quiet and not self._held and self._reading is None
        done = await self.bus.recovery.take(self.family, cls, worker, self._room, idle=idle)
        taken = []
        for entry, verdict in done:
            if verdict.startswith("taken:"):
                _, epoch, single = verdict.split(":")
                taken.append(self._lease(entry, cls, int(epoch), worker, alone=single == "1"))
        alone = any(lease.alone for lease in taken)
        if generation != self.generation or self._draining or (alone and self._held):
            await self.give_back(taken)
            return False
        for lease in taken:
            self._hold(lease)
        self._inbox += taken
        self._room -= len(taken)
        if taken:
            self._arrived.set()
        return any(verdict == "waits" for _, verdict in done)

    async def _adopt(self, used: Iterable[str]) -> None:
        """When idle, work for lanes that no living worker serves; and for the CPU's backlog where that is faster."""
        served = {cls for w in await self.bus.workers.living(self.family) for cls in w.classes}
        others = [c for c in used if not c.startswith("w.") and c not in self.record.classes]
        self._orphans = tuple(cls for cls in others if cls not in served)
        for cls in self._orphans:
            await self.bus.recovery.settle(self.family, cls, self.worker)
        self._spilled = SLOWER in others and self.record.classes[0] == FASTER
        await self.relieve()
        for cls in self._orphans:
            if self._draining or self._quiet or self._held:
                return
            await self._move(cls, count=1)

    async def relieve(self) -> None:
        """Take back from the CPU's lane what would end sooner on the accelerator, if anything was spilled of late."""
        if self._spilled and not (self._draining or self._quiet):
            await self._move(SLOWER, count=RELIEF, sooner=True)

    async def _move(self, cls: str, *, count: int, sooner: bool = False) -> None:
        target = self.record.classes[0]
        moved = await self.bus.recovery.move(
            self.family, cls, target, self.worker, count=count, sooner=sooner
        )
        if moved:
            _log.info("jobs_moved", source=cls, target=target, jobs=len(moved))

    async def _reconcile(self) -> None:
        """Hand over leases Redis says are ours but whose delivery was lost with a connection."""
        strange: set[tuple[str, str]] = set()
        for cls in {*self.lanes, *(lease.cls for lease in self._held.values())}:
            pending = (await self.bus.lanes.pending(self.family, cls)).get(self.worker, 0)
            if pending <= sum(lease.cls == cls for lease in self._held.values()):
                continue
            rows = await self.bus.recovery.held_by(self.family, cls, self.worker, 1000)
            strange |= {(cls, entry.job) for entry in rows if entry.job not in self._held}
        for cls, job in strange & self._strange:
            if job not in self._held:
                await self._hand_over(cls, self.worker, [job])
                _log.warning("lost_delivery_returned", worker=self.worker, job=job)
        self._strange = strange

    async def drain(self) -> None:
        """Take no more work, and hand over every lease still held, uncharged."""
        self._draining = True
        self.wake()
        await self._announce_drain()
        await self._await_reading()
        for cls in {*self.lanes, *(lease.cls for lease in self._held.values())}:
            await self._hand_over(cls, self.worker, None)
        self._drop_all("returned")
        self._inbox.clear()

    async def _await_reading(self) -> None:
        """Let the read in flight end; what it still brings is handed over."""
        if self._reading is not None:
            with contextlib.suppress(BusDown, ResponseError):
                await self._reading
            self._reading = None

    async def _announce_drain(self) -> None:
        raise NotImplementedError
