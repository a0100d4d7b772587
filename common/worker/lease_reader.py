"""The lease reader: reads new entries of a worker's lanes, and work that was handed over, within the worker's room."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from redis.exceptions import ResponseError

from common.bus import Bus, keys, metrics
from common.bus.connection import BLOCK_MS, BusDown
from common.bus.keys import GROUP, RETURNED
from common.bus.recovery import Entry
from common.ids import Family
from common.tasks import wait
from common.worker.incarnation import Incarnation
from common.worker.leases import HeldLeases, Lease
from common.worker.outbox import Outbox

# Seconds after which the reader of a full worker checks its room again, in case a wake was missed.
FULL_S = 1.0


class LeaseReader:
    """Reads the lanes of one family for one worker; only one caller at a time may `read`."""

    def __init__(
        self,
        bus: Bus,
        family: Family,
        incarnation: Incarnation,
        leases: HeldLeases,
        outbox: Outbox,
        *,
        largest_items: int,
        largest_tokens: int,
    ) -> None:
        self.largest_items, self.largest_tokens = largest_items, largest_tokens
        self._bus, self._family, self._incarnation = bus, family, incarnation
        self._leases, self._outbox = leases, outbox
        self._inbox: list[Lease] = []
        self._arrived = asyncio.Event()
        self._reading: asyncio.Task[list[Lease]] | None = None
        self._reading_own: asyncio.Task[list[Lease]] | None = None
        self._asked = 0  # leases to keep of the read in flight
        self._in_redis = False  # True until the read in flight is answered
        self._awaited = False  # True while a caller waits in `read`
        self._room = 0  # leases that the waiting caller would take beside the read in flight
        self._want_take = False  # with room for one lease, take handed-over work first
        self._quiet = False  # a job waits to run alone: read nothing until idle, then take that job
        self._draining = False

    @property
    def takes_more(self) -> bool:
        """False while the worker drains, or waits to be idle for a job that runs alone."""
        return not (self._draining or self._quiet)

    async def read(self, free_items: int, free_tokens: int) -> list[Lease]:
        """Wait up to a second for new leases, and return at most as many as fit the free room.

        The own lane is read first, then the shared lanes; handed-over or reclaimed work arrives in between. Without
        room the call waits for the end of a lease, or for `wake`, and returns no lease, so that the caller computes its
        room again.
        """
        self._gather()
        room = min(free_items // self.largest_items, free_tokens // self.largest_tokens)
        if room <= 0 and self._leases.held.keys() <= {lease.job for lease in self._inbox}:
            room = 1  # an idle worker always has room for one parcel
        waits = bool(self._inbox) and not self._draining  # leases that arrived after the last call
        if room <= 0 or not (waits or self._may_read()):
            await wait(self._leases.changed, FULL_S)
            self._leases.changed.clear()  # after the wait: an earlier change ends it
            return []
        self._leases.changed.clear()
        only_take = self._quiet or (self._want_take and room == 1)
        if self._reading is None and not self._inbox and not only_take:
            self._asked = max(1, room // 2)
            self._reading = asyncio.create_task(self._read(room))
        elif self._reading is not None and self._asked == 0 and not self._inbox:
            self._asked = max(1, room // 2)  # handed-over work took this read's room
        self._room = room - (self._asked if self._reading is not None else 0)
        self._awaited = True
        try:
            if not self._inbox or self._room <= 0:
                await self._await_arrivals()
        finally:
            self._awaited = False
            self._room = 0  # the caller has stopped waiting
        return self._collected(room)

    def _may_read(self) -> bool:
        """Return whether a worker with room may read now; the caller is woken when this changes to True."""
        blocked = self._quiet and bool(self._leases.held) and self._reading is None
        return not (blocked or self._draining or self._leases.runs_alone)

    def _gather(self) -> None:
        """Move the leases of a read that has ended to the inbox, without those that are no longer held."""
        arrived: list[Lease] = []
        if self._reading is not None and self._reading.done():
            task, self._reading = self._reading, None
            arrived = task.result()
        self._inbox = [lease for lease in arrived + self._inbox if self._leases.is_held(lease)]

    def _collected(self, room: int) -> list[Lease]:
        """Return arrived leases that fit in the room, minus the room reserved for the read in flight."""
        self._gather()
        spare = max(0, room - (self._asked if self._reading is not None else 0))
        leases, self._inbox = self._inbox[:spare], self._inbox[spare:]
        self._arrived.clear()
        return leases

    async def _await_arrivals(self) -> None:
        arrived = asyncio.create_task(self._arrived.wait())
        try:
            waits = {arrived} | ({self._reading} if self._reading is not None else set())
            await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        finally:
            arrived.cancel()

    async def _read(self, room: int) -> list[Lease]:
        """Wait for entries on any of the worker's lanes, and return leases of entries within the room.

        With little room the lanes are read one by one, the own lane first. Only if all are empty, one read waits on all
        lanes, since a wait on a single lane would notice entries of other lanes late. Redis counts per stream, so this
        read may return an entry from each lane; entries beyond the room are handed over.
        """
        lanes = self._incarnation.lanes
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

    async def read_own(self, count: int) -> list[Lease]:
        """Wait up to a second for leases of the own lane, and return at most `count`, regardless of the room.

        One task may call this while another task waits in `read`.
        """
        if not self._may_read():
            await asyncio.sleep(FULL_S)
            return []
        self._reading_own = asyncio.create_task(self._read_own(count))
        return await asyncio.shield(self._reading_own)

    async def _read_own(self, count: int) -> list[Lease]:
        lane = self._incarnation.lanes[:1]
        try:
            return await self._group_read(lane, count, BLOCK_MS, beside=True)
        except BusDown:
            await asyncio.sleep(0.2)
            return []

    async def _group_read(
        self, classes: Sequence[str], count: int, block: int | None, *, beside: bool = False
    ) -> list[Lease]:
        """Lease entries of lanes; with `beside` the call takes no room from the read in flight."""
        lanes = {keys.lane(self._family, cls): cls for cls in classes}
        blocking = () if block is None else ("BLOCK", block)
        worker, generation = self._incarnation.name, self._incarnation.generation
        command = ("XREADGROUP", "GROUP", GROUP, worker, "COUNT", count, *blocking, "STREAMS")
        self._in_redis = self._in_redis or not beside
        try:
            reply = await self._bus.connection.blocking(*command, *lanes, *([">"] * len(lanes)))
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self._incarnation.lose()  # Redis was emptied: the next beat registers again
            await asyncio.sleep(0.2)
            return []
        finally:
            self._in_redis = self._in_redis and beside
        found = [
            (
                self._lease(entry, lanes[name.decode()], 1, worker, fresh=not entry.leased),
                entry.suspicions,
            )
            for name, rows in reply or ()
            for entry in await self._bus.recovery.sound(self._family, lanes[name.decode()], rows)
        ]
        gone = (
            self._draining or generation != self._incarnation.generation or self._leases.runs_alone
        )
        fit = [lease for lease, suspicions in found if not gone and suspicions < 2]
        if self._reading is not None and not beside:
            fit = fit[: self._asked]
        unfit = [lease for lease, _ in found if lease not in fit]
        for lease in fit:
            self._leases.hold(lease)
        with contextlib.suppress(BusDown):  # LaneRecovery finds lost deliveries
            await self._outbox.give_back(unfit)
        return await self._unexpired(fit)

    def _lease(
        self,
        entry: Entry,
        cls: str,
        epoch: int,
        worker: str,
        *,
        alone: bool = False,
        fresh: bool = False,
    ) -> Lease:
        metrics.JOB_ATTEMPTS.labels(metrics.lane_label(self._family, cls)).observe(epoch)
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
            fresh,
        )

    async def _unexpired(self, leases: list[Lease]) -> list[Lease]:
        """End jobs that expired in the queue, before they run; return the other leases."""
        now = self._bus.clock.now_ms()
        for lease in leases:
            if lease.deadline_ms < now:
                await self._outbox.expire(lease)
        return [lease for lease in leases if lease.deadline_ms >= now]

    async def take(self, orphans: Sequence[str]) -> None:
        """Take handed-over work for the caller that waits in `read`, from this worker's lanes and from `orphans`."""
        waits = False
        for cls in (*self._incarnation.lanes, *orphans):
            if self._draining or self._leases.runs_alone:
                return
            if self._room <= 0:
                pending = await self._bus.lanes.pending(self._family, cls)
                self._want_take = self._want_take or RETURNED in pending
                if not (RETURNED in pending and self._claims_room()):
                    continue
            waits = await self._take_from(cls) or waits
            self._want_take = False
        if self._room > 0 and self._reading is not None and self._asked == 0:
            self._room, self._asked = self._room - 1, 1  # the claimed room was not needed
        if waits or self._room > 0:
            self._hush(quiet=waits and not self._leases.runs_alone)
        if self._room > 0 and self._reading is None:
            self._arrived.set()  # the caller of `read` waited only for this work

    def nothing_handed_over(self) -> None:
        """Read new entries as usual, since no work was handed over: the family's lanes are empty."""
        self._want_take = False
        self._hush(quiet=False)

    def _hush(self, *, quiet: bool) -> None:
        """With `quiet`, read nothing until the worker is idle, so that a job can run alone; else read as usual."""
        if self._quiet and not quiet:
            self._leases.wake()
        self._quiet = quiet

    def _claims_room(self) -> bool:
        """Claim the room of a read waiting in Redis for handed-over work; leases of that read are then handed over."""
        if not (self._awaited and self._in_redis and self._asked > 0):
            return False
        self._room, self._asked = self._room + self._asked, 0
        return self._room > 0

    async def _take_from(self, cls: str) -> bool:
        """Take handed-over work of one lane; return whether a job there waits to run alone."""
        worker, generation = self._incarnation.name, self._incarnation.generation
        idle = self._quiet and not self._leases.held and self._reading is None
        done = await self._bus.recovery.take(self._family, cls, worker, self._room, idle=idle)
        taken = []
        for entry, verdict in done:
            if verdict.startswith("taken:"):
                _, epoch, single = verdict.split(":")
                taken.append(self._lease(entry, cls, int(epoch), worker, alone=single == "1"))
        alone = any(lease.alone for lease in taken)
        if (
            generation != self._incarnation.generation
            or self._draining
            or (alone and self._leases.held)
        ):
            await self._outbox.give_back(taken)
            return False
        for lease in taken:
            self._leases.hold(lease)
        self._inbox += taken
        self._room -= len(taken)
        if taken:
            self._arrived.set()
        return any(verdict == "waits" for _, verdict in done)

    def stop(self) -> None:
        """Read and take no more leases; wakes a waiting reader."""
        self._draining = True
        self._leases.wake()

    async def join(self) -> None:
        """Wait for the reads in flight; the leases of a late reply are handed over."""
        for reading in (self._reading, self._reading_own):
            if reading is not None:
                with contextlib.suppress(BusDown, ResponseError):
                    await reading
        self._reading = self._reading_own = None

    def clear(self) -> None:
        """Forget arrived leases that no caller has read, since they are no longer held."""
        self._inbox.clear()
