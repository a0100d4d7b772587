"""Prompts that are rewritten, and generations that are paused, between two steps: the tokens of a fresh generation."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from bench.engine import random_models
from common.cost.step import Step
from common.errors import InternalError
from common.pages.identity import PAGE, root_id
from common.types.generation import SamplingParams
from engine.decoder.capacity import DecoderCapacity
from engine.decoder.engine import DecoderEngine
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.output.choice import ChoiceOutput, StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.scheduler import Scheduler, StepLimits
from engine.decoder.sequence import TokenSequence
from engine.device import DeviceQueue
from tests.support.engine_simulator import Ask, Rewrite, Simulation, prompts, some_spans
from tests.unit.engine.test_ahead import PROBES, STOP, RememberingExecutor
from tests.unit.engine.test_schedule import LONGEST, WINDOWS, shape

MOST_PROMPT = 200


class Change(NamedTuple):
    """A change at a step of the run: a pause or a resume, another prompt for a slot, an abort."""

    step: int
    kind: str
    start: int
    removed: int
    added: int


class Life(NamedTuple):
    """A generation: its prompt's length, its limit, when it arrives, the boundaries it has, and what happens to it."""

    length: int
    max_new: int
    arrives: int
    every: int
    changes: list[Change]


CHANGE = st.builds(
    Change,
    step=st.integers(0, 60),
    kind=st.sampled_from(["pause", "resume", "rewrite", "rewrite", "rewrite", "abort"]),
    start=st.integers(0, 100),
    removed=st.integers(0, 100),
    added=st.integers(0, 70),
)
LIFE = st.builds(
    Life,
    length=st.integers(1, 100),
    max_new=st.integers(1, 60),
    arrives=st.integers(0, 20),
    every=st.sampled_from([0, 1, 7, 16]),
    changes=st.lists(CHANGE, max_size=4),
)


class RewrittenRun:
    """Computes some lives on a fresh engine; `prompts` says after how many tokens each got which prompt."""

    def __init__(
        self, lives: Sequence[Life], pages: int, device: DeviceQueue, several: int, short: int = 0
    ) -> None:
        self.executor, self.short = RememberingExecutor(pages, short_context=short), short
        capacity = DecoderCapacity(PROBES, slo_s=60.0, context=4096, fixed=True)
        self.engine = DecoderEngine(
            self.executor, capacity, StepLimits(64, 4), device, lookup=True, several=several
        )
        self.lives = lives
        vocabulary = Vocabulary(self.executor.tokenizer_json())
        self.generations = []
        for number, life in enumerate(lives):
            prompt = [(number * 17 + at) % 200 for at in range(life.length)]
            rules = StopRules(life.max_new, ids=[STOP])
            request = GenerationRequest(
                f"r{number}", [prompt], rules, root_id("0f", ""),
                sampling=SamplingParams(temperature=0.0), short_context=short,
            )  # fmt: skip
            self.generations.append(Generation(request, vocabulary, number))
        self.prompts = [[(0, list(each.choices[0].sequence.prompt))] for each in self.generations]
        self.aborted: set[int] = set()
        self.rewritten = self.evicted = 0
        self._added: set[int] = set()
        self._paused: set[int] = set()
        self._done: set[tuple[int, int]] = set()

    async def run(self, chance: random.Random, *, ahead: bool) -> None:
        """Compute everything; after the last change whatever is paused goes on."""
        engine, number = self.engine, 0
        last = 61 + max(life.arrives for life in self.lives)
        while number <= last or not engine.idle or engine.running or engine.scheduler.paused:
            step = engine.running
            if step is None:
                self._between(number, over=number > last)
                parts = engine.plan()
                engine.scheduler.check(parts or ())
                step = None if parts is None else engine.submit(parts)
            if step is not None:
                if ahead:
                    engine.submit_ahead()
                if chance.random() < 0.3:
                    await asyncio.shield(step.handle.result())
                self._beside(number)
                engine.commit(step, await step.handle.result())
                engine.scheduler.check()
            self.evicted += any(not each.pages for each in engine.scheduler.paused)
            number += 1

    def _beside(self, number: int) -> None:
        """Pause, resume and abort while a step is in flight."""
        for at in self._added - self.aborted:
            for change in self.lives[at].changes:
                if change.step == number and change.kind == "abort":
                    self.engine.abort(self.generations[at])
                    self.aborted.add(at)
                elif change.step == number and change.kind == "pause":
                    self.engine.pause(self.generations[at])
                    self._paused.add(at)
                elif change.step == number and change.kind == "resume":
                    self.engine.resume(self.generations[at])
                    self._paused.discard(at)

    def _between(self, number: int, *, over: bool) -> None:
        """Add what arrives, rewrite prompts, and let what has reached its boundary go on."""
        for at, (life, generation) in enumerate(zip(self.lives, self.generations, strict=True)):
            choice = generation.choices[0]
            if life.arrives <= number and at not in self._added:
                choice.boundary = life.every or None
                self.engine.add(generation)
                self._added.add(at)
            if at not in self._added or at in self.aborted or choice.finish is not None:
                continue
            for place, change in enumerate(life.changes):
                if change.kind == "rewrite" and change.step <= number:
                    if (at, place) not in self._done:
                        self._rewrite(at, change)
                    self._done.add((at, place))
            if choice.room <= 0:
                assert len(choice.tokens) == choice.boundary, "a step ran over a boundary"
                choice.boundary += life.every
            if over or at not in self._paused:
                self.engine.resume(generation)

    def _rewrite(self, at: int, change: Change) -> None:
        choice, before = self.generations[at].choices[0], self.prompts[at][-1][1]
        start = min(change.start, len(before))
        added = [(change.step + each) % 200 for each in range(change.added)]
        prompt = [*before[:start], *added, *before[start + change.removed :]] or [1]
        if len(prompt) > MOST_PROMPT:
            return
        long = choice.sequence.long
        held, computed_before = bool(choice.sequence.pages), choice.sequence.todo[0][0]
        computed = self.engine.rewrite(choice, prompt)
        if held and choice.sequence.pages:  # full pages before the change stay
            kept = min(start, computed_before, choice.sequence.length - 1) // PAGE * PAGE
            if long is choice.sequence.long:
                assert computed <= choice.sequence.length - kept
        self.prompts[at].append((len(choice.tokens), prompt))
        self.rewritten += 1

    def expected(self, at: int) -> list[int]:
        """Return what fresh generations get that are forced to each prompt and the tokens before."""
        output: list[int] = []
        for _ in range(self.lives[at].max_new):
            prompt = [each for since, each in self.prompts[at] if since <= len(output)][-1]
            tokens = [*prompt, *output]
            long = 0 < self.short < len(tokens)
            digest = hashlib.blake2b(repr((tokens, 0, long)).encode()).digest()
            if digest[0] < 12:
                break
            output.append(digest[1])
        return output


@given(
    lives=st.lists(LIFE, min_size=1, max_size=5),
    pages=st.integers(-(-(MOST_PROMPT + 60) // PAGE), 40),
    seed=st.integers(0, 1 << 16),
    ahead=st.booleans(),
    several=st.sampled_from([1, 4]),
    short=st.just(0) | st.integers(20, 150),
)
async def test_the_tokens_of_a_fresh_generation(
    lives: list[Life], pages: int, seed: int, *, ahead: bool, several: int, short: int
) -> None:
    """Pauses, other prompts and boundaries anywhere: what follows is what the last prompt and the tokens say.

    Pages before a change are not computed again unless the text becomes longer than a short context, or as short again;
    no step runs over a boundary, and no page stays held.
    """
    device = DeviceQueue()
    try:
        run = RewrittenRun(lives, pages, device, several, short)
        await run.run(random.Random(seed), ahead=ahead)
    finally:
        device.close()
    event(f"rewritten: {min(run.rewritten, 3)}")
    event(f"evicted while paused: {run.evicted > 0}")
    event(f"outgrew the short context: {min(run.engine.scheduler.outgrown, 3)}")
    for at, generation in enumerate(run.generations):
        found, expected = list(generation.choices[0].tokens), run.expected(at)
        assert found == expected[: len(found)]
        assert at in run.aborted or found == expected
    assert sum(pool.used for pool in run.engine.scheduler.table.pools) == 0


@st.composite
def rewrites(draw: st.DrawFn) -> tuple[Sequence[int | None], int, int, StepLimits, list[Ask]]:
    """Random arrivals with windows and a host, of which some are paused and get another prompt."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    asks = []
    for prompt in prompts(rng, draw(st.integers(1, 6)), LONGEST):
        changes = []
        for _ in range(rng.randint(0, 2)):
            start = rng.randint(0, len(prompt) - 1)
            tail = prompt[start + rng.randint(0, 40) :]
            other = (
                *prompt[:start],
                *(rng.randrange(50) for _ in range(rng.randint(1, 40))),
                *tail,
            )
            other = other[:LONGEST]
            spans = some_spans(rng, other)
            changes.append(Rewrite(rng.randint(5, 60), rng.randint(0, 10), other, spans))
        changes.sort(key=lambda change: change.at)
        leaves = rng.randint(20, 70) if rng.random() < 0.2 else -1
        came, new = rng.randint(0, 4), rng.randint(1, 60)
        asks.append(Ask(came, prompt, new, leaves, "a", tuple(changes), some_spans(rng, prompt)))
    pages = -(-(LONGEST + 60) // PAGE) + draw(st.sampled_from([0, 1, 3, 100]))
    bounds = StepLimits(draw(st.sampled_from([16, 40, 512])), draw(st.sampled_from([1, 2, 64])))
    return draw(st.sampled_from(WINDOWS)), pages, draw(st.sampled_from([0, 5, 200])), bounds, asks


@given(rewrites(), st.just(0) | st.integers(20, 120))
def test_rewritten_under_windows(
    case: tuple[list[int | None], int, int, StepLimits, list[Ask]], short: int
) -> None:
    """With windows, and pages that come back from the host, each row of a rewritten sequence sees what it must.

    So it is with a short context, on whose two sides no page is that of the other.
    """
    windows, pages, host, bounds, asks = case
    run = Simulation(shape(pages, windows, host), bounds, asks, short).run()
    for order, ask in enumerate(asks):
        found, expected = run.sequences[order].output, run.expected(order)
        assert found == expected[: len(found)]
        assert ask.leaves >= 0 or found == expected


def test_a_paused_sequence_keeps_its_pages_until_others_need_them() -> None:
    """One that is paused holds its pages beside nobody, and loses them to one that needs all; then it is recomputed."""
    scheduler = Scheduler(shape(7, [None]), StepLimits(512, 8))
    root, most = root_id("0f", ""), 7 * PAGE
    paused, other = (
        TokenSequence("j", 0, n, [n] * (6 * PAGE + 5), root=root, most=most) for n in range(2)
    )
    scheduler.add(paused)
    for part in scheduler.step():
        scheduler.commit(part, 1)
    scheduler.pause(paused)
    assert scheduler.step() == []
    assert len(paused.pages[0]) == 7
    scheduler.unpause(paused)
    (part,) = scheduler.step()
    assert part.positions == [6 * PAGE + 5]
    scheduler.pause(paused)
    scheduler.add(other)
    assert scheduler.step() == []  # the next step has the pages
    (part,) = scheduler.step()
    assert (part.sequence, len(part.positions)) == (other, other.length)
    assert not paused.pages
    scheduler.commit(part, None)
    scheduler.drop([other])
    scheduler.unpause(paused)
    (part,) = scheduler.step()
    assert (part.sequence, len(part.positions)) == (paused, paused.length)
    scheduler.check([part])


async def test_a_prompt_stays_while_a_step_is_in_flight() -> None:
    """A caller that rewrites a prompt beside a step is told so, and nothing changes."""
    device = DeviceQueue()
    try:
        run = RewrittenRun([Life(5, 5, 0, 0, [])], 9, device, 1)
        (generation,) = run.generations
        run.engine.add(generation)
        parts = run.engine.plan()
        assert parts is not None
        step = run.engine.submit(parts)
        with pytest.raises(InternalError):
            run.engine.rewrite(generation.choices[0], [1])
        run.engine.commit(step, await step.handle.result())
        assert generation.choices[0].sequence.prompt == list(range(5))
    finally:
        device.close()


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_real_model(family: str, temperature: float, tmp_path: Path) -> None:
    """Tokens and log probabilities after an extension are to the bit those of a fresh generation after the same tokens.

    With penalties and a seed, in layers with and without a window; pages before the slot are not computed again.
    """
    torch.set_num_threads(1)
    random_models.write(tmp_path, family, random_models.windowed(family, 1))
    runner = TorchExecutor.load(
        str(tmp_path), device="cpu", dtype="fp32", threads=2, kv_bytes=8 << 20
    )
    assert runner.exact
    draw = random.Random(1)
    prompt, slot = ([draw.randrange(random_models.VOCABULARY) for _ in range(n)] for n in (150, 40))
    other = [*prompt[:70], *slot, *prompt[90:]]
    sampling = SamplingParams(temperature=temperature, seed=5, repetition=1.2, frequency=0.3)

    def begin(tokens: list[int], outputs: list[ChoiceOutput]) -> Generation:
        request = GenerationRequest(
            "r", [tokens], StopRules(60), root_id(runner.fingerprint, ""), sampling=sampling,
            logprobs=2,
        )  # fmt: skip
        made = Generation(request, Vocabulary(runner.tokenizer_json()), 0)
        made.choices[0].restore(outputs)
        made.choices[0].sequence.resume(made.choices[0].tokens)
        return made

    probes = [(Step(1, 1, 1.0), 1e-3), (Step(4, 4, 8.0), 1e-3), (Step(1, 64, 2000.0), 1e-3)]
    capacity = DecoderCapacity(probes, slo_s=60.0, context=runner.shape.context, fixed=True)
    device = DeviceQueue()
    try:
        engine = DecoderEngine(runner, capacity, StepLimits(64, 8), device)
        extended = begin(prompt, [])
        engine.add(extended)
        while len(extended.choices[0].tokens) < 23:
            await engine.step()
        choice = extended.choices[0]
        before = choice.take()
        assert before is not None
        computed = engine.rewrite(choice, other)
        assert choice.sequence.length - computed == 70 // PAGE * PAGE
        fresh = begin(other, [before._replace(finish=None)])
        await _end(engine)
        await engine.offload.forget()
        apart = DecoderEngine(runner, capacity, StepLimits(64, 8), device)
        apart.add(fresh)
        await _end(apart)
        found = [generation.choices[0].take() for generation in (extended, fresh)]
    finally:
        device.close()
    assert found[0] is not None
    assert found[0] == found[1]
    assert len(found[0].tokens) > 5


async def _end(engine: DecoderEngine) -> None:
    while not engine.idle:
        await engine.step()
        engine.scheduler.check()


class TenantAnswer(NamedTuple):
    """An answer of a tenant: which texts its slot holds in turn, between a head and a question, and tokens for each."""

    tenant: str
    head: int
    slots: list[int]
    question: int
    tokens: int


_TEXTS = [[40 + number] * length for number, length in enumerate((20, 31, 32, 70, 100))]
TENANT_ANSWER = st.builds(
    TenantAnswer,
    tenant=st.sampled_from(["a", "b"]),
    head=st.sampled_from([0, 5, 32, 64, 90]),
    slots=st.lists(st.integers(0, len(_TEXTS) - 1), min_size=1, max_size=4),
    question=st.sampled_from([1, 30, 40]),
    tokens=st.integers(1, 40),
)


@given(st.lists(TENANT_ANSWER, min_size=1, max_size=5))
def test_pages_of_a_slot_are_found_after_an_equal_prefix_within_the_tenant(
    served: list[TenantAnswer],
) -> None:
    """A new answer and each replacement compute all pages but those whose whole prefix was computed for the tenant.

    So one tenant's passages, and the same passage behind another text, are computed again.
    """
    scheduler = Scheduler(shape(1000, [None]), StepLimits(512, 8))
    computed: set[tuple[str, tuple[int, ...]]] = set()  # prefixes of full pages, by tenant
    found = 0

    def missing(tenant: str, tokens: Sequence[int]) -> int:
        pages = range(1, (len(tokens) - 1) // PAGE + 1)  # the last token's page is computed always
        known = sum((tenant, tuple(tokens[: page * PAGE])) in computed for page in pages)
        return len(tokens) - known * PAGE

    def step(tenant: str, sequence: TokenSequence) -> int:
        (part,) = scheduler.step()
        scheduler.commit(part, 7 if part.draws else None)
        tokens = sequence.tokens()
        for page in range(1, (sequence.length - 1) // PAGE + 1):
            computed.add((tenant, tuple(tokens[: page * PAGE])))
        return len(part.positions)

    for order, answer in enumerate(served):
        prompts = [
            [1] * answer.head + _TEXTS[slot] + [2] * answer.question for slot in answer.slots
        ]
        tenant, root = answer.tenant, root_id("0f", answer.tenant)
        sequence = TokenSequence("j", 0, order, prompts[0], root=root, most=500)
        scheduler.add(sequence)
        expected = missing(tenant, prompts[0])
        assert step(tenant, sequence) == expected
        assert sequence.cached == len(prompts[0]) - expected
        for prompt in prompts[1:]:
            for _ in range(answer.tokens):
                step(tenant, sequence)
            expected = missing(tenant, [*prompt, *sequence.output])
            assert scheduler.rewrite(sequence, prompt) == expected
            found += sequence.length - expected
            assert step(tenant, sequence) == expected
        scheduler.drop([sequence])
    event(f"pages found by a replacement: {min(found // PAGE, 5)}")
