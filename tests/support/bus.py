"""Hands that drive the bus one script at a time: workers without loops, whose death is a deleted heartbeat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.bus import Admission, Bus, NewJob, keys
from common.clock import SystemClock
from common.config import Common
from common.errors import CODES
from common.ids import Family, job_id, ulid
from common.redis.heartbeat import Heartbeat
from common.wire.jobs import EmbedWork
from common.wire.message import encode
from common.wire.registry import WorkerRecord
from common.wire.results import EmbedResult, Event
from common.worker.leases import Lease
from common.worker.worker import Worker

EMBED = Family("embed.test")
WORK = encode(EmbedWork(fingerprint="f", tokens=[[1, 2, 3]]))
RESULT = EmbedResult(dimension=1, vectors=b"\0\0\0\0", tokens=3)


class NoHeart:
    """No thread renews these pulses: the test decides who lives."""

    def add(self, pulse: Heartbeat) -> None:
        """Nothing is renewed."""

    def remove(self, pulse: Heartbeat) -> None:
        """Nothing was."""


def record(worker: str, *classes: str, items: int = 100, tokens: int = 10_000, **more: Any) -> Any:
    """Return a worker's record."""
    return WorkerRecord(
        worker=worker,
        classes=list(classes or ("gpu",)),
        device="cpu",
        depth_items=items,
        depth_tokens=tokens,
        **more,
    )


class Hand:
    """A worker without loops: it beats, settles and takes when told to."""

    def __init__(self, bus: Bus, family: Family, name: str, *classes: str, **depth: Any) -> None:
        made = record(name, *classes, **depth)
        self.bus, self.family = bus, family
        self.parts = Worker(bus, family, made, heartbeats=NoHeart())  # type: ignore[arg-type]
        outbox = self.parts.outbox
        self.step, self.finish, self.refuse = outbox.emit, outbox.finish, outbox.refuse
        self.fail, self.give_back, self.hand_over = outbox.fail, outbox.give_back, outbox.hand_over
        self.let_go, self.reconcile = self.parts.leases.let_go, self.parts.recovery.reconcile
        self.drain, self.stop = self.parts.drain, self.parts.stop

    @property
    def worker(self) -> str:
        """The present incarnation's name."""
        return self.parts.name

    @property
    def generation(self) -> int:
        """How many names were given up."""
        return self.parts.generation

    @property
    def held(self) -> Mapping[str, Lease]:
        """Job id -> lease."""
        return self.parts.leases.held

    @property
    def record(self) -> WorkerRecord:
        """What the worker publishes."""
        return self.parts.record

    @record.setter
    def record(self, record: WorkerRecord) -> None:
        self.parts.incarnation.record = record

    async def join(self) -> Hand:
        """Register, with a heartbeat that outlasts the test: only `die` ends it, however slow the machine."""
        await self.parts.incarnation.register()
        await self._last()
        return self

    async def beat(self) -> list[str]:
        """Beat once; the verdict and the jobs to stop."""
        said = await self.parts.incarnation.beat("keep")
        await self._last()
        return said

    async def _last(self) -> None:
        await self.bus.connection.call("PEXPIRE", keys.heart(self.family, self.worker), 600_000)

    async def pull(self, count: int = 1, cls: str = "") -> list[Lease]:
        """Read up to `count` unread entries of one lane."""
        return await self.parts.reader._group_read([cls or self.record.classes[0]], count, None)

    async def take(self, count: int = 1, cls: str = "", *, idle: bool = False) -> list[Any]:
        """Take handed-over entries; leases, or the verdict where nothing was taken."""
        cls = cls or self.record.classes[0]
        out: list[Any] = []
        for entry, verdict in await self.bus.recovery.take(
            self.family, cls, self.worker, count, idle=idle
        ):
            if verdict.startswith("taken:"):
                _, epoch, alone = verdict.split(":")
                lease = self.parts.reader._lease(
                    entry, cls, int(epoch), self.worker, alone=alone == "1"
                )
                self.parts.leases._held[lease.job] = lease
                out.append(lease)
            else:
                out.append(verdict)
        return out

    async def die(self) -> None:
        """Lose the heartbeat, as after kill -9 and one TTL."""
        await self.bus.connection.call("DEL", keys.heart(self.family, self.worker))

    async def settle(self) -> list[str]:
        """Settle dead consumers of the shared lanes; the verdicts."""
        reached(self.bus)
        verdicts = []
        for cls in self.record.classes:
            verdicts += [
                v.verdict for v in await self.bus.recovery.settle(self.family, cls, self.worker)
            ]
        return verdicts

    async def revive(self) -> None:
        """One beat of the real loop: a lost heartbeat begins a new incarnation."""
        await self.parts.beat_once()


def reached(bus: Bus, seconds: float = 60.0) -> None:
    """Pretend that Redis has been reached for so long without a break."""
    bus.connection.policy.reachable_since = bus.clock.monotonic() - seconds


def new_job(family: Family = EMBED, items: int = 1, tokens: int = 10) -> NewJob:
    """Return a job with an id of its own."""
    return NewJob(job_id(family, ulid()), WORK, items, tokens)


async def admit(
    bus: Bus, *jobs: NewJob, classes: tuple[str, ...] = ("gpu",), left_s: float = 60.0, **more: Any
) -> Admission:
    """Admit jobs for router `r1` of tenant `t`, with `left_s` to their deadline."""
    deadline = bus.clock.now_ms() + int(left_s * 1000)
    options: dict[str, Any] = {"router": "r1", "tenant": "t", "deadline_ms": deadline} | more
    return await bus.admission.admit(jobs, classes=classes, **options)


async def must(bus: Bus, *jobs: NewJob, **more: Any) -> list[NewJob]:
    """Admit jobs that must be admitted."""
    admission = await admit(bus, *jobs, **more)
    assert admission.outcome == "admitted", admission
    return list(jobs)


async def state(bus: Bus, job: NewJob | str) -> str:
    """Return a job's state."""
    found = await bus.jobs.get(job if isinstance(job, str) else job.id)
    return found.state if found is not None else "none"


async def outcome(bus: Bus, job: NewJob | str) -> Event:
    """Return the one outcome of a job's log; its indices must be 0, 1, 2..."""
    events = await bus.jobs.log(job if isinstance(job, str) else job.id)
    assert [e.index for e in events] == list(range(len(events)))
    assert [e.ends for e in events] == [False] * (len(events) - 1) + [True]
    end = events[-1]
    if (
        end.kind != "result"
    ):  # whoever ended it, a worker or a script, said how clients are answered
        code = "job_failed" if end.kind == "dead" else end.code
        assert end.error is not None
        assert end.error.status == CODES[code].http_status
    return end


async def differences(bus: Bus, family: Family = EMBED) -> list[str]:
    """Recount use from the streams; what differed."""
    _, _, wrong = await bus.recovery.reap(family, ("gpu", "cpu"))
    return wrong


async def matching(bus: Bus, pattern: str) -> list[str]:
    """Return the names of all keys that match a pattern, on every server."""
    names: list[str] = []
    for call in bus.connection.callers():
        cursor: Any = 0
        while True:
            cursor, found = await call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            names += [name.decode() for name in found]
            if int(cursor) == 0:
                break
    return sorted(names)


async def open_bus(url: str, data_dir: str, *, cluster: bool = False) -> Bus:
    """Open a bus on one server or cluster."""
    config = Common(data_dir=data_dir, redis_url=url, redis_cluster=cluster)
    return await Bus.open(config, SystemClock())
