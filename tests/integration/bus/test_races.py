"""What several processes change at once stays whole: a step of another process between two commands changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from common.bus import Bus, keys
from common.ids import Family, job_id, ulid
from common.registry.collections import Collections
from common.registry.idempotency import Idempotency
from common.wire.registry import CollectionRecord
from tests.support.bus import Hand, must, new_job, open_bus
from tests.support.servers import Cluster

BODY = b"0123456789abcdef"
MINE, OTHER = (job_id(Family("request"), ulid()) for _ in range(2))
Step = Callable[[], Awaitable[Any]]


def between(
    bus: Bus, verb: str, name: str, *, before: Step | None = None, after: Step | None = None
) -> None:
    """Have another process take a step right before or after each command `verb` on the key `name`."""
    call = bus.connection.call

    async def interrupted(*command: Any, **more: Any) -> Any:
        meets = command[:2] == (verb, name)
        if meets and before is not None:
            await before()
        reply = await call(*command, **more)
        if meets and after is not None:
            await after()
        return reply

    bus.connection.call = interrupted  # type: ignore[method-assign]


async def test_an_adopted_job_that_expires_stays_gone(bus: Bus, family: Family) -> None:
    """A job record that expires while a router takes it over is not made anew, without a time to live."""
    await Hand(bus, family, "w").join()
    (job,) = await must(bus, new_job(family))
    name, call = keys.job(job.id), bus.connection.call
    between(bus, "EXISTS", name, after=lambda: call("DEL", name))
    await bus.jobs.adopt(job.id, "r2")
    left = await call("HGETALL", name)
    assert left == [] or b"state" in left, "a record of nothing but its router"

    await call("DEL", name)
    await bus.jobs.adopt(job.id, "r2")
    assert await call("EXISTS", name) == 0


async def test_an_adopted_job_names_its_router(bus: Bus, family: Family) -> None:
    """A living job's record names the router that took it over, and keeps its time to live."""
    await Hand(bus, family, "w").join()
    (job,) = await must(bus, new_job(family))
    await bus.connection.call("PEXPIRE", keys.job(job.id), 60_000)
    await bus.jobs.adopt(job.id, "r2")
    state = await bus.jobs.get(job.id)
    assert state is not None
    assert state.router == "r2"
    assert 0 < await bus.connection.call("PTTL", keys.job(job.id)) <= 60_000


async def test_a_claim_is_never_granted_without_being_kept(bus: Bus) -> None:
    """However often another request takes a key and gives it back meanwhile, who is told that the key is his has it."""
    name, call = "idem:t:k", bus.connection.call
    between(bus, "SET", name, before=lambda: call("SET", name, BODY + OTHER.encode()))
    between(bus, "GET", name, before=lambda: call("DEL", name))
    granted = await Idempotency(bus).claim("t", "k", BODY, MINE)
    bus.connection.call = call  # type: ignore[method-assign]
    assert granted == await Idempotency(bus).claimed("t", "k")
    assert await call("TTL", name) > 0


async def test_a_release_leaves_the_next_ones_claim(bus: Bus) -> None:
    """A claim that expired and was taken by another request while it is released stays that request's."""
    name, call = "idem:t:k", bus.connection.call
    await Idempotency(bus).claim("t", "k", BODY, MINE)
    taken: list[str] = []

    async def take() -> None:
        taken.append(OTHER)
        await call("SET", name, BODY + OTHER.encode())

    between(bus, "GET", name, after=take)
    await Idempotency(bus).release("t", "k", MINE)
    bus.connection.call = call  # type: ignore[method-assign]
    assert await Idempotency(bus).claimed("t", "k") == (taken[0] if taken else None)


async def test_many_clients_claim_one_key(bus: Bus, place: Any, tmp_path: Any) -> None:
    """Of many clients that claim a key at once one has it; all others are told of that one."""
    clustered = isinstance(place[0], Cluster)
    others = [await open_bus(place[0].url, str(tmp_path), cluster=clustered) for _ in range(4)]
    try:
        for turn in range(10):
            told = await asyncio.gather(
                *(
                    Idempotency(each).claim(
                        "t", f"k{turn}", BODY, job_id(Family("request"), ulid())
                    )
                    for each in others * 3
                )
            )
            assert set(told) == {await Idempotency(bus).claimed("t", f"k{turn}")}
    finally:
        for each in others:
            await each.close()


def record(name: str) -> CollectionRecord:
    """Return a record of one collection's name with an id of its own."""
    return CollectionRecord(id=name, tenant="t", name="n", dimension=3, metric="cosine")


async def test_a_creator_that_leaves_leaves_no_collection_unannounced(bus: Bus) -> None:
    """A collection and the mark by which replicas find it are written in one step: no creator can leave in between."""
    collections, call = Collections(bus), bus.connection.call
    before = await collections.changes()

    async def leave() -> None:
        raise asyncio.CancelledError

    between(bus, "SET", keys.CHANGES, before=leave)
    assert await collections.create(record("a"))
    bus.connection.call = call  # type: ignore[method-assign]
    assert await collections.changes() not in {before, None}


async def test_a_swap_loses_no_other_swap(bus: Bus) -> None:
    """A collection that was replaced by another one meanwhile is not replaced again."""
    first, second, third = map(record, "abc")
    await Collections(bus).create(first)
    call = bus.connection.call

    async def meanwhile() -> None:
        bus.connection.call = call  # type: ignore[method-assign]
        assert await Collections(bus).replace(first, third)

    between(bus, "HGET", "{collections}:records", after=meanwhile)
    assert not await Collections(bus).replace(first, second)
    assert await Collections(bus).get("t", "n") == third
    assert await Collections(bus).removed() == {"a"}


async def test_a_removal_leaves_the_collection_that_came_meanwhile(bus: Bus) -> None:
    """A name that means another collection by the time of the removal keeps its meaning."""
    first, second = map(record, "ab")
    await Collections(bus).create(first)
    call = bus.connection.call

    async def meanwhile() -> None:
        bus.connection.call = call  # type: ignore[method-assign]
        assert await Collections(bus).replace(first, second)

    between(bus, "HGET", "{collections}:records", after=meanwhile)
    await Collections(bus).remove(first)
    assert await Collections(bus).get("t", "n") == second


async def test_a_swap_whose_reply_was_lost_has_happened(bus: Bus) -> None:
    """The repetition of a swap whose reply did not arrive says that the name means the new collection."""
    first, second = map(record, "ab")
    await Collections(bus).create(first)
    script = bus.connection.script

    async def twice(name: str, *rest: Any, **more: Any) -> Any:
        await script(name, *rest, **more)
        return await script(name, *rest, **more)

    bus.connection.script = twice  # type: ignore[method-assign]
    assert await Collections(bus).replace(first, second)
    assert await Collections(bus).get("t", "n") == second
