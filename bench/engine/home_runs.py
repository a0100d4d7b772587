"""Random work for an engine with homes on the device and on the host, whose answers are those of the device alone."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.engine import exactness, random_models
from common.cost.linear import Probe
from common.cost.step import Step
from common.pages.identity import page_ids, root_id
from common.types.generation import SamplingParams
from common.types.helper_address import HelperAddress
from engine.decoder.capacity import DecoderCapacity
from engine.decoder.engine import DecoderEngine
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.offload.computed_step import ComputedStep
from engine.decoder.offload.costs import OffloadCosts, OffloadPoints, OffloadProfile
from engine.decoder.offload.homes import HomePlanner
from engine.decoder.offload.plan import OffloadMode, Resume
from engine.decoder.output.choice import StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.scheduler import StepLimits
from engine.device import DeviceQueue


class HomeSizes(NamedTuple):
    """Pages on the device and on the host; tokens of a common head, and of the longest tail and answer of a request.

    A request begins with as many tokens of the head as one of `heads`.
    """

    pages: int
    host_pages: int
    heads: tuple[int, int, int]
    tail: int
    new: int

    @property
    def head(self) -> int:
        """The tokens of the whole head."""
        return max(self.heads)


SMALL = HomeSizes(10, 12, (0, 40, 70), 120, 40)  # the longest sequence takes 8 pages
LONG = HomeSizes(17, 48, (0, 0, 290), 60, 150)  # the longest takes 16, of which 8 may be a front
# Every family, and every kind of weights: layers with a window, without one, and both.
KINDS = tuple(
    map(
        " ".join, zip(random_models.FAMILIES, cycle(("fp32", "bf16", "int4", "int8")), strict=False)
    )
)
# Kinds of models without windows: their sequences may be over both tiers.
UNWINDOWED = ("llama fp32", "olmo2 bf16", "granite int8")
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition=1.4, presence=0.5),
    SamplingParams(temperature=0.9, seed=7, top_k=20, frequency=0.3),
)
_LIMITS = StepLimits(256, 8)
# The costs of a small model, about as they are measured: plans follow from the seed, not from how busy the machine is.
POINTS = OffloadPoints(
    layers=2,
    linear=[(1, 3e-5), (8, 6e-5), (64, 2.5e-4)],
    device=[Probe(1, 1, 5e-6), Probe(1, 300, 1.5e-5), Probe(4, 600, 4e-5)],
    host=[Probe(1, 1, 1e-5), Probe(1, 300, 3e-5), Probe(4, 600, 8e-5)],
    prefill=[Probe(1, 528, 5e-5), Probe(1, 2080, 1.5e-4)],
    exchange=[Probe(1, 0, 2e-5), Probe(4, 0, 4e-5)],
    page_s=2e-5,
    step_s=2e-4,
)


class HomeSides(NamedTuple):
    """A model with few pages on the device and more on the host, and the model with pages for all."""

    executor: TorchExecutor
    alone: TorchExecutor


class FixedProfile(OffloadProfile):
    """Costs that no computed step changes."""

    def __init__(self, points: OffloadPoints) -> None:
        """Keep the costs that are fitted to the points."""
        super().__init__(points)
        self._fitted = super().costs

    @property
    def costs(self) -> OffloadCosts:
        """The costs as fitted at the start."""
        return self._fitted


class Work(NamedTuple):
    """A request, the step at which it arrives, and the steps during which it is aborted and its pages are forgotten.

    One that is `low` gives way to those that are not, also to those that arrive after it. One that is `extended` waits
    after so many tokens and gets another prompt then.
    """

    prompt: list[int]
    n: int
    max_new: int
    sampling: SamplingParams
    arrives: int
    aborted: int | None
    forgotten: int | None
    low: bool
    extended: tuple[int, list[int]] | None = None

    def prompt_at(self, tokens: int) -> list[int]:
        """Return the prompt after which the token after so many tokens is drawn."""
        return self.extended[1] if self.extended and self.extended[0] <= tokens else self.prompt


class HomeCounts(NamedTuple):
    """Answers that differ from those of the device alone, those compared, and what happened on the way.

    `device` and `host` are rows attended there in steps in stages, `both` those of the former with a front on the host,
    `left` sequences that left a front there, `preempted` sequences that lost their pages, `moves`
    those that changed their home, `aborted` requests, `shared` prompt tokens that were found computed, and `extended`
    prompts that were changed. `resumed` counts prompts of which only the host had pages, by what became of these, and
    `pages` those with which sequences came home to the host, by how they got them. `excused` answers differ first
    where the model itself is undecided, which counts where bits depend on the batch.
    """

    wrong: list[str]
    compared: int
    device: int
    host: int
    preempted: int
    moves: int
    aborted: int
    shared: int
    extended: int
    resumed: Counter[Resume]
    pages: Counter[str]
    excused: int = 0
    both: int = 0
    left: int = 0


def sides(
    kind: str,
    directory: Path,
    helper: HelperAddress | None = None,
    device: str = "cpu",
    sizes: HomeSizes = SMALL,
) -> HomeSides:
    """Write a small model of a kind ("family dtype") and load both executors, one for helpers at an address."""
    family, dtype = kind.split()
    random_models.write(directory, family, random_models.windowed(family, 2))
    alone = TorchExecutor.load(
        str(directory), device=device, dtype=dtype, threads=1, kv_bytes=4 << 20
    )
    each = sum(alone.shape.page_bytes)
    executor = TorchExecutor.load(
        str(directory), device=device, dtype=dtype, threads=1, kv_bytes=sizes.pages * each,
        host_bytes=sizes.host_pages * each, host_threads=1, helper=helper,
    )  # fmt: skip
    return HomeSides(executor, alone)


async def compare(
    sides: HomeSides, seed: int, mode: OffloadMode, sizes: HomeSizes = SMALL, *, split: bool = False
) -> HomeCounts:
    """Compute random work in a mode and on the device alone; raises what breaks an invariant of the pages.

    With `split` sequences may be over both tiers.

    Alone there is room for all requests from the beginning, none is aborted, and steps have another size. All is drawn
    greedily, without penalties, where bits depend on the batch.
    """
    draw = random.Random(seed)
    head = [draw.randrange(random_models.VOCABULARY) for _ in range(sizes.head)]
    samplings = SAMPLINGS if sides.alone.exact else SAMPLINGS[:1]
    works = [_work(draw, head, samplings, sizes) for _ in range(draw.randint(3, 9))]
    extensions = random.Random(f"{seed} extensions")
    works = [_extended(extensions, work, sizes) for work in works]
    points = _scaled(POINTS, draw)
    profile = FixedProfile(_near_host(points) if split else points)
    homes = HomePlanner(sides.executor, profile, mode, split=split)
    before, both = dict(sides.executor.attended), sides.executor.on_both
    device = DeviceQueue()
    try:
        run = HomeRun(sides.executor, device, homes)
        found = await run.all(works)
        alone = HomeRun(sides.alone, device, None, draw.choice((96, 256)))
        kept = [number for number, work in enumerate(works) if work.aborted is None]
        expected = await alone.all(
            [works[number]._replace(arrives=0, forgotten=None) for number in kept]
        )
    finally:
        device.close()
    wrong, excused = [], 0
    for number, answer in zip(kept, expected, strict=True):
        if found[number] == answer:
            continue
        if _undecided(sides.alone, works[number], found[number], answer):
            excused += 1
        else:
            wrong.append(f"request {number}: {found[number]} instead of {answer}")
    after = sides.executor.attended
    return HomeCounts(
        wrong,
        len(kept),
        after["device"] - before["device"],
        after["host"] - before["host"],
        run.engine.scheduler.preemptions,
        run.moves,
        len(works) - len(kept),
        run.shared,
        run.extended,
        homes.resumed,
        homes.host_pages,
        excused,
        sides.executor.on_both - both,
        run.left,
    )


def _undecided(
    alone: TorchExecutor, work: Work, found: list[list[int]], expected: list[list[int]]
) -> bool:
    """True if all choices that differ do so first where the two likeliest tokens are nearly as likely."""
    if alone.exact:
        return False
    for ours, theirs in zip(found, expected, strict=True):
        same = [ours[at] == theirs[at] for at in range(min(len(ours), len(theirs)))]
        if all(same):
            if ours != theirs:
                return False
            continue
        first = same.index(False)
        text = [*work.prompt_at(first), *theirs[:first]]
        best = exactness.logits_alone(alone, text, random.Random(1))[-1].topk(2).values
        if best[0] - best[1] >= exactness.GAP:
            return False
    return True


class HomeRun:
    """One engine that computes random work, checking every invariant; `steps` are its steps in stages by now."""

    def __init__(
        self,
        executor: TorchExecutor,
        device: DeviceQueue,
        homes: HomePlanner | None,
        tokens: int = _LIMITS.tokens,
    ) -> None:
        """Begin without work; a step has at most so many `tokens`."""
        capacity = DecoderCapacity(
            [(Step(1, 1, 1), 1e-3), (Step(1, 64, 2048), 2e-3)], slo_s=60.0, context=512, itl_s=60.0,
            fixed=True,
        )  # fmt: skip
        self.engine = DecoderEngine(
            executor, capacity, StepLimits(tokens, _LIMITS.running), device,
            lookup=True, several=3, homes=homes,
        )  # fmt: skip
        self.moves = self.left = self.shared = self.extended = 0
        self.steps: list[ComputedStep] = []
        self._vocabulary = Vocabulary(executor.tokenizer_json())
        self._root, self._order = root_id(executor.fingerprint, ""), 0

    async def all(self, works: Sequence[Work]) -> list[list[list[int]]]:
        """Compute all works; return the tokens of each choice of each."""
        engine, generations = self.engine, [self._generation(work) for work in works]
        last = max(
            (max(work.arrives, work.aborted or 0, work.forgotten or 0) for work in works), default=0
        )
        number = 0
        while number <= last or not engine.idle or engine.running or engine.scheduler.paused:
            step = engine.running
            if step is None:
                self._extend(works, generations)
                parts = engine.plan()
                step = None if parts is None else engine.submit(parts)
            if step is not None:
                engine.submit_ahead()
            else:
                await asyncio.sleep(0)  # copies that hold pages end meanwhile
            for work, generation in zip(works, generations, strict=True):
                if work.arrives == number:
                    engine.add(generation)
                if work.aborted == number:
                    engine.abort(generation)
                if work.forgotten == number:  # as when its session is deleted
                    engine.scheduler.table.tiers.forget(page_ids(self._root, work.prompt))
            if step is not None:
                result = await step.handle.result()
                moves = self.engine.homes.latest.moves if self.engine.homes else ()
                self.moves, self.left = (
                    self.moves + len(moves),
                    self.left + sum(move.front > 0 for move in moves),
                )
                engine.commit(step, result)
                if engine.homes and step.rows is not None and engine.homes.computed is not None:
                    self.steps.append(engine.homes.computed)
                assert engine.running is not None or not engine.scheduler.table.tiers.left
            engine.scheduler.check()
            number += 1
        tiers = engine.scheduler.table.tiers
        while tiers.moving:  # noqa: ASYNC110 - copies of idle pages notify nobody here
            await asyncio.sleep(0.001)
        assert all(pool.used == 0 for pool in (*tiers.device, *tiers.host))
        assert tiers.corrupt == 0
        for generation in generations:
            assert generation.failure is None, generation.failure
            self.shared += sum(max(0, choice.sequence.cached) for choice in generation.choices)
        return [[list(choice.tokens) for choice in each.choices] for each in generations]

    def _extend(self, works: Sequence[Work], generations: Sequence[Generation]) -> None:
        """Give those that have reached their boundary their other prompt, and let them go on."""
        for work, generation in zip(works, generations, strict=True):
            choice = generation.choices[0]
            if work.extended is None or choice.boundary is None or choice.finish is not None:
                continue
            if choice.room <= 0 and choice.sequence in self.engine.scheduler.paused:
                choice.boundary = None
                self.engine.rewrite(choice, work.extended[1])
                self.engine.resume(generation)
                self.extended += 1

    def _generation(self, work: Work) -> Generation:
        request = GenerationRequest(
            f"r{self._order}", [work.prompt], StopRules(work.max_new), self._root, n=work.n,
            sampling=work.sampling, low=work.low,
        )  # fmt: skip
        self._order += work.n
        made = Generation(request, self._vocabulary, self._order - work.n)
        made.choices[0].boundary = work.extended[0] if work.extended else None
        return made


def _extended(draw: random.Random, work: Work, sizes: HomeSizes) -> Work:
    """Return a request of one choice with, half of the time, another text in a slot of its prompt after some tokens."""
    if work.n > 1 or draw.random() < 0.5:
        return work
    start = draw.randint(0, len(work.prompt))
    slot = [draw.randrange(random_models.VOCABULARY) for _ in range(draw.randint(1, 60))]
    prompt = [*work.prompt[:start], *slot, *work.prompt[start + draw.randint(0, 60) :]]
    return work._replace(extended=(draw.randint(1, sizes.new), prompt[: sizes.head + sizes.tail]))


def _work(
    draw: random.Random,
    head: list[int],
    samplings: Sequence[SamplingParams],
    sizes: HomeSizes,
) -> Work:
    tail = [draw.randrange(random_models.VOCABULARY) for _ in range(draw.randint(1, sizes.tail))]
    aborted, forgotten = (draw.randrange(40) if draw.random() < 0.2 else None for _ in range(2))
    return Work(
        head[: draw.choice(sizes.heads)] + tail, draw.choice((1, 1, 2, 3)), draw.randint(1, sizes.new),
        draw.choice(samplings), draw.randrange(20), aborted, forgotten, draw.random() < 0.3,
    )  # fmt: skip


def _near_host(points: OffloadPoints) -> OffloadPoints:
    """Return costs of a machine whose host is as quick at attention as its device is slow."""
    host, exchange, device = (
        [probe._replace(seconds=factor * probe.seconds) for probe in probes]
        for probes, factor in ((points.host, 0.02), (points.exchange, 0.02), (points.device, 20))
    )
    return msgspec.structs.replace(points, host=host, exchange=exchange, device=device)


def _scaled(points: OffloadPoints, draw: random.Random) -> OffloadPoints:
    """Return costs of another machine: weights, attention on the host and copies of pages that take longer or less."""
    slow, host, way = draw.choice((1, 20)), draw.choice((0.1, 1, 10)), draw.choice((0.1, 1, 1000))
    return msgspec.structs.replace(
        points,
        linear=[(rows, slow * seconds) for rows, seconds in points.linear],
        host=[probe._replace(seconds=host * probe.seconds) for probe in points.host],
        page_s=way * points.page_s,
    )
