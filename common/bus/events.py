"""A router's ear: outcomes and events of its requests, by doorbell, with the log as the truth.

The journal may be missed and is never needed: whoever waits reads the log at least once a second.
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
IDLE_S = 60.0
LOOK_S = 1.0
BELL_EVENTS = 128  # what a bell keeps for a reader that stands still; the log keeps everything
TELL_S = 30.0
FORGET_S = 600.0  # longer than a journal lives after its last ring
_LATEST = 16  # who looks at a log has most often all but its end


def _nothing(_seconds: float) -> None:
    return


class Subscription:
    """One waiter's doorbell for one id."""

    def __init__(self, journal: Notifications, name: str, family: Family) -> None:
        self._journal, self._name, self._family = journal, name, family
        journal.waiting[family] += 1
        self._rung: asyncio.Queue[Event | None] = asyncio.Queue(BELL_EVENTS)
        journal.bells[name].add(self._rung)
        self._open = True

    async def wait(self, seconds: float) -> Event | None:
        """Return the event it rang with; None after `seconds`, or where the log must be read.

        That is for an event too large for the journal, and for events dropped since their reader was slow.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._rung.get()
        return None

    def close(self) -> None:
        """Stop listening; once is enough."""
        if not self._open:
            return
        self._open = False
        bells = self._journal.bells
        bells[self._name].discard(self._rung)
        if not bells[self._name]:
            del bells[self._name]
        self._journal.leave(self._family)


class Notifications:
    """Listens on `{f}:journal:<router>` and `{f}:room` of every family in which something is awaited.

    `on_room` is called with a family where room may have appeared for who was refused there with `waits`.
    """

    def __init__(
        self,
        bus: Connection,
        router: str,
        heard: Callable[[float], None] = _nothing,
        supervisor: Supervisor | None = None,
    ) -> None:
        """`heard` is told, for each ring, how many seconds after it was rung; `supervisor` owns the readers."""
        self.bus = bus
        self.router = router
        self._heard, self._supervisor = heard, supervisor or Supervisor()
        self.bells: defaultdict[str, set[asyncio.Queue[Event | None]]] = defaultdict(set)
        self.waiting: Counter[Family] = Counter()
        self._readers: dict[Family, asyncio.Task[None]] = {}
        self._ready: dict[Family, float] = {}
        self.on_room: Callable[[Family], None] = lambda _family: None

    async def start(self) -> None:
        """Nothing is read before something is awaited."""

    async def stop(self) -> None:
        """Stop listening; waiters fall back to the log until their deadlines."""
        await self._supervisor.end(*self._readers.values())
        self._readers.clear()

    def listen(self, family: Family) -> None:
        """Listen in a family from now on, until nothing has been awaited there for a minute."""
        self._ready[family] = self.bus.clock.monotonic()
        if family not in self._readers:
            self._readers[family] = self._supervisor.scoped(
                lambda: self._read(family), f"journal {family}"
            )

    def leave(self, family: Family) -> None:
        """One waiter less in a family; its reader stays a while for the next."""
        self.waiting[family] -= 1
        if family in self._ready:
            self._ready[family] = self.bus.clock.monotonic()

    def bell(self, name: str, family: Family) -> Subscription:
        """Return a doorbell for an id (a job's, or a shard's writes) in `family`."""
        self.listen(family)
        return Subscription(self, name, family)

    async def _read(self, family: Family) -> None:
        last = dict.fromkeys((keys.journal(family, self.router), keys.room(family)), b"0-0")
        told_at = -math.inf
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
            except Exception:  # noqa: BLE001 - without its reader a router hears everything late
                _log.exception("journal_failed", family=str(family))
                await asyncio.sleep(1.0)
                continue
            for stream, entries in reply or ():
                last[stream.decode()] = entries[-1][0]
                self._heard_from(family, stream.decode(), entries)
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
        """Say that there is a journal: a deletion reads those it is told of."""
        name, now_ms = keys.journals(family), self.bus.clock.now_ms()
        with contextlib.suppress(BusFull):  # then the jobs' records name it
            await self.bus.call("ZADD", name, now_ms, self.router)
            await self.bus.call("ZREMRANGEBYSCORE", name, "-inf", now_ms - int(1000 * FORGET_S))
            await self.bus.call("PEXPIRE", name, int(1000 * FORGET_S))

    def _awaited(self, family: Family) -> bool:
        recent = self.bus.clock.monotonic() - self._ready[family] < IDLE_S
        return recent or self.waiting[family] > 0

    async def _goes_on(self, name: str, last: bytes) -> bool:
        """Return whether the journal's newest id is not below `last`: Redis' clock may have gone back."""
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
            with contextlib.suppress(BadMessage):  # then the log says what it is
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
        """Yield the events of a job from index `start` to its outcome, none twice, none skipped.

        Ends without an outcome when the deadline passes. A `bell` that was there before the job was admitted spares
        the first look at the log; where nothing rings the log is read every `look_s`.
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
        """Return the outcome of a job; an "expired" event made here if the deadline passed first."""
        async with contextlib.aclosing(self.events(job, 0, deadline_ms, bell)) as events:
            async for event in events:
                if event.ends:
                    return event
        error = DeadlineExceeded("the deadline passed before the result")
        return error_event(-1, "expired", error)


def _put(bell: asyncio.Queue[Event | None], event: Event | None) -> None:
    """Add an event to a bell; a full one drops what it holds and keeps one None: the log has it all."""
    if bell.full():
        while not bell.empty():
            bell.get_nowait()
        event = None
    bell.put_nowait(event)


def _since(raw: Sequence[bytes], start: int) -> list[Event]:
    """Return the events from index `start` on, decoding no more than it takes to find them."""
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
