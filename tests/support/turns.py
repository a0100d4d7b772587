"""Sessions and turns for tests, and what must hold of every session at every moment of the chaos driver."""

from __future__ import annotations

import random
from typing import Any, cast

import redis

from common.bus import Bus, keys
from common.ids import Family, job_id, ulid
from common.registry.sessions import Sessions
from common.wire.message import decode
from common.wire.sessions import SessionRecord, SessionTurn, Turn


async def made(bus: Bus, family: Family, tenant: str = "t", **more: Any) -> SessionRecord:
    """Create a session of one tenant."""
    now = bus.clock.now_ms()
    fields: dict[str, Any] = {
        "id": job_id(family, ulid()),
        "tenant": tenant,
        "model": "m",
        "fingerprint": "f",
        "version": 0,
        "tokens": 0,
        "turns": 0,
        "ttl_s": 3600,
        "created_ms": now,
        "updated_ms": now,
    }
    record = SessionRecord(**(fields | more))
    await Sessions(bus).create(record)
    return record


def turn_of(job: str, history: int = 0, text: str = "water") -> Turn:
    """Return a turn of three prompt tokens and two of an answer."""
    return Turn(
        job=job,
        history=history,
        messages=b"[]",
        answer=text,
        prompt=[1, 2, 3],
        output=[4, 5],
        finish="stop",
        at_ms=1,
    )


class Turns:
    """Sessions, and the jobs admitted as their turns."""

    def __init__(self, family: Family, seed: int) -> None:
        self.family, self.random = family, random.Random(seed)
        self.open: list[str] = []
        self.deleted: set[str] = set()
        self.parts: dict[str, SessionTurn] = {}
        self.seen: dict[str, list[bytes]] = {}

    async def create(self, bus: Bus) -> None:
        """Begin a session."""
        record = await made(bus, self.family)
        self.open.append(record.id)
        self.seen[record.id] = []

    async def choose(self, bus: Bus) -> SessionRecord | None:
        """Return a session for a turn, sometimes one that is gone, sometimes at a version that is past."""
        name = self.random.choice([*self.open, *self.deleted])
        record = await Sessions(bus).stored(name)
        if record is not None and record.version and self.random.random() < 0.1:
            return _at(record, record.version - 1)
        return record

    def admitted(self, job: str, record: SessionRecord) -> None:
        """A job is to be a turn."""
        self.parts[job] = SessionTurn(
            session=record.id,
            version=record.version,
            history=record.tokens,
            messages=b"[]",
            keep_partial=self.random.random() < 0.5,
        )

    def end_of(self, job: str) -> dict[str, Any]:
        """Return what `finish` and `refuse` are told of a job's turn."""
        part = self.parts.get(job)
        return {"part": (turn_of(job, part.history), part)} if part else {}

    def partial(self, job: str) -> tuple[Turn, SessionTurn] | None:
        """Return what `step` is told of a cancelled job's turn."""
        part = self.parts.get(job)
        return (turn_of(job, part.history), part) if part and part.keep_partial else None

    def lost(self, job: str) -> bool:
        """Return whether a job is the turn of a session that was deleted."""
        return job in self.parts and self.parts[job].session in self.deleted

    def wrong(self, raw: redis.Redis) -> str:
        """Return what does not hold of some session now, "" if all is well."""
        live: dict[str, int] = {}
        for job, part in self.parts.items():
            state = _state(raw, job)
            live[part.session] = live.get(part.session, 0) + (state in {"queued", "running"})
            if state == "result" and job not in self._jobs(raw, part.session):
                return f"{job} ended with a result, its turn is not in {part.session}"
        for name, before in self.seen.items():
            turns = _turns(raw, name)
            if turns[: len(before)] != before:
                return f"{name} lost turns"
            if name in self.deleted and len(turns) > len(before):
                return f"{name} got a turn after it was deleted"
            self.seen[name] = turns
            version, count = (
                int(n or 0) for n in raw.hmget(keys.session(name), "version", "turns")
            )
            if not version == count == len(turns):
                return f"{name} is at version {version}, counts {count}, holds {len(turns)} turns"
            jobs = [decode(turn, Turn).job for turn in turns]
            if len(set(jobs)) < len(jobs):
                return f"{name} holds a turn twice: {jobs}"
            for turn in (decode(turn, Turn) for turn in turns[len(before) :]):
                state = _state(raw, turn.job)
                if (state == "result") == turn.partial:
                    return f"{turn.job} ended as {state}, its turn is partial: {turn.partial}"
            if live.get(name, 0) > 1:
                return f"{name} has {live[name]} turns at once"
        return ""

    def _jobs(self, raw: redis.Redis, name: str) -> set[str]:
        return {decode(turn, Turn).job for turn in _turns(raw, name)}


def _state(raw: redis.Redis, job: str) -> str:
    return cast("bytes", raw.hget(keys.job(job), "state") or b"").decode()


def _turns(raw: redis.Redis, name: str) -> list[bytes]:
    return cast("list[bytes]", raw.lrange(keys.turns(name), 0, -1))


def _at(record: SessionRecord, version: int) -> SessionRecord:
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return SessionRecord(**(fields | {"version": version}))
