"""Submissions that wait for room are woken by a notification: the time to try again never comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from operator import contains
from pathlib import Path
from typing import Any

import pytest

from common.bus import Bus, Notifications
from common.ids import Family, ulid
from common.registry.layout import ShardLayout
from common.wire.registry import CollectionRecord
from services.router.admission.controller import AdmissionController
from services.router.admission.queue import AdmissionQueue, Ticket
from services.router.text.requests import Parcel
from services.router.workflows.workflow import Workflow
from services.router.workflows.write import await_served
from tests.support.admission import admission_of, context_of
from tests.support.bus import EMBED, RESULT, WORK, Hand, must, new_job, open_bus
from tests.support.servers import Server
from tests.support.waiting import until

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
def queue(journal: Notifications) -> AdmissionQueue:
    """A queue in which only a notification wakes."""
    return AdmissionQueue(journal, again_s=FOR_EVER_S)


@pytest.fixture
def admission(bus: Bus, journal: Notifications, queue: AdmissionQueue) -> AdmissionController:
    """The admission of a router of this queue."""
    return admission_of(bus, journal, queue)


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


async def _workflow(
    bus: Bus, journal: Notifications, admission: AdmissionController, hand: Hand
) -> Workflow:
    """Return a leased request; `hand` serves its family."""
    (job,) = await must(bus, new_job(REQUEST), left_s=600, classes=("gpu",))
    (lease,) = await hand.pull()
    assert lease.job == job.id
    return Workflow(context_of(bus, journal, admission), lease, "t", 0)


async def test_a_full_lane_is_not_asked_again_before_room_appears(
    bus: Bus,
    journal: Notifications,
    queue: AdmissionQueue,
    admission: AdmissionController,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refused stage is admitted by the word alone, and asks once a word."""
    requests = await Hand(bus, REQUEST, "r").join()
    workflow = await _workflow(bus, journal, admission, requests)
    hand = await Hand(bus, EMBED, "g", items=1).join()
    asked = Asked(bus, monkeypatch)
    count = 5
    parcels = [Parcel(WORK, 1, 10)] * count
    gathering = asyncio.create_task(workflow.gather("embed", [EMBED], ["gpu"], parcels, bulk=False))

    def admitted(number: int) -> bool:
        """So many parcels are admitted, and the next one is refused."""
        return asked.said.count("admitted") == number and (
            number == count or asked.said[-1] == "refused"
        )

    for done in range(count):
        await until(partial(admitted, done + 1))
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
    assert not queue.lines
    assert not queue.trying


async def test_waiters_are_woken_one_by_one(queue: AdmissionQueue) -> None:
    """A word wakes the oldest of each line; whoever leaves passes the turn on, admitted or not."""
    first, second, bulk = (Ticket(queue, EMBED, share) for share in (1.0, 1.0, 0.5))
    woken: list[str] = []

    async def stand(name: str, ticket: Any) -> None:
        ticket.begin()
        await ticket.wait(FOR_EVER_S)
        woken.append(name)

    tickets = {"first": first, "second": second, "bulk": bulk}
    standing = {name: asyncio.create_task(stand(name, ticket)) for name, ticket in tickets.items()}
    await until(lambda: sum(map(len, queue.lines.values())) == 3)
    queue.wake(EMBED)
    await asyncio.gather(standing["first"], standing["bulk"])
    assert not standing["second"].done()
    first.leave()
    await standing["second"]
    assert woken[-1] == "second"
    for ticket in (second, bulk):
        ticket.leave()
    assert not queue.lines
    assert not queue.trying


async def test_a_word_during_the_refusal_is_not_lost(queue: AdmissionQueue) -> None:
    """A word between the refusal in Redis and the router's waiting wakes the waiter at once."""
    ticket = Ticket(queue, EMBED, 1.0)
    ticket.begin()
    queue.wake(EMBED)
    async with asyncio.timeout(60):
        await ticket.wait(FOR_EVER_S)
    ticket.leave()


async def test_a_collection_is_served_when_a_replica_holds_it(
    bus: Bus, admission: AdmissionController, monkeypatch: pytest.MonkeyPatch
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
    waiting = asyncio.create_task(
        await_served(bus, admission, record, ShardLayout.of(record, None))
    )
    for shard in range(record.shards):
        await until(partial(contains, looks, shard))
        for _ in range(300):
            await bus.connection.call("PING")
        assert looks.count(shard) == 1
        await bus.writes.publish_opened(record.id, shard, "r", "0-0")
    async with asyncio.timeout(60):
        await waiting
    assert len(looks) == 4
