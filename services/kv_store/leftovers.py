"""What sessions left on the bus, found by the indexes that were written with it: work in proportion to the sessions.

A session's list of jobs names every job and request that was run for it. Of each of them the keys have fixed names; the
job's record names its lane's entry, `{f}:letters` its dead letter, `{f}:claimed:<request>` its idempotency claim. Rings
are in the journals that `{f}:journals` names, which hold a minute.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

from common.bus import Bus, keys
from common.ids import Family, family_of, time_of, unique_of
from services.kv_store.found import CLAIMS, DEAD, JOURNAL, LANE, ScanResult

RINGS_MS = 60_000  # a journal's older rings mean nothing to anybody
_SKEW_MS = 1_000  # between the clock that made an id and Redis'
_AT_ONCE = 32
_ROWS = 500


class Leftovers:
    """Looks again and again for what the same sessions left: what a look removed is still looked for by the next."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._journals: defaultdict[Family, set[str]] = defaultdict(set)

    async def find(self, sessions: Collection[str], jobs: Collection[str]) -> ScanResult:
        """Return what there is of sessions, but their records and lists of jobs, and of what was run for them."""
        found = ScanResult(servers=len(self._bus.connection.callers()))
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

    async def _keep(self, names: Iterable[str], found: ScanResult) -> None:
        for name in names:
            found.scanned += 1
            if await self._bus.connection.call("EXISTS", name):
                found.keys.add(name)

    async def _session(self, name: str, found: ScanResult) -> None:
        await self._keep((keys.turns(name), keys.held(name)), found)

    async def _job(self, name: str, found: ScanResult) -> None:
        await self._keep((keys.job(name), keys.log(name), keys.seen(name)), found)
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

    async def _claim(self, name: str, found: ScanResult) -> None:
        found.scanned += 1
        claim = await self._bus.connection.call("GET", keys.claimed(name))
        if claim is None:
            return
        found.keys.add(keys.claimed(name))
        found.read[CLAIMS] += 1
        value = await self._bus.connection.call("GET", claim)
        if value is not None and value.endswith(name.encode()):
            found.claims.add(claim.decode())

    async def _letters(self, family: Family, names: list[str], found: ScanResult) -> None:
        stream = keys.dead(family)
        for first in range(0, len(names), _ROWS):
            some = names[first : first + _ROWS]
            entries = await self._bus.connection.call("HMGET", keys.letters(family), *some)
            for name, letters in zip(some, entries, strict=True):
                for entry in (letters or b"").split():
                    found.read[DEAD] += 1
                    found.entries.setdefault(stream, {})[entry] = name

    async def _rings(self, family: Family, names: list[str], found: ScanResult) -> None:
        """Look through the last minute of the journals, from the first of these jobs on; what is older goes."""
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
