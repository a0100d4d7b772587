"""Leftovers of sessions on the bus: keys, stream entries and claims, and the two ways to find them.

The indexes that are written with a session name all its leftovers, and reading them takes time in proportion to the
session. Its list of jobs names every job and request that was run for it, and the keys of each have fixed names. The
job's record names its lane's entry, `{f}:letters` its dead letter, and `{f}:claimed:<request>` its idempotency claim.
Notifications (rings) are in the journals that `{f}:journals` names, which hold a minute.

Sessions older than the indexes are found by a scan of every key of every server. A request's id, its stages' job ids
and every key made from them hold one ulid, so the scan looks for the ulids: in a key, in the job field of a dead
letter, of a journal's ring or of a lane's entry, or in the value of an idempotency claim.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any

from msgspec import Struct, field

from common.bus import Bus, keys
from common.ids import Family, family_of, time_of, unique_of
from common.registry.sessions import Sessions
from common.registry.trace_index import TraceIndex

CLAIMS, DEAD, JOURNAL, LANE = keys.CLAIMS, ":dead", ":journal:", ":lane:"
STREAMS = (DEAD, JOURNAL, LANE)
RINGS_MS = 60_000  # no router needs a journal's older rings
_SKEW_MS = 1_000  # possible difference of an id's clock and Redis' clock
_AT_ONCE = 32
_KEYS_AT_ONCE = 400
_ROWS = 500
_SCANNED_KEYS = 1000
_SCANNED_ROWS = {DEAD: 20, JOURNAL: 500, LANE: 20}  # payloads may be large
_ULID = re.compile(r"(?<![0-9a-z])[0-9a-hjkmnp-tv-z]{26}(?![0-9a-z])")


class Leftovers(Struct):
    """Keys, stream entries (by stream, with their jobs) and claims; `scanned` counts keys, `read` entries by kind."""

    servers: int = 0
    scanned: int = 0
    keys: set[str] = field(default_factory=set)
    entries: dict[str, dict[bytes, str]] = field(default_factory=dict)
    claims: set[str] = field(default_factory=set)
    read: dict[str, int] = field(default_factory=lambda: dict.fromkeys((CLAIMS, *STREAMS), 0))
    walked: bool = False  # every key of every server was scanned, besides the indexes

    @property
    def count(self) -> int:
        """The number of keys, entries and claims found."""
        return len(self.keys) + len(self.claims) + sum(map(len, self.entries.values()))

    def add(self, other: Leftovers) -> None:
        """Add the leftovers that another look found."""
        self.keys |= other.keys
        self.claims |= other.claims
        for name, entries in other.entries.items():
            self.entries.setdefault(name, {}).update(entries)
        self.scanned += other.scanned
        self.walked |= other.walked
        for kind, count in other.read.items():
            self.read[kind] += count


def ulids_in(name: str) -> list[str]:
    """Return the ulids that a key or an id contains."""
    return _ULID.findall(name)


def ulids_of(names: Iterable[str]) -> set[str]:
    """Return the ulids of sessions, requests and jobs; the jobs of one request share its ulid."""
    return {unique_of(name).split(".")[0] for name in names}


class LeftoverSearch:
    """Looks for the leftovers of some sessions: by the indexes, and by a scan if the indexes are not complete."""

    def __init__(self, bus: Bus, sessions: Sequence[str]) -> None:
        self._bus, self._sessions = bus, sessions
        self._indexed, self._index = IndexSearch(bus), TraceIndex(bus)
        self.jobs: dict[str, set[str]] = {}  # by session: every job and request run for it

    async def trace(self) -> None:
        """Mark the sessions deleted, and read the names of the jobs and requests run for them."""
        for name in self._sessions:
            await Sessions(self._bus).mark_deleted(name)
            jobs = await Sessions(self._bus).jobs(name)
            self.jobs[name] = {*jobs, *filter(None, jobs.values())}

    async def look(self) -> Leftovers:
        """Return the leftovers that exist now."""
        every = set().union(*self.jobs.values())
        found = await self._indexed.find(self._sessions, every)
        if not await self._index.complete(self._sessions):
            spare = {
                part for name in self._sessions for part in (keys.session(name), keys.jobs(name))
            }
            found.add(await scan(self._bus, ulids_of([*self._sessions, *every]), spare))
        return found

    async def remove(self, found: Leftovers) -> None:
        """Remove the found leftovers; keys that name others last."""
        for name in found.claims:
            await self._bus.connection.call("DEL", name)
        for name, entries in found.entries.items():
            if LANE in name:  # the bus' scripts remove these, and lower the lane's use
                continue
            await self._bus.connection.call("XDEL", name, *entries)
            if name.endswith(DEAD):
                letters = name.removesuffix(DEAD) + ":letters"
                await self._bus.connection.call("HDEL", letters, *entries.values())
        by_tag: dict[str, list[str]] = {}
        for name in found.keys:
            by_tag.setdefault(name.partition("}")[0], []).append(name)
        for names in by_tag.values():
            for first in range(0, len(names), _KEYS_AT_ONCE):
                await self._bus.connection.call("UNLINK", *names[first : first + _KEYS_AT_ONCE])


class IndexSearch:
    """Looks by the indexes for the leftovers of sessions; each look also reads the journals of earlier looks."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._journals: defaultdict[Family, set[str]] = defaultdict(set)

    async def find(self, sessions: Collection[str], jobs: Collection[str]) -> Leftovers:
        """Return the leftovers of sessions, without their records and lists of jobs, and of their jobs and requests."""
        found = Leftovers(servers=len(self._bus.connection.callers()))
        every = sorted({*sessions, *jobs})
        await _each(every, lambda name: self._job(name, found))
        await _each(sorted(sessions), lambda name: self._session(name, found))
        by_family: defaultdict[Family, list[str]] = defaultdict(list)
        for name in sorted(jobs):
            by_family[family_of(name)].append(name)
        for family, names in by_family.items():
            await self._letters(family, names, found)
            await self._rings(family, names, found)
        return found

    async def _keep(self, names: Iterable[str], found: Leftovers) -> None:
        for name in names:
            found.scanned += 1
            if await self._bus.connection.call("EXISTS", name):
                found.keys.add(name)

    async def _session(self, name: str, found: Leftovers) -> None:
        await self._keep((keys.turns(name), keys.held(name)), found)

    async def _job(self, name: str, found: Leftovers) -> None:
        names = (keys.job(name), keys.log(name), keys.control(name), keys.seen(name))
        await self._keep(names, found)
        await self._claim(name, found)
        lane, entry, router = await self._bus.connection.call(
            "HMGET", keys.job(name), "lane", "entry", "router"
        )
        if router:
            self._journals[family_of(name)].add(router.decode())
        if lane is None or entry is None:
            return
        stream = keys.lane(family_of(name), lane.decode())
        found.read[LANE] += 1
        if await self._bus.connection.call("XRANGE", stream, entry, entry):
            found.entries.setdefault(stream, {})[entry] = name

    async def _claim(self, name: str, found: Leftovers) -> None:
        found.scanned += 1
        claim = await self._bus.connection.call("GET", keys.claimed(name))
        if claim is None:
            return
        found.keys.add(keys.claimed(name))
        found.read[CLAIMS] += 1
        value = await self._bus.connection.call("GET", claim)
        if value is not None and value.endswith(name.encode()):
            found.claims.add(claim.decode())

    async def _letters(self, family: Family, names: list[str], found: Leftovers) -> None:
        stream = keys.dead(family)
        for first in range(0, len(names), _ROWS):
            some = names[first : first + _ROWS]
            entries = await self._bus.connection.call("HMGET", keys.letters(family), *some)
            for name, letters in zip(some, entries, strict=True):
                for entry in (letters or b"").split():
                    found.read[DEAD] += 1
                    found.entries.setdefault(stream, {})[entry] = name

    async def _rings(self, family: Family, names: list[str], found: Leftovers) -> None:
        """Look through the journals' last minute, from the first of these jobs on; remove older entries."""
        told = await self._bus.connection.call("ZRANGE", keys.journals(family), 0, -1)
        self._journals[family] |= {router.decode() for router in told}
        oldest = self._bus.clock.now_ms() - RINGS_MS
        begin = min(time_of(unique_of(name)) for name in names) - _SKEW_MS
        wanted = set(names)
        for router in sorted(self._journals[family]):
            stream = keys.journal(family, router)
            await self._bus.connection.call("XTRIM", stream, "MINID", "=", max(oldest, 0))
            start = str(max(begin, oldest, 0))
            while rows := await self._bus.connection.call(
                "XRANGE", stream, start, "+", "COUNT", _ROWS
            ):
                found.read[JOURNAL] += len(rows)
                for entry, flat in rows:
                    job = (
                        dict(zip(flat[::2], flat[1::2], strict=True))
                        .get(b"j", b"")
                        .decode(errors="replace")
                    )
                    if job in wanted:
                        found.entries.setdefault(stream, {})[entry] = job
                start = "(" + rows[-1][0].decode()


async def _each(names: list[str], look: Callable[[str], Awaitable[Any]]) -> None:
    for first in range(0, len(names), _AT_ONCE):
        await asyncio.gather(*(look(name) for name in names[first : first + _AT_ONCE]))


async def scan(bus: Bus, ulids: Collection[str], spare: Collection[str] = ()) -> Leftovers:
    """Scan every key of every server for leftovers of `ulids`; `spare` names keys to leave out. Raises BusDown."""
    found = Leftovers(walked=True)
    for caller in bus.connection.callers():
        found.servers += 1
        async for names in _names(caller):
            found.scanned += len(names)
            await _look(bus, names, ulids, spare, found)
    return found


async def _names(caller: Any) -> AsyncIterator[list[str]]:
    cursor: Any = b"0"
    while True:
        cursor, raw = await caller("SCAN", cursor, "COUNT", _SCANNED_KEYS)
        yield [name.decode(errors="replace") for name in raw]
        if cursor in {b"0", 0}:
            return


async def _look(
    bus: Bus, names: list[str], ulids: Collection[str], spare: Collection[str], found: Leftovers
) -> None:
    streams, claims = [], []
    for name in names:
        if name in spare or name in found.keys:
            continue
        if any(ulid in ulids for ulid in ulids_in(name)):
            found.keys.add(name)
        elif name.startswith(CLAIMS):
            claims.append(name)
        elif name.startswith("{") and any(part in name for part in STREAMS):
            streams.append(name)
    for name in streams:
        await _stream(bus, name, ulids, found)
    for at in range(0, len(claims), _AT_ONCE):
        some = claims[at : at + _AT_ONCE]
        values = await asyncio.gather(*(bus.connection.call("GET", name) for name in some))
        found.read[CLAIMS] += len(some)
        for name, value in zip(some, values, strict=True):
            request = (value or b"")[16:].decode(errors="replace")
            if any(ulid in ulids for ulid in ulids_in(request)):
                found.claims.add(name)


async def _stream(bus: Bus, name: str, ulids: Collection[str], found: Leftovers) -> None:
    kind = next(part for part in STREAMS if part in name)
    if await bus.connection.call("TYPE", name) != b"stream":
        return
    after, most = "-", _SCANNED_ROWS[kind]
    while True:
        rows = await bus.connection.call("XRANGE", name, after, "+", "COUNT", most)
        found.read[kind] += len(rows)
        for entry, flat in rows:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            job = (fields.get(b"j") or fields.get(b"job") or b"").decode(errors="replace")
            if any(ulid in ulids for ulid in ulids_in(job)):
                found.entries.setdefault(name, {})[entry] = job
        if len(rows) < most:
            return
        after = "(" + rows[-1][0].decode()
