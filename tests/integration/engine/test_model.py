"""The engine with real models: whatever runs beside a stream, and with however few pages, its tokens are the same."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import pytest
import torch

from bench.engine import random_models
from common.bus import Bus, Notifications
from common.ids import Family
from common.types.generation import SamplingParams
from common.wire.jobs import GenerateWork
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.scheduler import StepLimits
from tests.support.engine import Desk, running, text_of, tokens_of


def works(runner: TorchExecutor) -> list[GenerateWork]:
    """Return work of all kinds: lengths, shared beginnings, greedy and drawn, penalties, choices, stops."""
    draw = random.Random(5)
    head = [draw.randrange(3, random_models.VOCABULARY) for _ in range(90)]
    made = []
    for number in range(10):
        tail = [draw.randrange(3, random_models.VOCABULARY) for _ in range(draw.randint(1, 120))]
        prompt = head[: draw.choice([0, 40, 90])] + tail
        sampling = SamplingParams(
            temperature=draw.choice([0.0, 0.7, 1.2]),
            top_p=draw.choice([1.0, 0.9]),
            top_k=draw.choice([0, 20]),
            presence=draw.choice([0.0, 0.5]),
            repetition=draw.choice([1.0, 1.3]),
            seed=number,
        )
        made.append(
            GenerateWork(
                fingerprint=runner.fingerprint,
                scope="t",
                prompts=[prompt],
                n=draw.choice([1, 1, 2]),
                max_new=draw.randint(20, 70),
                sampling=sampling,
                logprobs=draw.choice([-1, 2]),
                min_new=draw.choice([0, 5]),
                stop_ids=[draw.randrange(3, random_models.VOCABULARY) for _ in range(3)],
            )
        )
    return made


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma3_text"])
async def test_mixed_batches_give_what_each_gives_alone(
    bus: Bus, tmp_path: Path, family: str
) -> None:
    """Tokens, texts and ends of jobs that share steps, pages and preemptions are those of jobs run one at a time."""
    torch.set_num_threads(1)
    random_models.write(tmp_path / "m", family, random_models.windowed(family, 1))

    def load(kv_bytes: int) -> TorchExecutor:
        return TorchExecutor.load(
            str(tmp_path / "m"), device="cpu", dtype="fp32", threads=1, kv_bytes=kv_bytes
        )

    roomy = load(8 << 20)
    few = load(9 * sum(roomy.shape.page_bytes))
    assert few.shape.pages < roomy.shape.pages
    asked = works(roomy)
    journal = Notifications(bus.connection, "r1")
    await journal.start()
    desk = Desk(bus, journal, Family(roomy.card(created_ms=0, partitions=1).family))
    async with running(bus, roomy, bounds=StepLimits(512, 1)):
        alone = [await desk.result(await desk.admit(one)) for one in asked]
    for _ in range(5):  # how many share the pages at once is a matter of timing
        async with running(bus, few, bounds=StepLimits(40, 8)) as worker:
            # Nothing is computed before all are there, so that they must share.
            begin = threading.Event()
            held = asyncio.create_task(worker.thread.run(begin.wait, 60))
            jobs = [await desk.admit(one) for one in asked]
            begin.set()
            await held
            mixed = [await desk.result(job) for job in jobs]
            assert worker.no_page_held()
            preempted = worker.value("spillway_preemptions_total")
        if preempted > 0:
            break
    await journal.stop()

    for one, (expected, _), (found, result) in zip(asked, alone, mixed, strict=True):
        for choice in range(one.n):
            assert tokens_of(found, choice) == tokens_of(expected, choice)
            assert text_of(found, choice) == text_of(expected, choice)
            ends = [
                [p.finish for p in side if p.choice == choice][-1] for side in (found, expected)
            ]
            assert ends[0] == ends[1] is not None
        assert result.completion_tokens == sum(len(piece.tokens) for piece in found)
    assert preempted > 0 or family != "llama"
