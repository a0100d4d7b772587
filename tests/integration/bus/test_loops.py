"""Workers with their real loops and heartbeat thread, and a router's journal: what the scripts' tests step over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.bus import Bus, BusDown, Notifications, keys
from common.bus.recovery import Verdict
from common.clock import SystemClock
from common.config import Common
from common.ids import Family
from common.redis.heartbeat import Heartbeat
from common.wire.message import encode
from common.wire.results import Event
from common.worker.leases import Lease
from common.worker.worker import Worker
from tests.support.bus import (
    EMBED,
    RESULT,
    Hand,
    admit,
    differences,
    must,
    new_job,
    open_bus,
    outcome,
    reached,
    record,
    state,
)
from tests.support.servers import Server
from tests.support.waiting import until


@pytest.fixture
async def bus(shared_redis: Server, tmp_path: Path) -> AsyncIterator[Bus]:
    """A bus on the shared server."""
    opened = await open_bus(shared_redis.url, str(tmp_path))
    yield opened
    await opened.close()


def worker(bus: Bus, name: str, *classes: str) -> Worker:
    """Return a worker for jobs of one item."""
    return Worker(bus, EMBED, record(name, *classes), largest_items=1, largest_tokens=10)


async def read_until(consumer: Worker, count: int, room: int = 8) -> list[Lease]:
    """Read until so many leases came."""
    leases: list[Lease] = []
    async with asyncio.timeout(60):
        while len(leases) < count:
            leases += await consumer.reader.read(room, room * 10)
    return leases


async def test_a_real_death(bus: Bus, shared_redis: Server, tmp_path: Path) -> None:
    """A killed worker's leases, own lane included, reach another within seconds; as a zombie it is refused."""
    other = await open_bus(shared_redis.url, str(tmp_path))
    dead, good = worker(other, "gpu-dead"), worker(bus, "gpu-good")
    await dead.start()
    jobs = await must(bus, *(new_job() for _ in range(3)))
    jobs += await must(bus, new_job(), prefer="gpu-dead")
    leases = await read_until(dead, 4)
    other.heartbeats.stop()
    for task in dead._tasks:
        task.cancel()
    await good.start()
    taken = await read_until(good, 4)
    assert {x.job for x in taken} == {job.id for job in jobs}
    zombies = [await dead.outbox.finish(lease, RESULT) for lease in leases]
    assert zombies == ["fenced"] * 4
    assert [await good.outbox.finish(lease, RESULT) for lease in taken] == ["ok"] * 4
    await dead.reader.join()
    await other.close()
    await good.drain()
    await good.stop()
    assert await differences(bus) == []


async def test_a_suspect_runs_alone(bus: Bus) -> None:
    """Under steady load a job with two suspicions is not starved, and when it runs nothing runs beside it."""
    hand = await Hand(bus, EMBED, "hand").join()
    (suspect,) = await must(bus, new_job())
    await hand.give_back(await hand.pull())
    await bus.connection.call("HSET", keys.job(suspect.id), "suspicions", 2)
    await hand.die()
    consumer = worker(bus, "gpu-a")
    await consumer.start()
    seen: list[Lease] = []
    running: list[Lease] = []
    async with asyncio.timeout(60):
        while not any(lease.alone for lease in seen):
            await admit(bus, *(new_job() for _ in range(4)))
            leases = await consumer.reader.read(8, 80)
            seen += leases
            running += leases
            if any(lease.alone for lease in running):
                assert len(running) == len(consumer.leases.held) == 1
            if len(running) > 3 or (consumer.reader._quiet and running):
                await consumer.outbox.finish(running.pop(0), RESULT)
    assert await consumer.outbox.finish(running[0], RESULT) == "ok"
    assert (await outcome(bus, suspect)).kind == "result"
    await consumer.drain()
    await consumer.stop()


async def test_never_more_than_room(bus: Bus) -> None:
    """Whatever waits, unread, handed over or on the own lane, a read brings no more than there is room for."""
    hand = await Hand(bus, EMBED, "hand").join()
    consumer = worker(bus, "gpu-a")
    await must(bus, *(new_job() for _ in range(12)))
    await hand.give_back([x for _ in range(12) for x in await hand.pull()])
    await consumer.start()
    await must(bus, *(new_job() for _ in range(12)))
    await must(bus, *(new_job() for _ in range(12)), prefer="gpu-a")
    done = 0
    async with asyncio.timeout(60):
        for room in (1, 1, 2, 3, 1, 4, 8, 1, *([16] * 1000)):
            leases = await consumer.reader.read(room, room * 10)
            assert len(leases) <= room
            for lease in leases:
                done += await consumer.outbox.finish(lease, RESULT) == "ok"
            if done == 36:
                break
    assert done == 36
    await consumer.drain()
    await consumer.stop()
    assert await differences(bus) == []


@pytest.mark.parametrize("alone", [False, True])
async def test_work_that_comes_after_the_reader_left(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """Handed-over work may be leased just after a read has ended: the next read returns it."""
    hand = await Hand(bus, EMBED, "hand").join()
    (job,) = await must(bus, new_job())
    await hand.give_back(await hand.pull())
    await hand.die()
    if alone:
        await bus.connection.call("HSET", keys.job(job.id), "suspicions", 2)
    consumer = worker(bus, "gpu-a")
    await consumer.incarnation.register()
    reader = consumer.reader

    async def take_while_read() -> list[Lease]:
        left.clear()
        reading = asyncio.create_task(reader.read(0, 0))
        await until(
            lambda: reading.done() or (reader._awaited and (reader._in_redis or reader._quiet))
        )
        taking = asyncio.create_task(reader.take(()))
        leases = await reading
        left.set()
        await taking
        return leases

    take, left = bus.recovery.take, asyncio.Event()
    if alone:
        async with asyncio.timeout(60):
            while not reader._quiet:  # the job waits until the worker is idle
                assert await take_while_read() == []
        while reader._reading is not None:
            assert await reader.read(0, 0) == []

    async def late(family: Family, cls: str, *args: Any, **options: Any) -> list[Verdict]:
        if not cls.startswith("w."):
            await left.wait()
        return await take(family, cls, *args, **options)

    monkeypatch.setattr(bus.recovery, "take", late)
    async with asyncio.timeout(60):
        while (
            not consumer.leases.held
        ):  # on a busy machine a read may end before the work is asked for
            assert await take_while_read() == []
    assert consumer.leases.held.keys() == {job.id}
    leases: list[Lease] = []
    for _ in range(3):  # a read in flight may reserve the room of the first
        leases += await reader.read(0, 0)
    assert [(lease.job, lease.alone) for lease in leases] == [(job.id, alone)]
    assert await consumer.outbox.finish(leases[0], RESULT) == "ok"
    await consumer.drain()
    await consumer.stop()


async def test_a_lane_nobody_serves(bus: Bus) -> None:
    """When the accelerator's last worker is gone, an idle CPU worker takes on what waits there, read and unread."""
    gpu = await Hand(bus, EMBED, "gpu-a", "gpu").join()
    cpu = worker(bus, "cpu-a", "cpu")
    await cpu.start()
    jobs = await must(bus, *(new_job() for _ in range(4)), classes=("gpu", "cpu"))
    assert len(await gpu.pull(2)) == 2
    await gpu.die()
    bus.workers.forget(EMBED)
    done: set[str] = set()
    async with asyncio.timeout(60):
        while len(done) < 4:
            reached(bus)
            for lease in await cpu.reader.read(4, 40):
                assert await cpu.outbox.finish(lease, RESULT) == "ok"
                done.add(lease.job)
    assert done == {job.id for job in jobs}
    await cpu.drain()
    await cpu.stop()
    assert await differences(bus) == []


async def test_back_to_the_accelerator(bus: Bus) -> None:
    """An accelerator worker takes back what waits unread on the CPU's lane and would end later there."""
    slow = Hand(bus, EMBED, "cpu-a", "cpu")
    slow.record = msgspec.structs.replace(slow.record, beta_s=0.5)
    await slow.join()
    (job,) = await must(bus, new_job(), classes=("cpu",))
    gpu = worker(bus, "gpu-a", "gpu")
    await gpu.start()
    (lease,) = await read_until(gpu, 1)
    assert (lease.job, lease.cls) == (job.id, "gpu")
    await gpu.outbox.finish(lease, RESULT)
    await gpu.drain()
    await gpu.stop()


async def test_expired_work_never_runs(bus: Bus) -> None:
    """A job whose deadline passed in the queue is ended instead of delivered."""
    consumer = worker(bus, "gpu-a")
    await consumer.incarnation.register()
    (late,) = await must(bus, new_job(), left_s=0.5)
    (fine,) = await must(bus, new_job())
    await asyncio.sleep(0.55)
    await consumer.start()
    (lease,) = await read_until(consumer, 1)
    assert lease.job == fine.id
    assert (await outcome(bus, late)).kind == "expired"
    await consumer.drain()
    await consumer.stop()
    assert await state(bus, fine) == "queued"


async def test_draining_mid_read(bus: Bus) -> None:
    """What a read in flight brings while the worker drains is handed over, not lost."""
    consumer = worker(bus, "gpu-a")
    await consumer.start()
    reading = asyncio.create_task(consumer.reader.read(8, 80))
    await asyncio.sleep(0.1)
    draining = asyncio.create_task(consumer.drain())
    hand = await Hand(bus, EMBED, "hand").join()
    (job,) = await must(bus, new_job())
    await draining
    assert await reading == []
    await consumer.stop()
    leases = [*await hand.take(), *await hand.pull()]
    assert [lease.job for lease in leases] == [job.id]
    assert leases[0].attempts == leases[0].epoch


async def test_a_hung_step_loses_its_leases(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that overruns by far ends the heartbeat, though loop and thread are alive; when done, it begins anew."""
    monkeypatch.setattr("common.redis.heartbeat.OVERDUE_S", 0.5)
    consumer = worker(bus, "gpu-hung")
    await consumer.start()
    (job,) = await must(bus, new_job())
    (lease,) = await read_until(consumer, 1)
    consumer.incarnation.heartbeat.working(0.01)
    hand = await Hand(bus, EMBED, "hand").join()
    async with asyncio.timeout(60):
        while await bus.connection.call("EXISTS", keys.heart(EMBED, "gpu-hung")):
            await asyncio.sleep(0.1)
            await hand.beat()
    reached(bus)
    assert await hand.settle() == ["returned"]
    found = await bus.jobs.get(job.id)
    assert found is not None
    assert found.suspicions == 1
    consumer.incarnation.heartbeat.idle()
    assert await consumer.outbox.finish(lease, RESULT) == "fenced"
    await until(lambda: consumer.generation == 1)
    await consumer.stop()


async def test_journal_forgets(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal keeps nothing of what is no longer awaited: no bell, no reader, no family."""
    monkeypatch.setattr("common.bus.events.IDLE_S", 0.0)
    hand = await Hand(bus, EMBED, "g").join()
    journal = Notifications(bus.connection, "r1")
    jobs = await must(bus, *(new_job() for _ in range(5)))
    ends = [journal.end(job.id, bus.clock.now_ms() + 20_000) for job in jobs]
    waiting = asyncio.gather(*ends)
    for _ in jobs:
        await hand.finish((await hand.pull())[0], RESULT)
    assert [event.kind for event in await waiting] == ["result"] * 5
    await until(lambda: not journal._readers)
    assert (dict(journal.bells), dict(journal._ready), dict(journal.waiting)) == ({}, {}, {})
    await journal.stop()


async def test_journal_after_the_clock_went_back(bus: Bus) -> None:
    """A journal whose ids begin again below the last one read is heard again."""
    journal = Notifications(bus.connection, "r1")
    name = keys.journal(EMBED, "r1")
    bell = journal.bell("x", EMBED)
    event = Event(index=0, kind="progress")
    await bus.connection.call("XADD", name, "9999999999999-0", "j", "x", "i", 0, "e", encode(event))
    assert await bell.wait(60) == event
    await bus.connection.call("DEL", name)
    await bus.connection.call("XADD", name, "5-0", "j", "x", "i", 0, "e", encode(event))
    assert await bell.wait(60) == event
    bell.close()
    await journal.stop()


async def test_journal_is_bounded(bus: Bus) -> None:
    """Large events ring without their bytes, and come whole from the log."""
    hand = await Hand(bus, EMBED, "g").join()
    (job,) = await must(bus, new_job())
    (lease,) = await hand.pull()
    big = Event(index=0, kind="progress", data=b"x" * 100_000)
    await hand.step([lease], {job.id: big})
    rows = await bus.connection.call("XRANGE", keys.journal(EMBED, "r1"), "-", "+")
    assert sum(len(value) for _, flat in rows for value in flat) < 200
    journal = Notifications(bus.connection, "r1")
    async for event in journal.events(job.id, 0, bus.clock.now_ms() + 5000):
        assert event == big
        break
    await journal.stop()


@pytest.mark.soak
async def test_blocked_loop_keeps_its_leases(bus: Bus) -> None:
    """A loop that is blocked for longer than a heartbeat lives, but not for 10 s, loses nothing."""
    consumer = worker(bus, "gpu-a")
    await consumer.start()
    await must(bus, new_job())
    (lease,) = await read_until(consumer, 1)
    time.sleep(5.5)  # noqa: ASYNC251 - the very thing under test
    assert await consumer.outbox.finish(lease, RESULT) == "ok"
    await asyncio.sleep(1.2)
    assert consumer.generation == 0
    await consumer.drain()
    await consumer.stop()


@pytest.mark.parametrize("place", ["valkey", "valkey-cluster-3"], indirect=True)
async def test_the_heartbeat_thread(place: tuple[Server, int], tmp_path: Path) -> None:
    """The thread alone renews a heart that lives, on any node, and marks lost one whose key is gone."""
    server, partitions = place
    bus = await open_bus(server.url, str(tmp_path), cluster=partitions > 1)
    pulses = [Heartbeat(keys.heart(Family("embed.test", n), "w")) for n in range(3)]
    for pulse in pulses[:2]:
        await bus.connection.call("SET", pulse.key, 1, "PX", 2500)
    for pulse in pulses:
        bus.heartbeats.add(pulse)
    await until(pulses[2].lost.is_set)

    async def renewed() -> bool:
        left: list[int] = [await bus.connection.call("PTTL", pulse.key) for pulse in pulses]
        return min(left[:2]) > 2500 and left[2] < 0

    await until(renewed)
    assert [pulse.lost.is_set() for pulse in pulses] == [False, False, True]
    await bus.close()


async def test_with_a_password(redis_server: Server, tmp_path: Path) -> None:
    """User and password go with every connection, the heartbeat thread's too; a wrong one is told as the reason."""
    commands = ("ACL", "SETUSER", "mesh", "on", ">se:cret", "~*", "&*", "+@all", "-@admin")
    redis_server.command(*commands)
    redis_server.command("CONFIG", "SET", "requirepass", "other")
    url = redis_server.url.replace("//", "//mesh:se%3Acret@")
    bus = await open_bus(url, str(tmp_path))
    consumer = worker(bus, "gpu-a")
    await consumer.start()
    await must(bus, new_job())
    (lease,) = await read_until(consumer, 1)
    pulse = Heartbeat(keys.heart(EMBED, "nobody"))
    bus.heartbeats.add(pulse)
    await until(pulse.lost.is_set)
    assert await consumer.outbox.finish(lease, RESULT) == "ok"
    await consumer.drain()
    await consumer.stop()
    await bus.close()
    wrong = Common(data_dir=str(tmp_path), redis_url=url.replace("cret", "crot"))
    with pytest.raises(BusDown, match="invalid username-password"):
        await Bus.open(wrong, SystemClock(), timeout_s=0.1)
