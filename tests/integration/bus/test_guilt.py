"""Who is charged for a death, who is convicted, and what must never charge anyone."""

from __future__ import annotations

from common.bus import Bus, JobState, NewJob, Notifications
from common.ids import Family
from common.registry.dead_letters import DeadLetters
from common.wire.results import Event
from tests.support.bus import RESULT, WORK, Hand, differences, must, new_job, outcome, state


async def known(bus: Bus, job: NewJob) -> JobState:
    """Return the record of a job that exists."""
    found = await bus.jobs.get(job.id)
    assert found is not None
    return found


async def test_three_errors(bus: Bus, family: Family) -> None:
    """Three own errors convict: dead letter with the last error and the job itself, and an error event."""
    hand = await Hand(bus, family, "g").join()
    (job,) = await must(bus, new_job(family))
    leases = await hand.pull()
    for number, verdict in enumerate(("returned", "returned", "dead")):
        assert await hand.fail(leases[0], "model_error", f"no {number}", "trace") == verdict
        leases = await hand.take()
    assert leases == []
    event = await outcome(bus, job)
    assert (event.kind, event.code, event.message) == ("dead", "model_error", "no 2")
    (letter,) = await DeadLetters(bus).all(family)
    assert (letter.job, letter.payload, letter.items, letter.tokens) == (job.id, WORK, 1, 10)
    assert (letter.code, letter.message, letter.trace) == ("model_error", "no 2", "trace")
    assert (letter.tenant, letter.attempts) == ("t", 3)
    assert await bus.lanes.use(family) == {"gpu": (0, 0)}
    assert await DeadLetters(bus).all() == [letter]
    assert await DeadLetters(bus).drop(job.id)
    assert not await DeadLetters(bus).drop(job.id)
    assert await DeadLetters(bus).all() == []


async def test_an_error_is_charged_once(bus: Bus, family: Family) -> None:
    """A failure reported again, its first reply lost, is not charged again."""
    hand = await Hand(bus, family, "g").join()
    (job,) = await must(bus, new_job(family))
    (lease,) = await hand.pull()
    assert await hand.fail(lease, "x", "y") == "returned"
    assert await hand.fail(lease, "x", "y") == "done"
    (lease,) = await hand.take()
    assert await hand.fail(lease, "x", "y") == "returned"
    assert await state(bus, job) == "queued"


async def test_a_death_suspects_all_its_leases(bus: Bus, family: Family) -> None:
    """A death charges one suspicion to each lease, none to what was queued; two suspicions run alone."""
    good = await Hand(bus, family, "good").join()
    jobs = await must(bus, *(new_job(family) for _ in range(3)))
    for death in range(2):
        bad = await Hand(bus, family, f"bad{death}").join()
        leases = await bad.take(2) if death else await bad.pull(2)
        assert len(leases) == 2
        await bad.die()
        assert await good.settle() == ["returned"] * 2
    assert [(await known(bus, job)).suspicions for job in jobs] == [2, 2, 0]
    assert await good.take(5) == ["waits", "waits"]
    (alone,) = await good.take(5, idle=True)
    assert alone.alone
    assert await good.take(5) == ["waits"]
    assert await good.finish(alone, RESULT) == "ok"
    (other,) = await good.take(5, idle=True)
    assert await good.finish(other, RESULT) == "ok"
    assert [(await outcome(bus, job)).kind for job in jobs[:2]] == ["result"] * 2
    assert await differences(bus, family) == []


async def test_an_idle_worker_takes_one_alone_or_several_others(bus: Bus, family: Family) -> None:
    """A suspected job is never taken in one go with others."""
    good = await Hand(bus, family, "good").join()
    innocent, suspected = await must(bus, new_job(family), new_job(family))
    (first, second) = await good.pull(2)
    await good.give_back([first, second])
    await bus.connection.call("HSET", f"{{{family}}}:job:{suspected.id}", "suspicions", 2)
    leases = await good.take(5, idle=True)
    assert [x if isinstance(x, str) else x.job for x in leases] == [innocent.id, "waits"]


async def killed_alone(bus: Bus, family: Family, good: Hand, name: str) -> list[str]:
    """Let a worker take the suspected job alone and die of it."""
    bad = await Hand(bus, family, name).join()
    (lease,) = await bad.take(1, idle=True)
    assert lease.alone
    await bad.die()
    return await good.settle()


async def test_three_deaths_alone(bus: Bus, family: Family) -> None:
    """Two suspicions, then three deaths alone without one event: convicted, and only then."""
    good = await Hand(bus, family, "good").join()
    (job,) = await must(bus, new_job(family))
    for death in range(2):
        bad = await Hand(bus, family, f"bad{death}").join()
        await (bad.take() if death else bad.pull())
        await bad.die()
        assert await good.settle() == ["returned"]
    verdicts = [await killed_alone(bus, family, good, f"alone{n}") for n in range(3)]
    assert verdicts == [["returned"], ["returned"], ["dead"]]
    event = await outcome(bus, job)
    assert (event.kind, event.code) == ("dead", "job_failed")
    (letter,) = await DeadLetters(bus).all(family)
    assert letter.attempts == 5
    assert await bus.lanes.use(family) == {"gpu": (0, 0)}


async def test_progress_clears(bus: Bus, family: Family) -> None:
    """One logged event clears suspicions and deaths alone; that life's death is a first suspicion again."""
    good = await Hand(bus, family, "good").join()
    (job,) = await must(bus, new_job(family))
    for death in range(2):
        bad = await Hand(bus, family, f"bad{death}").join()
        await (bad.take() if death else bad.pull())
        await bad.die()
        await good.settle()
    for n in range(2):
        assert await killed_alone(bus, family, good, f"alone{n}") == ["returned"]
    last = await Hand(bus, family, "last").join()
    (lease,) = await last.take(1, idle=True)
    assert await last.step([lease], {job.id: Event(index=0, kind="progress")}) == set()
    assert (await known(bus, job)).suspicions == 0
    await last.die()
    assert await good.settle() == ["returned"]
    assert (await known(bus, job)).suspicions == 1
    (lease,) = await good.take()
    assert not lease.alone
    assert await good.finish(lease, RESULT, index=1) == "ok"


async def test_hand_over_is_free(bus: Bus, family: Family) -> None:
    """However often a job is handed over, it is charged nothing."""
    hands = [await Hand(bus, family, name).join() for name in ("a", "b")]
    (job,) = await must(bus, new_job(family))
    leases = await hands[0].pull()
    for turn in range(8):
        await hands[turn % 2].give_back(leases)
        leases = await hands[1 - turn % 2].take()
    assert (await known(bus, job)).suspicions == 0
    assert leases[0].epoch == 9
    assert await hands[0].finish(leases[0], RESULT) == "ok"


async def test_a_lost_heartbeat_is_free_for_who_returns(bus: Bus, family: Family) -> None:
    """A worker that finds its heartbeat gone begins anew under another name and hands over uncharged."""
    hand = await Hand(bus, family, "gpu-x").join()
    shared, own = await must(bus, new_job(family)), await must(bus, new_job(family), prefer="gpu-x")
    await hand.pull()
    await hand.pull(1, "w.gpu-x")
    was = hand.worker
    await hand.die()
    await hand.revive()
    assert hand.worker != was
    assert hand.generation == 1
    assert dict(hand.held) == {}
    jobs = {lease.job for lease in await hand.take(5)} | {x.job for x in await hand.pull(5)}
    assert jobs == {shared[0].id, own[0].id}
    assert [(await known(bus, job)).suspicions for job in (*shared, *own)] == [0, 0]
    assert await differences(bus, family) == []


async def test_own_lane_of_the_dead(bus: Bus, family: Family) -> None:
    """A dead worker's own lane, read, handed over and unread, moves to the lane it served; then it is gone.

    The jobs are no longer fresh there: the dead worker may have logged events.
    """
    bad = await Hand(bus, family, "bad", "gpu").join()
    good = await Hand(bus, family, "good", "cpu").join()
    jobs = await must(bus, *(new_job(family) for _ in range(3)), prefer="bad")
    first, returned = await bad.pull(2, "w.bad")
    assert first.fresh
    await bus.recovery.hand_over(family, "w.bad", "bad", [returned.job])
    await bad.die()
    await good.settle()
    moved = await bus.recovery.settle_own_lane(family, "bad", "good", "cpu")
    assert sorted(v.verdict for v in moved) == ["moved"] * 3
    assert [(await known(bus, job)).suspicions for job in jobs] == [1, 0, 0]
    assert await bus.lanes.use(family) == {"gpu": (3, 30), "w.bad": (0, 0)}
    assert await differences(bus, family) == []
    assert await differences(bus, family) == []
    assert (await bus.lanes.use(family))["gpu"] == (3, 30)
    assert "w.bad" not in await bus.lanes.use(family)
    other = await Hand(bus, family, "other", "gpu").join()
    leases = await other.pull(5)
    assert {lease.job for lease in leases} == {job.id for job in jobs}
    assert not any(lease.fresh for lease in leases)
    for lease in leases:
        assert await other.finish(lease, RESULT) == "ok"


async def test_expired_at_recovery(bus: Bus, family: Family) -> None:
    """What a dead worker held and whose deadline has passed ends as expired, uncharged."""
    bad = await Hand(bus, family, "bad").join()
    good = await Hand(bus, family, "good").join()
    (job,) = await must(bus, new_job(family))
    assert await bad.pull()
    await bad.die()
    # Not waited for: on a busy machine no time is short enough and yet long enough to read the job in.
    await bus.connection.call(
        "HSET", f"{{{family}}}:job:{job.id}", "deadline", bus.clock.now_ms() - 1
    )
    assert await good.settle() == ["expired"]
    assert (await outcome(bus, job)).kind == "expired"
    journal = Notifications(bus.connection, "r1")
    assert (await journal.end(job.id, bus.clock.now_ms() + 2000)).code == "deadline_exceeded"
    await journal.stop()
