"""A deletion removes everything, proves it, harms nothing else, and may be killed anywhere and repeated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.bus import Bus, keys
from common.errors import Unavailable
from common.ids import job_id, ulid, unique_of
from common.registry.sessions import SessionEnds, Sessions, history_of
from common.wire.sessions import SessionRecord
from services.kv_store.deletion.session_eraser import SessionEraser
from services.kv_store.deletion.sweep import Sweep
from tests.support.bus import Hand, state
from tests.support.session_traces import (
    FAMILY,
    around,
    begin,
    end,
    grounded,
    holding,
    lived,
    now,
)
from tests.support.turns import made

LONG = 3_600_000


class Killed(BaseException):
    """The process that erases is gone."""


@pytest.fixture(params=["index", "walk"], autouse=True)
async def found_by(request: pytest.FixtureRequest, bus: Bus) -> str:
    """How leftovers are found: by the indexes, or, as for sessions older than those, by a walk over every key."""
    if request.param == "index":
        await bus.connection.call("HSET", keys.INDEX, "since", 0, "letters", 0)
    return str(request.param)


def until(bus: Bus, seconds: float = 10) -> int:
    """Return a moment some seconds ahead."""
    return bus.clock.now_ms() + int(1000 * seconds)


async def gone(bus: Bus, record: SessionRecord) -> None:
    """Erase a session as kv_store does."""
    eraser = SessionEraser(bus)
    await eraser.erase([(record.id, "t")], until(bus), prove=True)
    await SessionEnds(bus).forget(record.id, "t")


async def test_everything_goes(bus: Bus, hand: Hand, found_by: str) -> None:
    """Not one key, value or entry on any server holds text or id of the session; another session keeps all of its."""
    ours, theirs = await lived(bus, hand, "rosebud"), await lived(bus, hand, "xanadu")
    before = await holding(bus, "xanadu")
    assert len(await holding(bus, "rosebud")) > 15
    eraser = SessionEraser(bus)
    (proof,) = await eraser.erase([(ours.id, "t")], until(bus), prove=True)
    await SessionEnds(bus).forget(ours.id, "t")

    jobs = [*await Sessions(bus).jobs(ours.id)]
    assert await holding(bus, "rosebud", unique_of(ours.id), *jobs) == []
    assert await holding(bus, "xanadu") == before
    assert (await now(bus, theirs)).version == 2
    assert proof["removed"] == {
        "turns": 1,
        "job": 5,
        "log": 5,
        "seen": 2,
        "dead": 1,
        "journal": 7,
        "claimed": 2,
        "claims": 2,
    }
    (store,) = proof["proof"]["stores"]
    assert store["keys"] > 10
    assert {line["found"] for line in store["searched"]} == {0}
    assert store["searched"][0]["in"].startswith("keys of" if found_by == "index" else "keys")
    patterns = {line["pattern"] for line in store["searched"]}
    assert {f"*{unique_of(ours.id)}*", "*:dead*", "*:journal:*", "*:lane:*", "idem:*"} <= patterns
    assert len(patterns) == 4 + 4  # the session, and its three requests


async def test_running_turn(bus: Bus, hand: Hand) -> None:
    """A running turn is cancelled and waited for; its late result is refused; no new turn begins."""
    record = await made(bus, FAMILY)
    lease = await begin(bus, hand, record, "rosebud")
    with pytest.raises(Unavailable) as refused:
        await SessionEraser(bus).erase([(record.id, "t")], until(bus, 1), prove=True)
    assert refused.value.code == "session_running"
    task = asyncio.create_task(SessionEraser(bus).erase([(record.id, "t")], until(bus), prove=True))
    while not await hand.step([lease]):  # noqa: ASYNC110 - the cancellation comes with a step
        await asyncio.sleep(0.01)
    (proof,) = await task
    assert proof["removed"]["job"] == 1
    assert await state(bus, lease.job) == "none"
    assert await holding(bus, "rosebud") == []


async def test_a_request_before_its_turn(bus: Bus, hand: Hand) -> None:
    """A grounded request that never came to its generation is erased too, once it was noted."""
    record = await made(bus, FAMILY)
    request = job_id(FAMILY._replace(name="request"), ulid())
    await grounded(bus, record, request, "rosebud")
    assert await holding(bus, "rosebud")
    await gone(bus, record)
    assert await holding(bus, "rosebud", unique_of(record.id)) == []


async def test_killed_anywhere(bus: Bus, hand: Hand) -> None:
    """Cut off after any number of commands and repeated by another process, a deletion is complete."""
    call, cut, finished = bus.connection.call, 0, False
    while not finished:
        record, calls = await lived(bus, hand, "rosebud"), 0

        async def failing(*command: Any, _cut: int = cut, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > _cut:
                raise Killed
            return await call(*command, **more)

        bus.connection.call = failing  # type: ignore[method-assign]
        try:
            await gone(bus, record)
            finished = True
        except Killed:
            pass
        finally:
            bus.connection.call = call  # type: ignore[method-assign]
        index = await bus.connection.call("ZSCORE", keys.sessions(FAMILY, "t"), record.id)
        assert finished or index is not None  # a sweep finds it
        assert cut == 0 or await Sessions(bus).get(record.id) is None
        await gone(bus, record)
        assert await holding(bus, "rosebud", unique_of(record.id)) == []
        cut = cut * 2 + 3


async def test_one_turn_killed_anywhere(bus: Bus, hand: Hand) -> None:
    """One turn of three goes, cut off after any number of commands and repeated; the other two keep what they said.

    Nothing on any server holds its text, or the tokens that later turns had of it; how many they were is still known,
    and a turn that was rendered from the former ones does not come in any more.
    """
    call, cut, finished = bus.connection.call, 0, False
    while not finished:
        record = await made(bus, FAMILY)
        jobs = {}
        for text in ("first", "rosebud", "last"):
            lease = await begin(bus, hand, record, text)
            await end(bus, hand, lease, record, text)
            jobs[text], record = lease.job, await now(bus, record)
        await around(bus, jobs["rosebud"], "rosebud")
        calls = 0

        async def failing(*command: Any, _cut: int = cut, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > _cut:
                raise Killed
            return await call(*command, **more)

        eraser = SessionEraser(bus)
        bus.connection.call = failing  # type: ignore[method-assign]
        try:
            await eraser.erase_turn(record.id, jobs["rosebud"])
            finished = True
        except Killed:
            pass
        finally:
            bus.connection.call = call  # type: ignore[method-assign]
        await eraser.erase_turn(record.id, jobs["rosebud"])

        assert await holding(bus, "rosebud") == []
        assert await state(bus, jobs["rosebud"]) == "none"
        after, turns = await now(bus, record), await Sessions(bus).turns(record.id)
        assert [turn.answer for turn in turns] == ["first", "last"]
        assert (after.turns, after.fingerprint) == (2, "")
        assert history_of(after, turns, "f") is None
        assert [turn.usage for turn in turns] == [(3, 2), (13, 2)]
        assert turns[1].prompt == turns[1].output == []
        assert after.version > record.version
        assert await state(bus, jobs["last"]) == "result"
        await gone(bus, record)
        cut = cut * 2 + 3


async def test_sweep(bus: Bus, hand: Hand) -> None:
    """Expired sessions leave index and dead letters; abandoned deletions are finished; what lives, stays."""
    old = bus.clock.now_ms() - LONG
    expired, abandoned, living, young = [
        await made(bus, FAMILY, id=job_id(FAMILY, ulid(made_at)))
        for made_at in (old, old, old, bus.clock.now_ms())
    ]
    for record in (expired, abandoned, living):
        await end(bus, hand, await begin(bus, hand, record, "rosebud"), record, "rosebud")
    await Sessions(bus).mark_deleted(abandoned.id)
    await bus.connection.call("DEL", keys.session(expired.id), keys.turns(expired.id))
    await bus.connection.call("DEL", keys.session(young.id))  # as in the middle of an import
    await bus.connection.call(
        "PERSIST", keys.session(living.id)
    )  # as after a kill in the middle of a creation
    sweep = Sweep(bus, SessionEraser(bus), 0.001)
    await asyncio.sleep(0.01)

    assert await sweep.once() == 2
    left = {
        name.decode()
        for name in await bus.connection.call("ZRANGE", keys.sessions(FAMILY, "t"), 0, -1)
    }
    assert left == {living.id, young.id}
    assert await bus.connection.call("PTTL", keys.session(living.id)) > 0
    marks = [unique_of(job) for job in await Sessions(bus).jobs(living.id)]
    assert all(any(m in name for m in [*marks, unique_of(living.id)]) or "journal" in name
               for name in await holding(bus, "rosebud"))  # fmt: skip
    for record in (expired, abandoned):
        assert await holding(bus, unique_of(record.id)) == []
    assert await sweep.once() == 0
    assert (await now(bus, living)).version == 1
