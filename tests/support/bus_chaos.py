"""A seeded driver of the bus against a model: every step's effect on every job must be one the step may have.

Before and after each step the whole family is read from the server. A step says which job it acts for and how; the
checks say what may have changed: whose log grew, who was charged, what ended and why. Steps run with connections cut
and the server killed under them; the rules stay the same, for a command may then have run once, twice or never.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

from common.bus import Bus, BusDown, NewJob, Notifications, keys
from common.ids import Family
from common.wire.message import decode
from common.wire.results import Event
from common.worker.leases import Lease
from tests.support.bus import Hand, open_bus, reached
from tests.support.servers import Server
from tests.support.turns import Turns

OVER = {"result", "error", "expired", "cancelled", "dead"}


@dataclass
class Seen:
    """One job as the server has it."""

    state: str = "none"
    lane: str = ""
    entries: int = 0
    holder: str | None = None
    epoch: int = 0
    log: tuple[bytes, ...] = ()
    errors: int = 0
    suspicions: int = 0
    alone: str = ""
    alone_deaths: int = 0


@dataclass
class Act:
    """What a step does: who acts, on which jobs, and what it may end them with."""

    name: str
    worker: str = ""
    jobs: frozenset[str] = frozenset()
    emits: bool = False
    fails: bool = False
    settles: bool = False
    ends: frozenset[str] = frozenset()


@dataclass
class Ear:
    """A router's reader of one job, through the deaths of routers."""

    job: str
    seen: list[Event] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class Violation(AssertionError):
    """The bus broke a promise."""


class Chaos:
    """Drives one family of one server with `seed`; `run` raises Violation at the first broken promise."""

    def __init__(self, server: Server, data_dir: str, seed: int) -> None:
        self.server, self.data_dir = server, data_dir
        self.random = random.Random(seed)
        self.family = Family("embed.chaos")
        self.buses: list[Bus] = []
        self.journals: list[Notifications] = []
        self.workers: list[Hand] = []
        self.zombies: list[tuple[Hand, list[Lease]]] = []
        self.jobs: dict[str, NewJob] = {}
        self.live: set[str] = set()
        self.near: set[str] = set()
        self.cancelled: set[str] = set()
        self.poison: set[str] = set()
        self.deadly: set[str] = set()
        self.turns = Turns(self.family, seed)
        self.ears: dict[str, Ear] = {}
        self.counts: dict[str, int] = {}
        self.names = 0
        self.raw = server.client()

    # -- reading the server ----------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Seen]:
        """Read every job that is not over, with its entries, leases and log; checks use against the streams."""
        tag, use = "{" + str(self.family) + "}", self._fields(keys.use(self.family))
        seen = {job: Seen() for job in self.live}
        classes = {k.decode().rsplit(":", 1)[0] for k in use if b":" in k}
        for cls in sorted(classes):
            lane, items, tokens = keys.lane(self.family, cls), 0, 0
            owners = self._owners(lane)
            entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", self.raw.xrange(lane))
            for entry, fields in entries:
                items, tokens = items + int(fields[b"i"]), tokens + int(fields[b"n"])
                queued = seen.setdefault(fields[b"j"].decode(), Seen())
                queued.entries += 1
                queued.lane = cls
                queued.holder, queued.epoch = owners.pop(entry, (None, 0))
            if owners:
                raise Violation(f"leases of entries that are gone: {owners}")
            had = (
                int(use.get(f"{cls}:items".encode(), 0)),
                int(use.get(f"{cls}:tokens".encode(), 0)),
            )
            if had != (items, tokens):
                raise Violation(f"use of {cls} is {had}, its stream holds {(items, tokens)}")
        for job, it in seen.items():
            record = {k.decode(): v.decode() for k, v in self._fields(f"{tag}:job:{job}").items()}
            it.state = record.get("state", "none")
            it.log = tuple(cast("list[bytes]", self.raw.lrange(f"{tag}:log:{job}", 0, -1)))
            it.errors, it.suspicions = (
                int(record.get("errors", 0)),
                int(record.get("suspicions", 0)),
            )
            it.alone, it.alone_deaths = record.get("alone", ""), int(record.get("alone_deaths", 0))
            if (it.state in OVER or it.state == "none") != (it.entries == 0) or it.entries > 1:
                raise Violation(f"{job} is {it.state} with {it.entries} entries")
            if it.entries and record["lane"] != it.lane:
                raise Violation(f"{job} lies in {it.lane}, its record says {record['lane']}")
        return seen

    def _fields(self, key: str) -> dict[bytes, bytes]:
        return cast("dict[bytes, bytes]", self.raw.hgetall(key))

    def _owners(self, lane: str) -> dict[bytes, tuple[str, int]]:
        """Return who holds which entry of a lane, and how often it was leased."""
        if not self.raw.exists(lane) or not self.raw.xinfo_groups(lane):
            return {}
        rows = self.raw.xpending_range(lane, "workers", "-", "+", 10_000)
        return {
            row["message_id"]: (row["consumer"].decode(), row["times_delivered"])
            for row in cast("list[dict[str, Any]]", rows)
        }

    # -- checking --------------------------------------------------------------------------------------

    def check(self, act: Act, old: Seen, new: Seen, job: str) -> None:
        """Raise Violation unless `act` may turn `old` into `new`."""
        mine = job in act.jobs and old.holder == act.worker
        grown = len(new.log) - len(old.log)
        if new.log[: len(old.log)] != old.log or grown < 0:
            raise Violation(f"{act}: the log of {job} lost events")
        events = [decode(raw, Event) for raw in new.log]
        if [e.index for e in events] != list(range(len(events))):
            raise Violation(f"{act}: indices of {job} are {[e.index for e in events]}")
        over = new.state in OVER
        if [e.ends for e in events] != [False] * (len(events) - over) + [True] * over:
            raise Violation(f"{act}: {job} is {new.state}, its events {[e.kind for e in events]}")
        if grown - over > 0 and not (mine and act.emits):
            raise Violation(f"{act}: an event of {job} by a stranger: {old} {new}")
        charged = new.errors - old.errors
        if charged and not (charged == 1 and mine and act.fails):
            raise Violation(f"{act}: {job} charged with {charged} errors: {old} {new}")
        suspected = new.suspicions - old.suspicions
        if suspected > 0 and not (suspected == 1 and act.settles and self._is_dead(old.holder)):
            raise Violation(f"{act}: {job} charged with {suspected} suspicions: {old} {new}")
        if suspected < 0 and not (mine and act.emits):
            raise Violation(f"{act}: {job} was cleared by a stranger")
        if over:
            self._check_end(act, old, new, job, mine=mine)

    def _check_end(self, act: Act, old: Seen, new: Seen, job: str, *, mine: bool) -> None:
        kind = new.state
        allowed = {
            "result": mine and "result" in act.ends,
            "error": mine
            and ("error" in act.ends or ("result" in act.ends and self.turns.lost(job))),
            "expired": job in self.near,
            "cancelled": job in self.cancelled,
            "dead": (mine and act.fails and old.errors == 2)
            or (
                act.settles
                and self._is_dead(old.holder)
                and old.alone_deaths == 2
                and old.alone == old.holder
            ),
        }
        if not allowed[kind]:
            raise Violation(f"{act}: {job} ended as {kind}: {old} {new}")
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def _is_dead(self, name: str | None) -> bool:
        return (
            name is not None and name != "returned" and name not in {w.worker for w in self.workers}
        )

    async def step(self, act: Act, run: Callable[[], Awaitable[Any]], *, hurt: str = "") -> None:
        """Do one step, perhaps with the server hurt under it, and check what it changed."""
        before = self.snapshot()
        task = asyncio.ensure_future(run())
        if hurt:
            await asyncio.sleep(self.random.random() * 0.004)
            if hurt == "kill":
                await asyncio.to_thread(self.server.restart)
                self.raw.connection_pool.disconnect()
            else:
                self.raw.client_kill_filter(_type="normal", skipme=True)
        with contextlib.suppress(BusDown):
            await task
        for _ in range(200):  # commands whose waiter has left run to their end
            if not any(bus.connection.in_flight for bus in self.buses[2:]):
                break
            await asyncio.sleep(0.002)
        after = self.snapshot()
        for job in self.live:
            self.check(act, before.get(job, Seen()), after[job], job)
        if wrong := self.turns.wrong(self.raw):
            raise Violation(f"{act}: {wrong}")
        self.live -= {job for job, it in after.items() if it.state in OVER}
        for worker in self.workers:
            self.raw.pexpire(keys.heart(self.family, worker.worker), 3_600_000)
        for bus in self.buses:
            reached(bus)
        self.counts[act.name] = self.counts.get(act.name, 0) + 1

    async def open(self) -> None:
        """Open the buses of four processes: two routers', two for workers."""
        self.buses = [await open_bus(self.server.url, self.data_dir) for _ in range(4)]
        self.journals = [Notifications(self.buses[n].connection, f"r{n}") for n in range(2)]

    async def close(self) -> None:
        """Close everything."""
        for ear in self.ears.values():
            if ear.task is not None:
                ear.task.cancel()
                await asyncio.gather(ear.task, return_exceptions=True)
        for journal in self.journals:
            await journal.stop()
        for bus in self.buses:
            await bus.close()
        self.raw.close()
