"""The outbox of a worker: writes events and ends of leased jobs to the bus, each fenced by its lease's epoch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from common.bus import Bus, keys, metrics
from common.bus.connection import BusDown, BusFull
from common.cost.slowdown import Slowness
from common.errors import Cancelled, DeadlineExceeded, SpillwayError
from common.ids import Family
from common.wire.message import encode
from common.wire.results import Event, Result, error_event
from common.wire.sessions import SessionTurn, Turn
from common.worker.incarnation import Incarnation
from common.worker.leases import HeldLeases, Lease

MAX_ERRORS = 3
_MOST_ENDS = 16  # in one script, during which Redis runs nothing else
SessionPart = tuple[Turn, SessionTurn]


class RunningBatch(NamedTuple):
    """The batch that a worker runs: its predicted end, its number in the lane's plan, and its size.

    `slowness` is the device's slowness in earlier batches.
    """

    until_ms: int
    batch: int
    items: int
    tokens: int
    slowness: Slowness = Slowness()

    def line(self) -> str:
        """Return the batch as the heartbeat's value."""
        log, weight = (round(1000 * part) for part in self.slowness)
        return f"{max(0, self.until_ms)} {self.batch} {self.items} {self.tokens} {log} {weight}"


class JobEnd(NamedTuple):
    """The end of a leased job; for a session's job with the keys and arguments that append its turn."""

    lease: Lease
    event: Event
    session: Sequence[str] = ()
    tail: Sequence[object] = ("",)


class Outbox:
    """Writes the events and the ends of one worker's leased jobs."""

    def __init__(
        self, bus: Bus, family: Family, incarnation: Incarnation, leases: HeldLeases
    ) -> None:
        self._bus, self._family = bus, family
        self._incarnation, self._leases = incarnation, leases

    async def emit(
        self,
        leases: Iterable[Lease],
        events: Mapping[str, Event] | None = None,
        *,
        fold: bool = False,
        partial: Callable[[Lease], SessionPart | None] | None = None,
        doing: RunningBatch | None = None,
    ) -> set[str]:
        """Emit one step's events (or none) for `leases`; return the jobs to stop: cancelled or fenced off.

        Cancelled jobs are ended here; fenced-off jobs are forgotten; a job whose event's index is not the length of its
        log is failed. `fold` replaces a log by its event, which must then contain the whole log. `partial` returns the
        turn that a cancelled job's session keeps, if its client asked for that. `doing` reports the batch that runs now
        to admission.
        """
        batch = list(leases)
        if not batch:
            return set()
        names = [keys.use(self._family), keys.heart(self._family, self._incarnation.name)]
        args: list[object] = [self._incarnation.name, doing.line() if doing else "", len(batch)]
        for lease in batch:
            event = (events or {}).get(lease.job)
            names += self._keys(lease)
            args += [lease.job, lease.entry, lease.epoch, lease.router]
            args += [event.index, event.kind, encode(event)] if event else [-1, "", b""]
            args.append("1" if fold else "0")
        reply = await self._bus.connection.script("emit", names, args)
        stop: dict[str, bytes] = {}
        for lease, verdict, router in zip(batch, reply[::2], reply[1::2], strict=True):
            if verdict != b"ok":
                stop[lease.job] = verdict
            elif router.decode() != lease.router:
                self._leases.reroute(lease, router.decode())
        for lease in batch:
            if (verdict := stop.get(lease.job)) is not None:
                await self._stop(lease, verdict, partial)
        return set(stop)

    async def _stop(
        self,
        lease: Lease,
        verdict: bytes,
        partial: Callable[[Lease], SessionPart | None] | None,
    ) -> None:
        if verdict == b"cancelled":
            kept = partial(lease) if partial is not None else None
            cancelled = error_event(0, "cancelled", Cancelled("the request was cancelled"))
            await self._end(lease, cancelled, part=kept)
        elif verdict == b"gap":
            await self.fail(lease, "log_gap", "an event's index was not its log's length")
        else:
            self._leases.spans.end(lease, verdict.decode())
            self._leases.forget(lease)

    async def finish(
        self,
        lease: Lease,
        result: Result,
        *,
        index: int = 0,
        part: SessionPart | None = None,
    ) -> str:
        """End a job with its result; "fenced", without writing, if another worker holds the lease by then.

        `index` is the expected length of the log; if the log has another length, the event gets the log's index. The
        turn of `part` is appended to its session in the same script; "deleted" or "changed" if the session does not
        expect the turn any more: the job then ends with the error `session_deleted` or `session_changed`.
        """
        event = Event(index=index, kind="result", data=encode(result))
        return await self._end(lease, event, part=part)

    async def finish_all(self, results: Iterable[tuple[Lease, Result]]) -> list[str]:
        """End jobs with their results as `finish` does, up to 16 in one script; return a verdict for each."""
        ends = [
            JobEnd(self._leases.current(lease), Event(index=0, kind="result", data=encode(result)))
            for lease, result in results
        ]
        parts = [ends[first : first + _MOST_ENDS] for first in range(0, len(ends), _MOST_ENDS)]
        verdicts = await asyncio.gather(*(self._end_all(part, 120.0) for part in parts))
        return list(itertools.chain.from_iterable(verdicts))

    async def refuse(
        self,
        lease: Lease,
        error: SpillwayError,
        *,
        index: int = 0,
        part: SessionPart | None = None,
    ) -> str:
        """End a job with an error that another try would repeat.

        `part` has the partial turn that the session keeps, if the client asked for that.
        """
        kind: Literal["expired", "error"] = (
            "expired" if error.code == "deadline_exceeded" else "error"
        )
        return await self._end(lease, error_event(index, kind, error), part=part)

    async def expire(self, lease: Lease) -> None:
        """End a job whose deadline passed before it ran; while Redis is away, only forget the lease."""
        error = DeadlineExceeded("the deadline passed before the job ran")
        try:
            await self._end(lease, error_event(0, "expired", error), timeout_s=2.0)
        except BusDown:
            self._leases.forget(lease)  # found as a lost delivery

    async def fail(self, lease: Lease, code: str, message: str, trace: str = "") -> str:
        """Charge a job with its own error: it gets another try, or after 3 errors becomes a dead letter."""
        names = [keys.use(self._family), keys.dead(self._family), keys.letters(self._family)]
        names += [*self._keys(lease), keys.room(self._family)]
        args = [lease.worker, lease.job, lease.entry, lease.epoch]
        args += [code, message[:2000], trace[-8000:], MAX_ERRORS, lease.cls]
        reply = await self._bus.connection.script("fail", names, args, timeout_s=120.0)
        verdict = str(reply.decode())
        self._leases.forget(lease)
        if verdict == "bad":  # the entry belonged to no job
            metrics.BAD_ENTRIES.labels(metrics.lane_label(self._family, lease.cls)).inc()
        self._count(lease, verdict, verdict, code)
        return verdict

    async def give_back(self, leases: Iterable[Lease]) -> None:
        """Hand over some leases without charging their jobs."""
        batch = list(leases)
        for worker, cls in {(lease.worker, lease.cls) for lease in batch}:
            jobs = [x.job for x in batch if (x.worker, x.cls) == (worker, cls)]
            await self.hand_over(cls, worker, jobs)
        for lease in batch:
            self._leases.spans.end(lease, "returned")
            self._leases.forget(lease)

    async def hand_over(self, cls: str, worker: str, jobs: Iterable[str] | None) -> None:
        """Hand over the leases that `worker` holds on a lane (`jobs` None: all), uncharged.

        Leases of a worker's own lane, which has no other reader, go to the shared lane.
        """
        shared = self._incarnation.record.classes[0] if cls == keys.own(worker) else None
        await self._bus.recovery.hand_over(self._family, cls, worker, jobs, shared=shared)

    def _keys(self, lease: Lease) -> list[str]:
        lane = keys.lane(self._family, lease.cls)
        journal = keys.journal(self._family, lease.router)
        return [keys.job(lease.job), keys.log(lease.job), lane, journal]

    async def _end(
        self,
        lease: Lease,
        event: Event,
        *,
        timeout_s: float = 120.0,
        part: SessionPart | None = None,
    ) -> str:
        session, tail = await self._session_args(part, timeout_s)
        end = JobEnd(self._leases.current(lease), event, session, tail)
        return (await self._end_all([end], timeout_s))[0]

    async def _end_all(self, ends: Sequence[JobEnd], timeout_s: float) -> list[str]:
        """End jobs in one script and return their verdicts; an end with a wrong log index is repeated."""
        names = [keys.use(self._family)]
        args: list[object] = [ends[0].lease.worker, len(ends)]
        for lease, event, session, tail in ends:
            names += [*self._keys(lease), *session]
            args += [lease.job, lease.entry, lease.epoch, lease.router]
            args += [event.index, event.kind, encode(event), *tail]
        names.append(keys.room(self._family))
        reply = await self._bus.connection.script("finish", names, args, timeout_s=timeout_s)
        found: list[str] = []
        for end, verdict, router in zip(ends, reply[::2], reply[1::2], strict=True):
            found.append(await self._ended(end, verdict.decode(), router.decode(), timeout_s))
        return found

    async def _ended(self, end: JobEnd, verdict: str, router: str, timeout_s: float) -> str:
        lease, event = end.lease, end.event
        if verdict.startswith("gap:"):
            event = msgspec.structs.replace(event, index=int(verdict[4:]))
            return (await self._end_all([end._replace(event=event)], timeout_s))[0]
        if verdict == "early":
            await self.give_back([lease])  # this process' clock is ahead: an uncharged retry
        self._leases.forget(lease)
        self._count(lease, verdict, event.kind, event.code)
        if verdict == "ok" and router != lease.router:
            await self._notify(lease, router, event)
        return verdict

    def _count(self, lease: Lease, verdict: str, kind: str, code: str) -> None:
        ended = {"ok": kind, "deleted": "error", "changed": "error"}.get(verdict, verdict)
        self._leases.spans.end(lease, code or ("ok" if ended in {"result", "done"} else ended))
        # These verdicts end no job: another try follows, an earlier call counted the end, or the entry had no job.
        again = {"early", "returned", "done", "bad"}
        if ended not in again:
            metrics.ended(self._family, lease.cls, ended)

    async def _session_args(
        self, part: SessionPart | None, timeout_s: float
    ) -> tuple[list[str], list[object]]:
        """Return the keys and arguments with which the script `finish` appends a turn to its session."""
        if part is None:
            return [], [""]
        turn, session = part
        name = session.session
        tenant = await self._bus.connection.call(
            "HGET", keys.session(name), "tenant", timeout_s=timeout_s
        )
        index = keys.sessions(self._family, (tenant or b"").decode())
        names = [keys.session(name), keys.turns(name), keys.jobs(name), index]
        return names, self._turn_args(turn, session)

    def _turn_args(self, turn: Turn, session: SessionTurn) -> list[object]:
        part = msgspec.structs.replace(turn, partial=True) if session.keep_partial else None
        tokens = turn.history + len(turn.prompt) + len(turn.output)
        # A turn without history is the session's only turn, so the session gets this worker's fingerprint.
        fingerprint = "" if turn.history else self._incarnation.record.fingerprint
        args: list[object] = [session.session, session.version, encode(turn)]
        return [*args, encode(part) if part else b"", tokens, fingerprint]

    async def _notify(self, lease: Lease, router: str, event: Event) -> None:
        journal = keys.journal(self._family, router)
        with contextlib.suppress(BusDown, BusFull):  # the router also reads the log every second
            await self._bus.connection.call(
                "XADD", journal, "*", "j", lease.job, "i", event.index, "e", ""
            )
            await self._bus.connection.call("PEXPIRE", journal, 60_000)
