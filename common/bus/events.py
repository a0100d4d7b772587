"""Notifications of a router: the events of its jobs as they are written, with each job's log as the truth.

Notifications come through one Redis stream (`journal`) for each router and family. They may be lost and are never
needed: a waiter for an event also reads the job's log at least once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence

from common import log
from common.bus import keys, unreadable
from common.bus.connection import BLOCK_MS, BusDown, BusFull, Connection
from common.errors import DeadlineExceeded
from common.ids import Family, family_of
from common.tasks import Supervisor
from common.wire.message import BadMessage, decode
from common.wire.results import Event, error_event

_log = log.get("bus")
IDLE_S = 60.0  # seconds for which a family is read after the last wait for one of its jobs
LOOK_S = 1.0
KEPT = 256  # notifications that a router may have heard and that still wait in its journal to be trimmed
BELL_EVENTS = 128  # events kept for a waiter that does not read; the log keeps all of them
TELL_S = 30.0
FORGET_S = 600.0  # longer than a journal lives after its last entry
_LATEST = 16  # entries of a log read first: most readers lack only its end


def _nothing(_seconds: float) -> None:
    return


class Subscription:
    """The notifications of one id (a job, or the writes of a shard) for one waiter."""

    def __init__(self, journal: Notifications, name: str, family: Family) -> None:
        self._journal, self._name, self._family = journal, name, family
        journal.waiting[family] += 1
        self._rung: asyncio.Queue[Event | None] = asyncio.Queue(BELL_EVENTS)
        journal.bells[name].add(self._rung)
        self._open = True

    async def wait(self, seconds: float) -> Event | None:
        """Return the next event; None after `seconds`, or if the event must be read from the log.

        The log must be read for an event too large for a notification, and after a slow waiter's events were dropped.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._rung.get()
        return None

    def close(self) -> None:
        """End the subscription; further calls do nothing."""
        if not self._open:
            return
        self._open = False
        bells = self._journal.bells
        bells[self._name].discard(self._rung)
        if not bells[self._name]:
            del bells[self._name]
        self._journal.leave(self._family)


class Notifications:
    """Reads `{f}:journal:<router>` and `{f}:room` of every family in which this router waits for a job or for room.

    `on_room` is called with a family when its lanes may have room for jobs that were refused with `waits`.
    """

    def __init__(
        self,
        bus: Connection,
        router: str,
        heard: Callable[[float], None] = _nothing,
        supervisor: Supervisor | None = None,
    ) -> None:
        """`heard` is called with the age in seconds of each notification; `supervisor` owns the reading tasks."""
        self.bus = bus
        self.router = router
        self._heard, self._supervisor = heard, supervisor or Supervisor()
        self.bells: defaultdict[str, set[asyncio.Queue[Event | None]]] = defaultdict(set)
        self.waiting: Counter[Family] = Counter()
        self._readers: dict[Family, asyncio.Task[None]] = {}
        self._ready: dict[Family, float] = {}
        self.on_room: Callable[[Family], None] = lambda _family: None

    async def start(self) -> None:
        """Do nothing: the streams of a family are read only while this router waits there."""

    async def stop(self) -> None:
        """Stop reading; waiters fall back to the log until their deadlines."""
        await self._supervisor.end(*self._readers.values())
        self._readers.clear()

    def listen(self, family: Family) -> None:
        """Read the notifications of a family until no one has waited there for a minute."""
        self._ready[family] = self.bus.clock.monotonic()
        if family not in self._readers:
            self._readers[family] = self._supervisor.scoped(
                lambda: self._read(family), f"journal {family}"
            )

    def leave(self, family: Family) -> None:
        """Count one waiter less in a family; the family is read for a while longer, for the next waiter."""
        self.waiting[family] -= 1
        if family in self._ready:
            self._ready[family] = self.bus.clock.monotonic()

    def bell(self, name: str, family: Family) -> Subscription:
        """Subscribe to an id of `family`: that of a job, or that of a shard's writes."""
        self.listen(family)
        return Subscription(self, name, family)

    async def _read(self, family: Family) -> None:
        journal = keys.journal(family, self.router)
        last = dict.fromkeys((journal, keys.room(family)), b"0-0")
        told_at, kept = -math.inf, 0
        while self._awaited(family):
            try:
                if self.bus.clock.monotonic() - told_at > TELL_S:
                    await self._tell(family)
                    told_at = self.bus.clock.monotonic()
                reply = await self.bus.blocking(
                    "XREAD", "COUNT", 1000, "BLOCK", BLOCK_MS, "STREAMS", *last, *last.values()
                )
                for name in () if reply else [name for name in last if last[name] != b"0-0"]:
                    if not await self._goes_on(name, last[name]):
                        last[name] = b"0-0"
            except BusDown:
                await asyncio.sleep(0.2)
                continue
            except Exception:  # noqa: BLE001 - without this task the router learns of events late
                _log.exception("journal_failed", family=str(family))
                await asyncio.sleep(1.0)
                continue
            for stream, entries in reply or ():
                last[stream.decode()] = entries[-1][0]
                self._heard_from(family, stream.decode(), entries)
                if stream == journal.encode():
                    kept += len(entries)
            if kept >= KEPT:
                kept = 0
                self._supervisor.spawn(self._trim(journal, last[journal]), "trim a journal")
        for memory in (self._readers, self._ready, self.waiting):
            memory.pop(family, None)

    def _heard_from(
        self, family: Family, name: str, entries: Sequence[tuple[bytes, list[bytes]]]
    ) -> None:
        if name == keys.room(family):
            self.on_room(family)
            return
        for entry, flat in entries:
            self._ring(flat, _order(entry)[0])

    async def _tell(self, family: Family) -> None:
        """Register this router's journal in the family, since a deletion searches the registered journals."""
        name, now_ms = keys.journals(family), self.bus.clock.now_ms()
        with contextlib.suppress(BusFull):  # the records of the jobs also name the router
            await self.bus.call("ZADD", name, now_ms, self.router)
            await self.bus.call("ZREMRANGEBYSCORE", name, "-inf", now_ms - int(1000 * FORGET_S))
            await self.bus.call("PEXPIRE", name, int(1000 * FORGET_S))

    async def _trim(self, journal: str, heard: bytes) -> None:
        """Remove the entries before `heard` from a journal: this router has read them, and no other reads them."""
        with contextlib.suppress(BusDown):  # the next call removes the rest, or a minute's lapse
            await self.bus.call("XTRIM", journal, "MINID", heard, timeout_s=1.0)

    def _awaited(self, family: Family) -> bool:
        recent = self.bus.clock.monotonic() - self._ready[family] < IDLE_S
        return recent or self.waiting[family] > 0

    async def _goes_on(self, name: str, last: bytes) -> bool:
        """Return whether a stream's newest id is at least `last`; False after Redis' clock has gone back."""
        newest = await self.bus.call("XREVRANGE", name, "+", "-", "COUNT", 1, timeout_s=1.0)
        return not newest or _order(newest[0][0]) >= _order(last)

    def _ring(self, flat: list[bytes], rung_ms: int) -> None:
        entry = dict(zip(flat[::2], flat[1::2], strict=True))
        if not {b"j", b"e"} <= entry.keys():
            unreadable.note("journal", "a ring has the fields 'j' and 'e'")
            return
        bells = self.bells.get(entry[b"j"].decode(errors="replace"))
        if bells:
            self._heard((self.bus.clock.now_ms() - rung_ms) / 1000)
            event = None
            with contextlib.suppress(BadMessage):  # None makes the waiter read the log
                event = decode(entry[b"e"], Event) if entry[b"e"] else None
            for bell in bells:
                _put(bell, event)

    async def events(
        self,
        job: str,
        start: int,
        deadline_ms: int,
        bell: Subscription | None = None,
        *,
        look_s: float = LOOK_S,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a job from index `start` to its outcome, in order, each once.

        Ends without an outcome when the deadline passes. With a `bell`, a subscription made before the job was
        admitted, the log is not read at first. While no notification comes, the log is read every `look_s` seconds.
        """
        expected, look = start, bell is None
        bell = bell or self.bell(job, family_of(job))
        try:
            while True:
                if look:
                    for event in await self._logged(job, expected):
                        expected = event.index + 1
                        yield event
                        if event.ends:
                            return
                left_s = (deadline_ms - self.bus.clock.now_ms()) / 1000
                if left_s <= 0:
                    return
                ring = await bell.wait(min(left_s, look_s))
                look = ring is None or ring.index > expected
                if ring is not None and ring.index == expected:
                    expected += 1
                    yield ring
                    if ring.ends:
                        return
        finally:
            bell.close()

    async def _logged(self, job: str, start: int) -> list[Event]:
        with contextlib.suppress(BusDown):
            name = keys.log(job)
            raw = await self.bus.call("LRANGE", name, -_LATEST, -1, timeout_s=1.0)
            events = _since(raw, start)
            if len(raw) == _LATEST and (not events or events[0].index > start):
                events = _since(await self.bus.call("LRANGE", name, 0, -1, timeout_s=1.0), start)
            return events
        return []

    async def end(self, job: str, deadline_ms: int, bell: Subscription | None = None) -> Event:
        """Return the outcome of a job; after the deadline an "expired" event that no log has."""
        async with contextlib.aclosing(self.events(job, 0, deadline_ms, bell)) as events:
            async for event in events:
                if event.ends:
                    return event
        error = DeadlineExceeded("the deadline passed before the result")
        return error_event(-1, "expired", error)


def _put(bell: asyncio.Queue[Event | None], event: Event | None) -> None:
    """Add an event to a waiter's queue; a full queue is emptied and gets one None, so that the log is read."""
    if bell.full():
        while not bell.empty():
            bell.get_nowait()
        event = None
    bell.put_nowait(event)


def _since(raw: Sequence[bytes], start: int) -> list[Event]:
    """Return the events from index `start` on; entries are decoded from the end, and no further than needed."""
    found: list[Event] = []
    for item in reversed(raw):
        event = unreadable.event_of(item)
        if event is None:
            continue
        if event.index < start:
            break
        found.append(event)
    return found[::-1]


def _order(entry: bytes) -> tuple[int, int]:
    ms, _, seq = entry.partition(b"-")
    return int(ms), int(seq)
