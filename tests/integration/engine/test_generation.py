"""The generation loop on a real bus: streams, choices, refusals, cancels, deadlines, failures, folds and hand-over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.bus import Bus
from common.ids import Family
from common.registry.dead_letters import DeadLetters
from common.types.generation import SamplingParams
from common.wire.jobs import GenerateWork
from engine.decoder.executor.simulated_executor import END, answer
from engine.decoder.scheduler import StepLimits
from services.adapters.generate import job as job_module
from services.adapters.generate import output_emitter
from tests.support.engine import (
    FAMILY,
    LANE,
    WAIT_S,
    Desk,
    HeldRunner,
    Worker,
    ended,
    running,
    text_of,
    tokens_of,
    work,
)
from tests.support.waiting import until


def said(prompt: str, count: int, choice: int = 0) -> str:
    """What the sim device says to a prompt."""
    phrase = answer(list(prompt.encode()), choice)
    return (phrase * (count // len(phrase) + 1))[:count].decode()


async def test_streams_of_many_jobs(bus: Bus, desk: Desk) -> None:
    """Each job's pieces are its own answer, in order, with usage; the lane is empty afterwards."""
    before = ended("ok")
    async with running(bus) as worker:
        prompts = [f"hello {n} " * (n % 7 + 1) for n in range(30)]
        jobs = [await desk.admit(work(p, max_new=10 + n)) for n, p in enumerate(prompts)]
        for n, (job, prompt) in enumerate(zip(jobs, prompts, strict=True)):
            pieces, result = await desk.result(job)
            assert text_of(pieces) == said(prompt, 10 + n)
            assert (result.prompt_tokens, result.completion_tokens) == (len(prompt), 10 + n)
            assert [piece.finish for piece in pieces if piece.finish] == ["length"]
            assert [piece.at for piece in pieces] == sorted(piece.at for piece in pieces)
        assert worker.no_page_held()
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}
    assert ended("ok") == before + 30
    assert worker.value("spillway_batch_wait_seconds_count", lane=LANE) == 30
    assert worker.generated() == sum(range(10, 40))


async def test_a_job_whose_end_cannot_be_told(
    bus: Bus, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error as a generation is ended costs one more try: its client gets the same answer, and its end."""
    async with running(bus) as worker:
        finish = worker.consumer.outbox.finish
        failed: list[str] = []

        async def breaks(lease: Any, result: Any, **more: Any) -> str:
            if not failed:
                failed.append(lease.job)
                raise RuntimeError("boom")
            return await finish(lease, result, **more)

        monkeypatch.setattr(worker.consumer.outbox, "finish", breaks)
        job = await desk.admit(work("hello", max_new=10))

        pieces, result = await desk.result(job)
        assert text_of(pieces) == said("hello", 10)
        assert result.completion_tokens == 10
        assert failed == [job]
        assert worker.no_page_held()
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}


async def test_work_of_all_kinds(bus: Bus, desk: Desk) -> None:
    """One worker: several prompts and choices, every way to end, log probabilities."""
    async with running(bus) as worker:
        await choices_share_their_prompt(worker, desk)
        await choices_end_where_they_must(desk)
        await logprobs_ride_with_their_tokens(desk)


async def choices_share_their_prompt(worker: Worker, desk: Desk) -> None:
    """Choice c belongs to prompt c // n; each prompt is computed once, and found again within its scope."""
    prompts = ["a" * 100, "b" * 200]
    pieces, result = await desk.result(await desk.admit(work(*prompts, n=3, max_new=20)))

    for choice in range(6):
        assert text_of(pieces, choice) == said(prompts[choice // 3], 20, choice)
    assert (result.prompt_tokens, result.completion_tokens) == (300, 120)
    rows = sum(len(part.positions) for batch in worker.runner.batches for part in batch)
    assert rows <= 300 + 6 * 32 + 120
    again, result = await desk.result(await desk.admit(work(prompts[1], max_new=5)))
    assert result.cached_tokens == 192
    other, result = await desk.result(await desk.admit(work(prompts[1], max_new=5, scope="u")))
    assert result.cached_tokens == 0
    assert text_of(again) == text_of(other)


async def choices_end_where_they_must(desk: Desk) -> None:
    """Stop strings are cut off across tokens; stop ids, min_new, ignore_eos and forced answers do what they say."""
    whole = said("x", 30)
    cut = await desk.admit(work("x", max_new=30, stop=["ted ", "zzz"]))
    late = await desk.admit(work("x", max_new=30, stop=["ted"], min_new=12))
    byte = await desk.admit(work("x", max_new=30, stop_ids=[ord("d")]))
    on = await desk.admit(work("x", max_new=30, stop_ids=[ord("d")], ignore_eos=True))
    forced = await desk.admit(work("x", max_new=2, forced=[*b"No passage.", END]))
    none = await desk.admit(work("x", max_new=0))

    pieces, result = await desk.result(cut)
    assert text_of(pieces) == "simula"
    assert (pieces[-1].finish, pieces[-1].stopped_by) == ("stop", "ted ")
    assert result.completion_tokens == len("simulated ")
    assert await desk.text(late) == whole[: whole.index("ted", 12)]
    pieces, result = await desk.result(byte)
    assert (text_of(pieces), pieces[-1].finish, pieces[-1].stopped_by) == (
        "simulate",
        "stop",
        "d",
    )
    assert tokens_of(pieces) == list(b"simulate")
    assert await desk.text(on) == whole
    pieces, _ = await desk.result(forced)
    assert (text_of(pieces), pieces[-1].finish) == ("No passage.", "stop")
    pieces, result = await desk.result(none)
    assert (text_of(pieces), pieces[-1].finish, result.completion_tokens) == ("", "length", 0)


async def logprobs_ride_with_their_tokens(desk: Desk) -> None:
    """Every token of every piece has its log probability, with bytes."""
    pieces, _ = await desk.result(await desk.admit(work("x", max_new=9, logprobs=1)))
    for piece in pieces:
        assert [item.id for item in piece.logprobs] == piece.tokens
        assert [item.raw for item in piece.logprobs] == [bytes([t]) for t in piece.tokens]
        assert all(len(item.top) == 1 for item in piece.logprobs)


async def test_an_end_does_not_take_the_text_of_others_with_it(
    bus: Bus, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is collected until there is enough of it or time has passed, whatever other answers begin or end."""
    monkeypatch.setattr(output_emitter, "TOGETHER", 1 << 20)
    monkeypatch.setattr(output_emitter, "SOON_S", WAIT_S)
    monkeypatch.setattr(output_emitter, "MOST_S", WAIT_S)
    slow = HeldRunner(alpha_s=0.005)
    async with running(bus, slow) as worker:
        first = await desk.admit(work("first", max_new=2))
        await desk.end(first)  # from here on the time since all text was sent is short
        slow.gate.clear()
        job = await desk.admit(work("hello", max_new=25))
        others = [await desk.admit(work(f"other {n}", max_new=n)) for n in range(2, 12, 3)]
        sequences = worker.scheduler
        await until(lambda: len(sequences.running + sequences.waiting) > len(others))
        slow.gate.set()
        assert await desk.text(job) == said("hello", 25)
        events = [event for event in await bus.jobs.log(job) if event.kind == "progress"]
        assert len(events) <= 2  # its first token, and all others with its end


async def test_refusals(bus: Bus, desk: Desk) -> None:
    """Work that cannot be done ends at once with a sentence, without tries and without a dead letter."""
    runner = HeldRunner(kv_bytes=16 * 4096)
    async with running(bus, runner) as worker:
        asked: dict[str, tuple[GenerateWork | bytes, str, str]] = {
            "junk": (b"\xc1junk", "invalid_request", "no work"),
            "other": (work("x", fingerprint="0" * 32), "unavailable", "replaced"),
            "long": (work("x", max_new=9000), "invalid_request", "8192 in all"),
            "pages": (work("x", max_new=600), "unprocessable", "KV_BYTES"),
            "empty": (work(""), "invalid_request", "no tokens"),
            "none": (work(), "invalid_request", "at least one prompt"),
            "ids": (work([5, 9999]), "invalid_request", "outside"),
            "stop": (work("x", stop_ids=[-1]), "invalid_request", "stop id"),
        }
        for payload, code, sentence in asked.values():
            event = await desk.end(await desk.admit(payload))
            assert (event.kind, event.code) == ("error", code)
            assert sentence in event.message
        assert worker.runner.batches == []
    assert await DeadLetters(bus).all(FAMILY) == []
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}


async def test_cancel_frees_pages_within_a_step(bus: Bus, desk: Desk) -> None:
    """A cancelled stream, and one still in its prompt, end at the next step and give their pages back."""
    runner = HeldRunner(beta_s=0.005)
    async with running(bus, runner, bounds=StepLimits(32, 8)) as worker:
        stream = await desk.admit(work("x", max_new=5000))
        prompt = await desk.admit(work("y" * 8000, max_new=10))
        await desk.until(stream, 3)
        async with asyncio.timeout(WAIT_S):
            while len(worker.scheduler.running) < 2:  # noqa: ASYNC110 - the scheduler has no event for it
                await asyncio.sleep(0.005)
        for job in (stream, prompt):
            assert await bus.control.cancel(job) == "flagged"
            assert (await desk.end(job)).kind == "cancelled"
        steps = len(runner.batches)
        async with asyncio.timeout(WAIT_S):
            while not worker.no_page_held():  # noqa: ASYNC110 - nor for this
                await asyncio.sleep(0.001)
        assert len(runner.batches) - steps <= 2
        assert sum(len(part.positions) for batch in runner.batches for part in batch) < 8000
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}


async def test_deadlines(bus: Bus, desk: Desk) -> None:
    """A choice runs at most to its job's deadline; what was delivered before stays, and the outcome is expired."""
    async with running(bus, HeldRunner(beta_s=0.02)) as worker:
        late = await desk.admit(work("x", max_new=500), seconds=1.5)
        event = await desk.end(late)
        assert (event.kind, event.code) == ("expired", "deadline_exceeded")
        pieces = await desk.pieces(late)
        assert text_of(pieces) == said("x", len(tokens_of(pieces)))
        assert worker.no_page_held()


async def test_an_error_charges_its_own_job(bus: Bus, desk: Desk) -> None:
    """A job that makes the model raise becomes a dead letter after three tries; its neighbours end well."""
    async with running(bus) as worker:
        worker.runner.gate.clear()
        good = [await desk.admit(work(f"g{n}", max_new=30)) for n in range(4)]
        bad = await desk.admit(work([HeldRunner.POISON, 1, 2]))
        worker.runner.gate.set()

        assert (await desk.end(bad)).kind == "dead"
        for n, job in enumerate(good):
            assert await desk.text(job) == said(f"g{n}", 30)
        assert worker.no_page_held()
    (letter,) = await DeadLetters(bus).all(FAMILY)
    assert (letter.job, letter.attempts, letter.message) == (bad, 3, "RuntimeError: poisoned")


async def test_preemption_under_few_pages(bus: Bus, desk: Desk) -> None:
    """With pages for two at a time, many streams all end with their own text."""
    runner = HeldRunner(kv_bytes=12 * 4096)
    async with running(bus, runner) as worker:
        prompts = [f"{n} " * 20 for n in range(12)]
        jobs = [await desk.admit(work(prompt, max_new=150)) for prompt in prompts]
        for prompt, job in zip(prompts, jobs, strict=True):
            assert await desk.text(job) == said(prompt, 150)
        assert worker.value("spillway_preemptions_total") > 0


async def test_a_long_log_is_folded(bus: Bus, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of a long stream stays short, and what it holds is everything, each piece with its own index."""
    monkeypatch.setattr(job_module, "FOLD_EVERY", 16)
    one = await Worker(bus, HeldRunner(beta_s=0.002)).start(drain_s=0.1)
    job = await desk.admit(work("x", max_new=400))
    await desk.until(job, 150)
    await one.stop()
    async with running(bus, HeldRunner(beta_s=0.002)):
        event = await desk.end(job)
    assert event.kind == "result"
    assert event.index > 16
    events = await bus.jobs.log(job)
    pieces = await desk.pieces(job)
    assert text_of(pieces) == said("x", 400)
    assert len(events) <= 17
    assert [piece.at for piece in pieces] == list(range(event.index))


async def test_hand_over_at_drain(bus: Bus, desk: Desk) -> None:
    """A worker told to stop hands its streams over; the next goes on at the next token, uncharged and unchanged."""
    one = await Worker(bus, HeldRunner(beta_s=0.01)).start(drain_s=0.3)
    asked = work("x", max_new=300, n=2, sampling=SamplingParams(temperature=0.5, seed=3))
    job = await desk.admit(asked)
    before = await desk.until(job, 10)
    await one.stop()
    handed = await desk.pieces(job)
    assert len(tokens_of(handed)) < 300
    async with running(bus):
        pieces, result = await desk.result(job)
        assert [text_of(pieces, c) for c in (0, 1)] == [said("x", 300, c) for c in (0, 1)]
        assert pieces[: len(before)] == before
        assert pieces[: len(handed)] == handed
        assert result.completion_tokens == 600
    state = await bus.jobs.get(job)
    assert state is not None
    assert state.attempts <= 1


async def test_a_drain_lets_streams_end(bus: Bus, desk: Desk) -> None:
    """Within the drain time what runs is finished, and what has not begun goes to others at once."""
    one = await Worker(bus, HeldRunner(beta_s=0.005), bounds=StepLimits(64, 1)).start()
    job = await desk.admit(work("x", max_new=100))
    await desk.until(job, 5)
    waiting = [await desk.admit(work(f"w{n}", max_new=5)) for n in range(3)]
    stopping = asyncio.create_task(one.stop())
    async with running(bus):
        for n, other in enumerate(waiting):
            assert await desk.text(other) == said(f"w{n}", 5)
    await stopping
    assert await desk.text(job) == said("x", 100)
    assert one.generated() == 100


async def test_two_workers_share_the_lane(bus: Bus, desk: Desk) -> None:
    """Many streams over two workers: every one ends once, with its own text."""
    before = ended("ok")
    async with (
        running(bus, HeldRunner(beta_s=0.001)) as one,
        running(bus, HeldRunner(beta_s=0.001)) as two,
    ):
        jobs = [await desk.admit(work(f"p{n}", max_new=20)) for n in range(60)]
        for n, job in enumerate(jobs):
            assert await desk.text(job) == said(f"p{n}", 20)
    assert ended("ok") == before + 60
    assert min(one.generated(), two.generated()) > 0
    assert await bus.workers.living(Family("chat.sim-chat")) == []
