"""The embedding loop on a real bus: results, refusals, cancellation, expiry, isolation and hand-over."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from common.bus import Bus, NewJob, Notifications
from common.ids import Family, job_id, ulid
from common.registry.dead_letters import DeadLetters
from common.wire.jobs import EmbedWork
from common.wire.message import encode
from common.wire.registry import WorkerRecord
from common.wire.results import EmbedResult, Event, decode_result
from common.worker.incarnation import incarnation_name
from common.worker.worker import Worker as FamilyWorker
from engine.device import DeviceQueue, spare
from engine.encoder.capacity import calibrate
from services.adapters.encode.loop import EmbeddingLoop, SubmittedBatch, with_capacity
from services.adapters.encode.questions import QuestionDevice
from services.adapters.metrics import WorkMetrics
from tests.support.clock import ManualClock
from tests.support.fake_encoders import NAN, POISON, TinyModel, work
from tests.support.waiting import until

FAMILY = Family("embed.tiny")
LANE = "embed.tiny/0:gpu"
WAIT_S = 60.0


class Desk:
    """What a router does, in few lines: admit jobs and wait for their ends."""

    def __init__(self, bus: Bus, journal: Notifications) -> None:
        self.bus, self.journal = bus, journal

    async def admit(
        self,
        *texts: list[int],
        seconds: float = WAIT_S,
        payload: bytes = b"",
        prefer: str | None = None,
    ) -> str:
        job = job_id(FAMILY, ulid())
        tokens = sum(len(text) for text in texts)
        admission = await self.bus.admission.admit(
            [NewJob(job, payload or work(*texts), max(1, len(texts)), max(1, tokens))],
            classes=("gpu",),
            router="r1",
            tenant="t",
            deadline_ms=self.bus.clock.now_ms() + int(seconds * 1000),
            prefer=prefer,
        )
        assert admission.outcome == "admitted", admission
        return job

    async def end(self, job: str) -> Event:
        return await self.journal.end(job, self.bus.clock.now_ms() + int(WAIT_S * 1000))


class Worker:
    """A loop with its model, to be started and stopped; with `beside` questions have a model and a thread of their own.

    By the device's clock, which stands still, whatever is due at once is due before all else.
    """

    def __init__(self, bus: Bus, *, beside: bool = False) -> None:
        self.model, self.beside = TinyModel(), TinyModel()
        self.stopping = asyncio.Event()
        capacity = calibrate(self.model, 2.0)
        self.model.batches.clear()
        self.model.entered.clear()
        record = WorkerRecord(
            worker=incarnation_name("gpu"),
            classes=["gpu"],
            device="cpu",
            depth_items=0,
            depth_tokens=0,
            fingerprint=self.model.fingerprint,
        )
        self.consumer = FamilyWorker(bus, FAMILY, with_capacity(record, capacity))
        self.device, self.second = DeviceQueue(clock=ManualClock()), DeviceQueue()
        self.loop = EmbeddingLoop(
            self.consumer,
            self.model,
            capacity,
            clock=bus.clock,
            device=self.device,
            metrics=WorkMetrics(CollectorRegistry()).on(LANE, "tiny"),
            questions=QuestionDevice(self.beside, self.second) if beside else None,
        )
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> Worker:
        await self.consumer.start()
        self.task = asyncio.create_task(self.loop.run(self.stopping, 5.0))
        return self

    async def stop(self) -> None:
        self.stopping.set()
        self.model.gate.set()
        self.beside.gate.set()
        assert self.task is not None
        async with asyncio.timeout(WAIT_S):
            await self.task
        self.device.close()
        self.second.close()


def ended(outcome: str) -> float:
    """Return how many jobs have ended so, at any worker of this process."""
    labels = {"lane": LANE, "outcome": outcome}
    return REGISTRY.get_sample_value("spillway_jobs_total", labels) or 0.0


@pytest.fixture
async def desk(bus: Bus) -> AsyncIterator[Desk]:
    """Return a router's side of the bus."""
    journal = Notifications(bus.connection, "r1")
    await journal.start()
    yield Desk(bus, journal)
    await journal.stop()


async def held(worker: Worker, desk: Desk) -> str:
    """Close the model's gate and return a job that waits there, as the running batch."""
    worker.model.gate.clear()
    job = await desk.admit([1])
    async with asyncio.timeout(WAIT_S):
        await asyncio.to_thread(worker.model.entered.wait)
    return job


@contextlib.asynccontextmanager
async def running(bus: Bus, *, beside: bool = False) -> AsyncIterator[Worker]:
    """Run one worker and drain it at the end."""
    worker = await Worker(bus, beside=beside).start()
    try:
        yield worker
    finally:
        await worker.stop()


def rows(event: Event) -> list[list[float]]:
    """Return the vectors of a result."""
    assert event.kind == "result", event
    result = decode_result(event.data)
    assert isinstance(result, EmbedResult)
    return np.frombuffer(result.vectors, "<f4").reshape(-1, result.dimension).tolist()


async def test_results_and_isolation(bus: Bus, desk: Desk) -> None:
    """Jobs get their own vectors; a poisoned text and a NaN become dead letters, their neighbours do not."""
    dead, ok = ended("dead"), ended("ok")
    async with running(bus) as worker:
        first = await held(worker, desk)
        good = [await desk.admit([n, n], [n]) for n in range(2, 8)]
        bad = [await desk.admit([POISON]), await desk.admit([NAN])]
        worker.model.gate.set()

        assert rows(await desk.end(first)) == [TinyModel.row([1])]
        for n, job in zip(range(2, 8), good, strict=True):
            assert rows(await desk.end(job)) == [TinyModel.row([n, n]), TinyModel.row([n])]
        ends = [await desk.end(job) for job in bad]
        assert [end.kind for end in ends] == ["dead", "dead"]
    assert ended("dead") == dead + 2
    assert ended("ok") == ok + 7
    letters = await DeadLetters(bus).all(FAMILY)
    assert sorted(letter.job for letter in letters) == sorted(bad)
    assert {letter.attempts for letter in letters} == {3}
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}


async def test_a_batch_begins_while_the_one_before_leaves_a_core(
    bus: Bus, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch says that it leaves cores without work: the next one is computed beside it, and may end first."""
    async with running(bus) as worker:
        spared, gate, encode = asyncio.Event(), threading.Event(), worker.model.encode
        loop = asyncio.get_running_loop()

        def leaves_a_core(texts: Any) -> Any:
            made = encode(texts)
            if texts[0] == [1]:
                spare()
                loop.call_soon_threadsafe(spared.set)
                assert gate.wait(WAIT_S)
            return made

        monkeypatch.setattr(worker.model, "encode", leaves_a_core)
        first = await desk.admit([1])
        async with asyncio.timeout(WAIT_S):
            await spared.wait()
        second = await desk.admit([2])
        await until(lambda: len(worker.model.batches) == 2)
        gate.set()

        assert rows(await desk.end(first)) == [TinyModel.row([1])]
        assert rows(await desk.end(second)) == [TinyModel.row([2])]
    assert worker.model.batches == [[[1]], [[2]]]
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}


def test_half_of_the_time_beside_each_other_counts_for_each() -> None:
    """Two batches share the device from when the first leaves cores and the second is queued, to the first's end."""
    first, second = (SubmittedBatch([], 1.0, queued_s, full=False) for queued_s in (0.0, 5.0))
    assert first.shared_s(second, 8.0) == 0.0  # it left no core
    first.spare_s = 4.0
    assert first.shared_s(second, 8.0) == 1.5
    first.spare_s = 6.0
    assert first.shared_s(second, 8.0) == 1.0
    second.ahead_s = 1.5
    assert second.left_s == 0.0
    second.ahead_s = 0.25
    assert second.left_s == 0.75


async def test_a_job_whose_end_cannot_be_told(
    bus: Bus, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error as a job is ended costs one more try of this job; its neighbours end as always."""
    async with running(bus) as worker:
        finish = worker.consumer.outbox.finish
        failed: list[str] = []

        async def breaks(lease: Any, result: Any) -> str:
            if not failed:
                failed.append(lease.job)
                raise RuntimeError("boom")
            return await finish(lease, result)

        async def breaks_all(results: Any) -> list[str]:
            raise RuntimeError(f"boom: {results}")

        monkeypatch.setattr(worker.consumer.outbox, "finish", breaks)
        monkeypatch.setattr(worker.consumer.outbox, "finish_all", breaks_all)
        jobs = [await desk.admit([n]) for n in range(2, 6)]

        for n, job in zip(range(2, 6), jobs, strict=True):
            assert rows(await desk.end(job)) == [TinyModel.row([n])]
    assert len(failed) == 1
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}


async def test_refusals(bus: Bus, desk: Desk) -> None:
    """Work that is not for this model ends at once, without tries and without a dead letter."""
    async with running(bus) as worker:
        junk = await desk.end(await desk.admit(payload=b"\xc1junk"))
        other = await desk.end(await desk.admit(payload=work([1], fingerprint="0" * 32)))

        assert (junk.kind, junk.code) == ("error", "invalid_request")
        assert (other.kind, other.code) == ("error", "unavailable")
        assert worker.model.batches == []
    assert await DeadLetters(bus).all(FAMILY) == []


async def test_cancelled_and_expired_work_is_not_computed(bus: Bus, desk: Desk) -> None:
    """What was cancelled or ran out of time behind a long batch ends while that runs, and never reaches the model."""
    async with running(bus) as worker:
        first = await held(worker, desk)
        cancelled = await desk.admit([2])
        await until(lambda: len(worker.consumer.leases.held) == 2)
        assert await bus.control.cancel(cancelled) == "flagged"
        late = await desk.admit([3], seconds=0.2)

        assert (await desk.end(cancelled)).kind == "cancelled"
        assert (await desk.end(late)).kind == "expired"
        worker.model.gate.set()
        assert (await desk.end(first)).kind == "result"
        assert worker.model.batches == [[[1]]]
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}


def behind(worker: Worker, items: int) -> bool:
    """Return whether so many texts wait at the device behind the running batch."""
    return worker.loop._next is not None and worker.loop._next.items == items


async def test_the_next_batch_waits_at_the_device(bus: Bus, desk: Desk) -> None:
    """While a batch runs, all that arrives is queued behind it as one batch, which the device begins by itself."""
    async with running(bus) as worker:
        jobs = [await held(worker, desk)]
        for n in range(2, 6):
            jobs.append(await desk.admit([n]))
            await until(partial(behind, worker, n - 1))
        worker.model.gate.set()

        assert [rows(await desk.end(job)) for job in jobs] == [
            [TinyModel.row([n])] for n in range(1, 6)
        ]
        assert worker.model.batches == [[[1]], [[2], [3], [4], [5]]]


def question(worker: Worker, text: list[int]) -> bytes:
    """Return the work of a search's question."""
    return encode(EmbedWork(worker.model.fingerprint, [text], question=True))


async def test_a_question_is_computed_beside_a_batch(bus: Bus, desk: Desk) -> None:
    """While a batch runs and another waits, a question in the worker's own lane ends, though the worker has no room."""
    async with running(bus, beside=True) as worker:
        jobs = [await held(worker, desk)]
        half = worker.loop._capacity.limits.tokens // 2
        jobs += [await desk.admit([n] * half) for n in (2, 3, 4)]
        await until(lambda: worker.loop._free_jobs() <= 0)
        asked = [
            await desk.admit([n, n], payload=question(worker, [n, n]), prefer=worker.consumer.name)
            for n in (8, 9)
        ]
        jobs.append(await desk.admit([5] * half))

        assert [rows(await desk.end(job)) for job in asked] == [
            [TinyModel.row([n, n])] for n in (8, 9)
        ]
        assert [text for batch in worker.beside.batches for text in batch] == [[8, 8], [9, 9]]
        assert worker.model.batches == [[[1]]]
        assert jobs[-1] not in worker.consumer.leases.held  # there was no room
        worker.model.gate.set()
        assert [(await desk.end(job)).kind for job in jobs] == ["result"] * len(jobs)
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}


async def test_questions_that_wait_run_together(bus: Bus, desk: Desk) -> None:
    """While a question runs, those that arrive form the next batch; cancelled and expired ones are not ended twice."""
    async with running(bus, beside=True) as worker:
        worker.beside.gate.clear()
        jobs = []
        for n in (2, 3, 4, 6):
            jobs.append(await desk.admit([n], payload=question(worker, [n])))
            await until(lambda: len(worker.consumer.leases.held) == len(jobs))
            await asyncio.to_thread(worker.beside.entered.wait)
        assert await bus.control.cancel(jobs[2]) == "flagged"
        jobs.append(await desk.admit([5], seconds=0.3, payload=question(worker, [5])))
        await asyncio.sleep(0.4)
        worker.beside.gate.set()

        kinds = [(await desk.end(job)).kind for job in jobs]
        assert kinds == ["result", "result", "cancelled", "result", "expired"]
        assert worker.beside.batches == [[[2]], [[3], [4], [6]]]
        assert worker.model.batches == []
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}


async def test_a_poisoned_question_spoils_no_other(bus: Bus, desk: Desk) -> None:
    """A question that raises becomes a dead letter after its tries; another one beside it gets its vector."""
    async with running(bus, beside=True) as worker:
        texts = [[POISON], [7]]
        jobs = [await desk.admit(text, payload=question(worker, text)) for text in texts]
        ends = [await desk.end(job) for job in jobs]
        assert [end.kind for end in ends] == ["dead", "result"]
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}


async def test_a_long_question_runs_with_the_batches(bus: Bus, desk: Desk) -> None:
    """A question with more than an eighth of the largest batch's tokens would hold up others: it waits its turn."""
    async with running(bus, beside=True) as worker:
        text = [3] * (worker.loop._capacity.limits.tokens // 8 + 1)
        assert (await desk.end(await desk.admit(text, payload=question(worker, text)))).kind == (
            "result"
        )
        assert worker.model.batches == [[text]]
        assert worker.beside.batches == []


async def test_a_question_is_the_next_task_of_a_single_device(bus: Bus, desk: Desk) -> None:
    """Where the device takes one task after another, a question goes before a batch that waits for it."""
    async with running(bus) as worker:
        gate = threading.Event()
        other = worker.device.submit(gate.wait, kind="generate")
        half = worker.loop._capacity.limits.tokens // 2
        jobs = [await desk.admit([2] * half)]
        await until(lambda: len(worker.consumer.leases.held) == 1 and not worker.loop._queue)
        jobs.append(
            await desk.admit([9, 9], payload=question(worker, [9, 9]), prefer=worker.consumer.name)
        )
        await until(lambda: len(worker.device._unbegun) == 2)
        gate.set()
        await other

        assert [(await desk.end(job)).kind for job in jobs] == ["result"] * len(jobs)
        assert worker.model.batches == [[[9, 9]], [[2] * half]]


async def test_drain_ends_the_questions_that_run(bus: Bus, desk: Desk) -> None:
    """A drained worker ends its running questions; another one gets those that wait, and no job is charged."""
    one = await Worker(bus, beside=True).start()
    one.beside.gate.clear()
    jobs = [await desk.admit([2], payload=question(one, [2]), prefer=one.consumer.name)]
    await asyncio.to_thread(one.beside.entered.wait)
    jobs += [
        await desk.admit([n], payload=question(one, [n]), prefer=one.consumer.name)
        for n in range(3, 6)
    ]
    await until(lambda: len(one.consumer.leases.held) == len(jobs))
    stopping = asyncio.create_task(one.stop())
    async with running(bus):
        events = [await desk.end(job) for job in jobs]
        await stopping

    assert [rows(event) for event in events] == [[TinyModel.row([n])] for n in range(2, 6)]
    states = [await bus.jobs.get(job) for job in jobs]
    assert max(state.attempts for state in states if state) <= 1
    assert one.beside.batches == [[[2]]]
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}


async def test_drain_hands_over_what_is_queued(bus: Bus, desk: Desk) -> None:
    """A drained worker ends its running batch; another one does the rest, and no job is charged."""
    one = await Worker(bus).start()
    jobs = [await held(one, desk)]
    jobs += [await desk.admit([n]) for n in range(2, 12)]
    await asyncio.sleep(0.2)
    stopping = asyncio.create_task(one.stop())
    async with running(bus):
        events = [await desk.end(job) for job in jobs]
        await stopping

    assert [rows(event) for event in events] == [[TinyModel.row([n])] for n in range(1, 12)]
    states = [await bus.jobs.get(job) for job in jobs]
    assert None not in states
    assert max(state.attempts for state in states if state) <= 1
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}


async def test_two_workers_share_the_lane(bus: Bus, desk: Desk) -> None:
    """Many jobs over two workers: every one ends once, with its own vectors."""
    before = ended("ok")
    async with running(bus), running(bus):
        jobs = await asyncio.gather(*(desk.admit([n + 1, n + 2]) for n in range(150)))
        events = await asyncio.gather(*(desk.end(job) for job in jobs))

    assert ended("ok") == before + 150
    assert [rows(event) for event in events] == [
        [TinyModel.row([n + 1, n + 2])] for n in range(150)
    ]
