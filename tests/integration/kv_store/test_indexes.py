"""A deletion's work is that of its session, whatever else a store holds; what earlier versions left is found, too."""

from __future__ import annotations

from typing import Any

import pytest

from common.bus import Bus, Notifications, keys
from common.ids import child_id, job_id, ulid, unique_of
from common.registry.dead_letters import DeadLetters
from common.registry.idempotency import Idempotency
from common.registry.sessions import SessionEnds, Sessions
from common.registry.trace_index import OLD_MS, TraceIndex
from common.wire.sessions import SessionRecord
from services.kv_store.deletion.session_eraser import SessionEraser
from services.kv_store.deletion.sweep import Sweep
from tests.conftest import PROFILE
from tests.support.bus import Hand
from tests.support.session_traces import EMBEDS, FAMILY, REQUESTS, holding, lived
from tests.support.turns import made

READS = (
    "exists", "get", "hget", "hmget", "hgetall", "lrange", "smembers", "type", "xrange",
    "zrange", "zrangebyscore", "zscan", "scan", "xtrim",
)  # fmt: skip
WRITES = ("del", "unlink", "xdel", "hdel", "zrem", "hset", "persist")
LONG_MS = 3_600_000


async def crowd(bus: Bus, count: int) -> None:
    """Have a store hold all that `count` requests of other sessions leave: records, logs, letters, claims, rings."""
    ring_ms = bus.clock.now_ms() - 30_000
    await bus.connection.call("ZADD", keys.journals(FAMILY), ring_ms, "r9")
    for at in range(count):
        session, job = job_id(FAMILY, ulid()), job_id(FAMILY, ulid())
        await bus.connection.call("HSET", keys.session(session), "tenant", "t", "ttl", 3600)
        await bus.connection.call("ZADD", keys.sessions(FAMILY, "t"), at, session)
        await bus.connection.call(
            "ZADD", keys.due(FAMILY), bus.clock.now_ms() + LONG_MS, f"t/{session}"
        )
        await bus.connection.call("HSET", keys.job(job), "state", "result")
        await bus.connection.call("RPUSH", keys.log(job), "event")
        entry = await bus.connection.call(
            "XADD", keys.dead(FAMILY), "*", "job", job, "payload", "p"
        )
        await bus.connection.call("HSET", keys.letters(FAMILY), job, entry)
        await bus.connection.call(
            "XADD", keys.journal(FAMILY, "r9"), f"{ring_ms}-{at + 1}", "j", job
        )
        await Idempotency(bus).claim("t", job, b"0123456789abcdef", job)


async def calls(bus: Bus) -> dict[str, int]:
    """Return how often each command that reads or writes data has run, on all servers."""
    total: dict[str, int] = {}
    for call in bus.connection.callers():
        for line in (await call("INFO", "commandstats")).decode().splitlines():
            name, _, rest = line.removeprefix("cmdstat_").partition(":")
            if name in (*READS, *WRITES):
                total[name] = total.get(name, 0) + int(rest.split(",")[0].removeprefix("calls="))
    return total


async def deleted(bus: Bus, record: SessionRecord) -> dict[str, Any]:
    """Delete a session as kv_store does; return the proof."""
    eraser = SessionEraser(bus)
    (proof,) = await eraser.erase([(record.id, "t")], bus.clock.now_ms() + 10_000, prove=True)
    await SessionEnds(bus).forget(record.id, "t")
    return proof


async def cost(bus: Bus, hand: Hand) -> dict[str, int]:
    """Return the commands that the deletion of a session takes."""
    record = await lived(bus, hand, "rosebud")
    before = await calls(bus)
    proof = await deleted(bus, record)
    after = await calls(bus)
    assert await holding(bus, "rosebud", unique_of(record.id)) == []
    assert proof["removed"]["dead"] == 1
    return {
        name: after[name] - before.get(name, 0)
        for name in after
        if after[name] > before.get(name, 0)
    }


async def test_a_deletion_does_not_grow_with_the_store(bus: Bus, hand: Hand) -> None:
    """The same commands delete a session beside a hundred others and beside many; none walks over the keys."""
    await bus.connection.call("HSET", keys.INDEX, "since", 0, "letters", 0)
    await crowd(bus, 100)
    few = await cost(bus, hand)
    await crowd(bus, 1900 if PROFILE == "soak" else 400)
    assert await cost(bus, hand) == few
    assert "scan" not in few


async def test_rings_of_a_job_whose_record_is_gone(bus: Bus, hand: Hand) -> None:
    """Rings go although the job's record, which names the router, was removed after the delivery."""
    await bus.connection.call("HSET", keys.INDEX, "since", 0, "letters", 0)
    record = await lived(bus, hand, "rosebud")
    journal = Notifications(bus.connection, "r1")
    for family in (FAMILY, REQUESTS, EMBEDS):
        journal.listen(family)
        while not await bus.connection.call("ZSCORE", keys.journals(family), "r1"):
            pass
    await journal.stop()
    for job, request in (await Sessions(bus).jobs(record.id)).items():
        await bus.connection.call("UNLINK", *(keys.job(job), keys.log(job)))
        if request:
            await bus.connection.call("UNLINK", *(keys.job(request), keys.log(request)))
    assert await holding(bus, "rosebud")
    await deleted(bus, record)
    assert await holding(bus, "rosebud") == []


async def unindexed(bus: Bus, record: SessionRecord) -> None:
    """Take away what earlier versions did not write."""
    jobs = await Sessions(bus).jobs(record.id)
    for job, request in jobs.items():
        if job.startswith(EMBEDS.name):
            await bus.connection.call("HDEL", keys.jobs(record.id), job)
        for name in filter(None, (job, request)):
            await bus.connection.call("DEL", keys.claimed(name))
    for family in (FAMILY, REQUESTS, EMBEDS):
        await bus.connection.call("DEL", keys.letters(family), keys.journals(family))


async def test_what_an_earlier_version_left(bus: Bus, hand: Hand) -> None:
    """A session from before the indexes is deleted whole, right after the start and once its letters are indexed."""
    first, second = [await lived(bus, hand, text) for text in ("rosebud", "xanadu")]
    await unindexed(bus, first)
    await unindexed(bus, second)
    indexing = TraceIndex(bus)
    await indexing.begin()
    assert not await indexing.complete([first.id])
    await deleted(bus, first)
    assert await holding(bus, "rosebud", unique_of(first.id)) == []
    await indexing.run()
    assert not await indexing.complete([second.id])
    assert await indexing.complete([job_id(FAMILY, ulid(bus.clock.now_ms()))])
    await deleted(bus, second)
    assert await holding(bus, "xanadu", unique_of(second.id)) == []


async def test_old_sessions_are_not_walked_for_for_ever(bus: Bus, hand: Hand) -> None:
    """A day after the first start only letters are left of earlier versions: a walk is for those of stages."""
    record = await lived(bus, hand, "rosebud")
    await unindexed(bus, record)
    indexing = TraceIndex(bus)
    await bus.connection.call("HSET", keys.INDEX, "since", bus.clock.now_ms() + 1000 - OLD_MS)
    await indexing.run()
    old = job_id(FAMILY, ulid(bus.clock.now_ms() - 2 * OLD_MS))
    assert not await indexing.complete([old])
    await bus.connection.call("HSET", keys.INDEX, "since", bus.clock.now_ms() - OLD_MS)
    assert await indexing.complete([old])
    embed = child_id(job_id(REQUESTS, ulid()), EMBEDS, "embed", 0)
    await bus.connection.call("XADD", keys.dead(EMBEDS), "*", "job", embed)
    await indexing.index_letters()
    assert not await indexing.complete([old])


class Killed(BaseException):
    """The process that indexes is gone."""


@pytest.mark.parametrize("cut", range(12))
async def test_indexing_killed_anywhere(bus: Bus, hand: Hand, cut: int) -> None:
    """Indexing that was cut off goes on; until it is complete nothing is taken for indexed."""
    record = await lived(bus, hand, "rosebud")
    await unindexed(bus, record)
    call, left = bus.connection.call, cut

    async def failing(*command: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return await call(*command, **more)

    await TraceIndex(bus).begin()
    bus.connection.call = failing  # type: ignore[method-assign]
    try:
        await TraceIndex(bus).run()
    except Killed:
        bus.connection.call = call  # type: ignore[method-assign]
        assert not await TraceIndex(bus).complete([])
    bus.connection.call = call  # type: ignore[method-assign]
    await TraceIndex(bus).run()
    assert await TraceIndex(bus).complete([])
    (letter,) = await DeadLetters(bus).all(FAMILY)
    assert await bus.connection.call("HGET", keys.letters(FAMILY), letter.job) is not None
    assert await DeadLetters(bus).drop(letter.job)
    assert await DeadLetters(bus).all(FAMILY) == []


async def test_a_letter_of_an_earlier_version_can_be_dropped(bus: Bus, hand: Hand) -> None:
    """A dead letter that no index names is found all the same."""
    await lived(bus, hand, "rosebud")
    await bus.connection.call("DEL", keys.letters(FAMILY))
    (letter,) = await DeadLetters(bus).all(FAMILY)
    assert await DeadLetters(bus).drop(letter.job)
    assert not await DeadLetters(bus).drop(letter.job)
    assert await bus.connection.call("EXISTS", keys.letters(FAMILY)) == 0


async def test_a_sweep_does_not_walk(bus: Bus, hand: Hand) -> None:
    """The sweep of an expired session takes the same commands beside a hundred other sessions and beside a thousand."""
    await bus.connection.call("HSET", keys.INDEX, "since", 0, "letters", 0)
    costs = []
    for more in (100, 900):
        await crowd(bus, more)
        old = job_id(FAMILY, ulid(bus.clock.now_ms() - LONG_MS))
        record = await made(bus, FAMILY, id=old)
        await bus.connection.call("DEL", keys.session(record.id))
        before = await calls(bus)
        while not await Sweep(bus, SessionEraser(bus), 0.001).once():
            pass
        after = await calls(bus)
        costs.append({name: after[name] - before.get(name, 0) for name in after})
    assert costs[0].get("scan", 0) == 0
    assert costs[0] == costs[1]
