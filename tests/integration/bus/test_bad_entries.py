"""Entries of lanes that cannot be read become dead letters, wherever they are met, and hold nothing up."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from common.bus import Bus, Notifications, keys
from common.bus.keys import RETURNED
from common.bus.recovery import BATCH
from common.ids import Family, family_of
from common.registry.dead_letters import DeadLetters
from common.registry.deletion import Deletions, digest_of
from common.wire.search import Write
from tests.integration.supervision.poison import LOG_POISON, STREAM_POISON, lane_poison
from tests.support.bus import RESULT, Hand, admit, differences, must, new_job, outcome, state
from tests.support.servers import Cluster, Server

KINDS = sorted(lane_poison(Family("embed.test")))
# Whose fields are sound: only their missing record tells that they are no jobs.
UNKNOWN = [kind for kind in KINDS if kind.endswith("of no job")]
UNREADABLE = [kind for kind in KINDS if kind not in UNKNOWN]


async def poison(bus: Bus, family: Family, kind: str, cls: str = "gpu") -> str:
    """Put one bad entry on a lane; its id."""
    fields = lane_poison(family)[kind]
    entry: bytes = await bus.connection.call("XADD", keys.lane(family, cls), "*", *fields)
    return entry.decode()


async def convicted(bus: Bus, family: Family, cls: str = "gpu") -> None:
    """Check that one dead letter was made, bounded in size, and that the lane is empty and its use right."""
    (letter,) = await DeadLetters(bus).all(family)
    assert letter.code == "bad_entry"
    assert family_of(letter.job) == family
    assert len(letter.payload) <= 8192
    assert await bus.connection.call("XLEN", keys.lane(family, cls)) == 0
    assert await bus.lanes.pending(family, cls) == {}
    assert await differences(bus, family) == []


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", UNREADABLE)
async def test_read(bus: Bus, family: Family, kind: str) -> None:
    """A worker that reads a bad entry convicts it, and gets the job behind it in the same reading."""
    hand = await Hand(bus, family, "w").join()
    await poison(bus, family, kind)
    (job,) = await must(bus, new_job(family))

    (lease,) = await hand.pull(10)
    assert lease.job == job.id
    assert [x.code for x in await DeadLetters(bus).all(family)] == ["bad_entry"]
    assert await bus.lanes.use(family) == {"gpu": (1, 10)}

    await hand.give_back([lease])
    assert await bus.control.cancel(job.id) == "removed"
    await convicted(bus, family)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", UNREADABLE)
async def test_held_by_the_dead(bus: Bus, family: Family, kind: str) -> None:
    """A bad entry that died in somebody's hands is convicted by whoever settles what the dead one held."""
    hand = await Hand(bus, family, "w").join()
    await Hand(bus, family, "dead").join()
    await poison(bus, family, kind)
    lane = keys.lane(family, "gpu")
    await bus.connection.call("XREADGROUP", "GROUP", keys.GROUP, "dead", "STREAMS", lane, ">")
    await bus.connection.call("DEL", keys.heart(family, "dead"))

    await hand.settle()

    await convicted(bus, family)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", UNREADABLE)
async def test_handed_over(bus: Bus, family: Family, kind: str) -> None:
    """A bad entry that was handed over is convicted by whoever would take it."""
    hand = await Hand(bus, family, "w").join()
    entry = await poison(bus, family, kind)
    lane = keys.lane(family, "gpu")
    await bus.connection.call("XREADGROUP", "GROUP", keys.GROUP, "other", "STREAMS", lane, ">")
    await bus.connection.call("XCLAIM", lane, keys.GROUP, RETURNED, 0, entry, "JUSTID")

    assert await hand.take(5) == []

    await convicted(bus, family)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("how", ["moved", "own lane of the dead", "reaped"])
async def test_unread(bus: Bus, family: Family, kind: str, how: str) -> None:
    """A bad entry nobody has read is convicted by who moves the lane's entries, or looks for expired ones."""
    hand = await Hand(bus, family, "w").join()
    cls = "gpu"
    if how == "own lane of the dead":
        dead = await Hand(bus, family, "dead").join()
        cls = keys.own("dead")
        await dead.die()
    await poison(bus, family, kind, cls)

    if how == "moved":
        assert await bus.recovery.move(family, "gpu", "cpu", "w") == []
    elif how == "reaped":
        await differences(bus, family)
    else:
        await hand.settle()  # time has passed, says the hand
        await bus.recovery.settle_own_lane(family, "dead", "w", "gpu")

    await convicted(bus, family, cls)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.parametrize("how", ["failed", "told of", "handed over", "settled"])
async def test_no_job(bus: Bus, family: Family, kind: str, how: str) -> None:
    """An entry of a job nobody admitted is convicted when its worker has anything to say of it, or dies."""
    hand = await Hand(bus, family, "w").join()
    await poison(bus, family, kind)
    (lease,) = await hand.pull(5)

    if how == "failed":
        assert await hand.fail(lease, "x", "y") == "bad"
    elif how == "told of":
        assert await hand.step([lease]) == {lease.job}
        assert not hand.held
        await hand.hand_over("gpu", "w", [lease.job])  # as a delivery that was lost
    elif how == "handed over":
        await hand.give_back([lease])
    else:
        other = await Hand(bus, family, "other").join()
        await hand.die()
        await other.settle()

    assert not hand.held or how == "settled"
    await convicted(bus, family)
    assert await bus.jobs.get(lease.job) is None
    assert not await bus.connection.call("EXISTS", keys.job(lease.job))


async def test_a_job_ends_with_its_entry(bus: Bus, family: Family) -> None:
    """A job whose entry was damaged on its lane ends at once, as dead, and its use is given back."""
    hand = await Hand(bus, family, "w").join()
    (job,) = await must(bus, new_job(family))
    lane = keys.lane(family, "gpu")
    (found,) = await bus.connection.call("XRANGE", lane, "-", "+")
    entry, flat = found
    fields = dict(zip(flat[::2], flat[1::2], strict=True)) | {b"i": b"many"}
    await bus.connection.call("DEL", lane)
    await bus.connection.call("XADD", lane, entry, *[x for pair in fields.items() for x in pair])
    await bus.connection.call("XGROUP", "CREATE", lane, keys.GROUP, "0")

    assert await hand.pull(5) == []

    event = await outcome(bus, job)
    assert (event.kind, event.code) == ("dead", "bad_entry")
    assert await state(bus, job) == "dead"
    await convicted(bus, family)


async def test_many(bus: Bus, family: Family) -> None:
    """More bad entries than are looked at in one go neither hide nor delay the jobs among them."""
    hand = await Hand(bus, family, "w").join()
    jobs = []
    for kind in 20 * UNREADABLE:
        await poison(bus, family, kind)
        if kind == UNREADABLE[0]:
            jobs += await must(bus, new_job(family))

    leases = await hand.pull(1000)

    assert [lease.job for lease in leases] == [job.id for job in jobs]
    letters = await DeadLetters(bus).all(family)
    assert len(letters) == 20 * len(UNREADABLE)


def range_reads(server: Server | Cluster) -> int:
    """Return how many ranges of streams a server has read since it started."""
    total = 0
    for node in server.servers if isinstance(server, Cluster) else [server]:
        stats = node.command("INFO", "commandstats")
        total += stats.get("cmdstat_xrange", {"calls": 0})["calls"]
    return total


async def test_a_lane_is_counted_once(bus: Bus, family: Family, place: Any) -> None:
    """Convicting many entries reads the lane once a call, not once an entry: Redis answers others meanwhile."""
    server, count = place[0], 3 * BATCH
    hand = await Hand(bus, family, "w").join()
    for _ in range(count):
        await poison(bus, family, UNREADABLE[0])
    before = range_reads(server)

    await hand.pull(count)

    assert len(await DeadLetters(bus).all(family)) == count
    assert await bus.lanes.use(family) == {"gpu": (0, 0)}
    assert range_reads(server) - before <= count + 20


async def test_bad_dead_letters(bus: Bus, family: Family) -> None:
    """Nonsense among the dead letters is passed over by who lists or drops them."""
    hand = await Hand(bus, family, "w").join()
    await bus.connection.call("XADD", keys.dead(family), "*", "x", "y")
    await bus.connection.call("XADD", keys.dead(family), "*", "job", b"\xff", "items", "many")
    (job,) = await must(bus, new_job(family))
    for _ in range(3):
        (lease,) = await hand.pull() + await hand.take()
        await hand.fail(lease, "job_failed", "it raised")

    assert [x.job for x in await DeadLetters(bus).all(family)] == [job.id]
    assert await DeadLetters(bus).drop(job.id)
    assert await DeadLetters(bus).all(family) == []
    assert (await admit(bus, new_job(family))).outcome == "admitted"


async def test_log(bus: Bus, family: Family) -> None:
    """Nonsense in a job's log is passed over by whoever reads the log, and by who waits for its end."""
    hand = await Hand(bus, family, "w").join()
    (job,) = await must(bus, new_job(family))
    (lease,) = await hand.pull()
    assert await hand.finish(lease, RESULT) == "ok"
    for item in 10 * LOG_POISON:
        await bus.connection.call("LPUSH", keys.log(job.id), item)
        await bus.connection.call("RPUSH", keys.log(job.id), item)

    (event,) = await bus.jobs.log(job.id)
    journal = Notifications(bus.connection, "another")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(journal.stop)
        assert await journal.end(job.id, bus.clock.now_ms() + 60_000) == event
    assert event.kind == "result"


async def test_journal(bus: Bus, family: Family) -> None:
    """A router hears a ring behind nonsense in its journal without a look at the log."""
    hand = await Hand(bus, family, "w").join()
    journal = Notifications(bus.connection, "r1")
    try:
        (job,) = await must(bus, new_job(family))
        bell = journal.bell(job.id, family)
        for fields in STREAM_POISON:
            await bus.connection.call("XADD", keys.journal(family, "r1"), "*", *fields)
        (lease,) = await hand.pull()
        await hand.finish(lease, RESULT)

        event = await bell.wait(60.0)
        bell.close()

        assert event is not None
        assert event.kind == "result"
    finally:
        await journal.stop()


async def test_forgets(bus: Bus, family: Family) -> None:
    """Bad entries of the stream of deletions are told as such, so that a worker goes on behind them."""
    for fields in STREAM_POISON:
        await bus.connection.call("XADD", keys.forgets(family), "*", *fields)
    session = new_job(family).id
    await Deletions(bus).announce(session, [b"p" * 16])

    *bad, good = await Deletions(bus).read(family, "0-0")

    assert [(each.session, each.ids) for each in bad] == len(STREAM_POISON) * [(b"", [])]
    assert (good.session, good.ids) == (digest_of(session), [b"p" * 16])


async def test_writes(bus: Bus) -> None:
    """Bad entries of a shard's writes come as such, in order, so that a replica counts them and goes on."""
    name = keys.writes(bus.writes.search_family("c"), "c", 0)
    for fields in STREAM_POISON:
        await bus.connection.call("XADD", name, "*", *fields)
    write = Write(request="r", index=0, router="r1")
    entry = await bus.writes.append("c", 0, write)

    *bad, good = await bus.writes.read({("c", 0): "0-0"})

    assert [isinstance(each[3], ValueError) for each in bad] == len(STREAM_POISON) * [True]
    assert good == ("c", 0, entry, write)
