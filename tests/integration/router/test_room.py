"""Requests of several jobs that wait for room are woken by the word of the bus: the time to try again never comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from common.bus import Bus, Notifications
from common.ids import Family, ulid
from common.wire.registry import CollectionRecord
from services.router.admission.policy import DeliveryLatency, LanePolicy
from services.router.queue.room import Room
from services.router.text.requests import Parcel
from services.router.workflows.workflow import Workflow, WorkflowContext
from services.router.workflows.write import await_served
from tests.support.bus import EMBED, RESULT, WORK, Hand, must, new_job, open_bus
from tests.support.servers import Server

FOR_EVER_S = 3600.0
REQUEST = Family("request")


@pytest.fixture
async def bus(shared_redis: Server, tmp_path: Path) -> AsyncIterator[Bus]:
    """A bus on the shared server."""
    opened = await open_bus(shared_redis.url, str(tmp_path))
    yield opened
    await opened.close()


@pytest.fixture
async def journal(bus: Bus) -> AsyncIterator[Notifications]:
    """A router's journal."""
    made = Notifications(bus.connection, "r1")
    yield made
    await made.stop()


@pytest.fixture
def room(journal: Notifications) -> Room:
    """Lines in which only the word that room appeared wakes."""
    return Room(journal, again_s=FOR_EVER_S)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is true that no event announces."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came true")


class Asked:
    """How often a bus was asked to admit, and what it said."""

    def __init__(self, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        admit = bus.admission.admit

        async def noted(*jobs: Any, **terms: Any) -> Any:
            admission = await admit(*jobs, **terms)
            self.said.append(admission.outcome)
            return admission

        monkeypatch.setattr(bus.admission, "admit", noted)


async def _run(bus: Bus, journal: Notifications, room: Room, hand: Hand) -> Workflow:
    """Return a leased request; `hand` serves its family."""
    (job,) = await must(bus, new_job(REQUEST), left_s=600, classes=("gpu",))
    (lease,) = await hand.pull()
    assert lease.job == job.id
    policy = LanePolicy("windve-tokens", DeliveryLatency())
    tools = WorkflowContext(policy, bus, journal, None, None, 1, {}, room)  # type: ignore[arg-type]
    return Workflow(tools, lease, "t", 0)


async def test_a_full_lane_is_not_asked_again_before_room_appears(
    bus: Bus, journal: Notifications, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused stage is admitted by the word alone, and asks once a word."""
    requests = await Hand(bus, REQUEST, "r").join()
    run = await _run(bus, journal, room, requests)
    hand = await Hand(bus, EMBED, "g", items=1).join()
    asked = Asked(bus, monkeypatch)
    count = 5
    parcels = [Parcel(WORK, 1, 10)] * count
    gathering = asyncio.create_task(run.gather("embed", [EMBED], ["gpu"], parcels, bulk=False))
    for done in range(count):
        await until(
            lambda done=done: (
                asked.said.count("admitted") == done + 1
                and (done == count - 1 or asked.said[-1] == "refused")
            )
        )
        for _ in range(300):
            await bus.connection.call("PING")
        (lease,) = await hand.pull()
        assert await hand.finish(lease, RESULT) == "ok"
    async with asyncio.timeout(60):
        _, results = await gathering
    assert len(results) == count
    assert asked.said.count("admitted") == count
    # Each end of a job may wake the stage twice: by the job's result and by the word.
    assert asked.said.count("refused") <= 2 * count
    assert not room.lines
    assert not room.trying


async def test_waiters_are_woken_one_by_one(room: Room) -> None:
    """A word wakes the oldest of each line; whoever leaves passes the turn on, admitted or not."""
    first, second, bulk = (room.place(EMBED, share) for share in (1.0, 1.0, 0.5))
    woken: list[str] = []

    async def stand(name: str, place: Any) -> None:
        place.look()
        await place.wait(FOR_EVER_S)
        woken.append(name)

    places = {"first": first, "second": second, "bulk": bulk}
    standing = {name: asyncio.create_task(stand(name, place)) for name, place in places.items()}
    await until(lambda: sum(map(len, room.lines.values())) == 3)
    room.wake(EMBED)
    await asyncio.gather(standing["first"], standing["bulk"])
    assert not standing["second"].done()
    first.leave()
    await standing["second"]
    assert woken[-1] == "second"
    for place in (second, bulk):
        place.leave()
    assert not room.lines
    assert not room.trying


async def test_a_word_during_the_refusal_is_not_lost(room: Room) -> None:
    """A word between the refusal in Redis and the router's waiting wakes the waiter at once."""
    place = room.place(EMBED, 1.0)
    place.look()
    room.wake(EMBED)
    async with asyncio.timeout(60):
        await place.wait(FOR_EVER_S)
    place.leave()


async def test_a_collection_is_served_when_a_replica_holds_it(
    bus: Bus, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for a new collection's shards is woken by the replica that has opened them."""
    monkeypatch.setattr("services.router.workflows.write.READY_S", FOR_EVER_S)
    record = CollectionRecord(
        id=ulid(), tenant="t", name="c", dimension=1, metric="cosine", shards=2
    )  # fmt: skip
    looks: list[int] = []
    applied = bus.writes.applied

    async def noted(collection: str, shard: int) -> Any:
        looks.append(shard)
        return await applied(collection, shard)

    monkeypatch.setattr(bus.writes, "applied", noted)
    waiting = asyncio.create_task(await_served(bus, room, record))
    for shard in range(record.shards):
        await until(lambda shard=shard: shard in looks)
        for _ in range(300):
            await bus.connection.call("PING")
        assert looks.count(shard) == 1
        await bus.writes.publish_opened(record.id, shard, "r", "0-0")
    async with asyncio.timeout(60):
        await waiting
    assert len(looks) == 4
