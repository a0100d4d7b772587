"""Who waits on the bus is woken: full workers, own lanes and slow readers, told by counters instead of times."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from common.bus import Bus, Notifications
from common.bus.events import BELL_EVENTS
from common.wire.results import Event
from common.worker.leases import Lease
from common.worker.worker import Worker
from tests.support.bus import EMBED, RESULT, Hand, differences, must, new_job, open_bus, record
from tests.support.servers import Server
from tests.support.waiting import until

FOR_EVER_S = 3600.0


@pytest.fixture
async def bus(shared_redis: Server, tmp_path: Path) -> AsyncIterator[Bus]:
    """A bus on the shared server."""
    opened = await open_bus(shared_redis.url, str(tmp_path))
    yield opened
    await opened.close()


@pytest.fixture
async def consumer(bus: Bus) -> AsyncIterator[Worker]:
    """A worker for jobs of one item, which beats and recovers."""
    made = Worker(bus, EMBED, record("gpu-a"), largest_items=1, largest_tokens=10)
    await made.start()
    yield made
    await made.drain()
    await made.stop()


async def turns(bus: Bus, count: int) -> None:
    """Wait for so many round trips to Redis: what would poll has polled by then."""
    for _ in range(count):
        await bus.connection.call("PING")


async def read_one(consumer: Worker) -> Lease:
    """Read one lease with room for one."""
    async with asyncio.timeout(60):
        while True:
            if leases := await consumer.reader.read(1, 10):
                return leases[0]


async def _hold(bus: Bus, consumer: Worker) -> Lease:
    await must(bus, new_job())
    return await read_one(consumer)


async def test_a_full_worker_waits(
    bus: Bus, consumer: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read without room returns when a lease has ended, and not before."""
    monkeypatch.setattr("common.worker.lease_reader.FULL_S", FOR_EVER_S)
    lease = await _hold(bus, consumer)
    reading = asyncio.create_task(consumer.reader.read(0, 0))
    await turns(bus, 200)
    assert not reading.done()
    assert await consumer.outbox.finish(lease, RESULT) == "ok"
    async with asyncio.timeout(60):
        assert await reading == []


async def test_what_makes_room_wakes_a_full_worker(
    bus: Bus, consumer: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease handed over, a word of the worker's owner and a drain end a read without room."""
    monkeypatch.setattr("common.worker.lease_reader.FULL_S", FOR_EVER_S)
    lease = await _hold(bus, consumer)
    ways = (lambda: consumer.outbox.give_back([lease]), consumer.leases.wake, consumer.drain)
    for way in ways:
        reading = asyncio.create_task(consumer.reader.read(0, 0))
        await turns(bus, 50)
        if consumer.leases.held:
            assert not reading.done()
        done = way()
        if done is not None:
            await done
        async with asyncio.timeout(60):
            await reading
        if way is ways[0]:
            lease = await read_one(consumer)


async def test_a_job_alone_keeps_the_reader_waiting(
    bus: Bus, consumer: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a job runs alone a read with room waits; the end of that job wakes the reader."""
    monkeypatch.setattr("common.worker.lease_reader.FULL_S", FOR_EVER_S)
    lease = await _hold(bus, consumer)
    consumer.leases._held[lease.job] = lease = lease._replace(alone=True)
    reading = asyncio.create_task(consumer.reader.read(8, 80))
    await turns(bus, 200)
    assert not reading.done()
    await consumer.outbox.finish(lease, RESULT)
    async with asyncio.timeout(60):
        assert await reading == []


def _count_reads(consumer: Worker, monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Note the BLOCK of every read of the lanes from now on."""
    blocks: list[int | None] = []
    read = consumer.reader._group_read

    async def noted(classes: Sequence[str], count: int, block: int | None) -> list[Lease]:
        blocks.append(block)
        return await read(classes, count, block)

    monkeypatch.setattr(consumer.reader, "_group_read", noted)
    return blocks


@pytest.mark.parametrize("own", [True, False])
async def test_room_for_one_waits_on_every_lane(
    bus: Bus, consumer: Worker, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """A worker with room for one job is woken by its own lane and by the shared one alike, in one blocked read."""
    monkeypatch.setattr("common.worker.lease_reader.BLOCK_MS", 5000)
    blocks = _count_reads(consumer, monkeypatch)
    reading = asyncio.create_task(read_one(consumer))
    await until(lambda: 5000 in blocks)
    await turns(bus, 50)
    before = list(blocks)
    (job,) = await must(bus, new_job(), **({"prefer": "gpu-a"} if own else {}))
    lease = await reading
    assert (lease.job, lease.cls) == (job.id, "w.gpu-a" if own else "gpu")
    assert blocks == before  # it was in the read that waited
    await consumer.outbox.finish(lease, RESULT)


async def test_what_comes_on_two_lanes_at_once_is_handed_back(bus: Bus, consumer: Worker) -> None:
    """A read of several lanes may bring a job from each: what exceeds its room goes back, uncharged; own lane first."""
    (shared,) = await must(bus, new_job())
    (mine,) = await must(bus, new_job(), prefer="gpu-a")
    consumer.reader._asked = 1
    consumer.reader._reading = asyncio.create_task(
        consumer.reader._group_read(consumer.incarnation.lanes, 1, None)
    )
    (lease,) = await consumer.reader._reading
    consumer.reader._reading = None
    assert lease.job == mine.id
    assert list(consumer.leases.held) == [mine.id]
    await consumer.outbox.finish(lease, RESULT)
    again = await read_one(consumer)
    assert again.job == shared.id
    found = await bus.jobs.get(shared.id)
    assert found is not None
    assert found.suspicions == 0
    await consumer.outbox.finish(again, RESULT)
    assert await differences(bus) == []


async def test_handed_over_work_does_not_wait_for_the_read_in_flight(
    bus: Bus, consumer: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one room of a worker goes to handed-over work though a read waits in Redis; what that brings goes back."""
    monkeypatch.setattr("common.worker.lease_reader.BLOCK_MS", 5000)
    hand = await Hand(bus, EMBED, "hand").join()
    (job,) = await must(bus, new_job())
    (lease,) = await hand.pull()
    blocks = _count_reads(consumer, monkeypatch)
    reading = asyncio.create_task(read_one(consumer))
    await until(lambda: 5000 in blocks)
    await hand.give_back([lease])
    taken = await reading
    assert taken.job == job.id
    (late,) = await must(bus, new_job())
    await until(lambda: consumer.reader._reading is not None and consumer.reader._reading.done())
    assert list(consumer.leases.held) == [taken.job]
    await consumer.outbox.finish(taken, RESULT)
    again = await read_one(consumer)
    assert again.job == late.id
    await consumer.outbox.finish(again, RESULT)
    assert await differences(bus) == []


async def test_a_flooded_reader_falls_back_to_the_log(bus: Bus) -> None:
    """A reader that stands still keeps a bounded number of events, and misses none of them when it goes on."""
    hand = await Hand(bus, EMBED, "g").join()
    heard: list[float] = []
    journal = Notifications(bus.connection, "r1", heard.append)
    (job,) = await must(bus, new_job())
    (lease,) = await hand.pull()
    events = journal.events(job.id, 0, bus.clock.now_ms() + 120_000)
    count = 3 * BELL_EVENTS
    async with contextlib.aclosing(events):
        await hand.step([lease], {job.id: Event(index=0, kind="progress")})
        seen = [await anext(events)]
        for index in range(1, count):
            await hand.step([lease], {job.id: Event(index=index, kind="progress")})
        await hand.finish(lease, RESULT, index=count)
        await until(lambda: len(heard) >= count)
        (bell,) = journal.bells[job.id]
        assert bell.qsize() <= BELL_EVENTS
        seen += [event async for event in events]
    assert [event.index for event in seen] == list(range(count + 1))
    assert seen[-1].kind == "result"
    await journal.stop()
