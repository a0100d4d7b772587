"""A task for each leased job: bounded in number, its events in order through outages, stopped when cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.bus import Bus, BusDown
from common.wire.results import Event
from common.worker.leases import Lease
from common.worker.serve_each import JobServer, LogNames, serve_each
from common.worker.worker import Worker
from tests.support.bus import EMBED, RESULT, must, new_job, outcome, record

NAMES = LogNames("test", "job_failed", "step_failed")


class Told:
    """A job that logs what it is told to, and ends when released."""

    def __init__(self, worker: Worker, lease: Lease) -> None:
        self.worker, self.lease = worker, lease
        self.events: list[Event] = []
        self.release, self.was_stopped = asyncio.Event(), asyncio.Event()

    def tell(self, *indices: int) -> None:
        """Make the events of these indices."""
        self.events += [Event(index=i, kind="progress", data=b"%d" % i) for i in indices]

    async def run(self) -> None:
        await self.release.wait()
        await self.worker.outbox.finish(self.lease, RESULT, index=99)

    def event(self) -> Event | None:
        return self.events.pop(0) if self.events else None

    async def stopped(self) -> None:
        self.was_stopped.set()


@contextlib.asynccontextmanager
async def serving(bus: Bus, concurrency: int) -> AsyncIterator[tuple[JobServer, list[Told]]]:
    """A server of one worker, and its jobs as they begin."""
    jobs: list[Told] = []

    def begin(worker: Worker, lease: Lease) -> Told:
        jobs.append(Told(worker, lease))
        return jobs[-1]

    worker = Worker(bus, EMBED, record("gpu-a"), largest_items=1, largest_tokens=10)
    await worker.start()
    server = JobServer(bus.supervisor, begin, NAMES, concurrency=concurrency)
    server.add(worker)
    try:
        yield server, jobs
    finally:
        for job in jobs:
            job.release.set()
        await server.drain(30)


async def until(condition: Any) -> None:
    """Wait for a condition that no event tells."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the bus has no event for it
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("lost", ["call", "reply"])
async def test_events_are_in_order_through_an_outage(
    bus: Bus, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An emit that failed, before or after Redis ran it, is repeated before the next event: no gap, nothing twice."""
    async with serving(bus, 4) as (server, jobs):
        (job,) = await must(bus, new_job())
        await until(lambda: jobs)
        outbox, failed = jobs[0].worker.outbox, asyncio.Event()
        emit = outbox.emit

        async def fails(leases: Any, events: Any = None, **more: Any) -> set[str]:
            if not events or failed.is_set():
                return await emit(leases, events, **more)
            failed.set()
            if lost == "reply":
                await emit(leases, events, **more)
            raise BusDown("away")

        monkeypatch.setattr(outbox, "emit", fails)
        jobs[0].tell(0, 1, 2)
        async with asyncio.timeout(60):
            while len(await bus.jobs.log(job.id)) < 3:
                server.step_now()
                await asyncio.sleep(0.02)
        assert failed.is_set()
        jobs[0].release.set()
        assert (await _ended(bus, job.id)).kind == "result"
        log = await bus.jobs.log(job.id)
        assert [event.data for event in log[:-1]] == [b"0", b"1", b"2"]
        assert [told.lease.attempts for told in jobs] == [1]


async def _ended(bus: Bus, job: str) -> Event:
    async with asyncio.timeout(60):
        while not any(event.ends for event in await bus.jobs.log(job)):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
    return await outcome(bus, job)


async def test_at_most_so_many_run(bus: Bus) -> None:
    """The jobs beyond the limit wait on the lane until one ends."""
    async with serving(bus, 2) as (_, jobs):
        names = [job.id for job in await must(bus, *(new_job() for _ in range(5)))]
        ended = 0
        while ended < 5:
            await until(lambda: len(jobs) > ended)  # noqa: B023 - asked at once
            assert len([job for job in jobs if not job.release.is_set()]) <= 2
            jobs[ended].release.set()
            await _ended(bus, jobs[ended].lease.job)
            ended += 1
        assert sorted(job.lease.job for job in jobs) == sorted(names)


async def test_a_cancelled_job_is_stopped(bus: Bus) -> None:
    """Its task is cancelled, and it cleans up after that; the others go on."""
    async with serving(bus, 4) as (server, jobs):
        first, second = await must(bus, new_job(), new_job())
        await until(lambda: len(jobs) == 2)
        await bus.control.cancel(first.id)
        server.step_now(every=True)
        stopped = next(job for job in jobs if job.lease.job == first.id)
        async with asyncio.timeout(60):
            await stopped.was_stopped.wait()
        assert (await outcome(bus, first)).kind == "cancelled"
        for job in jobs:
            job.release.set()
        assert (await _ended(bus, second.id)).kind == "result"
    assert not next(job for job in jobs if job.lease.job == second.id).was_stopped.is_set()


async def test_serve_each_drains(bus: Bus) -> None:
    """Told to stop, it ends what runs and hands over nothing that ended."""
    stopping, begun, release = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def serve(worker: Worker, lease: Lease) -> None:
        begun.set()
        await release.wait()
        await worker.outbox.finish(lease, RESULT)

    worker = Worker(bus, EMBED, record("gpu-a"), largest_items=1, largest_tokens=10)
    await worker.start()
    (job,) = await must(bus, new_job())
    serving_it = asyncio.create_task(
        serve_each(worker, serve, 4, names=NAMES, stopping=stopping, drain_s=60)
    )
    await begun.wait()
    stopping.set()
    release.set()
    await serving_it
    assert (await outcome(bus, job)).kind == "result"
    assert await bus.workers.living(EMBED) == []
