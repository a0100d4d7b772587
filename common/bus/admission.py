"""Admission of jobs to lanes: one atomic decision for each."""

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
    """A job to admit: its id (which contains its family), encoded Work, and size.

    `view`, if any, is kept in the job's record for whoever shows its result.
    """

    id: str
    payload: bytes
    items: int
    tokens: int
    view: bytes = b""


class Admission(NamedTuple):
    """The outcome of an admission; on refusal `reason` and, where coming back helps, `retry_after_s`.

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
    """A router's choice of lanes: WindVE's policies are made of these.

    `rule` "finish" admits what is predicted to end in time (WindVE section 5 of the spec: token-aware, open loop),
    "count" what the workers' depth in queries allows (Algorithm 1), "all" whatever comes: probes. `order` "first"
    takes the classes as given, "turns" begins each admission with the next one. `hop_s` is the time from the end of a
    job to its client.
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
        known = self._workers.known(family)
        with tracing.span(f"admit {family.name.split('.')[0]}", "producer", ends=False) as span:
            admission = await self._admit(family, asked)
            if admission.reason == "no_worker":
                self._workers.forget(family)
                if known:  # a worker may have started since the roster was read
                    admission = await self._admit(family, asked)
        if admission.outcome == "admitted":  # a refusal is tried again, or the request tells of it
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
        for _ in range(10):  # the lock may go to another job between the two reads
            busy = (await self._redis.call("HGET", keys.session(session), "busy") or b"").decode()
            more = [keys.session(session), keys.turns(session), keys.jobs(session)]
            more += [keys.job(busy)] if busy else []
            turn = [session, asked.version, busy, asked.origin]
            reply = await self._redis.script("admit", [*names, *more], [*args, *turn])
            if reply[2] != b"session_moved":
                return reply
        return [b"refused", b"", b"session_busy", b"1", 0, 0, 0, 0]

    async def ask_for_room(self, family: Family) -> None:
        """Ask for the word that a worker has started or a job has ended, as a refused admission with `waits` does."""
        await self._redis.call("HSET", keys.use(family), "waits", 1)
