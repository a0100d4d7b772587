"""The door and the record of a job: admission, cancellation, and reading what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from common import tracing
from common.bus import keys, metrics
from common.bus.connection import BusFull
from common.bus.unreadable import event_of
from common.bus.workers import Workers, hash_of
from common.ids import Family, family_of
from common.wire.messages import Event

FULL_SHARE = 0.85
ENDED = ("result", "error", "expired", "cancelled", "dead")


class NewJob(NamedTuple):
    """A job to admit: its id (which contains its family), encoded Work, and size.

    `view`, if any, is kept in the job's record for whoever shows its result.
    """

    id: str
    payload: bytes
    items: int
    tokens: int
    view: bytes = b""


class Admission(NamedTuple):
    """What the door said; on refusal `reason` and, where coming back helps, `retry_after_s`.

    `held` and `depth` are (items, tokens) of the lane just after the admission, for the invariant use <= depth.
    """

    outcome: Literal["admitted", "exists", "refused"]
    lane: str
    reason: Literal[
        "",
        "depth",
        "tokens",
        "deadline",
        "no_worker",
        "bus_full",
        "session_not_found",
        "session_busy",
        "session_changed",
    ]
    retry_after_s: float
    held: tuple[int, int] = (0, 0)
    depth: tuple[int, int] = (0, 0)


class Terms(NamedTuple):
    """How a router chooses lanes: WindVE's policies are made of these.

    `rule` "finish" admits what is predicted to end in time (WindVE section 5 of the spec: token-aware, open loop),
    "count" what the workers' depth in queries allows (Algorithm 1), "all" whatever comes: probes. `order` "first"
    takes the classes as given, "turns" begins each admission with the next one. `hop_s` is the time from the end of a
    job to its client.
    """

    rule: Literal["finish", "count", "all"] = "finish"
    order: Literal["first", "turns"] = "first"
    hop_s: float = 0.0


class _Asked(NamedTuple):
    """What `Door.admit` was called with."""

    jobs: Sequence[NewJob]
    classes: Sequence[str]
    router: str
    tenant: str
    deadline_ms: int
    prefer: str
    value_s: float
    share: float
    replay_of: str
    session: str
    version: int
    origin: str
    terms: Terms
    own: bool
    spread: bool
    waits: bool


class Trace(NamedTuple):
    """What became of one lease of a job: `what` is "leased", "lost" (its worker died) or "returned"."""

    what: str
    worker: str
    at_ms: int


class JobState(NamedTuple):
    """The record of one job; `state` is "queued", "running" or an outcome; times are Redis' milliseconds.

    `first_ms` is when its first event was logged, `ended_ms` when it ended; 0 before. `trail` is the history of its
    leases, oldest first; a lease is known from its worker's first word on.
    """

    job: str
    tenant: str
    state: str
    lane: str
    entry: str
    created_ms: int
    deadline_ms: int
    attempts: int
    router: str
    items: int
    tokens: int
    next: int
    replay_of: str
    suspicions: int
    cancelled: bool
    first_ms: int = 0
    ended_ms: int = 0
    trail: tuple[Trace, ...] = ()
    traceparent: str = ""

    @property
    def over(self) -> bool:
        """True once the job has ended."""
        return self.state in ENDED


class Door(Workers):
    """Admission and lookup, for routers."""

    async def admit(
        self,
        jobs: Sequence[NewJob],
        *,
        classes: Sequence[str],
        router: str,
        tenant: str,
        deadline_ms: int,
        prefer: str | None = None,
        value_s: float = 3600.0,
        share: float = 1.0,
        replay_of: str = "",
        session: str = "",
        version: int = 0,
        origin: str = "",
        terms: Terms | None = None,
        own: bool = False,
        spread: bool = False,
        waits: bool = False,
    ) -> Admission:
        """Admit all `jobs` (of one family) to the first class that can hold and finish them in time, or none.

        Idempotent by job id. `own` says that the deadline is the request's own: it decides then, and not the objective
        (SLO) of the lane's workers. With `spread` each job goes into the first lane that has room for it, but still all
        of them or none. `prefer` names a worker whose own lane is taken if its predicted finish is at most the
        shared lane's + `value_s`. `share` < 1 keeps the rest of a lane's depth for others: bulk work leaves room for
        what someone waits for. With `waits` a refusal asks for the word that there is room, which the router's journal
        passes on to `on_room`. Raises BusDown; a full bus is a refusal with reason "bus_full".

        A `session` of the jobs' family makes the one job its next turn, which holds the turn lock until it is over:
        refused as "session_busy" while another does, as "session_changed" unless the session stands at `version`, as
        "session_not_found" if it is another tenant's, deleted or expired. `origin` is the request the job is a stage
        of, if that is not the job itself: it is deleted with the session.
        """
        asked = _Asked(
            jobs, classes, router, tenant, deadline_ms, prefer or "", value_s, share, replay_of, session,
            version, origin, terms or Terms(), own, spread, waits,
        )  # fmt: skip
        family = family_of(jobs[0].id)
        known = self.knows_roster(family)
        with tracing.span(f"admit {family.name.split('.')[0]}", "producer") as span:
            admission = await self._admit(family, asked)
            if admission.reason == "no_worker":
                self.forget_roster(family)
                if known:  # a worker may have started since the roster was read
                    admission = await self._admit(family, asked)
            if admission.outcome != "admitted":
                span.drop()  # it is tried again, or the request tells why not
            elif span.recorded:
                lane = metrics.lane_label(family, admission.lane)
                told = {"messaging.destination.name": lane, "messaging.message.id": jobs[0].id}
                span.set({"messaging.system": "redis", **told})
        return admission

    async def _admit(self, family: Family, asked: _Asked) -> Admission:
        hearts, terms = await self.hearts(family), asked.terms
        names: list[str] = [keys.use(family), keys.workers(family), keys.plan(family)]
        args: list[object] = [asked.router, asked.tenant, asked.deadline_ms, asked.replay_of]
        args += [FULL_SHARE, asked.share, tracing.current().traceparent, terms.rule, terms.order]
        args += [int(asked.spread), int(asked.own), terms.hop_s, int(asked.waits)]
        args.append(len(asked.classes))
        for cls in asked.classes:
            names.append(keys.lane(family, cls))
            args.append(cls)
        args += [asked.prefer, asked.value_s]
        if asked.prefer:
            names.append(keys.lane(family, keys.own(asked.prefer)))
        args.append(len(hearts))
        for worker, heart in hearts.items():
            names.append(heart)
            args.append(worker)
        args.append(len(asked.jobs))
        for job in asked.jobs:
            names.append(keys.job(job.id))
            args += [job.id, job.payload, job.items, job.tokens, job.view]
        try:
            reply = await self._at_turn(names, args, asked)
        except BusFull:
            return Admission("refused", "", "bus_full", 5.0)
        return Admission(
            reply[0].decode(),
            reply[1].decode(),
            reply[2].decode(),
            float(reply[3]),
            (int(reply[4]), int(reply[5])),
            (int(reply[6]), int(reply[7])),
        )

    async def _at_turn(self, names: list[str], args: list[object], asked: _Asked) -> Any:
        session = asked.session
        if not session:
            return await self.script("admit", names, [*args, ""])
        for _ in range(10):  # the lock may go to another job between the two reads
            busy = (await self.call("HGET", keys.session(session), "busy") or b"").decode()
            more = [keys.session(session), keys.turns(session), keys.jobs(session)]
            more += [keys.job(busy)] if busy else []
            turn = [session, asked.version, busy, asked.origin]
            reply = await self.script("admit", [*names, *more], [*args, *turn])
            if reply[2] != b"session_moved":
                return reply
        return [b"refused", b"", b"session_busy", b"1", 0, 0, 0, 0]

    async def ask_for_room(self, family: Family) -> None:
        """Ask for the word that a worker has started or a job has ended, as a refused admission with `waits` does."""
        await self.call("HSET", keys.use(family), "waits", 1)

    async def cancel(self, job: str) -> Literal["removed", "flagged", "over", "unknown"]:
        """Cancel a job: removed if nobody has taken it, else its worker learns at its next step."""
        family = family_of(job)
        for _ in range(10):  # a job may be moved to another lane between the two reads
            state = await self.job(job)
            if state is None:
                return "unknown"
            names = [
                keys.use(family),
                keys.job(job),
                keys.log(job),
                keys.lane(family, state.lane),
                keys.journal(family, state.router),
                keys.room(family),
            ]
            verdict: Literal["removed", "flagged", "over", "unknown", "moved"]
            verdict = (await self.script("cancel", names, [job, state.lane])).decode()
            if verdict == "removed":
                metrics.ended(family, state.lane, "cancelled")
            if verdict != "moved":
                return verdict
        return "flagged"

    async def job(self, job: str) -> JobState | None:
        """Return the record of a job, or None if there is none (any more)."""
        flat = await self.call("HGETALL", keys.job(job))
        f = {k.decode(): v.decode() for k, v in hash_of(flat).items() if k != b"view"}
        if "state" not in f or "lane" not in f:
            return None
        return JobState(
            job,
            f["tenant"],
            f["state"],
            f["lane"],
            f["entry"],
            int(f["created"]),
            int(f["deadline"]),
            int(f.get("attempts", 0)) + (f["state"] != "queued"),
            f["router"],
            int(f["items"]),
            int(f["tokens"]),
            int(f["next"]),
            f.get("replay_of", ""),
            int(f.get("suspicions", 0)),
            "cancelled" in f,
            int(f.get("first", 0)),
            int(f.get("ended", 0)),
            _trail(f.get("trail", "")),
            f.get("traceparent", ""),
        )

    async def view(self, job: str) -> bytes | None:
        """Return what a job was admitted with for whoever shows its result, or None."""
        found: bytes | None = await self.call("HGET", keys.job(job), "view")
        return found

    async def log(self, job: str, start: int = 0) -> list[Event]:
        """Return the events of a job from index `start` on."""
        events = map(event_of, await self.call("LRANGE", keys.log(job), 0, -1))
        return [event for event in events if event is not None and event.index >= start]

    async def adopt(self, job: str, router: str) -> None:
        """Make `router` the one whose journal rings for this job from now on; a job that is gone stays gone."""
        await self.script("adopt", [keys.job(job)], [router])

    async def shorten(self, job: str, seconds: float) -> None:
        """Let the log of a delivered result go in `seconds`."""
        for key in (keys.log(job), keys.job(job)):
            await self.call("PEXPIRE", key, int(seconds * 1000))


def _trail(text: str) -> tuple[Trace, ...]:
    rows = (line.split(" ") for line in text.splitlines())
    return tuple(Trace(what, worker, int(at)) for what, worker, at in rows)
