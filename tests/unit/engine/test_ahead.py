"""Steps that are submitted ahead: the same tokens as one step after another, whatever arrives, ends and is aborted."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hypothesis import event, example, given
from hypothesis import strategies as st

from common.pages.identity import PAGE, root_id
from common.types.generation import SamplingParams
from engine.decoder.capacity import DecoderCapacity, measure
from engine.decoder.engine import SEVERAL_S, DecoderEngine, tokens_at_once
from engine.decoder.executor.interface import (
    EarlyEnd,
    PageLoads,
    SampledToken,
    SamplingRequest,
    SequenceInput,
    draw_several,
    run_of,
)
from engine.decoder.executor.simulated_executor import SimulatedExecutor
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.output.choice import StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.scheduler import StepLimits
from engine.device import DeviceQueue

STOP = 256
PROBES = measure(SimulatedExecutor(alpha_s=0.0, beta_s=0.0), 64, 8)


class RememberingExecutor(SimulatedExecutor):
    """Keeps the tokens written to its pages; each token drawn depends on the last `looks` tokens there.

    A token that is missing, or a page that was given to another sequence too early, changes what is drawn; so does a
    page of a text of another kind, where texts longer than `short_context` are (0: no text is).
    """

    def __init__(self, pages: int, looks: int = 1 << 30, short_context: int = 0) -> None:
        super().__init__(alpha_s=0.0, beta_s=0.0, kv_bytes=pages * 4096)
        self.looks, self.short_context = looks, short_context
        self.memory: dict[tuple[int, int], tuple[int, bool]] = {}
        self.rows = self.steps = 0

    def execute(
        self,
        batch: Sequence[SequenceInput],
        loading: PageLoads | None = None,
        early: EarlyEnd | None = None,
    ) -> list[SampledToken | None]:
        self.steps += 1
        return draw_several(batch, self.remember, early)

    def remember(self, batch: Sequence[SequenceInput]) -> list[SampledToken | None]:
        """Write the rows' tokens to their pages and draw a token of each."""
        drawn: list[SampledToken | None] = []
        for rows in batch:
            assert len(rows.tokens) == len(rows.positions)
            (pages,) = rows.pages
            for token, at in zip(rows.tokens, rows.positions, strict=True):
                self.memory[pages[at // PAGE], at % PAGE] = token, rows.long
            self.rows += len(rows.tokens)
        for rows in batch:
            (pages,), sample = rows.pages, rows.sample
            if sample is None:
                drawn.append(None)
                continue
            first = rows.positions[-1] + 1 - len(rows.drafts)
            run = [
                self._drawn(pages, first + ahead, each)
                for ahead, each in enumerate((sample, *rows.drafts))
            ]
            drawn.append(run_of(rows, run))
        return drawn

    def _drawn(self, pages: Sequence[int], end: int, sample: SamplingRequest) -> SampledToken:
        seen = [self.memory[pages[at // PAGE], at % PAGE] for at in range(end)]
        assert sample.position == end
        long = 0 < self.short_context < end
        assert seen == [(token, long) for token in (*sample.prompt, *sample.output)]
        tokens = [token for token, _ in seen[-self.looks :]]
        digest = hashlib.blake2b(repr((tokens, sample.choice, long)).encode()).digest()
        return SampledToken(
            STOP if digest[0] < 12 and STOP not in sample.banned else digest[1], 0.0, []
        )


class Work(NamedTuple):
    """A generation: its prompts' lengths, its limits, the step it arrives at, and the step it is aborted at, if any."""

    lengths: list[int]
    max_new: int
    min_new: int
    arrives: int
    aborted: int | None


WORK = st.builds(
    Work,
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    max_new=st.integers(1, 60),
    min_new=st.integers(0, 10),
    arrives=st.integers(0, 30),
    aborted=st.none() | st.none() | st.integers(0, 60),
)


class Run:
    """Computes some work on a fresh engine, with steps ahead or without."""

    def __init__(
        self,
        works: Sequence[Work],
        executor: RememberingExecutor,
        device: DeviceQueue,
        *,
        lookup: bool = False,
        several: int = 1,
    ) -> None:
        self.executor = executor
        capacity = DecoderCapacity(PROBES, slo_s=60.0, context=4096, fixed=True)
        limits = StepLimits(64, 6)
        self.engine = DecoderEngine(
            self.executor, capacity, limits, device, lookup=lookup, several=several
        )
        self.ahead = 0
        self._works = list(works)
        vocabulary = Vocabulary(self.executor.tokenizer_json())
        self.generations = [
            self._generation(number, work, vocabulary) for number, work in enumerate(works)
        ]

    def _generation(self, number: int, work: Work, vocabulary: Vocabulary) -> Generation:
        prompts = [[(number * 17 + at) % 200 for at in range(length)] for length in work.lengths]
        rules = StopRules(work.max_new, work.min_new, ids=[STOP])
        request = GenerationRequest(
            f"r{number}",
            prompts,
            rules,
            root_id("0f", ""),
            sampling=SamplingParams(temperature=0.0),
            short_context=self.executor.short_context,
        )
        return Generation(request, vocabulary, 10 * number)

    def happen(self, step: int) -> None:
        """Add and abort what arrives and leaves at this step."""
        for work, generation in zip(self._works, self.generations, strict=True):
            if work.arrives == step:
                self.engine.add(generation)
            if work.aborted == step:
                self.engine.abort(generation)

    async def run(self, *, ahead: bool, pause: Sequence[bool]) -> None:
        """Compute everything; with a `pause` the device gets ahead of the events of that step."""
        engine, last = (
            self.engine,
            max(max(work.arrives, work.aborted or 0) for work in self._works),
        )
        number = 0
        while number <= last or not engine.idle or engine.running:
            step = engine.running
            if step is None:
                parts = engine.plan()
                step = None if parts is None else engine.submit(parts)
            if step is not None:
                if ahead:
                    self.ahead += engine.submit_ahead()
                if pause[number % len(pause)]:
                    await asyncio.shield(step.handle.result())
                self.happen(number)
                engine.commit(step, await step.handle.result())
                engine.scheduler.check()
            else:
                self.happen(number)
            number += 1

    def outcome(self) -> list[list[tuple[list[int], str | None]]]:
        """Return tokens and ends of every choice that was not aborted."""
        return [
            [(list(choice.tokens), choice.finish) for choice in generation.choices]
            for work, generation in zip(self._works, self.generations, strict=True)
            if work.aborted is None
        ]


async def compared(
    works: list[Work],
    pause: list[bool],
    executor: Callable[[], RememberingExecutor],
    *,
    lookup: bool = False,
    several: int = 1,
) -> Run:
    """Compute the work step after step, and again with steps ahead; the tokens are the same, and no page stays held.

    Returns the second run.
    """
    device = DeviceQueue()
    try:
        plain, early = (
            Run(works, executor(), device),
            Run(works, executor(), device, lookup=lookup, several=several),
        )
        await plain.run(ahead=False, pause=[False])
        await early.run(ahead=True, pause=pause)
    finally:
        device.close()
    assert early.outcome() == plain.outcome()
    assert sum(pool.used for pool in early.engine.scheduler.table.pools) == 0
    return early


@given(
    works=st.lists(WORK, min_size=1, max_size=5),
    pages=st.integers(9, 40),
    pause=st.lists(st.booleans(), min_size=1, max_size=7),
)
@example([Work([40, 45, 50], 60, 60, 0, None)] * 2, 9, [False])
async def test_the_same_tokens_as_one_step_after_another(
    works: list[Work], pages: int, pause: list[bool]
) -> None:
    """Arrivals, aborts, stop tokens and preemptions change no token, and leave no page held."""
    await compared(works, pause, lambda: RememberingExecutor(pages))


@given(
    works=st.lists(WORK, min_size=1, max_size=5),
    pages=st.integers(9, 40),
    looks=st.integers(1, 3),
    pause=st.lists(st.booleans(), min_size=1, max_size=7),
)
@example([Work([40, 45, 50], 60, 60, 0, None)] * 2, 9, 1, [False])
@example([Work([40], 60, 60, 0, None)], 40, 1, [False])
async def test_the_same_tokens_with_guesses(
    works: list[Work], pages: int, looks: int, pause: list[bool]
) -> None:
    """Tokens that are guessed and computed ahead are those that would have been drawn one by one."""
    early = await compared(works, pause, lambda: RememberingExecutor(pages, looks), lookup=True)
    event(f"guesses right: {min(early.engine.accepted, 20)}")


@given(
    works=st.lists(WORK, min_size=1, max_size=5),
    pages=st.integers(9, 40),
    looks=st.none() | st.integers(1, 3),
    several=st.integers(2, 6),
    short=st.just(0) | st.integers(30, 100),
    pause=st.lists(st.booleans(), min_size=1, max_size=7),
)
@example([Work([40, 45, 50], 60, 60, 0, None)] * 2, 9, None, 4, 0, [False])
@example([Work([40], 60, 60, 0, None)], 40, 1, 4, 0, [False])
@example([Work([40, 45, 50], 60, 60, 0, None)] * 2, 9, None, 4, 64, [False])
@example([Work([40], 60, 60, 0, None)], 40, 1, 4, 65, [False])
async def test_the_same_tokens_several_a_step(
    works: list[Work], pages: int, looks: int | None, several: int, short: int, pause: list[bool]
) -> None:
    """Steps that give each sequence several tokens, cut short by arrivals, beside guesses or alone, change none.

    So it is for a model whose texts begin again beyond a short context: a step never runs over that length.
    """
    early = await compared(
        works,
        pause,
        lambda: RememberingExecutor(pages, looks or 1 << 30, short),
        lookup=looks is not None,
        several=several,
    )
    event(f"tokens beyond a step's first: {min(early.executor.rows - early.executor.steps, 20)}")


async def test_a_stream_alone_takes_a_step_for_several_tokens() -> None:
    """A generation of 40 tokens takes the step of its prompt and steps of four; no row is computed in vain."""
    device = DeviceQueue()
    try:
        run = Run([Work([5], 41, 41, 0, None)], RememberingExecutor(9), device, several=4)
        await run.run(ahead=True, pause=[False])
    finally:
        device.close()
    (((tokens, finish),),) = run.outcome()
    assert (len(tokens), finish) == (41, "length")
    assert run.executor.steps == 1 + 10
    assert run.executor.rows == 5 + 40


async def test_an_arrival_cuts_a_step_short() -> None:
    """A step of several tokens ends with the token it is at when a generation arrives, and the next has both."""
    device, executor = DeviceQueue(), GatedExecutor(9)
    try:
        works = [Work([5], 40, 40, 0, None), Work([6], 2, 2, 99, None)]
        run = Run(works, executor, device, several=4)
        engine = run.engine
        engine.add(run.generations[0])
        executor.gate.release()
        await engine.step()
        executor.entered.clear()
        parts = engine.plan()
        assert parts is not None
        assert [part.ahead for part in parts] == [3]
        step = engine.submit(parts)
        await asyncio.to_thread(executor.entered.wait, 60.0)
        engine.add(run.generations[1])
        assert not engine.submit_ahead()
        executor.gate.release()
        result = await step.handle.result()
        engine.commit(step, result)
        assert result.tokens == 1
        assert len(run.generations[0].choices[0].tokens) == 2
        parts = engine.plan()
        assert parts is not None
        assert {part.sequence.job for part in parts} == {"r0", "r1"}
    finally:
        executor.gate.release(1000)
        device.close()


@given(
    st.floats(0.0, 1.0),
    st.integers(1, 8),
    st.lists(st.integers(1, 100), min_size=1, max_size=8),
)
def test_tokens_at_once(token_s: float, most: int, rooms: list[int]) -> None:
    """A step gives a token at least, no more than asked for or than there is room for, and none that comes late."""
    count = tokens_at_once(token_s, most, rooms)
    assert 1 <= count <= max(1, min(most, *rooms))
    assert count == 1 or count * token_s <= SEVERAL_S


async def test_repeated_tokens_are_guessed() -> None:
    """An answer that repeats itself takes fewer steps than it has tokens."""
    device = DeviceQueue()
    try:
        run = Run([Work([40], 200, 200, 0, None)], RememberingExecutor(40, 1), device, lookup=True)
        await run.run(ahead=True, pause=[False])
    finally:
        device.close()
    engine = run.engine
    assert engine.accepted > 100
    assert engine.drafted < 2 * engine.accepted


async def test_decoding_runs_ahead() -> None:
    """Of a generation alone all steps but the first are submitted ahead, and no row is computed in vain."""
    device = DeviceQueue()
    try:
        run = Run([Work([5], 40, 40, 0, None)], RememberingExecutor(9), device)
        await run.run(ahead=True, pause=[False])
    finally:
        device.close()
    (((tokens, finish),),) = run.outcome()
    assert (len(tokens), finish) == (40, "length")
    assert run.ahead == 39
    assert run.executor.rows == 5 + 39


class GatedExecutor(RememberingExecutor):
    """Waits in each step for the test."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        self.gate, self.entered = threading.Semaphore(0), threading.Event()

    def remember(self, batch: Sequence[SequenceInput]) -> list[SampledToken | None]:
        self.entered.set()
        assert self.gate.acquire(timeout=60.0)
        return super().remember(batch)


async def test_an_arrival_takes_back_the_step_ahead() -> None:
    """A generation that arrives while a step runs has rows in the next step."""
    device, executor = DeviceQueue(), GatedExecutor(9)
    try:
        run = Run([Work([5], 40, 40, 0, None), Work([6], 2, 2, 99, None)], executor, device)
        engine = run.engine
        engine.add(run.generations[0])
        parts = engine.plan()
        assert parts is not None
        step = engine.submit(parts)
        assert engine.submit_ahead()
        assert not engine.submit_ahead()  # at most one
        engine.add(run.generations[1])
        executor.gate.release()
        engine.commit(step, await step.handle.result())
        parts = engine.plan()
        assert parts is not None
        assert {part.sequence.job for part in parts} == {"r0", "r1"}
    finally:
        executor.gate.release(1000)
        device.close()
