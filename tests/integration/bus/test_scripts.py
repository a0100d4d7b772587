"""What each script promises, on every server: admission, leases, logs, cancelling."""

from __future__ import annotations

import msgspec
import pytest

from common.bus import Bus, Notifications, keys
from common.errors import InvalidRequest
from common.ids import Family
from common.registry.dead_letters import DeadLetters
from common.wire.results import Event
from tests.support.bus import RESULT, Hand, admit, differences, must, new_job, outcome, state


async def test_nobody_there(bus: Bus, family: Family) -> None:
    """Without a living worker of any class nothing is admitted, and nothing is left behind."""
    job = new_job(family)
    refused = await admit(bus, job)
    assert (refused.outcome, refused.reason) == ("refused", "no_worker")
    assert refused.retry_after_s > 0
    assert await bus.jobs.get(job.id) is None
    hand = await Hand(bus, family, "w1").join()
    assert (await admit(bus, job)).outcome == "admitted"  # although the roster was read just before
    await hand.die()
    assert (await admit(bus, new_job(family))).reason == "no_worker"


async def test_depth(bus: Bus, family: Family) -> None:
    """What a lane holds never exceeds its workers' depth, in items and in tokens; then the next class, then no."""
    await Hand(bus, family, "g", "gpu", items=3, tokens=100).join()
    await Hand(bus, family, "c", "cpu", items=2, tokens=1000).join()
    lanes = [await admit(bus, new_job(family), classes=("gpu", "cpu")) for _ in range(6)]
    assert [a.lane for a in lanes] == ["gpu"] * 3 + ["cpu"] * 2 + [""]
    assert lanes[-1].reason == "depth"
    assert lanes[2].held == (3, 30)
    assert lanes[2].depth == (3, 100)
    assert await bus.lanes.use(family) == {"cpu": (2, 20), "gpu": (3, 30)}
    assert await differences(bus, family) == []


async def test_depth_in_tokens(bus: Bus, family: Family) -> None:
    """Tokens bound a lane as items do."""
    await Hand(bus, family, "g", items=100, tokens=25).join()
    assert [(await admit(bus, new_job(family))).reason for _ in range(3)] == ["", "", "tokens"]


async def test_deadline(bus: Bus, family: Family) -> None:
    """A job that could not be finished in time is refused with how late it would be."""
    hand = Hand(bus, family, "g")
    hand.record = msgspec.structs.replace(hand.record, alpha_items_s=1.0, beta_s=0.5)
    await hand.join()
    assert (await admit(bus, new_job(family), left_s=1.6)).outcome == "admitted"
    late = await admit(bus, new_job(family), left_s=1.6)
    assert late.reason == "deadline"
    assert late.retry_after_s == pytest.approx(0.9, abs=0.1)
    assert (await admit(bus, new_job(family), left_s=-1)).reason == "deadline"


async def test_all_or_none(bus: Bus, family: Family) -> None:
    """Several jobs are admitted together or not at all."""
    await Hand(bus, family, "g", items=3).join()
    jobs = [new_job(family) for _ in range(4)]
    assert (await admit(bus, *jobs)).reason == "depth"
    assert [await bus.jobs.get(job.id) for job in jobs] == [None] * 4
    assert (await admit(bus, *jobs[:3])).outcome == "admitted"
    assert await bus.lanes.use(family) == {"gpu": (3, 30)}


async def test_admission_is_idempotent(bus: Bus, family: Family) -> None:
    """Admitting a job again, after a lost reply or by another router, finds it and adds nothing."""
    hand = await Hand(bus, family, "g", items=1).join()
    (job,) = await must(bus, new_job(family))
    again = await admit(bus, job)
    assert (again.outcome, again.lane) == ("exists", "gpu")
    (lease,) = await hand.pull()
    await hand.finish(lease, RESULT)
    assert (await admit(bus, job)).outcome == "exists"
    assert await bus.lanes.use(family) == {"gpu": (0, 0)}


async def test_a_view_comes_with_the_job(bus: Bus, family: Family) -> None:
    """What shows a job's result is known from its admission on, to whoever asks, whatever its bytes."""
    await Hand(bus, family, "g").join()
    bare, shown = new_job(family), new_job(family)._replace(view=b"\xff\x00")
    await must(bus, bare, shown)
    assert [await bus.jobs.view(job.id) for job in (bare, shown)] == [None, b"\xff\x00"]
    assert await state(bus, shown) == "queued"


async def test_preferred_lane(bus: Bus, family: Family) -> None:
    """A living preferred worker's own lane is taken while it has room; then the shared lane."""
    hand = await Hand(bus, family, "a", items=2).join()
    await Hand(bus, family, "b", items=2).join()
    lanes = [(await admit(bus, new_job(family), prefer="a")).lane for _ in range(5)]
    assert lanes == ["w.a", "w.a", "gpu", "gpu", ""]
    assert await hand.pull(5, "w.a")
    assert (await admit(bus, new_job(family), prefer="nobody")).outcome == "refused"
    await hand.die()
    assert await differences(bus, family) == []


async def test_preference_has_a_price(bus: Bus, family: Family) -> None:
    """The own lane is not worth waiting for if the shared one is sooner by more than its value."""
    hand = Hand(bus, family, "a")
    hand.record = msgspec.structs.replace(hand.record, alpha_items_s=1.0)
    await hand.join()
    other = Hand(bus, family, "b")
    other.record = msgspec.structs.replace(other.record, alpha_items_s=1.0)
    await other.join()
    lanes = [(await admit(bus, new_job(family), prefer="a", value_s=1.2)).lane for _ in range(4)]
    assert lanes == ["w.a", "w.a", "w.a", "gpu"]


async def test_what_the_preferred_took_elsewhere_counts(bus: Bus, family: Family) -> None:
    """A worker busy with the shared lane's jobs is no sooner than one with as many of its own."""
    hands = []
    for name in ("a", "b"):
        hand = Hand(bus, family, name)
        hand.record = msgspec.structs.replace(hand.record, alpha_items_s=1.0)
        hands.append(await hand.join())
    shared = await must(bus, *(new_job(family) for _ in range(3)))
    assert (await admit(bus, new_job(family), prefer="a", value_s=0.2)).lane == "w.a"
    assert len(await hands[0].pull(3)) == len(shared)
    assert (await admit(bus, new_job(family), prefer="a", value_s=0.2)).lane == "gpu"
    assert (await admit(bus, new_job(family), prefer="a", value_s=9.0)).lane == "w.a"
    assert await differences(bus, family) == []


async def test_draining_depth(bus: Bus, family: Family) -> None:
    """A draining worker's depth counts no more, and its leases go to others, uncharged."""
    a = await Hand(bus, family, "a", items=2).join()
    b = await Hand(bus, family, "b", items=2).join()
    jobs = await must(bus, new_job(family), new_job(family))
    (own,) = await must(bus, new_job(family), prefer="a")
    await a.pull(2)
    await a.pull(1, "w.a")
    await a.drain()
    assert (await admit(bus, new_job(family))).reason == "depth"
    taken = await b.take(5)
    assert {lease.job for lease in taken} == {job.id for job in jobs}
    assert [lease.attempts for lease in taken] == [2, 2]
    assert [lease.job for lease in await b.pull()] == [own.id]
    states = [await bus.jobs.get(job.id) for job in [*jobs, own]]
    assert [s.suspicions for s in states if s] == [0, 0, 0]
    assert await differences(bus, family) == []


async def test_draining_refusal_is_not_about_the_dead(bus: Bus, family: Family) -> None:
    """When the last worker drains, the class has no worker."""
    a = await Hand(bus, family, "a").join()
    await a.drain()
    assert (await admit(bus, new_job(family))).reason == "no_worker"


async def test_result(bus: Bus, family: Family) -> None:
    """A finished job has its result as its last event, frees its use at once, and says so again when asked again."""
    hand = await Hand(bus, family, "g").join()
    (job,) = await must(bus, new_job(family))
    assert await state(bus, job) == "queued"
    (lease,) = await hand.pull()
    assert lease.attempts == 1
    assert await hand.step([lease]) == set()
    assert await state(bus, job) == "running"
    assert await hand.finish(lease, RESULT) == "ok"
    assert await hand.finish(lease, RESULT) == "done"  # as after a lost reply
    assert (await outcome(bus, job)).kind == "result"
    assert await state(bus, job) == "result"
    assert await bus.lanes.use(family) == {"gpu": (0, 0)}
    assert await bus.connection.call("XLEN", keys.lane(family, "gpu")) == 0
    assert await bus.connection.call("PTTL", keys.log(job.id)) > 600_000


async def test_a_job_without_tokens(bus: Bus, family: Family) -> None:
    """A job may count as no tokens, as a request of several jobs does."""
    hand = await Hand(bus, family, "g").join()
    await must(bus, new_job(family, tokens=0))
    (lease,) = await hand.pull()
    assert await hand.finish(lease, RESULT) == "ok"
    assert await bus.lanes.use(family) == {"gpu": (0, 0)}


async def test_error(bus: Bus, family: Family) -> None:
    """A refused job ends with the error's code, not with a dead letter."""
    hand = await Hand(bus, family, "g").join()
    (job,) = await must(bus, new_job(family))
    (lease,) = await hand.pull()
    await hand.refuse(lease, InvalidRequest("no such thing", code="invalid_value"))
    event = await outcome(bus, job)
    assert (event.kind, event.code) == ("error", "invalid_value")
    assert await DeadLetters(bus).all(family) == []


async def test_queued(bus: Bus, family: Family) -> None:
    """What waits on a lane is counted in jobs, however many items each has."""
    hand = await Hand(bus, family, "g").join()
    await must(bus, *(new_job(family, items=5) for _ in range(3)))
    leases = await hand.pull(2)
    lane = (await bus.lanes.states(family))["gpu"]
    assert (lane.items, lane.pending, lane.queued) == (15, 2, 1)
    await hand.give_back(leases[:1])
    lane = (await bus.lanes.states(family))["gpu"]
    assert (lane.pending, lane.queued) == (2, 2)
    for lease in await hand.take() + await hand.pull(3) + leases[1:]:
        await hand.finish(lease, RESULT)
    lane = (await bus.lanes.states(family))["gpu"]
    assert (lane.items, lane.pending, lane.queued) == (0, 0, 0)


async def test_zombie(bus: Bus, family: Family) -> None:
    """A worker that lost its leases can neither emit, nor finish, nor fail; it learns so at its next step or beat."""
    zombie = await Hand(bus, family, "z").join()
    good = await Hand(bus, family, "g").join()
    (job,) = await must(bus, new_job(family))
    (lease,) = await zombie.pull()
    await zombie.die()
    assert await good.settle() == ["returned"]
    (taken,) = await good.take()
    assert taken.epoch == 2
    assert await zombie.beat() == ["gone"]
    event = Event(index=0, kind="progress", data=b"zombie")
    assert await zombie.step([lease], {lease.job: event}) == {job.id}
    assert await zombie.finish(lease, RESULT) == "fenced"
    assert await zombie.fail(lease, "x", "y") == "fenced"
    assert await bus.jobs.log(job.id) == []
    assert await good.finish(taken, RESULT) == "ok"
    assert (await outcome(bus, job)).kind == "result"


async def test_same_worker_other_epoch(bus: Bus, family: Family) -> None:
    """A lease given back and taken again is another lease: the first one's epoch is refused."""
    hand = await Hand(bus, family, "a").join()
    (job,) = await must(bus, new_job(family))
    (first,) = await hand.pull()
    await hand.give_back([first])
    (second,) = await hand.take()
    assert (first.epoch, second.epoch) == (1, 2)
    assert await hand.step([first]) == {job.id}
    assert await hand.finish(first, RESULT) == "fenced"
    assert second.job in hand.held
    assert await hand.finish(second, RESULT) == "ok"


async def test_emit_index_fence(bus: Bus, family: Family) -> None:
    """An event enters the log only at its index; the same again is taken for a lost reply; another is refused."""
    hand = await Hand(bus, family, "g").join()
    (job,) = await must(bus, new_job(family))
    (lease,) = await hand.pull()
    for index in (0, 0, 1, 1):
        event = Event(index=index, kind="progress", data=b"%d" % index)
        assert await hand.step([lease], {job.id: event}) == set()
    assert [e.data for e in await bus.jobs.log(job.id)] == [b"0", b"1"]
    skipped = Event(index=3, kind="progress")
    assert await hand.step([lease], {job.id: skipped}) == {job.id}
    found = await bus.jobs.get(job.id)
    assert found is not None
    assert (found.state, len(await bus.jobs.log(job.id))) == ("queued", 2)
    (again,) = await hand.take()
    assert await hand.finish(again, RESULT) == "ok"  # wherever the log ends
    assert (await outcome(bus, job)).index == 2


async def test_emit_another_event_at_an_index(bus: Bus, family: Family) -> None:
    """Another event at the last index is not a repetition: it is refused, not lost in silence."""
    hand = await Hand(bus, family, "g").join()
    (job,) = await must(bus, new_job(family))
    (lease,) = await hand.pull()
    await hand.step([lease], {job.id: Event(index=0, kind="progress", data=b"a")})
    other = Event(index=0, kind="progress", data=b"b")
    assert await hand.step([lease], {job.id: other}) == {job.id}
    assert [e.data for e in await bus.jobs.log(job.id)] == [b"a"]


async def test_fold(bus: Bus, family: Family) -> None:
    """A folded log holds one event, whose index goes on counting; a reader from the start sees it and goes on."""
    hand = await Hand(bus, family, "g").join()
    (job,) = await must(bus, new_job(family))
    (lease,) = await hand.pull()
    for index in range(3):
        await hand.step([lease], {job.id: Event(index=index, kind="progress", data=b"x")})
    whole = Event(index=3, kind="progress", data=b"xxxx")
    assert await hand.step([lease], {job.id: whole}, fold=True) == set()
    assert await hand.step([lease], {job.id: whole}, fold=True) == set()
    assert await bus.jobs.log(job.id) == [whole]
    assert await hand.finish(lease, RESULT, index=4) == "ok"
    journal = Notifications(bus.connection, "r1")
    seen = [e.index async for e in journal.events(job.id, 0, bus.clock.now_ms() + 5000)]
    await journal.stop()
    assert seen == [3, 4]


async def test_steps_of_many_jobs(bus: Bus, family: Family) -> None:
    """One step carries the events of many jobs, some with none, each judged alone."""
    hand = await Hand(bus, family, "g").join()
    jobs = await must(bus, *(new_job(family) for _ in range(5)))
    leases = [lease for _ in jobs for lease in await hand.pull()]
    events = {j.id: Event(index=0, kind="progress", data=j.id.encode()) for j in jobs[::2]}
    await bus.control.cancel(jobs[1].id)
    assert await hand.step(leases, events) == {jobs[1].id}
    assert [len(await bus.jobs.log(job.id)) for job in jobs] == [1, 1, 1, 0, 1]
    assert (await outcome(bus, jobs[1])).kind == "cancelled"


async def test_cancel(bus: Bus, family: Family) -> None:
    """Cancelling removes a job nobody took; flags one that runs, which ends at the next step; else says so."""
    hand = await Hand(bus, family, "g").join()
    queued, running, done = await must(bus, new_job(family), new_job(family), new_job(family))
    assert await bus.control.cancel(queued.id) == "removed"
    assert (await outcome(bus, queued)).kind == "cancelled"
    leases = [lease for _ in range(2) for lease in await hand.pull()]
    assert await bus.control.cancel(running.id) == "flagged"
    assert await hand.beat() == ["ok", running.id]
    assert await hand.step(leases) == {running.id}
    assert (await outcome(bus, running)).kind == "cancelled"
    assert await bus.control.cancel(running.id) == "over"
    assert await hand.finish(leases[1], RESULT) == "ok"
    assert await bus.control.cancel(done.id) == "over"
    assert await bus.control.cancel(new_job(family).id) == "unknown"
    assert await differences(bus, family) == []
    assert await bus.lanes.use(family) == {"gpu": (0, 0)}


async def test_cancel_outruns_everything(bus: Bus, family: Family) -> None:
    """A cancelled job ends as cancelled whether its worker finishes, fails, hands over or dies."""
    a = await Hand(bus, family, "a").join()
    b = await Hand(bus, family, "b").join()
    jobs = await must(bus, *(new_job(family) for _ in range(4)))
    leases = [lease for _ in jobs for lease in await a.pull()]
    for job in jobs:
        assert await bus.control.cancel(job.id) == "flagged"
    assert await a.finish(leases[0], RESULT) == "cancelled"
    assert await a.fail(leases[1], "x", "y") == "cancelled"
    await a.give_back([leases[2]])
    await a.die()
    assert await b.settle() == ["cancelled"]
    assert [(await outcome(bus, job)).kind for job in jobs] == ["cancelled"] * 4
    assert await bus.lanes.use(family) == {"gpu": (0, 0)}


async def test_cancel_of_what_was_handed_over(bus: Bus, family: Family) -> None:
    """A job that waits between two workers is removed at once."""
    hand = await Hand(bus, family, "a").join()
    (job,) = await must(bus, new_job(family))
    await hand.give_back(await hand.pull())
    assert await bus.control.cancel(job.id) == "removed"
    assert await hand.take() == []


async def test_outcomes_reach_another_router(bus: Bus, family: Family) -> None:
    """A router that adopted a job hears its outcome, in its own journal or by the log."""
    hand = await Hand(bus, family, "g").join()
    (job,) = await must(bus, new_job(family))
    (lease,) = await hand.pull()
    await bus.jobs.adopt(job.id, "r2")
    journal = Notifications(bus.connection, "r2")
    await hand.finish(lease, RESULT)
    event = await journal.end(job.id, bus.clock.now_ms() + 5000)
    await journal.stop()
    assert event.kind == "result"


async def test_the_trail_of_a_job(bus: Bus, family: Family) -> None:
    """A job's record tells who leased it and when, whose lease was lost, and when its first event came."""
    first = await Hand(bus, family, "w1").join()
    job = new_job(family)
    await admit(bus, job)
    [lease] = await first.pull()
    await first.step([lease], {job.id: Event(index=0, kind="progress")})
    told = await bus.jobs.get(job.id)
    assert told is not None
    assert [(t.what, t.worker) for t in told.trail] == [("leased", "w1")]
    assert told.created_ms <= told.trail[0].at_ms <= told.first_ms

    second = await Hand(bus, family, "w2").join()
    await first.die()
    await second.settle()
    [again] = await second.take(idle=True)
    assert await second.finish(again, RESULT, index=1) == "ok"
    told = await bus.jobs.get(job.id)

    assert told is not None
    assert [(t.what, t.worker) for t in told.trail] == [
        ("leased", "w1"),
        ("lost", "w1"),
        ("leased", "w2"),
    ]
    assert told.trail[1].at_ms <= told.trail[2].at_ms <= told.ended_ms
