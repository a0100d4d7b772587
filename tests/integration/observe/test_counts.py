"""Jobs are counted by how they end, each once, whoever ends them; deliveries each time."""

from __future__ import annotations

from prometheus_client import REGISTRY

from common.bus import Bus
from common.errors import InvalidRequest
from common.ids import Family
from common.registry.dead_letters import DeadLetters
from tests.support.bus import RESULT, Hand, must, new_job

FAMILY = Family("embed.counted")
LANE = "embed.counted/0:gpu"
OUTCOMES = ("ok", "error", "expired", "cancelled", "dead", "fenced")


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, {"lane": LANE, **labels}) or 0.0


def ends() -> dict[str, float]:
    found = {name: value("spillway_jobs_total", outcome=name) for name in OUTCOMES}
    return {name: count for name, count in found.items() if count}


async def test_each_end_is_counted_once(bus: Bus) -> None:
    """Results, refusals, convictions, cancellations of both kinds, and what recovery ends; a late result is fenced."""
    one = await Hand(bus, FAMILY, "one").join()

    await must(bus, new_job(FAMILY))
    (lease,) = await one.pull()
    assert [await one.finish(lease, RESULT) for _ in range(2)] == ["ok", "done"]
    await must(bus, new_job(FAMILY))
    (lease,) = await one.pull()
    assert await one.refuse(lease, InvalidRequest("no")) == "ok"
    assert ends() == {"ok": 1, "error": 1}

    await must(bus, new_job(FAMILY))
    (lease,) = await one.pull()
    for verdict in ("returned", "returned", "dead"):
        assert await one.fail(lease, "bad", "bad") == verdict
        if verdict == "returned":
            (lease,) = await one.take()
    assert ends() == {"ok": 1, "error": 1, "dead": 1}
    assert await DeadLetters(bus).count(FAMILY) == 1
    assert await DeadLetters(bus).families() == [FAMILY]

    (queued,) = await must(bus, new_job(FAMILY))
    assert await bus.control.cancel(queued.id) == "removed"
    (running,) = await must(bus, new_job(FAMILY))
    (lease,) = await one.pull()
    assert await bus.control.cancel(running.id) == "flagged"
    assert await one.step([lease]) == {running.id}
    assert ends() == {"ok": 1, "error": 1, "dead": 1, "cancelled": 2}

    bad = await Hand(bus, FAMILY, "bad").join()
    first, second = await must(bus, new_job(FAMILY), new_job(FAMILY))
    late, _ = await bad.pull(2)
    assert (late.job, await bus.control.cancel(second.id)) == (first.id, "flagged")
    await bad.die()
    assert sorted(await one.settle()) == ["cancelled", "returned"]
    (lease,) = await one.take()
    assert await one.finish(lease, RESULT) == "ok"
    assert await bad.finish(late, RESULT) == "fenced"
    assert ends() == {"ok": 2, "error": 1, "dead": 1, "cancelled": 3, "fenced": 1}

    deliveries = value("spillway_job_attempts_count")
    firsts = value("spillway_job_attempts_bucket", le="1.0")
    assert (deliveries, firsts) == (9, 6)
