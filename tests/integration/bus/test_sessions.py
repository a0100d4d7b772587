"""Sessions on every server: one turn at a time, each appended once or not at all, whatever is lost or deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.bus import Admission, Bus, NewJob, keys
from common.errors import InternalError
from common.ids import Family, job_id, ulid
from common.registry.models import Models
from common.registry.sessions import Sessions, history_of
from common.types.model_card import ModelCard
from common.wire.results import Event, GenerateResult
from common.wire.sessions import SessionRecord, SessionTurn
from common.worker.leases import Lease
from tests.support.bus import Hand, admit, new_job, open_bus, outcome, state
from tests.support.servers import Cluster
from tests.support.turns import made, turn_of

DONE = GenerateResult(prompt_tokens=3, completion_tokens=2, version=1)


def part(record: SessionRecord, *, keep: bool = False) -> SessionTurn:
    """Return what a generation knows of the session it is a turn of."""
    return SessionTurn(
        session=record.id,
        version=record.version,
        history=record.tokens,
        messages=b"[]",
        keep_partial=keep,
    )


async def begin(bus: Bus, record: SessionRecord, job: NewJob | None = None) -> Admission:
    """Admit a session's next turn."""
    job = job or new_job(Family(*_family(record.id)))
    return await admit(bus, job, session=record.id, version=record.version)


def _family(name: str) -> tuple[str, int]:
    family, partition, _ = name.split("~")
    return family, int(partition)


async def lease_of(bus: Bus, hand: Hand, record: SessionRecord) -> Lease:
    """Admit a turn and lease it."""
    assert (await begin(bus, record)).outcome == "admitted"
    (lease,) = await hand.pull()
    return lease


async def end(hand: Hand, lease: Lease, record: SessionRecord, **more: Any) -> str:
    """Finish a leased turn."""
    turn = turn_of(lease.job, record.tokens)
    return await hand.finish(lease, DONE, part=(turn, part(record)), **more)


async def now(bus: Bus, record: SessionRecord) -> SessionRecord:
    """Return a session as it is now."""
    found = await Sessions(bus).get(record.id)
    assert found is not None
    assert found.version == found.turns == len(await Sessions(bus).turns(record.id))
    return found


async def test_turns(bus: Bus, family: Family) -> None:
    """Turns are appended in order; tokens, version and index follow; the lock is free for the next."""
    hand = await Hand(bus, family, "w", fingerprint="g").join()
    record = await made(bus, family)
    for turn in range(3):
        assert await end(hand, await lease_of(bus, hand, record), record) == "ok"
        before, record = record, await now(bus, record)
        assert (record.version, record.tokens, record.busy) == (turn + 1, 5 * (turn + 1), "")
        assert record.updated_ms >= before.updated_ms
    assert record.fingerprint == "g"  # its history is all of the worker's own tokens
    turns = await Sessions(bus).turns(record.id)
    assert [t.history for t in turns] == [0, 5, 10]
    assert history_of(record, turns, "g") == [1, 2, 3, 4, 5] * 3
    assert history_of(record, turns, "other") is None
    assert [t.history for t in await Sessions(bus).turns(record.id, 2)] == [10]
    score = await bus.connection.call("ZSCORE", keys.sessions(family, "t"), record.id)
    assert int(float(score)) == record.updated_ms
    assert set(await Sessions(bus).jobs(record.id)) == {t.job for t in turns}


async def test_refusals(bus: Bus, family: Family) -> None:
    """A session of nobody, of another tenant, at another version, or in a turn, takes no turn."""
    hand = await Hand(bus, family, "w").join()
    record = await made(bus, family)
    unknown = msgspec.structs.replace(record, id=job_id(family, ulid()))
    assert (await begin(bus, unknown)).reason == "session_not_found"
    foreign = await admit(bus, new_job(family), tenant="x", session=record.id, version=0)
    assert foreign.reason == "session_not_found"
    stale = msgspec.structs.replace(record, version=7)
    assert (await begin(bus, stale)).reason == "session_changed"
    assert await bus.lanes.use(family) == {}
    first = new_job(family)
    assert (await begin(bus, record, first)).outcome == "admitted"
    assert (await begin(bus, record)).reason == "session_busy"
    assert (await begin(bus, record, first)).outcome == "exists"  # a repetition is no second turn
    (lease,) = await hand.pull()
    assert (await begin(bus, record)).reason == "session_busy"
    assert await end(hand, lease, record) == "ok"
    assert (await begin(bus, record, first)).outcome == "exists"
    assert (await begin(bus, record)).reason == "session_changed"
    assert (await begin(bus, await now(bus, record))).outcome == "admitted"


async def test_two_race(bus: Bus, family: Family) -> None:
    """Of many turns at once one is admitted."""
    await Hand(bus, family, "w").join()
    record = await made(bus, family)
    said = await asyncio.gather(*(begin(bus, record) for _ in range(8)))
    assert [a.outcome for a in said].count("admitted") == 1
    assert {a.reason for a in said if a.outcome == "refused"} == {"session_busy"}


@pytest.mark.parametrize("way", ["cancel", "cancel held", "error", "dead", "expire"])
async def test_a_failed_turn_frees_the_lock(bus: Bus, family: Family, way: str) -> None:
    """However a turn fails, nothing is appended and the next may begin at the same version."""
    hand = await Hand(bus, family, "w").join()
    record = await made(bus, family)
    job = new_job(family)
    left_s = 0.3 if way == "expire" else 60
    await admit(bus, job, session=record.id, version=0, left_s=left_s)
    if way == "cancel":
        assert await bus.control.cancel(job.id) == "removed"
    elif way == "expire":
        await asyncio.sleep(0.35)
        await bus.recovery.reap(family, ("gpu",))
    else:
        (lease,) = await hand.pull()
        if way == "cancel held":
            assert await bus.control.cancel(job.id) == "flagged"
            assert await hand.step([lease], partial=lambda _: None) == {job.id}
        elif way == "error":
            kept = (turn_of(job.id), part(record))
            await hand.refuse(lease, InternalError("no"), part=kept)
        else:
            for _ in range(3):
                await hand.fail(lease, "model_error", "it raised")
                lease = next(iter(await hand.take()), lease)
    assert await state(bus, job) in {"cancelled", "error", "dead", "expired"}
    assert (await begin(bus, await now(bus, record))).outcome == "admitted"


async def test_partial_turns(bus: Bus, family: Family) -> None:
    """With keep_partial a cancelled or failed turn is appended, marked as partial."""
    hand = await Hand(bus, family, "w").join()
    record = await made(bus, family)
    lease = await lease_of(bus, hand, record)
    await bus.control.cancel(lease.job)
    kept = (turn_of(lease.job), part(record, keep=True))
    await hand.step([lease], partial=lambda _: kept)
    assert await state(bus, lease.job) == "cancelled"
    record = await now(bus, record)
    lease = await lease_of(bus, hand, record)
    kept = (turn_of(lease.job, record.tokens), part(record, keep=True))
    await hand.refuse(lease, InternalError("no"), part=kept)
    record = await now(bus, record)
    lease = await lease_of(bus, hand, record)
    await bus.control.cancel(lease.job)  # the answer was whole, and the cancellation first
    kept = (turn_of(lease.job, record.tokens), part(record, keep=True))
    said = await hand.finish(lease, DONE, part=kept)
    assert said == "cancelled"
    record = await now(bus, record)
    assert [t.partial for t in await Sessions(bus).turns(record.id)] == [True] * 3
    lease = await lease_of(bus, hand, record)
    await bus.control.cancel(lease.job)
    assert await end(hand, lease, record) == "cancelled"
    assert (await now(bus, record)).version == 3


async def test_lost_replies(bus: Bus, family: Family) -> None:
    """A finish whose reply was lost, repeated, appends once; an admission repeated is the same turn."""
    hand = await Hand(bus, family, "w").join()
    record = await made(bus, family)
    lease = await lease_of(bus, hand, record)
    script = bus.connection.script

    async def twice(name: str, *given: Any, **more: Any) -> Any:
        await script(name, *given, **more)
        return await script(name, *given, **more)

    bus.connection.script = twice  # type: ignore[method-assign]
    assert await end(hand, lease, record) == "done"
    record = await now(bus, record)
    assert record.version == 1
    job = new_job(family)
    assert (await begin(bus, record, job)).outcome == "exists"
    assert await bus.lanes.use(family) == {"gpu": (1, 10)}
    assert (await now(bus, record)).busy == job.id


async def test_deleted_in_mid_turn(bus: Bus, family: Family) -> None:
    """A late writer of a deleted session is refused: its job ends with that error, nothing is appended."""
    hand = await Hand(bus, family, "w").join()
    record = await made(bus, family)
    lease = await lease_of(bus, hand, record)
    assert await Sessions(bus).mark_deleted(record.id)
    assert await Sessions(bus).get(record.id) is None
    assert await end(hand, lease, record) == "deleted"
    event = await outcome(bus, lease.job)
    assert (event.kind, event.code) == ("error", "session_deleted")
    assert await Sessions(bus).turns(record.id) == []
    assert (await begin(bus, record)).reason == "session_not_found"
    assert not await Sessions(bus).touch(record.id, 10)
    gone = await made(bus, family)
    lease = await lease_of(bus, hand, gone)
    await bus.connection.call("DEL", keys.session(gone.id))
    assert await end(hand, lease, gone) == "deleted"
    assert await bus.connection.call("EXISTS", keys.session(gone.id), keys.turns(gone.id)) == 0


async def test_overtaken(bus: Bus, family: Family) -> None:
    """A finish for a session that waits for another turn is an error, not an appended turn."""
    hand = await Hand(bus, family, "w").join()
    record = await made(bus, family)
    lease = await lease_of(bus, hand, record)
    await bus.connection.call("HSET", keys.session(record.id), "busy", "another")
    assert await end(hand, lease, record) == "changed"
    assert (await outcome(bus, lease.job)).code == "session_changed"
    assert (await now(bus, record)).version == 0


async def test_taken_over(bus: Bus, family: Family) -> None:
    """A turn whose worker died is finished by the next one, once; the zombie's finish is fenced."""
    first = await Hand(bus, family, "a").join()
    record = await made(bus, family)
    old = await lease_of(bus, first, record)
    await first.step([old], {old.job: Event(index=0, kind="progress", data=b"x")})
    await first.die()
    second = await Hand(bus, family, "b").join()
    assert await second.settle() == ["returned"]
    assert (await begin(bus, record)).reason == "session_busy"
    (lease,) = await second.take()
    assert await end(first, old, record) == "fenced"
    assert await end(second, lease, record, index=1) == "ok"
    assert (await now(bus, record)).version == 1


async def test_time_to_live(bus: Bus, family: Family) -> None:
    """A turn outlasts a short time to live; its end renews it; touching sets it."""
    hand = await Hand(bus, family, "w").join()
    record = await made(bus, family, ttl_s=2)
    names = [keys.session(record.id), keys.turns(record.id), keys.jobs(record.id)]
    lease = await lease_of(bus, hand, record)
    assert await bus.connection.call("PTTL", names[0]) > 600_000
    assert await Sessions(bus).touch(record.id, 2)
    assert await bus.connection.call("PTTL", names[0]) > 600_000
    assert await end(hand, lease, record) == "ok"
    assert [0 < await bus.connection.call("PTTL", name) <= 2000 for name in names] == [
        True,
        True,
        False,
    ]
    assert await Sessions(bus).touch(record.id, 50, b'{"a":1}')
    assert all([await bus.connection.call("PTTL", name) > 40_000 for name in names])
    record = await now(bus, record)
    assert (record.ttl_s, record.metadata) == (50, b'{"a":1}')
    assert await Sessions(bus).mark_deleted(record.id)
    assert await bus.connection.call("PTTL", names[0]) == -1


async def test_a_full_redis_refuses_no_finish(bus: Bus, family: Family, place: Any) -> None:
    """Above maxmemory turns end and are appended; new ones, and new sessions, are refused at the door."""
    hand = await Hand(bus, family, "w").join()
    record = await made(bus, family)
    lease = await lease_of(bus, hand, record)
    servers = place[0].servers if isinstance(place[0], Cluster) else [place[0]]
    try:
        for server in servers:
            server.config_set("maxmemory", 1_000_000)
        assert (await begin(bus, record)).reason in {"bus_full", "session_busy"}
        assert await end(hand, lease, record) == "ok"
        record = await now(bus, record)
        assert record.version == 1
        assert (await begin(bus, record)).reason == "bus_full"
    finally:
        for server in servers:
            server.config_set("maxmemory", 0)


async def test_listing(bus: Bus, family: Family) -> None:
    """Pages hold a tenant's living sessions over all partitions, last used first, each once."""
    parts = family.partition + 1
    card = ModelCard(
        name="m",
        kind="generate",
        family=family.name,
        fingerprint="f",
        dimension=0,
        max_tokens=8,
        partitions=parts,
    )
    await Models(bus).publish(card, b"{}")
    mine = [
        await made(bus, Family(family.name, i % parts), updated_ms=1000 + i // 3) for i in range(10)
    ]
    await made(bus, family, tenant="x")
    await Sessions(bus).mark_deleted(mine[4].id)
    await bus.connection.call("DEL", keys.session(mine[7].id))
    seen, cursor = list[SessionRecord](), None
    while True:
        page, cursor = await Sessions(bus).page("t", cursor, 3)
        assert len(page) <= 3
        seen += page
        if cursor is None:
            break
        assert len(page) == 3
    assert len(seen) == 8
    assert {r.id for r in seen} == {r.id for i, r in enumerate(mine) if i not in {4, 7}}
    places = [(r.updated_ms, r.id) for r in seen]
    assert places == sorted(places, reverse=True)
    with pytest.raises(ValueError, match="cursor"):
        await Sessions(bus).page("t", "what", 3)


async def test_creation_is_repeatable(bus: Bus, family: Family, tmp_path: Path, place: Any) -> None:
    """A creation cut off anywhere, and repeated, leaves one session with its turns once."""
    other = await open_bus(place[0].url, str(tmp_path), cluster=isinstance(place[0], Cluster))
    turns = [turn_of("a"), turn_of("b", 5)]
    for cut in range(12):
        name = job_id(family, ulid())
        call, calls = other.connection.call, 0

        async def failing(*command: Any, _cut: int = cut, _call: Any = call, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > _cut:
                raise InternalError("killed")
            return await _call(*command, **more)

        record = SessionRecord(
            id=name, tenant="t", model="m", fingerprint="f", version=2, tokens=10, turns=2,
            ttl_s=60, created_ms=1, updated_ms=1,
        )  # fmt: skip
        other.connection.call = failing  # type: ignore[method-assign]
        with pytest.raises(InternalError):
            await Sessions(other).create(record, turns)
        other.connection.call = call  # type: ignore[method-assign]
        half = await Sessions(bus).get(name)
        assert half is None or len(await Sessions(bus).turns(name)) == 2
        await Sessions(bus).create(record, turns)
        assert len(await Sessions(bus).turns(name)) == 2
        assert await bus.connection.call("PTTL", keys.session(name)) > 0
        assert await now(bus, record) == record
    await other.close()
