"""Admission of jobs to lanes: one atomic script decides for all jobs of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from common import tracing
from common.bus import keys, metrics
from common.bus.connection import BusFull, Connection
from common.bus.workers import Workers
from common.ids import Family, family_of

FULL_SHARE = 0.85


class NewJob(NamedTuple):
    """A job to admit: its id (which contains its family), its encoded Work, and its size.

    `view` holds the encoded options of the response, if there are any; they are stored in the job's record.
    """

    id: str
    payload: bytes
    items: int
    tokens: int
    view: bytes = b""


class Admission(NamedTuple):
    """The outcome of an admission; a refusal has a `reason` and, if a later try may succeed, `retry_after_s`.

    `held` is the lane's load just after the admission, and `depth` its limit, both in (items, tokens). A lane never
    admits beyond its depth.
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
    """The rules by which a router chooses lanes; each of WindVE's policies is one combination of them.

    `rule` "finish" admits jobs that are predicted to end in time; "count" admits as many items as the workers' depth in
    queries allows (WindVE's Algorithm 1); "all" admits every job, for probes. `order` "first" tries the classes as
    given; with "turns" each admission begins with the next class. `hop_s` is the time from the end of a job until its
    client has the response.
    """

    rule: Literal["finish", "count", "all"] = "finish"
    order: Literal["first", "turns"] = "first"
    hop_s: float = 0.0


class _Asked(NamedTuple):
    """The arguments of one call of `LaneAdmission.admit`."""

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
    came_ms: int


class LaneAdmission:
    """Admits jobs to the lane that can finish them in time, or refuses them."""

    def __init__(self, redis: Connection, workers: Workers) -> None:
        self._redis, self._workers = redis, workers

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
        came_ms: int = 0,
    ) -> Admission:
        """Admit all `jobs` (of one family) to the first class that can hold and finish them in time, or admit none.

        A job that exists already is not admitted again. With `own` the deadline is the request's own and decides alone;
        without it the objective (SLO) of the lane's workers counts, too, from `came_ms` on (0: from now). With `spread`
        each job goes into the first lane that has room for it, but still all jobs are admitted or none. `prefer` names
        a worker: its own lane is chosen if its predicted finish is at most `value_s` later than the shared lane's. A
        `share` below 1 leaves the rest of a lane's depth to others, so that bulk work does not delay interactive work.
        With `waits` a refusal asks for a notification when there is room, which reaches `Notifications.on_room`. Raises
        BusDown; if Redis is full, the jobs are refused with the reason "bus_full".

        With a `session` (of the jobs' family) the only job is the session's next turn and holds the turn lock until the
        job ends. The job is refused as "session_busy" while another turn runs, as "session_changed" if the session's
        version is not `version`, and as "session_not_found" if the session belongs to another tenant, is deleted or has
        expired. `origin` is the request of which the job is a stage, empty if the job itself is the request; a deletion
        of the session removes that request, too.
        """
        asked = _Asked(
            jobs, classes, router, tenant, deadline_ms, prefer or "", value_s, share, replay_of, session,
            version, origin, terms or Terms(), own, spread, waits, came_ms,
        )  # fmt: skip
        family = family_of(jobs[0].id)
        known = self._workers.known(family)
        with tracing.span(f"admit {family.name.split('.')[0]}", "producer", ends=False) as span:
            admission = await self._admit(family, asked)
            if admission.reason == "no_worker":
                self._workers.forget(family)
                if known:  # a worker may have started since the records were read
                    admission = await self._admit(family, asked)
        # The span of a refusal is dropped: the admission is tried again, or the request's span has the error.
        if admission.outcome == "admitted":
            lane = metrics.lane_label(family, admission.lane)
            told = {"messaging.destination.name": lane, "messaging.message.id": jobs[0].id}
            span.set_attributes({"messaging.system": "redis", **told})
            span.end()
        return admission

    async def _admit(self, family: Family, asked: _Asked) -> Admission:
        hearts, terms = await self._workers.heartbeats(family), asked.terms
        names: list[str] = [keys.use(family), keys.workers(family), keys.plan(family)]
        args: list[object] = [asked.router, asked.tenant, asked.deadline_ms, asked.replay_of]
        args += [
            FULL_SHARE,
            asked.share,
            tracing.traceparent(tracing.current()),
            terms.rule,
            terms.order,
        ]
        args += [int(asked.spread), int(asked.own), terms.hop_s, int(asked.waits)]
        args.append(asked.came_ms)
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
            return await self._redis.script("admit", names, [*args, ""])
        for _ in range(10):  # another job may take the lock between the read and the script
            busy = (await self._redis.call("HGET", keys.session(session), "busy") or b"").decode()
            more = [keys.session(session), keys.turns(session), keys.jobs(session)]
            more += [keys.job(busy)] if busy else []
            turn = [session, asked.version, busy, asked.origin]
            reply = await self._redis.script("admit", [*names, *more], [*args, *turn])
            if reply[2] != b"session_moved":
                return reply
        return [b"refused", b"", b"session_busy", b"1", 0, 0, 0, 0]

    async def ask_for_room(self, family: Family) -> None:
        """Ask to be notified when a worker starts or a job ends, as a refused admission with `waits` does."""
        await self._redis.call("HSET", keys.use(family), "waits", 1)
