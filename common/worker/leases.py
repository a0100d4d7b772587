"""What a worker does with the leases it holds: emit, finish, refuse, fail, give back; each fenced by its epoch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec
from opentelemetry.trace import Span

from common import tracing
from common.bus import Bus, keys, metrics
from common.bus.connection import BusDown, BusFull
from common.errors import Cancelled, SpillwayError
from common.ids import Family
from common.wire.message import encode
from common.wire.registry import WorkerRecord
from common.wire.results import Event, Result, error_event
from common.wire.sessions import SessionTurn, Turn
from common.worker.spans import Spans

MAX_ERRORS = 3


class Lease(NamedTuple):
    """A worker's right to one job; `epoch` is the delivery count that fences off others' results.

    It should end by `due_ms`, in the planned `batch` (0: in none), and was predicted to by `finish_ms` (0: nothing
    was).
    """

    job: str
    payload: bytes
    items: int
    tokens: int
    deadline_ms: int
    router: str
    attempts: int
    alone: bool
    cls: str
    entry: str
    epoch: int
    worker: str
    traceparent: str = ""
    due_ms: int = 0
    batch: int = 0
    finish_ms: int = 0

    @property
    def fence(self) -> tuple[str, str, int]:
        """What tells this lease from every other one of the same job."""
        return self.worker, self.entry, self.epoch


SessionPart = tuple[Turn, SessionTurn]


def _part(turn: Turn | None, session: SessionTurn | None) -> SessionPart | None:
    return (turn, session) if turn is not None and session is not None else None


class RunningBatch(NamedTuple):
    """The batch a worker runs: until when it should be over, its number in the lane's plan, and its size."""

    until_ms: int
    batch: int
    items: int
    tokens: int

    def line(self) -> str:
        """Return it as the heartbeat's value."""
        return f"{max(0, self.until_ms)} {self.batch} {self.items} {self.tokens}"


class HeldLeases:
    """The leases of one worker in one family."""

    def __init__(self, bus: Bus, family: Family, record: WorkerRecord) -> None:
        self.bus, self.family, self.record = bus, family, record
        self._held: dict[str, Lease] = {}
        self._changed = asyncio.Event()  # a reader without room may have some now
        self.spans = Spans(family)

    @property
    def worker(self) -> str:
        """The present incarnation's name."""
        return self.record.worker

    @property
    def held(self) -> Mapping[str, Lease]:
        """Job id -> lease, of everything read and not ended."""
        return self._held

    def span(self, job: str) -> Span:
        """Return the span of a held job's processing; where traces are off, the trace it belongs to."""
        lease = self._held.get(job)
        return tracing.NONE if lease is None else self.spans.of(lease)

    def wake(self) -> None:
        """Let a reader without room look again; the end of a lease does so by itself."""
        self._changed.set()

    def _hold(self, lease: Lease) -> None:
        self._held[lease.job] = lease
        self.spans.begin(lease)

    def _drop_all(self, why: str) -> None:
        for lease in self._held.values():
            self.spans.end(lease, why)
        self._held.clear()
        self.wake()

    async def step(
        self,
        leases: Iterable[Lease],
        events: Mapping[str, Event] | None = None,
        *,
        fold: bool = False,
        partial: Callable[[Lease], SessionPart | None] | None = None,
        doing: RunningBatch | None = None,
    ) -> set[str]:
        """Emit one step's events (or none) for `leases`; return the jobs to stop: cancelled or fenced off.

        Jobs returned as cancelled are ended here; those fenced off are forgotten; one whose log has another length
        than its event says is failed. `fold` replaces a log by the event, which then must hold everything so far.
        `partial` gives what a cancelled job's session is to keep of the turn, if its client asked for that. `doing`
        tells the door what runs from now on.
        """
        batch = list(leases)
        if not batch:
            return set()
        names = [keys.use(self.family), keys.heart(self.family, self.worker)]
        args: list[object] = [self.worker, doing.line() if doing else "", len(batch)]
        for lease in batch:
            event = (events or {}).get(lease.job)
            names += self._keys(lease)
            args += [lease.job, lease.entry, lease.epoch, lease.router]
            args += [event.index, event.kind, encode(event)] if event else [-1, "", b""]
            args.append("1" if fold else "0")
        reply = await self.bus.connection.script("emit", names, args)
        stop: dict[str, bytes] = {}
        for lease, verdict, router in zip(batch, reply[::2], reply[1::2], strict=True):
            if verdict != b"ok":
                stop[lease.job] = verdict
            elif router.decode() != lease.router and self._is_held(lease):
                self._held[lease.job] = lease._replace(router=router.decode())
        for lease in batch:
            verdict = stop.get(lease.job)
            if verdict == b"cancelled":
                kept = partial(lease) if partial is not None else None
                cancelled = error_event(0, "cancelled", Cancelled("the request was cancelled"))
                await self._end(lease, cancelled, part=kept)
            elif verdict == b"gap":
                await self.fail(lease, "log_gap", "an event's index was not its log's length")
            elif verdict is not None:
                self.spans.end(lease, verdict.decode())
                self._forget(lease)
        return set(stop)

    def _keys(self, lease: Lease) -> list[str]:
        lane = keys.lane(self.family, lease.cls)
        journal = keys.journal(self.family, lease.router)
        return [keys.job(lease.job), keys.log(lease.job), lane, journal]

    async def finish(
        self,
        lease: Lease,
        result: Result,
        *,
        index: int = 0,
        turn: Turn | None = None,
        session: SessionTurn | None = None,
    ) -> str:
        """End a job with its result; "fenced" if the lease was another's by then, and nothing was written.

        `index` is where the log should end; where it does not, the event takes the index the log says. `turn` is
        appended to the `session` in the same step; "deleted" or "changed" if that does not wait for it any more: the
        job then ended with the error `session_deleted` or `session_changed` instead of its result.
        """
        event = Event(index=index, kind="result", data=encode(result))
        return await self._end(lease, event, part=_part(turn, session))

    async def refuse(
        self,
        lease: Lease,
        error: SpillwayError,
        *,
        index: int = 0,
        turn: Turn | None = None,
        session: SessionTurn | None = None,
    ) -> str:
        """End a job with an error that another try would not change.

        `turn` is what its session keeps of it, if the client asked for that.
        """
        kind: Literal["expired", "error"] = (
            "expired" if error.code == "deadline_exceeded" else "error"
        )
        return await self._end(lease, error_event(index, kind, error), part=_part(turn, session))

    async def _end(
        self,
        lease: Lease,
        event: Event,
        *,
        timeout_s: float = 120.0,
        part: SessionPart | None = None,
    ) -> str:
        lease = self._held[lease.job] if self._is_held(lease) else lease
        names = [keys.use(self.family), *self._keys(lease)]
        head = [lease.worker, 1, lease.job, lease.entry, lease.epoch, lease.router]
        tail: list[object] = [""]
        if part is not None:
            name = part[1].session
            tenant = await self.bus.connection.call(
                "HGET", keys.session(name), "tenant", timeout_s=timeout_s
            )
            index = keys.sessions(self.family, (tenant or b"").decode())
            names += [keys.session(name), keys.turns(name), keys.jobs(name), index]
            tail = self._turn_args(*part)
        names.append(keys.room(self.family))
        while True:
            args = [*head, event.index, event.kind, encode(event), *tail]
            verdict, router = await self.bus.connection.script(
                "finish", names, args, timeout_s=timeout_s
            )
            if not verdict.startswith(b"gap:"):
                break
            event = msgspec.structs.replace(event, index=int(verdict[4:]))
        if verdict == b"early":
            await self.give_back([lease])  # this process' clock is ahead: another try, uncharged
        self._forget(lease)
        self._count(lease, verdict.decode(), event.kind, event.code)
        if verdict == b"ok" and router.decode() != lease.router:
            await self._ring(lease, router.decode(), event)
        return str(verdict.decode())

    def _count(self, lease: Lease, verdict: str, kind: str, code: str) -> None:
        ended = {"ok": kind, "deleted": "error", "changed": "error"}.get(verdict, verdict)
        self.spans.end(lease, code or ("ok" if ended in {"result", "done"} else ended))
        # Another try follows; it was counted at the first; it was none.
        again = {"early", "returned", "done", "bad"}
        if ended not in again:
            metrics.ended(self.family, lease.cls, ended)

    def _turn_args(self, turn: Turn, session: SessionTurn) -> list[object]:
        part = msgspec.structs.replace(turn, partial=True) if session.keep_partial else None
        tokens = turn.history + len(turn.prompt) + len(turn.output)
        fingerprint = "" if turn.history else self.record.fingerprint  # the history is all its own
        args: list[object] = [session.session, session.version, encode(turn)]
        return [*args, encode(part) if part else b"", tokens, fingerprint]

    async def _ring(self, lease: Lease, router: str, event: Event) -> None:
        journal = keys.journal(self.family, router)
        with contextlib.suppress(BusDown, BusFull):  # the log has it: the router looks every second
            await self.bus.connection.call(
                "XADD", journal, "*", "j", lease.job, "i", event.index, "e", ""
            )
            await self.bus.connection.call("PEXPIRE", journal, 60_000)

    async def fail(self, lease: Lease, code: str, message: str, trace: str = "") -> str:
        """Charge a job with its own error: another try, or after 3 errors a dead letter."""
        job_keys = self._keys(lease)
        names = [
            keys.use(self.family),
            keys.dead(self.family),
            keys.letters(self.family),
            *job_keys,
            keys.room(self.family),
        ]
        args = [lease.worker, lease.job, lease.entry, lease.epoch]
        args += [code, message[:2000], trace[-8000:], MAX_ERRORS, lease.cls]
        verdict = (await self.bus.connection.script("fail", names, args, timeout_s=120.0)).decode()
        self._forget(lease)
        if verdict == "bad":  # it was no job's entry
            metrics.BAD_ENTRIES.labels(metrics.lane_label(self.family, lease.cls)).inc()
        self._count(lease, verdict, verdict, code)
        return str(verdict)

    async def give_back(self, leases: Iterable[Lease]) -> None:
        """Hand over some leases, uncharged."""
        batch = list(leases)
        for worker, cls in {(lease.worker, lease.cls) for lease in batch}:
            jobs = [x.job for x in batch if (x.worker, x.cls) == (worker, cls)]
            await self._hand_over(cls, worker, jobs)
        for lease in batch:
            self.spans.end(lease, "returned")
            self._forget(lease)

    async def _hand_over(self, cls: str, worker: str, jobs: Iterable[str] | None) -> None:
        """Hand over leases `worker` holds; from an own lane, which has no other reader, to the shared one."""
        shared = self.record.classes[0] if cls == keys.own(worker) else None
        await self.bus.recovery.hand_over(self.family, cls, worker, jobs, shared=shared)

    def let_go(self, lease: Lease) -> None:
        """Forget a lease of which nothing could be told: as a lost delivery, its job is soon tried again."""
        if self._is_held(lease):
            self.spans.end(lease, "lost")
            self._forget(lease)

    def _is_held(self, lease: Lease) -> bool:
        """True if this very lease is held, and not a later one of the same job."""
        held = self._held.get(lease.job)
        return held is not None and held.fence == lease.fence

    def _forget(self, lease: Lease) -> None:
        if self._is_held(lease):
            del self._held[lease.job]
            self.wake()
