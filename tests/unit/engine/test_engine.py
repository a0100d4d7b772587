"""The decoder engine as a library: generations are added, computed step by step, aborted, and fail alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from common.errors import InternalError
from common.pages.identity import root_id
from common.types.generation import SamplingParams
from engine.decoder.capacity import DecoderCapacity, measure
from engine.decoder.engine import DecoderEngine
from engine.decoder.executor.interface import (
    EarlyEnd,
    PageLoads,
    SampledToken,
    SequenceInput,
    StepFailed,
)
from engine.decoder.executor.simulated_executor import SimulatedExecutor, answer
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.output.choice import StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.scheduler import StepLimits
from engine.device import DeviceQueue

BAD = 7  # a prompt's first token that makes the executor raise for its sequence
WAIT_S = 60.0


class GatedExecutor(SimulatedExecutor):
    """The sim device, which a test can hold within a step; `batches` are the prompts' first tokens of each step."""

    def __init__(self) -> None:
        super().__init__(alpha_s=0.0, beta_s=0.0)
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.batches: list[list[int]] = []

    def execute(
        self,
        batch: Sequence[SequenceInput],
        loading: PageLoads | None = None,
        early: EarlyEnd | None = None,
    ) -> list[SampledToken | None]:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        firsts = [rows.sample.prompt[0] for rows in batch if rows.sample]
        self.batches.append(firsts)
        if BAD in firsts:
            raise StepFailed(firsts.index(BAD), "not finite")
        return super().execute(batch, loading, early)


class Bench:
    """An engine on a gated executor, and generations for it."""

    def __init__(self, executor: GatedExecutor, device: DeviceQueue) -> None:
        self.executor = executor
        capacity = DecoderCapacity(
            measure(SimulatedExecutor(alpha_s=0.0, beta_s=0.0), 64, 8), slo_s=60.0, context=4096
        )
        self.engine = DecoderEngine(executor, capacity, StepLimits(64, 8), device)
        self._vocabulary = Vocabulary(executor.tokenizer_json())
        self._order = 0

    def add(self, *prompts: list[int], max_new: int = 8) -> Generation:
        """Add a generation of one choice a prompt, drawn greedily."""
        request = GenerationRequest(
            f"r{self._order}",
            prompts,
            StopRules(max_new),
            root_id("0f", ""),
            sampling=SamplingParams(temperature=0.0),
        )
        generation = Generation(request, self._vocabulary, self._order)
        self._order += len(prompts)
        self.engine.add(generation)
        return generation

    async def run(self) -> None:
        """Step until nothing is left to compute."""
        while not self.engine.idle:
            await self.engine.step()

    @property
    def used(self) -> int:
        """Pages that a sequence holds."""
        return sum(pool.used for pool in self.engine.scheduler.table.pools)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    executor, device = GatedExecutor(), DeviceQueue()
    try:
        yield Bench(executor, device)
    finally:
        executor.gate.set()
        device.close()


def tokens(generation: Generation, choice: int = 0) -> list[int]:
    """Return a choice's tokens."""
    return list(generation.choices[choice].tokens)


async def test_generations_are_computed(bench: Bench) -> None:
    """Each choice gets the tokens of its prompt, ends after `max_new` tokens, and leaves no page held."""
    one, two = bench.add([1, 2, 3], max_new=5), bench.add([4, 5], [6] * 100, max_new=9)
    await bench.run()
    for generation, count in ((one, 5), (two, 9)):
        assert generation.over
        for choice in generation.choices:
            expected = answer(choice.sequence.prompt, choice.number)
            assert bytes(choice.tokens) == (expected * 9)[:count]
            output = choice.take()
            assert output is not None
            assert (output.text.encode(), output.finish) == (bytes(choice.tokens), "length")
    assert bench.used == 0


async def test_an_abort_stops_the_planned_step(bench: Bench) -> None:
    """A generation that is aborted after a step was planned is not submitted with the step."""
    stays, leaves = bench.add([1]), bench.add([2])
    parts = bench.engine.plan()
    assert parts is not None
    assert len(parts) == 2
    bench.engine.abort(leaves)
    step = bench.engine.submit(parts)
    progress = bench.engine.commit(step, await step.handle.result())
    assert [each.generation for each in progress] == [stays]
    assert bench.executor.batches == [[1]]
    await bench.run()
    assert tokens(leaves) == []
    assert len(tokens(stays)) == 8


async def test_an_abort_stops_within_the_running_step(bench: Bench) -> None:
    """A generation that is aborted while a step runs gets no token of that step, nor of a later one."""
    stays, leaves = bench.add([1]), bench.add([2])
    bench.executor.gate.clear()
    parts = bench.engine.plan()
    assert parts is not None
    step = bench.engine.submit(parts)
    with pytest.raises(InternalError):
        bench.engine.plan()  # one step is in flight
    await asyncio.to_thread(bench.executor.entered.wait, WAIT_S)
    bench.engine.abort(leaves)
    bench.executor.gate.set()
    progress = bench.engine.commit(step, await step.handle.result())
    assert [each.generation for each in progress] == [stays]
    await bench.run()
    assert bench.executor.batches == [[1, 2]] + [[1]] * 7
    assert tokens(leaves) == []
    assert len(tokens(stays)) == 8
    assert bench.used == 0


async def test_a_failure_ends_its_own_generation(bench: Bench) -> None:
    """A generation whose rows cannot be computed ends with its failure; the others get all their tokens."""
    fine, bad = bench.add([1], max_new=3), bench.add([BAD], [2], max_new=3)
    failed = [each for each in await bench.engine.step() if each.choice is None]
    assert [each.generation for each in failed] == [bad]
    assert bad.failure is not None
    assert (bad.failure.code, bad.failure.message) == ("model_error", "not finite")
    await bench.run()
    assert tokens(bad, 0) == tokens(bad, 1) == []
    assert len(tokens(fine)) == 3
    assert bench.used == 0
