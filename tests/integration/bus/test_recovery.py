"""Nothing stays where nobody can use it: outages, lost deliveries, moves, and the reaper."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE

import msgspec
import pytest

from common import process_identity
from common.bus import Bus, keys
from common.errors import Conflict
from common.ids import Family, job_id, ulid
from common.redis.heartbeat import OVERDUE_S, Heartbeat
from common.registry.collections import Collections
from common.registry.idempotency import Idempotency
from common.wire.registry import CollectionRecord
from common.wire.search import Document, Write
from tests.support.bus import (
    RESULT,
    Hand,
    admit,
    differences,
    must,
    new_job,
    outcome,
    reached,
    state,
)

SAY = "from common import process_identity; print(process_identity.here())"


async def test_nobody_is_declared_dead_after_an_outage(bus: Bus, family: Family) -> None:
    """A reclaimer that has not itself reached Redis for one TTL settles nobody."""
    bad = await Hand(bus, family, "bad").join()
    await Hand(bus, family, "good").join()
    await must(bus, new_job(family), new_job(family, 2), prefer=None)
    await bad.pull()
    await bad.die()
    for seconds, settled in ((0.0, 0), (4.9, 0), (5.1, 1)):
        reached(bus, seconds)
        assert len(await bus.recovery.settle(family, "gpu", "good")) == settled
    bus.connection.policy.suspect()
    assert bus.connection.policy.reached_for() < 1


async def test_a_process_that_is_gone_is_not_waited_for(bus: Bus, family: Family) -> None:
    """Its leases are settled before its heartbeat lapses, and right after an outage; those of the living are not."""
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", SAY, stdout=PIPE)
    told, _ = await ended.communicate()
    gone, alive = Hand(bus, family, "gone"), Hand(bus, family, "alive")
    for hand, where in ((gone, told.decode().strip()), (alive, process_identity.here())):
        hand.record = msgspec.structs.replace(hand.record, place=where)
        await hand.join()
        await must(bus, new_job(family), prefer=None)
        assert len(await hand.pull()) == 1
    bus.connection.policy.suspect()
    done = await bus.recovery.settle(family, "gpu", "good")
    assert [(each.entry.holder, each.verdict) for each in done] == [("gone", "returned")]
    assert [record.worker for record in await bus.workers.living(family)] == ["alive"]


async def test_the_living_are_not_settled(bus: Bus, family: Family) -> None:
    """The script itself looks at the heartbeat: a worker that came back in between keeps its leases."""
    hand = await Hand(bus, family, "a").join()
    good = await Hand(bus, family, "good").join()
    await must(bus, new_job(family))
    (lease,) = await hand.pull()
    assert await good.settle() == []
    entries = [(e, False) for e in await bus.recovery.held_by(family, "gpu", "a", 10)]
    assert await bus.recovery._reclaim("settle", family, "gpu", "a", "good", entries) == []
    assert await hand.finish(lease, RESULT) == "ok"


async def test_the_dead_take_nothing(bus: Bus, family: Family) -> None:
    """A worker without a heartbeat is given no lease."""
    a, b = await Hand(bus, family, "a").join(), await Hand(bus, family, "b").join()
    await must(bus, new_job(family))
    await a.give_back(await a.pull())
    await b.die()
    assert await b.take() == []
    assert len(await a.take()) == 1


async def test_two_reclaimers(bus: Bus, family: Family) -> None:
    """Two that settle the same death at once charge it once, and one job goes to one taker."""
    bad = await Hand(bus, family, "bad").join()
    hands = [await Hand(bus, family, name).join() for name in ("a", "b", "c")]
    (job,) = await must(bus, new_job(family))
    await bad.pull()
    await bad.die()
    settled = await asyncio.gather(*(hand.settle() for hand in hands))
    assert sum(verdicts.count("returned") for verdicts in settled) == 1
    taken = await asyncio.gather(*(hand.take() for hand in hands))
    assert sum(1 for leases in taken for x in leases if not isinstance(x, str)) == 1
    found = await bus.jobs.get(job.id)
    assert found is not None
    assert found.suspicions == 1


async def test_lost_delivery(bus: Bus, family: Family) -> None:
    """A lease whose delivery was lost with a connection is found and handed over, uncharged, on every lane."""
    hand = await Hand(bus, family, "a").join()
    jobs = [*await must(bus, new_job(family)), *await must(bus, new_job(family), prefer="a")]
    (kept,) = await must(bus, new_job(family))
    for cls in ("gpu", "w.a"):
        command = ("XREADGROUP", "GROUP", "workers", "a", "COUNT", 1, "STREAMS")
        await bus.connection.blocking(*command, keys.lane(family, cls), ">")
    (lease,) = await hand.pull()
    for _ in range(2):
        await hand.reconcile()
    taken = [*await hand.take(5), *await hand.pull(5)]
    assert {lease.job for lease in taken} == {job.id for job in jobs}
    assert await hand.finish(lease, RESULT) == "ok"
    assert lease.job == kept.id
    assert await differences(bus, family) == []


async def test_a_failed_job_of_an_own_lane_comes_back(bus: Bus, family: Family) -> None:
    """What fails on an own lane is tried again, there."""
    hand = await Hand(bus, family, "a").join()
    (job,) = await must(bus, new_job(family), prefer="a")
    (lease,) = await hand.pull(1, "w.a")
    assert await hand.fail(lease, "x", "y") == "returned"
    (lease,) = await hand.take(1, "w.a")
    assert await hand.finish(lease, RESULT) == "ok"
    assert (await outcome(bus, job)).kind == "result"


async def test_move(bus: Bus, family: Family) -> None:
    """Unread entries move while the target has depth; what is read, cancelled or over stays where it is."""
    slow = await Hand(bus, family, "slow", "cpu").join()
    fast = await Hand(bus, family, "fast", "gpu", items=2).join()
    jobs = await must(bus, *(new_job(family) for _ in range(5)), classes=("cpu",))
    await slow.pull()
    await bus.control.cancel(jobs[1].id)
    moved = await bus.recovery.move(family, "cpu", "gpu", "fast")
    assert moved == [jobs[2].id, jobs[3].id]
    assert await bus.lanes.use(family) == {"cpu": (2, 20), "gpu": (2, 20)}
    assert (await admit(bus, new_job(family))).reason == "depth"
    leases = await fast.pull(5)
    assert [lease.job for lease in leases] == moved
    for lease in leases:
        assert await fast.finish(lease, RESULT) == "ok"
    await fast.die()
    assert await bus.recovery.move(family, "cpu", "gpu", "fast") == []
    assert await differences(bus, family) == []


async def test_reap(bus: Bus, family: Family) -> None:
    """Expired work nobody holds ends; dead consumers at pending 0 go; dead workers and their lanes are forgotten."""
    dead = await Hand(bus, family, "dead").join()
    good = await Hand(bus, family, "good").join()
    held = await must(bus, new_job(family))
    await dead.give_back(await dead.pull())
    await dead.die()
    assert len(await good.take(5)) == 1
    late = await must(bus, new_job(family), left_s=0.5)
    fine = await must(bus, new_job(family))
    await asyncio.sleep(0.55)
    ended, deleted, wrong = await bus.recovery.reap(family, ["gpu"])
    assert (ended, deleted, wrong) == (1, 1, [])
    assert (await outcome(bus, late[0])).kind == "expired"
    assert await state(bus, fine[0]) == "queued"
    assert list(good.held) == [held[0].id]
    assert [w.worker for w in await bus.workers.living(family)] == ["good"]
    assert await bus.connection.call("EXISTS", keys.lane(family, "w.dead")) == 0
    assert await bus.connection.call("EXISTS", keys.lane(family, "w.good")) == 1
    assert (await bus.recovery.reap(family, ["gpu"]))[:2] == (0, 0)


async def test_two_reapers(bus: Bus, family: Family) -> None:
    """What several find expired at the same moment ends once."""
    dead = await Hand(bus, family, "dead").join()
    good = await Hand(bus, family, "good").join()
    jobs = await must(bus, new_job(family), left_s=0.5)
    jobs += await must(bus, new_job(family), left_s=0.5, prefer="dead")
    await dead.die()
    await asyncio.sleep(0.55)
    reached(bus)
    reaping = (bus.recovery.reap(family, ["gpu"]) for _ in range(4))
    settling = (bus.recovery.settle_own_lane(family, "dead", "good", "gpu") for _ in range(4))
    await asyncio.gather(*reaping, *settling, good.settle())
    assert [(await outcome(bus, job)).kind for job in jobs] == ["expired"] * 2
    assert await differences(bus, family) == []


async def test_reap_keeps_a_dead_consumer_with_leases(bus: Bus, family: Family) -> None:
    """A consumer with leases is never deleted, for its leases would go with it."""
    dead = await Hand(bus, family, "dead").join()
    (job,) = await must(bus, new_job(family))
    await dead.pull()
    await dead.die()
    assert (await bus.recovery.reap(family, ["gpu"]))[1] == 0
    good = await Hand(bus, family, "good").join()
    assert await good.settle() == ["returned"]
    assert (await bus.recovery.reap(family, ["gpu"]))[1] == 1
    (lease,) = await good.take()
    assert lease.job == job.id


async def test_recount(bus: Bus, family: Family) -> None:
    """Use that differs from the streams is put right and reported: it would be a bug."""
    await Hand(bus, family, "g").join()
    await must(bus, new_job(family))
    await bus.connection.call("HSET", keys.use(family), "gpu:items", 7, "gpu:tokens", 10)
    assert await differences(bus, family) == ["gpu 7/10 1/10"]
    assert await differences(bus, family) == []


async def test_leaving_leaves_nothing(bus: Bus, family: Family) -> None:
    """A worker that leaves in order takes its record, heartbeat and empty own lane with it."""
    hand = await Hand(bus, family, "a").join()
    before = await bus.connection.call("EXISTS", keys.lane(family, "w.a"))
    await hand.drain()
    await hand.stop()
    assert before == 1
    for name in (keys.lane(family, "w.a"), keys.heart(family, "a"), keys.workers(family)):
        assert await bus.connection.call("EXISTS", name) == 0


async def test_claims(bus: Bus) -> None:
    """An idempotency key belongs to its first body and request; a refused request gives it back."""
    r = [job_id(Family("request"), ulid()) for _ in range(7)]
    assert await Idempotency(bus).claim("t", "k", b"hash", r[1]) == r[1]
    assert await Idempotency(bus).claim("t", "k", b"hash", r[1]) == r[1]
    assert await Idempotency(bus).claim("t", "k", b"hash", r[2]) == r[1]
    assert await Idempotency(bus).claim("other", "k", b"hash", r[3]) == r[3]
    with pytest.raises(Conflict) as caught:
        await Idempotency(bus).claim("t", "k", b"diff", r[4])
    assert caught.value.code == "idempotency_conflict"
    await Idempotency(bus).release("t", "k", r[2])
    assert await Idempotency(bus).claim("t", "k", b"hash", r[5]) == r[1]
    await Idempotency(bus).release("t", "k", r[1])
    assert await Idempotency(bus).claim("t", "k", b"diff", r[6]) == r[6]


async def test_collections(bus: Bus) -> None:
    """A name means one collection; creating again after a lost reply succeeds; what was removed stays removed."""
    first = CollectionRecord(id="a", tenant="t", name="n", dimension=3, metric="cosine")
    other = CollectionRecord(id="b", tenant="t", name="n", dimension=3, metric="cosine")
    assert await Collections(bus).create(first)
    assert await Collections(bus).create(first)
    assert not await Collections(bus).create(other)
    assert await Collections(bus).replace(first, other)
    assert not await Collections(bus).replace(first, other)
    assert await Collections(bus).get("t", "n") == other
    assert await Collections(bus).get("u", "n") is None
    await Collections(bus).remove(other)
    assert await Collections(bus).all() == []
    assert await Collections(bus).removed() == {"a", "b"}


async def test_writes(bus: Bus) -> None:
    """Writes are read in order by every replica, from where it stands; trimmed below every one's snapshot."""
    ids = []
    for index in range(5):
        document = Document(id=str(index), hash="h", chunks=[])
        write = Write(request="r", index=index, router="r1", upserts=[document])
        ids.append(await bus.writes.append("c", 0, write))
    found = await bus.writes.read({("c", 0): "0-0", ("c", 1): "0-0"})
    assert [entry for _, _, entry, _ in found] == ids
    assert [w.index for *_, w in found if isinstance(w, Write)] == list(range(5))
    later = await bus.writes.read({("c", 0): ids[2]})
    assert [entry for _, _, entry, _ in later] == ids[3:]
    for replica in ("one", "two"):
        await bus.writes.publish_applied("c", 0, replica, ids[4], ["r1"])
    await bus.writes.publish_snapshot("c", 0, "one", ids[3])
    assert len(await bus.writes.read({("c", 0): "0-0"})) == 5
    await bus.writes.publish_snapshot("c", 0, "two", ids[2])
    left = await bus.writes.read({("c", 0): "0-0"})
    assert [entry for _, _, entry, _ in left] == ids[2:]


async def test_three_partitions_at_once(bus: Bus, place: tuple[object, int]) -> None:
    """Partitions are families of their own, on a Cluster's different nodes: depth and leases never mix."""
    families = [Family("embed.test", n) for n in range(3)]
    hands = [await Hand(bus, f, f"w{f.partition}", items=2).join() for f in families]
    admitted = await asyncio.gather(*(admit(bus, new_job(f)) for f in families * 3))
    assert sorted(a.outcome for a in admitted) == ["admitted"] * 6 + ["refused"] * 3
    for hand in hands:
        for lease in await hand.pull(5):
            assert lease.job.split("~")[1] == str(hand.family.partition)
            assert await hand.finish(lease, RESULT) == "ok"
    assert [await bus.lanes.use(f) for f in families] == [{"gpu": (0, 0)}] * 3


async def test_scripts_are_loaded_again(bus: Bus, family: Family, tmp_path: object) -> None:
    """A server that forgot the scripts, as after a restart, is given them again."""
    await Hand(bus, family, "g").join()
    for call in bus.connection.callers():
        await call("SCRIPT", "FLUSH")
    await must(bus, new_job(family))


def test_pulse() -> None:
    """A heart is renewed while the loop turns or a step is within max(10 s, 5 x its predicted time)."""
    now = [0.0]
    pulse = Heartbeat("k", lambda: now[0])
    now[0] = OVERDUE_S + 1
    assert pulse.overdue  # neither a step nor a turn of the loop
    pulse.turn()
    assert not pulse.overdue
    pulse.working(4.0)
    now[0] += 19.0
    assert not pulse.overdue
    now[0] += 2.0
    assert pulse.overdue
    pulse.turn()
    assert pulse.overdue  # the loop turns, but the step hangs
    pulse.idle()
    assert not pulse.overdue


async def test_other_partition_is_not_ours(bus: Bus, family: Family) -> None:
    """The door of one family says nothing about another."""
    await Hand(bus, family, "g").join()
    stranger = Family("embed.other", family.partition)
    assert (await admit(bus, new_job(stranger))).reason == "no_worker"
