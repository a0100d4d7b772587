"""Streams that survive: workers killed or stopped, Redis restarted or away; no delivered token lost or changed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.engine import random_models
from common.bus import Bus, Notifications
from common.config import Common
from common.ids import Family
from common.pages.identity import short_context
from common.registry.dead_letters import DeadLetters
from common.registry.models import Models
from common.types.generation import SamplingParams
from common.wire.jobs import GenerateWork
from services.adapters.generate.loop import AHEAD
from tests.integration.engine.test_generation import said
from tests.support.engine import FAMILY, Desk, HeldRunner, Worker, running, text_of, tokens_of, work
from tests.support.servers import Server

ROOT = Path(__file__).resolve().parents[3]
SIM = ("--device", "sim", "--embed-model", "none", "--chat-model", "sim")


@contextmanager
def process(config: Common, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a gpu_worker as an operator starts it."""
    env = {**os.environ, "SPILLWAY_REDIS_URL": config.redis_url, "SPILLWAY_LOG_FORMAT": "json"}
    command = [sys.executable, "-m", "services.gpu_worker", "--data-dir", config.data_dir, *flags]
    made = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield made
    finally:
        made.kill()
        made.wait()


async def live(bus: Bus, family: Family, count: int) -> None:
    """Wait until so many workers live."""
    async with asyncio.timeout(60):
        while len(await bus.workers.living(family)) < count:  # noqa: ASYNC110 - the registry has no event
            await asyncio.sleep(0.05)


async def test_a_stopped_worker(bus: Bus, desk: Desk, config: Common) -> None:
    """SIGSTOP in mid-stream: another goes on where the log ends; the woken one changes nothing, and takes over then."""
    flags = (*SIM, "--beta", "0.02")
    with process(config, *flags, "--instance", "a") as one:
        await live(bus, FAMILY, 1)
        jobs = {f"p{n}": await desk.admit(work(f"p{n}", max_new=250)) for n in range(3)}
        for job in jobs.values():
            await desk.until(job, 5)
        one.send_signal(signal.SIGSTOP)
        before = {job: await desk.pieces(job) for job in jobs.values()}
        with process(config, *flags, "--instance", "b", "--drain-s", "0.1") as two:
            for job in jobs.values():
                await desk.until(job, len(tokens_of(before[job])) + 5)
            one.send_signal(signal.SIGCONT)
            await live(bus, FAMILY, 2)
            two.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(two.wait, 40) == 0
        for prompt, job in jobs.items():
            pieces, result = await desk.result(job)
            assert text_of(pieces) == said(prompt, 250)
            assert pieces[: len(before[job])] == before[job]
            assert result.completion_tokens == 250
        one.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(one.wait, 40) == 0
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}
    assert await DeadLetters(bus).all(FAMILY) == []


@pytest.mark.parametrize(
    ("family", "killed_at"),
    [
        pytest.param("llama", 10, id="llama"),
        pytest.param("phi3", 5, id="before the short context is outgrown"),
        pytest.param("phi3", 25, id="after the short context was outgrown"),
    ],
)
async def test_a_killed_worker_with_a_real_model(
    bus: Bus, config: Common, tmp_path: Path, family: str, killed_at: int
) -> None:
    """kill -9 while tokens are drawn with penalties: the stream ends as it does undisturbed, under another worker."""
    chosen = random_models.settings(family, 1)
    if family == "phi3":
        rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        chosen |= {"original_max_position_embeddings": 95, "rope_parameters": rope}
    random_models.write(tmp_path / "m", family, chosen)
    flags: tuple[str, ...] = ("--embed-model", "none", "--chat-model", str(tmp_path / "m"))
    flags += ("--threads", "1", "--device", "cpu")
    flags += ("--step-tokens", "16", "--kv-bytes", str(4 << 20))
    journal = Notifications(bus.connection, "r1")
    await journal.start()
    name = Family("chat.m")
    with (
        process(config, *flags, "--instance", "a") as one,
        process(config, *flags, "--instance", "b") as two,
    ):
        await live(bus, name, 2)
        pids = {record.worker: record.pid for record in await bus.workers.living(name)}
        card = (await Models(bus).cards())["m"]
        assert short_context(card.fingerprint) == (95 if family == "phi3" else 0)
        desk = Desk(bus, journal, name)
        asked = GenerateWork(
            fingerprint=card.fingerprint,
            scope="t",
            prompts=[[5, 6, 7, 8] * 20],
            n=2,
            max_new=150,
            logprobs=1,
            sampling=SamplingParams(temperature=0.8, repetition=1.2, frequency=0.3, seed=9),
        )
        expected, _ = await desk.result(await desk.admit(asked))
        job = await desk.admit(asked)
        before = await desk.until(job, killed_at)
        (holder,) = await bus.lanes.pending(name, "gpu")
        (one if one.pid == pids[holder] else two).kill()
        found, result = await desk.result(job)
    await journal.stop()
    assert found[: len(before)] == before
    for choice in (0, 1):
        assert tokens_of(found, choice) == tokens_of(expected, choice)
        assert text_of(found, choice) == text_of(expected, choice)
    assert result.completion_tokens == 300


async def test_redis_restarts_and_stands_still(bus: Bus, desk: Desk, redis_server: Server) -> None:
    """Redis killed and restarted in mid-stream, then stopped: generation pauses, and goes on without a gap."""
    async with running(bus, HeldRunner(beta_s=0.01)) as worker:
        jobs = {f"p{n}": await desk.admit(work(f"p{n}", max_new=200)) for n in range(4)}
        for job in jobs.values():
            await desk.until(job, 5)
        await asyncio.to_thread(redis_server.restart)
        for job in jobs.values():
            await desk.until(job, 40)
        redis_server.pause()
        tokens = worker.loop.emitter.tokens
        await asyncio.sleep(1.0)
        assert worker.loop.emitter.tokens - tokens <= AHEAD + 1
        assert worker.loop.emitter.behind <= AHEAD
        redis_server.resume()
        for prompt, job in jobs.items():
            assert await desk.text(job) == said(prompt, 200)
        assert worker.no_page_held()
    assert await bus.lanes.use(FAMILY) == {"gpu": (0, 0)}


async def test_a_new_incarnation_drops_its_sequences(bus: Bus, desk: Desk) -> None:
    """A worker whose heartbeat was lost begins anew: its pages are free, its jobs come back and go on."""
    worker: Worker
    async with running(bus, HeldRunner(beta_s=0.005)) as worker:
        job = await desk.admit(work("x", max_new=300))
        before = await desk.until(job, 10)
        name = worker.consumer.name
        await bus.connection.call("DEL", f"{{{FAMILY}}}:heart:{name}")
        pieces, _ = await desk.result(job)
        assert worker.consumer.name != name
        assert text_of(pieces) == said("x", 300)
        assert pieces[: len(before)] == before
        assert worker.no_page_held()
    state = await bus.jobs.get(job)
    assert state is not None
    assert state.attempts <= 1
