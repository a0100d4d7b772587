"""Jobs with precomputed passages on a real bus and model: what is counted, who shares, and who is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from bench.engine import random_models
from common.bus import Bus, Notifications
from common.ids import Family
from common.types.generation import SamplingParams
from common.wire.jobs import GenerateWork
from engine.decoder.executor.torch_executor import TorchExecutor
from tests.support.engine import WAIT_S, Desk, Worker, running, tokens_of
from tests.support.precomputed import Span, passage, prompt_of

PASSAGES = [passage(1, 50), passage(2, 33)]


def loaded(folder: Path, family: str, **more: object) -> TorchExecutor:
    random_models.write(folder, family, random_models.settings(family, 1) | more)
    return TorchExecutor.load(str(folder), device="cpu", dtype="fp32", threads=1, kv_bytes=8 << 20)


def work(
    runner: TorchExecutor, prompt: list[int], spans: list[Span], scope: str = "t"
) -> GenerateWork:
    return GenerateWork(
        fingerprint=runner.fingerprint,
        scope=scope,
        prompts=[prompt],
        spans=spans,
        max_new=20,
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
    )


async def counted(worker: Worker, hits: int, misses: int) -> None:
    """Wait until the metrics count so many passages found and computed."""
    name = "spillway_precomputed_passages_total"

    def told() -> tuple[float, float]:
        return worker.value(name, outcome="hit"), worker.value(name, outcome="miss")

    async with asyncio.timeout(WAIT_S):
        while told() != (hits, misses):  # noqa: ASYNC110 - metrics ring nobody
            await asyncio.sleep(0.02)


async def test_passages_are_counted_and_shared_within_a_tenant(bus: Bus, tmp_path: Path) -> None:
    """Another prompt of the tenant finds them, another tenant does not; tokens are the same whoever computes them."""
    torch.set_num_threads(1)
    runner = loaded(tmp_path / "m", "llama")
    journal = Notifications(bus.connection, "r1")
    await journal.start()
    desk = Desk(bus, journal, Family("chat.m"))
    async with running(bus, runner) as worker:
        prompt, spans = prompt_of(PASSAGES, before=20, after=5)

        async def told(asked: GenerateWork) -> list[int]:
            return tokens_of((await desk.result(await desk.admit(asked)))[0])

        first = await told(work(runner, prompt, spans))
        assert worker.value("spillway_precomputed_passages_total", outcome="miss") <= 2
        store = runner.passages
        assert store is not None
        hits = store.hits  # a passage that came in two steps
        await counted(worker, hits, 2)
        assert worker.value("spillway_precomputed_passage_bytes") == store.bytes > 0
        other, places = prompt_of(PASSAGES[::-1], before=20, after=5)
        await told(work(runner, other, places))
        assert (store.misses, store.hits >= hits + 2) == (2, True)
        assert await told(work(runner, prompt, spans)) == first
        assert store.misses == 2
        assert await told(work(runner, prompt, spans, scope="u")) == first
        assert store.misses == 4
        hits = store.hits
        exact = await told(work(runner, prompt, []))
        assert (store.misses, store.hits) == (4, hits)
        assert exact != first
        await worker.loop.engine.offload.forget()  # as where deletions may have been missed
        assert (store.bytes, await told(work(runner, prompt, spans))) == (0, first)
        await counted(worker, store.hits, 6)
    await journal.stop()


async def test_a_model_that_cannot_refuses_the_job(bus: Bus, tmp_path: Path) -> None:
    """A job whose router did not know that the model has windows ends with a sentence, charged to nobody."""
    runner = loaded(tmp_path / "w", "mistral", sliding_window=40)
    journal = Notifications(bus.connection, "r1")
    await journal.start()
    desk = Desk(bus, journal, Family("chat.w"))
    async with running(bus, runner):
        event = await desk.end(await desk.admit(work(runner, *prompt_of(PASSAGES))))
        assert (event.kind, event.code) == ("error", "invalid_request")
        assert "model w cannot compute passages alone on this worker" in event.message
    await journal.stop()
