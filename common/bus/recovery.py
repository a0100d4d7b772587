"""Recovery of leases: settle those of dead workers, take those that were handed over, move and reap entries.

Each call first reads the entries with plain commands, then one script decides atomically; so two workers that reclaim
at once never disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from common import log
from common.bus import keys, metrics
from common.bus.connection import BusDown, BusFull, Connection
from common.bus.jobs import Jobs
from common.bus.keys import GROUP, RETURNED
from common.bus.lanes import Lanes
from common.bus.workers import Workers
from common.ids import Family, family_of, job_id, ulid
from common.process_identity import is_gone
from common.redis.heartbeat import TTL_MS

BATCH = 100
ENDS = {"dead", "expired", "cancelled"}  # verdicts after which a job is over
_log = log.get("bus")


class Entry(NamedTuple):
    """An entry of a lane; scripts need the keys that its fields name.

    The job should end by `due_ms`, in the planned `batch` (0: in none), and was predicted to end by `finish_ms` (0:
    nothing was predicted). If the entry is leased, `holder` is the worker and `idle_ms` the time since its delivery.
    A `leased` job may have been leased under an earlier entry.
    """

    id: str
    job: str
    payload: bytes
    items: int
    tokens: int
    deadline_ms: int
    router: str
    suspicions: int
    traceparent: str = ""
    due_ms: int = 0
    batch: int = 0
    finish_ms: int = 0
    leased: bool = False
    holder: str = ""
    idle_ms: int = 0
    deliveries: int = 0


class Verdict(NamedTuple):
    """The decision of a script about one entry."""

    entry: Entry
    verdict: str


class BadEntry(ValueError):
    """The error for a lane's entry that is no job; the message gives the reason."""


_NUMBER = re.compile(rb"[0-9]{1,15}")
_SHOWN = 80


def entry_of(raw: Sequence[bytes | list[bytes]], family: Family) -> Entry:
    """Parse one raw stream entry of a family's lane; BadEntry gives the fault."""
    name, flat = raw
    assert isinstance(name, bytes)
    assert isinstance(flat, list)
    f = dict(zip(flat[::2], flat[1::2], strict=True))
    return Entry(
        name.decode(),
        _job_of(f, family),
        _field(f, "p"),
        _number(f, "i"),
        _number(f, "n"),
        _number(f, "d"),
        _text(f, "r"),
        _number(f, "s"),
        f.get(b"t", b"").decode(errors="replace"),
        _number(f, "u"),
        _number(f, "b"),
        _number(f, "f"),
        b"l" in f,
    )


def _field(fields: Mapping[bytes, bytes], name: str) -> bytes:
    found = fields.get(name.encode())
    if found is None:
        raise BadEntry(f"the entry has no field {name!r}")
    return found


def _number(fields: Mapping[bytes, bytes], name: str) -> int:
    found = _field(fields, name)
    if _NUMBER.fullmatch(found) is None:
        raise BadEntry(f"field {name!r} is {found[:_SHOWN]!r}; expected at most 15 digits")
    return int(found)


def _text(fields: Mapping[bytes, bytes], name: str) -> str:
    found = _field(fields, name)
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        raise BadEntry(f"field {name!r} is {found[:_SHOWN]!r}; expected UTF-8") from error


def _job_of(fields: Mapping[bytes, bytes], family: Family) -> str:
    job = _text(fields, "j")
    try:
        found = family_of(job)
    except ValueError as error:
        raise BadEntry(f"field 'j' is {job[:_SHOWN]!r}; expected the id of a job") from error
    if found != family:
        raise BadEntry(f"the job {job[:_SHOWN]!r} belongs to the family {found}, not to {family}")
    return job


def _name_of(raw: Sequence[bytes | list[bytes]], family: Family) -> str:
    """Return the job id for a bad entry's dead letter: the entry's own if it can be read, else a new one."""
    flat = raw[1]
    assert isinstance(flat, list)
    try:
        return _job_of(dict(zip(flat[::2], flat[1::2], strict=True)), family)
    except BadEntry:
        return job_id(family, ulid())


class Recovery:
    """Scripts `reclaim`, `move` and `reap` with the reads that prepare them."""

    def __init__(self, redis: Connection, workers: Workers, lanes: Lanes, jobs: Jobs) -> None:
        self._redis, self._workers, self._lanes, self._jobs = redis, workers, lanes, jobs

    async def sound(self, family: Family, cls: str, rows: Iterable[Any]) -> list[Entry]:
        """Parse raw entries of a lane and return those that are jobs; the others become dead letters."""
        entries: list[Entry] = []
        bad: list[tuple[Any, str]] = []
        for row in rows:
            if not row[1]:
                continue  # deleted since it was delivered
            try:
                entries.append(entry_of(row, family))
            except BadEntry as error:
                bad.append((row, str(error)))
        if bad:
            try:
                for first in range(0, len(bad), BATCH):
                    await self._convict(family, cls, bad[first : first + BATCH])
            except (BusDown, BusFull, ResponseError) as error:
                # The next reader of these entries tries again.
                _log.error("bad_entries_left", lane=keys.lane(family, cls), why=str(error))
        return entries

    async def _convict(self, family: Family, cls: str, bad: Sequence[tuple[Any, str]]) -> None:
        """Make dead letters of a lane's entries that are no jobs, given as (raw entry, fault)."""
        lane = keys.lane(family, cls)
        names, args = (
            [keys.use(family), keys.dead(family), keys.letters(family), lane],
            [cls, len(bad)],
        )
        for row, why in bad:
            job = _name_of(row, family)
            state = await self._jobs.get(job)
            router = state.router if state is not None else ""
            names += [keys.job(job), keys.log(job), keys.journal(family, router)]
            args += [job, row[0], why]
            _log.error("bad_entry", lane=lane, entry=row[0].decode(), job=job, why=why)
        names.append(keys.room(family))
        done = await self._redis.script("convict", names, args)
        _count_bad(family, cls, int(done))

    async def held_by(self, family: Family, cls: str, consumer: str, count: int) -> list[Entry]:
        """Return up to `count` leases of one consumer on one lane, oldest first."""
        lane = keys.lane(family, cls)
        rows = await self._lanes.of_group("XPENDING", lane, GROUP, "-", "+", count, consumer)
        entries = []
        for row in rows:
            found = await self._redis.call("XRANGE", lane, row[0], row[0])
            who, idle_ms, times = row[1].decode(), int(row[2]), int(row[3])
            entries += [
                entry._replace(holder=who, idle_ms=idle_ms, deliveries=times)
                for entry in await self.sound(family, cls, found)
            ]
        return entries

    async def _unread(self, family: Family, cls: str, count: int) -> list[Entry]:
        lane = keys.lane(family, cls)
        groups = await self._lanes.of_group("XINFO", "GROUPS", lane)
        last = b"0-0"
        for flat in groups:
            group = dict(zip(flat[::2], flat[1::2], strict=True))
            last = group[b"last-delivered-id"]
        found = await self._redis.call("XRANGE", lane, b"(" + last, "+", "COUNT", count)
        return await self.sound(family, cls, found)

    async def _reclaim(
        self,
        mode: str,
        family: Family,
        cls: str,
        source: str,
        caller: str,
        entries: Iterable[tuple[Entry, bool]],
        *,
        shared: str | None = None,
        idle: bool = False,
    ) -> list[Verdict]:
        batch = list(entries)
        shared = shared or cls
        heart = keys.heart(family, caller if mode == "take" else source)
        names = [keys.use(family), keys.dead(family), keys.letters(family), heart]
        names += [keys.lane(family, cls), keys.lane(family, shared)]
        args: list[object] = [mode, source, caller, cls, shared, int(idle), len(batch)]
        for entry, unread in batch:
            names += [keys.job(entry.job), keys.log(entry.job), keys.journal(family, entry.router)]
            args += [entry.job, entry.id, int(unread)]
        names.append(keys.room(family))
        reply = [item.decode() for item in await self._redis.script("reclaim", names, args)]
        if len(reply) == 1:
            return []
        for verdict in reply[1::2]:
            if verdict in ENDS:
                metrics.ended(family, cls, verdict)
        _count_bad(family, cls, reply[1::2].count("bad"))
        by_job = {entry.job: entry for entry, _ in batch}
        return [Verdict(by_job[j], v) for j, v in zip(reply[::2], reply[1::2], strict=True)]

    async def settle(self, family: Family, cls: str, caller: str) -> list[Verdict]:
        """Settle the leases of every dead consumer of a lane."""
        done: list[Verdict] = []
        for consumer in await self._lanes.pending(family, cls):
            if consumer in {RETURNED, caller} or not await self._is_dead(family, consumer):
                continue
            held = await self.held_by(family, cls, consumer, BATCH)
            done += await self._reclaim(
                "settle", family, cls, consumer, caller, [(e, False) for e in held]
            )
        return done

    async def _is_dead(self, family: Family, worker: str) -> bool:
        """Return whether a worker is dead: its process is gone from this machine, or its heartbeat has expired.

        An expired heartbeat counts only if Redis has been reached without a break for one TTL.
        """
        heart, record = (
            keys.heart(family, worker),
            (await self._workers.records(family)).get(worker),
        )
        if record is not None and is_gone(record.place):
            await self._redis.call("DEL", heart)
            return True
        return self._redis.policy.reached_for() * 1000 >= TTL_MS and not await self._redis.call(
            "EXISTS", heart
        )

    async def settle_own_lane(
        self, family: Family, worker: str, caller: str, shared: str
    ) -> list[Verdict]:
        """Move the leases and unread entries of a dead worker's own lane to the shared lane it served (or `shared`)."""
        if not await self._is_dead(family, worker):
            return []
        cls = keys.own(worker)
        record = (await self._workers.records(family)).get(worker)
        shared = record.classes[0] if record is not None else shared
        if not await self._redis.call("EXISTS", keys.lane(family, cls)):
            return []
        done: list[Verdict] = []
        for holder in (worker, RETURNED):
            held = await self.held_by(family, cls, holder, BATCH)
            mode = "settle" if holder == worker else "return"
            batch = [(e, False) for e in held]
            if batch:
                done += await self._reclaim(mode, family, cls, holder, caller, batch, shared=shared)
        unread = [(e, True) for e in await self._unread(family, cls, BATCH)]
        if unread:
            done += await self._reclaim(
                "settle", family, cls, worker, caller, unread, shared=shared
            )
        return done

    async def hand_over(
        self,
        family: Family,
        cls: str,
        worker: str,
        jobs: Iterable[str] | None,
        *,
        shared: str | None = None,
    ) -> list[Verdict]:
        """Hand over a worker's own leases (all, or those of `jobs`), uncharged."""
        wanted = None if jobs is None else set(jobs)
        held = await self.held_by(family, cls, worker, 10_000)
        batch = [(e, False) for e in held if wanted is None or e.job in wanted]
        if not batch:
            return []
        return await self._reclaim("return", family, cls, worker, worker, batch, shared=shared)

    async def take(
        self, family: Family, cls: str, caller: str, count: int, *, idle: bool
    ) -> list[Verdict]:
        """Lease up to `count` entries of the consumer `returned`.

        A job with two suspicions is leased only if the worker is `idle`, and then alone.
        """
        held = await self.held_by(family, cls, RETURNED, count)
        if not held:
            return []
        batch = [(e, False) for e in held]
        return await self._reclaim("take", family, cls, RETURNED, caller, batch, idle=idle)

    async def move(
        self,
        family: Family,
        source: str,
        target: str,
        caller: str,
        *,
        count: int = BATCH,
        sooner: bool = False,
    ) -> list[str]:
        """Move unread entries of `source` to `target` while the target's depth has room; return the jobs.

        With `sooner` only jobs that are predicted to end earlier in the target are moved.
        """
        unread = await self._unread(family, source, count)
        if not unread:
            return []
        hearts = await self._workers.heartbeats(family)
        names = [keys.use(family), keys.workers(family), keys.plan(family)]
        names.append(keys.heart(family, caller))
        names += [keys.lane(family, source), keys.lane(family, target), *hearts.values()]
        args: list[object] = [source, target, int(sooner), len(hearts), *hearts, len(unread)]
        for entry in unread:
            names.append(keys.job(entry.job))
            args += [entry.job, entry.id]
        names.append(keys.room(family))
        return [item.decode() for item in await self._redis.script("move", names, args)]

    async def reap(self, family: Family, classes: Iterable[str]) -> tuple[int, int, list[str]]:
        """Clean up a family; return entries expired, consumers deleted, and differences of use, each of them a bug."""
        self._workers.forget(family)
        workers = set(await self._workers.heartbeats(family))
        used = await self._lanes.use(family)
        workers |= {cls[2:] for cls in used if cls.startswith("w.")}
        lanes = sorted({*classes, *used, *map(keys.own, workers)})
        expired: list[object] = []
        names = [keys.use(family), keys.workers(family), keys.dead(family), keys.letters(family)]
        names += [keys.lane(family, c) for c in lanes]
        job_keys: list[str] = []
        now, n = self._redis.clock.now_ms(), 0
        for index, cls in enumerate(lanes):
            workers |= set(await self._lanes.pending(family, cls)) - {RETURNED}
            workers |= await self._consumers(family, cls)
            for entry in await self._stale(family, cls, now):
                expired += [index + 1, entry.job, entry.id]
                job_keys += [
                    keys.job(entry.job),
                    keys.log(entry.job),
                    keys.journal(family, entry.router),
                ]
                n += 1
        ordered = sorted(workers)
        names += [keys.heart(family, w) for w in ordered]
        names += [*job_keys, keys.room(family)]
        args: list[object] = [len(lanes), *lanes, len(ordered), *ordered, n, *expired]
        ended, deleted, wrong, bad = await self._redis.script("reap", names, args)
        for cls in bad:
            _count_bad(family, cls.decode(), 1)
        return int(ended), int(deleted), [item.decode() for item in wrong]

    async def _consumers(self, family: Family, cls: str) -> set[str]:
        lane = keys.lane(family, cls)
        reply = await self._lanes.of_group("XINFO", "CONSUMERS", lane, GROUP)
        named = (dict(zip(flat[::2], flat[1::2], strict=True))[b"name"].decode() for flat in reply)
        return {name for name in named if name != RETURNED}

    async def _stale(self, family: Family, cls: str, now_ms: int) -> list[Entry]:
        found = await self._redis.call(
            "XRANGE", keys.lane(family, cls), "-", "+", "COUNT", 10 * BATCH
        )
        return [e for e in await self.sound(family, cls, found) if e.deadline_ms < now_ms]


def _count_bad(family: Family, cls: str, times: int) -> None:
    if times:
        metrics.BAD_ENTRIES.labels(metrics.lane_label(family, cls)).inc(times)
