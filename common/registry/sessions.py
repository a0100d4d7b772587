"""Sessions as stored: records, turns, and indexes to find them by; only the scripts `admit` and `finish` add turns.

The methods run plain commands one after another, so a kill may come between any two. A session is in its tenant's index
from before its record exists until all its data are gone, so a sweep of the indexes finds the leftovers of a kill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from common.bus import Bus, keys
from common.bus.jobs import JobState
from common.ids import Family, family_of, time_of, unique_of
from common.redis.replies import hash_of
from common.registry.models import Models
from common.wire.message import decode, encode
from common.wire.sessions import SessionRecord, Turn

TRACE_S = 24 * 3600  # seconds that a session's list of jobs outlives the session
AFTER_S = 600  # seconds that a session outlives the deadline of its running turn
YOUNG_MS = 900_000  # longer than any request lasts: an import is indexed before its session exists
_PAGE = 100


class SessionLife(NamedTuple):
    """A stored session's time to live (s), and the moment (ms) at which it was marked deleted, if it was."""

    ttl_s: int
    deleted_ms: int | None


class Sessions:
    """Creates, reads and marks sessions."""

    def __init__(self, bus: Bus) -> None:
        self._bus, self._redis = bus, bus.connection

    async def create(self, record: SessionRecord, turns: Sequence[Turn] = ()) -> None:
        """Store a new session, with its turns if it is imported; a repeated call changes nothing.

        BusFull if Redis is full; then, and after a kill, the next sweep removes the keys written so far.
        """
        name, family, ttl_ms = record.id, family_of(record.id), record.ttl_s * 1000
        stored = await self.stored(name)
        if stored is not None:
            if not stored.deleted:
                await self.mend(name, stored.ttl_s)
            return
        await self._index(record, family)
        await self._redis.call("DEL", keys.turns(name))
        for turn in turns:
            await self._redis.call("RPUSH", keys.turns(name), encode(turn))
            await self._redis.call("PEXPIRE", keys.turns(name), ttl_ms)
        fields: dict[str, object] = {
            "tenant": record.tenant,
            "model": record.model,
            "fingerprint": record.fingerprint,
            "version": record.version,
            "tokens": record.tokens,
            "turns": record.turns,
            "ttl": record.ttl_s,
            "created": record.created_ms,
            "updated": record.updated_ms,
            "metadata": record.metadata,
        }
        flat = [part for pair in fields.items() for part in pair]
        await self._redis.call("HSET", keys.session(name), *flat)
        await self._redis.call("PEXPIRE", keys.session(name), ttl_ms)
        # A sweep that ran before the record existed may have removed the session from the index.
        await self._index(record, family)

    async def mend(self, session: str, ttl_s: int) -> None:
        """Set the time to live of a session that has none, since a kill came too early."""
        if int(await self._redis.call("PTTL", keys.session(session))) == -1:
            await self._redis.call("PEXPIRE", keys.session(session), ttl_s * 1000)

    async def look_at(self, session: str, tenant: str, at_ms: int) -> None:
        """Have a sweep check at `at_ms` whether a session has ended."""
        await self._redis.call("ZADD", keys.due(family_of(session)), at_ms, f"{tenant}/{session}")

    async def due(self, family: Family, most: int) -> list[tuple[str, str]]:
        """Return (id, tenant) of up to `most` sessions of a family that a sweep should check now, the oldest first."""
        now_ms = self._bus.clock.now_ms()
        found = await self._redis.call(
            "ZRANGEBYSCORE", keys.due(family), "-inf", now_ms, "LIMIT", 0, most
        )
        rows = (raw.decode().partition("/") for raw in found)
        return [(name, tenant) for tenant, _, name in rows]

    async def _index(self, record: SessionRecord, family: Family) -> None:
        await self._redis.call("SADD", keys.tenants(family), record.tenant)
        await self.look_at(record.id, record.tenant, time_of(unique_of(record.id)) + YOUNG_MS)
        await self._redis.call(
            "ZADD", keys.sessions(family, record.tenant), record.updated_ms, record.id
        )

    async def stored(self, session: str) -> SessionRecord | None:
        """Return a session's record, even if it is marked as deleted; None if there is none."""
        found = hash_of(await self._redis.call("HGETALL", keys.session(session)))
        f = {name.decode(): value for name, value in found.items()}
        if not {"tenant", "version", "ttl", "created"} <= f.keys():
            return None
        return SessionRecord(
            id=session,
            tenant=f["tenant"].decode(),
            model=f["model"].decode(),
            fingerprint=f["fingerprint"].decode(),
            version=int(f["version"]),
            tokens=int(f["tokens"]),
            turns=int(f["turns"]),
            ttl_s=int(f["ttl"]),
            created_ms=int(f["created"]),
            updated_ms=int(f["updated"]),
            metadata=f["metadata"],
            busy=f.get("busy", b"").decode(),
            deleted="deleted" in f,
            pinned="pinned" in f,
        )

    async def get(self, session: str) -> SessionRecord | None:
        """Return a session's record; None if it is missing or marked as deleted. ValueError if `session` is no id."""
        found = await self.stored(session)
        return None if found is None or found.deleted else found

    async def running_turn(self, record: SessionRecord) -> JobState | None:
        """Return the job of a session's running turn; None between two turns."""
        turn = await self._bus.jobs.get(record.busy) if record.busy else None
        return None if turn is None or turn.over else turn

    async def turns(self, session: str, start: int = 0) -> list[Turn]:
        """Return a session's turns from `start` on, oldest first."""
        return [decode(row, Turn) for row in await self._rows(session, start)]

    async def encoded_turns(self, session: str, start: int, count: int) -> list[bytes]:
        """Return up to `count` turns from `start` on as they are stored, oldest first."""
        rows: list[bytes] = await self._redis.call(
            "LRANGE", keys.turns(session), start, start + count - 1
        )
        return rows

    async def touch(self, session: str, ttl_s: int = 0, metadata: bytes | None = None) -> bool:
        """Renew a session's time to live, and change it or the metadata if given; False if there is no session."""
        record = await self.get(session)
        if record is None:
            return False
        ttl_ms = (ttl_s or record.ttl_s) * 1000
        turn = await self.running_turn(record)
        if turn is not None:
            # A session outlives its turn; the end of the turn sets the time to live anew.
            ttl_ms = max(ttl_ms, turn.deadline_ms - self._bus.clock.now_ms() + 1000 * AFTER_S)
        await self.look_at(session, record.tenant, self._bus.clock.now_ms() + ttl_ms)
        if not await self._redis.call("PEXPIRE", keys.session(session), ttl_ms):
            return False
        await self._redis.call("PEXPIRE", keys.turns(session), ttl_ms)
        await self._redis.call("PEXPIRE", keys.jobs(session), ttl_ms + TRACE_S * 1000)
        given: list[object] = ["ttl", ttl_s] if ttl_s else []
        given += [] if metadata is None else ["metadata", metadata]
        if given:
            await self._redis.call("HSET", keys.session(session), *given)
        return True

    async def mark_deleted(self, session: str) -> bool:
        """Mark a session as deleted, so that it takes no turns any more; False if there is none.

        The record and the list of jobs, which the deletion needs, no longer expire: the caller must have them erased.
        """
        record = await self.stored(session)
        if record is None:
            return False
        await self.look_at(session, record.tenant, self._bus.clock.now_ms())
        await self._redis.call("HSET", keys.session(session), "deleted", self._bus.clock.now_ms())
        for name in (keys.session(session), keys.jobs(session)):
            await self._redis.call("PERSIST", name)
        return True

    async def remove_turn(self, session: str, job: str) -> None:
        """Take the turn of a job out of a session, and out of the tokens of later turns; repeated calls finish it.

        Later turns keep their messages and answers; the conversation is rendered anew for the next turn. A turn that
        runs meanwhile, or was rendered before, is not appended. Rows are replaced by value, since others may be
        appended or removed at once.
        """
        name, rows = keys.turns(session), await self._rows(session)
        await self._redis.call("HSET", keys.session(session), "fingerprint", "")
        places = [place for place, row in enumerate(rows) if decode(row, Turn).job == job]
        # If the turn is gone already, the later turns cannot be told from the earlier ones.
        earlier = set(rows[: places[0]] if places else ())
        for place in places:
            await self._redis.call("LREM", name, 0, rows[place])
        # From here on no turn rendered from the former turns is admitted or appended.
        await self._redis.call("HINCRBY", keys.session(session), "version", 1)
        for row in await self._rows(session):
            if row not in earlier:
                await self._without_tokens(name, row)
        count = int(await self._redis.call("LLEN", name))
        await self._redis.call("HSET", keys.session(session), "fingerprint", "", "turns", count)
        await self._redis.call("HINCRBY", keys.session(session), "version", 1)

    async def _rows(self, session: str, start: int = 0) -> list[bytes]:
        rows: list[bytes] = await self._redis.call("LRANGE", keys.turns(session), start, -1)
        return rows

    async def _without_tokens(self, name: str, raw: bytes) -> None:
        turn = decode(raw, Turn)
        if not (turn.prompt or turn.output):
            return
        bare = encode(replace(turn, history=0, prompt=[], output=[], counted=turn.usage))
        if int(await self._redis.call("LINSERT", name, "BEFORE", raw, bare)) < 0:
            return  # another call has replaced it
        if not int(await self._redis.call("LREM", name, 1, raw)):
            await self._redis.call("LREM", name, 1, bare)  # another call replaced it, too

    # -- pins ------------------------------------------------------------------------------------------

    async def pin(self, session: str) -> None:
        """Record that a session is pinned: kv_store then pins its pages."""
        if await self._redis.call("EXISTS", keys.session(session)):
            await self._redis.call("HSET", keys.session(session), "pinned", 1)
            await self._redis.call("ZADD", keys.PINNED, "NX", self._bus.clock.now_ms(), session)

    async def unpin(self, session: str) -> None:
        """Record that a session is not pinned any more."""
        await self._redis.call("HDEL", keys.session(session), "pinned")
        await self._redis.call("ZREM", keys.PINNED, session)

    async def pinned(self) -> list[str]:
        """Return the pinned sessions, the earliest pinned first; some may have expired."""
        return [name.decode() for name in await self._redis.call("ZRANGE", keys.PINNED, 0, -1)]

    # -- jobs run for a session ------------------------------------------------------------------------

    async def note_job(self, session: str, job: str, origin: str = "") -> None:
        """Add a job other than a turn, such as an export, to a session's list, so that it is deleted with the session.

        `origin` is the request of which the job is a stage. A job must be added before its admission, since a deletion
        finds jobs by this list only.
        """
        names = [keys.session(session), keys.jobs(session)]
        await self._redis.script("note", names, [1, job, origin])

    async def jobs(self, session: str) -> dict[str, str]:
        """Return job -> request ("" if the job is the request) for all jobs that ran for a session."""
        found = hash_of(await self._redis.call("HGETALL", keys.jobs(session)))
        return {job.decode(): origin.decode() for job, origin in found.items()}

    # -- listing ---------------------------------------------------------------------------------------

    async def families(self) -> list[Family]:
        """Return every family that may hold sessions: those of generators, each partition."""
        cards = [
            card for card in (await Models(self._bus).cards()).values() if card.kind == "generate"
        ]
        found = {Family(card.family, p) for card in cards for p in range(max(card.partitions, 1))}
        return sorted(found)

    async def page(
        self, tenant: str, cursor: str | None, limit: int
    ) -> tuple[list[SessionRecord], str | None]:
        """Return a page of a tenant's sessions over all families, last used first, and the next page's cursor.

        ValueError if the cursor was not returned by an earlier call.
        """
        below, page = _place(cursor), list[SessionRecord]()
        families = await self.families()
        while True:
            rows = list[tuple[int, str]]()
            for family in families:
                rows += await self._below(family, tenant, below, limit + 1)
            rows = sorted(rows, reverse=True)[: limit + 1]
            for at, row in enumerate(rows[:limit]):
                record = await self.get(row[1])
                page += [record] if record is not None else []  # expired sessions are still indexed
                if len(page) == limit:
                    return page, f"{row[0]}:{row[1]}" if at + 1 < len(rows) else None
            if len(rows) <= limit:
                return page, None
            below = rows[limit - 1]

    async def _below(
        self, family: Family, tenant: str, below: tuple[int, str] | None, count: int
    ) -> list[tuple[int, str]]:
        """Return up to `count` entries of one tenant's index that come after `below`, last used first."""
        found: list[tuple[int, str]] = []
        offset, most = 0, "+inf" if below is None else below[0]
        while len(found) < count:
            reply = await self._redis.call(
                *("ZREVRANGEBYSCORE", keys.sessions(family, tenant), most, "-inf"),
                *("WITHSCORES", "LIMIT", offset, count + _PAGE),
            )
            rows = [
                (int(float(at)), name.decode())
                for name, at in zip(reply[::2], reply[1::2], strict=True)
            ]
            found += [row for row in rows if below is None or row < below]
            if len(rows) < count + _PAGE:
                break
            offset += len(rows)
        return found[:count]


class SessionEnds:
    """Reads when sessions end, and removes their records, for pins, deletions and the sweep."""

    def __init__(self, bus: Bus) -> None:
        self._redis = bus.connection

    async def life(self, session: str) -> SessionLife | None:
        """Return a session's time to live and when it was marked deleted; None if it has no record."""
        tenant, deleted, ttl = await self._redis.call(
            "HMGET", keys.session(session), "tenant", "deleted", "ttl"
        )
        if tenant is None:
            return None
        return SessionLife(int(ttl), None if deleted is None else int(deleted))

    async def left_ms(self, session: str) -> int:
        """Return the milliseconds until a session expires; 0 if it has expired or has no time to live."""
        return max(int(await self._redis.call("PTTL", keys.session(session))), 0)

    async def begin_sweep(self, life_ms: int) -> bool:
        """Return whether the caller may sweep; if so, no other process may for `life_ms` milliseconds."""
        return bool(await self._redis.call("SET", keys.SWEEP, "1", "NX", "PX", max(life_ms, 1)))

    async def forget(self, session: str, tenant: str) -> None:
        """Remove a session's record, turns, list of jobs and index entries, after all its other data were erased."""
        family = family_of(session)
        for name in (keys.session(session), keys.turns(session), keys.jobs(session)):
            await self._redis.call("UNLINK", name)
        await self._redis.call("ZREM", keys.sessions(family, tenant), session)
        await self._redis.call("ZREM", keys.due(family), f"{tenant}/{session}")


def _place(cursor: str | None) -> tuple[int, str] | None:
    if not cursor:
        return None
    updated, _, name = cursor.partition(":")
    if not updated.isdecimal() or len(updated) > 15:
        raise ValueError(f"cursor {cursor[:80]!r}: expected what an earlier page gave")
    family_of(name)
    return int(updated), name


def history_of(record: SessionRecord, turns: Sequence[Turn], fingerprint: str) -> list[int] | None:
    """Return a session's tokens; None if its messages must be rendered anew for the model of `fingerprint`.

    That is so after an import from another model, and after the model was replaced.
    """
    if record.fingerprint != fingerprint:
        return None
    tokens: list[int] = []
    for turn in turns:
        if not turn.history:
            tokens.clear()
        tokens += [*turn.prompt, *turn.output]
    return tokens if len(tokens) == record.tokens and (tokens or not turns) else None
