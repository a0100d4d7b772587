"""The records of jobs: the state, the events, and the responsible router of each."""

from __future__ import annotations

from typing import NamedTuple

from common.bus import keys
from common.bus.connection import Connection
from common.bus.unreadable import event_of
from common.redis.replies import hash_of
from common.wire.results import Event

ENDED = ("result", "error", "expired", "cancelled", "dead")


class Trace(NamedTuple):
    """One change of a job's lease: `what` is "leased", "lost" (its worker died) or "returned"."""

    what: str
    worker: str
    at_ms: int


class JobState(NamedTuple):
    """The record of one job; `state` is "queued", "running" or an outcome; times are Redis' milliseconds.

    `first_ms` is when its first event was logged, `ended_ms` when it ended; 0 before. `trail` is the history of its
    leases, oldest first; a lease is listed from its worker's first script on that job.
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


class Jobs:
    """Reads the records of jobs, and changes which router answers for a job."""

    def __init__(self, redis: Connection) -> None:
        self._redis = redis

    async def get(self, job: str) -> JobState | None:
        """Return the record of a job; None if it has none, or no longer any."""
        flat = await self._redis.call("HGETALL", keys.job(job))
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
        """Return the encoded options of the response that a job was admitted with, or None."""
        found: bytes | None = await self._redis.call("HGET", keys.job(job), "view")
        return found

    async def log(self, job: str, start: int = 0) -> list[Event]:
        """Return the events of a job from index `start` on."""
        events = map(event_of, await self._redis.call("LRANGE", keys.log(job), 0, -1))
        return [event for event in events if event is not None and event.index >= start]

    async def adopt(self, job: str, router: str) -> None:
        """Send the notifications of a job to `router` from now on; a record that is gone is not created again."""
        await self._redis.script("adopt", [keys.job(job)], [router])

    async def expire(self, job: str, seconds: float) -> None:
        """Let the record and the log of a job, whose result was delivered, expire in `seconds`."""
        for key in (keys.log(job), keys.job(job)):
            await self._redis.call("PEXPIRE", key, int(seconds * 1000))


def _trail(text: str) -> tuple[Trace, ...]:
    rows = (line.split(" ") for line in text.splitlines())
    return tuple(Trace(what, worker, int(at)) for what, worker, at in rows)
