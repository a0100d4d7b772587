"""The door's arithmetic: the script plans and predicts what common/cost/finish.py does, on every server."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from common.bus import Bus, keys
from common.bus.admission import Terms
from common.cost.finish import Queue, Tail, place, remaining
from common.cost.linear import LinearCost
from common.cost.slowdown import Slowness, slowdown
from common.ids import Family
from common.worker.outbox import RunningBatch
from tests.conftest import PROFILE, SEED
from tests.support.bus import Hand, admit, differences, must, new_job, state

COST = LinearCost(0.05, 0.004, 2e-4)
LIMITS = {"limit_items": 64, "limit_tokens": 4000}
LATE = {"late_s": 0.05, "late_share": 0.2}
STEPS = 60 if PROFILE == "test" else 2000


async def planner(bus: Bus, family: Family, name: str = "g", cls: str = "gpu", **more: Any) -> Hand:
    """Return a worker by whose costs the door plans."""
    hand = Hand(bus, family, name, cls, items=10_000, tokens=1_000_000)
    costs = {"beta_s": COST.beta_s, "alpha_items_s": COST.alpha_items_s} | LIMITS | LATE
    costs |= {"alpha_tokens_s": COST.alpha_tokens_s}
    hand.record = msgspec.structs.replace(hand.record, **(costs | more))
    return await hand.join()


async def _entry(bus: Bus, family: Family, cls: str = "gpu") -> dict[str, Any]:
    """Return the fields of the newest entry of a lane."""
    ((_, flat),) = await bus.connection.call(
        "XREVRANGE", keys.lane(family, cls), "+", "-", "COUNT", 1
    )
    return {k.decode(): v for k, v in zip(flat[::2], flat[1::2], strict=True)}


async def test_script_and_function_agree(bus: Bus, family: Family) -> None:
    """Random loads, batches that begin and end: batch, predicted end and verdict are the function's."""
    rng, hop_s = random.Random(SEED), 0.007
    hand = await planner(bus, family)
    tail, doing, known = Tail(), RunningBatch(0, 0, 0, 0), Slowness()
    for _ in range(STEPS):
        if rng.random() < 0.3 and not hand.held:
            leases = await hand.pull(rng.randint(1, 4))
            if leases:
                size = sum(x.items for x in leases), sum(x.tokens for x in leases)
                known = Slowness(round(rng.uniform(-0.5, 0.9), 3), round(rng.uniform(0, 3), 3))
                factor = slowdown(known)
                until = bus.clock.now_ms() + int(1000 * factor * COST.seconds(*size))
                doing = RunningBatch(until, max(x.batch for x in leases), *size, known)
                await hand.step(leases, doing=doing)
        elif rng.random() < 0.4:
            for lease in list(hand.held.values()):
                await bus.control.cancel(lease.job)
                await hand.step([lease])
        items, tokens = rng.randint(1, 32), rng.randint(8, 2000)
        left_s = rng.choice([0.3, 1.0, 3.0, 30.0])
        job = new_job(family, items, tokens)
        used = (await bus.lanes.use(family)).get("gpu", (0, 0))
        deadline = bus.clock.now_ms() + int(1000 * left_s)
        admission = await admit(
            bus, job, deadline_ms=deadline, terms=Terms(hop_s=hop_s), own=True, left_s=0
        )
        found = await bus.jobs.get(job.id)
        now = found.created_ms if found else bus.clock.now_ms()
        left_s = (doing.until_ms - now) / 1000
        cost = COST.scaled(slowdown(known.faded(max(0.0, -left_s))))
        left_s = remaining(left_s, cost.seconds(doing.items, doing.tokens)) if doing.batch else 0.0
        queue = Queue(
            cost, 1, *used, doing.items, doing.tokens, left_s, doing.batch,
            LIMITS["limit_items"], LIMITS["limit_tokens"], hop_s, LATE["late_s"], LATE["late_share"],
        )  # fmt: skip
        due_s = (deadline - now) / 1000
        spot = place(queue, tail._replace(due_s=tail.due_s - now / 1000), items, tokens, due_s)
        slack = due_s - queue.safe(spot.finish_s)
        if abs(slack) > 0.02:  # nearer than the clocks of two processes agree
            assert (admission.outcome == "admitted") == (slack >= 0), (admission, slack)
        if admission.outcome == "admitted":
            entry = await _entry(bus, family)
            number = int(entry["b"])
            if number != spot.number:  # as near to a tail's due time
                number_slack = tail.due_s - now / 1000 - queue.safe(spot.finish_s)
                assert abs(number_slack) < 0.02 or tail.number == number
            else:
                assert int(entry["f"]) == pytest.approx(now + 1000 * spot.finish_s, abs=2)
            assert int(entry["u"]) == pytest.approx(deadline - 1000 * hop_s, abs=1)
            line = await bus.connection.call("HGET", keys.plan(family), "gpu")
            n, i, t, due, began = map(int, line.split())
            tail = Tail(n, i, t, due / 1000, began)
    assert await differences(bus, family) == []


async def test_objective_and_own_deadline(bus: Bus, family: Family) -> None:
    """A request without a deadline of its own is refused where it would end after the lane's objective."""
    await planner(bus, family, slo_s=0.5, late_s=0.0)
    await must(bus, new_job(family, 32, 2000))  # an empty lane takes one, whatever it costs
    refused = await admit(bus, new_job(family, 1, 10))
    assert refused.reason == "deadline"
    assert refused.retry_after_s == pytest.approx(0.135, abs=0.05)
    assert (await admit(bus, new_job(family, 1, 10), own=True)).outcome == "admitted"
    assert (await admit(bus, new_job(family, 1, 10), own=True, left_s=0.4)).reason == "deadline"


async def test_lanes_of_a_machine_are_slow_together(bus: Bus, family: Family) -> None:
    """What makes one lane slow is believed of the other lane of its machine, but not of another machine's."""
    known = Slowness(0.7, 3.0)
    gpu, cpu = await planner(bus, family, "g", "gpu"), await planner(bus, family, "c", "cpu")
    await must(bus, new_job(family, 1, 10))
    until = bus.clock.now_ms() + 60_000
    await gpu.step(await gpu.pull(1), doing=RunningBatch(until, 1, 1, 10, known))

    async def predicted_s() -> float:
        (job,) = await must(bus, new_job(family, 16, 1600), classes=("cpu",))
        found, entry = await bus.jobs.get(job.id), await _entry(bus, family, "cpu")
        assert found is not None
        await bus.control.cancel(job.id)
        return (int(entry["f"]) - found.created_ms) / 1000

    shared = slowdown(Slowness(), [known])
    assert await predicted_s() == pytest.approx(shared * COST.seconds(16, 1600), abs=0.003)

    incarnation = cpu.parts.incarnation
    incarnation.record = msgspec.structs.replace(incarnation.record, place="box/other/7 10 1")
    await incarnation.beat("keep")
    assert await predicted_s() == pytest.approx(COST.seconds(16, 1600), abs=0.003)


async def test_the_objective_counts_from_the_arrival(bus: Bus, family: Family) -> None:
    """A request that waited in its router has less time left, and the time by which it is due says so."""
    await planner(bus, family, slo_s=1.0, late_s=0.0)
    await must(bus, new_job(family, 1, 10))  # an empty lane takes one job, whatever it costs
    came_ms = bus.clock.now_ms() - 600
    await must(bus, new_job(family, 1, 10), came_ms=came_ms)
    assert int((await _entry(bus, family))["u"]) == came_ms + 1000
    refused = await admit(bus, new_job(family, 1, 10), came_ms=came_ms - 400)
    assert refused.reason == "deadline"


async def test_spread_is_all_or_nothing(bus: Bus, family: Family) -> None:
    """Jobs go where each has room; where one has none, none is admitted and nothing is planned."""
    await planner(bus, family, "g", "gpu", slo_s=1.0, late_s=0.0)
    await planner(bus, family, "c", "cpu", slo_s=1.0, late_s=0.0)
    jobs = [new_job(family, 16, 2000) for _ in range(5)]  # a lane ends two of them in 0.98 s
    options: dict[str, Any] = {"classes": ("gpu", "cpu"), "spread": True}
    assert (await admit(bus, *jobs, **options)).reason == "deadline"
    assert not any(any(size) for size in (await bus.lanes.use(family)).values())
    assert await bus.connection.call("EXISTS", keys.plan(family)) == 0
    assert (await admit(bus, *jobs[:4], **options)).outcome == "admitted"
    found = [await bus.jobs.get(job.id) for job in jobs[:4]]
    assert [job.lane for job in found if job] == ["gpu", "gpu", "cpu", "cpu"]


async def test_count_and_turns(bus: Bus, family: Family) -> None:
    """Algorithm 1: the accelerator's depth in queries, then the CPU's, then no; or both in turns."""
    await planner(bus, family, "g", "gpu", depth_queries=3)
    await planner(bus, family, "c", "cpu", depth_queries=2)
    options: dict[str, Any] = {"classes": ("gpu", "cpu"), "terms": Terms(rule="count")}
    taken = [await admit(bus, new_job(family), **options) for _ in range(6)]
    assert [one.lane for one in taken] == ["gpu"] * 3 + ["cpu"] * 2 + [""]
    assert (taken[2].held[0], taken[2].depth[0]) == (3, 3)
    assert taken[-1].reason == "depth"


async def test_turns(bus: Bus, family: Family) -> None:
    """Round robin begins with the next class each time, and goes on to the other where one is full."""
    await planner(bus, family, "g", "gpu", depth_queries=4)
    await planner(bus, family, "c", "cpu", depth_queries=2)
    options: dict[str, Any] = {"classes": ("gpu", "cpu"), "terms": Terms("count", "turns")}
    lanes = [(await admit(bus, new_job(family), **options)).lane for _ in range(7)]
    assert sorted(lanes[:4]) == ["cpu", "cpu", "gpu", "gpu"]
    assert lanes[4:] == ["gpu", "gpu", ""]


async def test_closed_workers_serve_their_own_lane_only(bus: Bus, family: Family) -> None:
    """A worker that is being probed is nobody's, but takes what is admitted to its own lane."""
    await planner(bus, family, "g", "gpu", closed=True)
    assert (await admit(bus, new_job(family))).reason == "no_worker"
    assert (await admit(bus, new_job(family), classes=("w.g",))).lane == "w.g"


async def test_moves_back_what_ends_sooner(bus: Bus, family: Family) -> None:
    """Of the CPU's lane only what the accelerator would end sooner goes back to it, planned there."""
    await planner(bus, family, "c", "cpu", beta_s=0.5, alpha_tokens_s=2e-3)
    fast = await planner(bus, family, "g", "gpu")
    jobs = [(await must(bus, new_job(family, 1, 500), classes=("cpu",)))[0] for _ in range(3)]
    moved = await bus.recovery.move(family, "cpu", "gpu", fast.worker, sooner=True)
    assert moved == [job.id for job in jobs]
    assert int((await _entry(bus, family))["b"]) > 0
    assert await state(bus, jobs[0]) == "queued"

    until = bus.clock.now_ms() + 60_000
    await fast.step(await fast.pull(3), doing=RunningBatch(until, 9, 3, 1500))
    await must(bus, new_job(family, 1, 500), classes=("cpu",))
    assert await bus.recovery.move(family, "cpu", "gpu", fast.worker, sooner=True) == []
    assert await differences(bus, family) == []
