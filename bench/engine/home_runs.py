"""Random work for an engine with homes on the device and on the host, whose answers are those of the device alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.engine import random_models
from common.cost.step import Step
from common.pages.identity import page_ids, root_id
from common.types.generation import SamplingParams
from engine.decoder.capacity import DecoderCapacity
from engine.decoder.engine import DecoderEngine
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.offload.costs import OffloadPoints, OffloadProfile
from engine.decoder.offload.homes import HomePlanner
from engine.decoder.offload.plan import OffloadMode
from engine.decoder.offload.probes import measure_stages
from engine.decoder.output.choice import StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.scheduler import StepLimits
from engine.device import DeviceQueue

PAGES, HOST_PAGES = 10, 20  # the longest sequence takes 8
HEAD, TAIL, NEW = 70, 120, 40
KINDS = ("llama fp32", "qwen2 fp32", "mistral int8")
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition=1.4, presence=0.5),
    SamplingParams(temperature=0.9, seed=7, top_k=20, frequency=0.3),
)
_LIMITS = StepLimits(256, 8)
_WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": 50,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
}


class HomeSides(NamedTuple):
    """A model with few pages on the device and more on the host, its costs, and the model with pages for all."""

    executor: TorchExecutor
    points: OffloadPoints
    alone: TorchExecutor


class Work(NamedTuple):
    """A request, the step at which it arrives, and the steps during which it is aborted and its pages are forgotten."""

    prompt: list[int]
    n: int
    max_new: int
    sampling: SamplingParams
    arrives: int
    aborted: int | None
    forgotten: int | None


class HomeCounts(NamedTuple):
    """Answers that differ from those of the device alone, those compared, and what happened on the way.

    `device` and `host` are rows attended there in steps in stages, `moves` sequences that changed their home.
    """

    wrong: list[str]
    compared: int
    device: int
    host: int
    preempted: int
    moves: int


def sides(kind: str, directory: Path, host_socket: str = "") -> HomeSides:
    """Write a small model of a kind ("family dtype") and load both executors, one for helpers at a socket if given."""
    family, dtype = kind.split()
    chosen: dict[str, Any] = random_models.settings(family, 2)
    if family == "qwen2":
        chosen |= _WINDOWED
    if family == "mistral":
        chosen["sliding_window"] = 40
    random_models.write(directory, family, chosen)
    alone = TorchExecutor.load(
        str(directory), device="cpu", dtype=dtype, threads=1, kv_bytes=4 << 20
    )
    each = sum(alone.shape.page_bytes)
    executor = TorchExecutor.load(
        str(directory), device="cpu", dtype=dtype, threads=1, kv_bytes=PAGES * each,
        host_bytes=HOST_PAGES * each, host_threads=1, host_socket=host_socket,
    )  # fmt: skip
    return HomeSides(executor, measure_stages(executor, 64, 4), alone)


async def compare(sides: HomeSides, seed: int, mode: OffloadMode) -> HomeCounts:
    """Compute random work in a mode, and each request of it alone; raises what breaks an invariant of the pages."""
    draw = random.Random(seed)
    head = [draw.randrange(random_models.VOCABULARY) for _ in range(HEAD)]
    works = [_work(draw, head) for _ in range(draw.randint(3, 9))]
    profile = OffloadProfile(_scaled(sides.points, draw))
    homes = HomePlanner(sides.executor, profile, mode)
    before = dict(sides.executor.attended)
    device = DeviceQueue()
    try:
        run = _Run(sides.executor, device, homes)
        found = await run.all(works)
        tokens = draw.choice((96, 256))
        alone = _Run(sides.alone, device, None, tokens)
        expected = [
            None if work.aborted is not None else (await alone.all([_now(work)]))[0]
            for work in works
        ]
    finally:
        device.close()
    pairs = list(zip(found, expected, strict=True))
    wrong = [f"{a} instead of {b}" for a, b in pairs if b is not None and a != b]
    after = sides.executor.attended
    return HomeCounts(
        wrong,
        sum(b is not None for _, b in pairs),
        after["device"] - before["device"],
        after["host"] - before["host"],
        run.engine.scheduler.preemptions,
        run.moves,
    )


class _Run:
    def __init__(
        self,
        executor: TorchExecutor,
        device: DeviceQueue,
        homes: HomePlanner | None,
        tokens: int = _LIMITS.tokens,
    ) -> None:
        capacity = DecoderCapacity(
            [(Step(1, 1, 1), 1e-3), (Step(1, 64, 2048), 2e-3)], slo_s=60.0, context=512, itl_s=60.0,
            fixed=True,
        )  # fmt: skip
        self.engine = DecoderEngine(
            executor, capacity, StepLimits(tokens, _LIMITS.running), device,
            lookup=True, several=3, homes=homes,
        )  # fmt: skip
        self.moves = 0
        self._vocabulary = Vocabulary(executor.tokenizer_json())
        self._root, self._order = root_id(executor.fingerprint, ""), 0

    async def all(self, works: Sequence[Work]) -> list[list[list[int]]]:
        """Compute all works; return the tokens of each choice of each."""
        engine, generations = self.engine, [self._generation(work) for work in works]
        last = max(max(work.arrives, work.aborted or 0, work.forgotten or 0) for work in works)
        number = 0
        while number <= last or not engine.idle or engine.running:
            step = engine.running
            if step is None:
                parts = engine.plan()
                step = None if parts is None else engine.submit(parts)
            if step is not None:
                engine.submit_ahead()
            for work, generation in zip(works, generations, strict=True):
                if work.arrives == number:
                    engine.add(generation)
                if work.aborted == number:
                    engine.abort(generation)
                if work.forgotten == number:  # as when its session is deleted
                    engine.scheduler.table.tiers.forget(page_ids(self._root, work.prompt))
            if step is not None:
                result = await step.handle.result()
                self.moves += len(self.engine.homes.latest.moves) if self.engine.homes else 0
                engine.commit(step, result)
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
        return [[list(choice.tokens) for choice in each.choices] for each in generations]

    def _generation(self, work: Work) -> Generation:
        request = GenerationRequest(
            f"r{self._order}", [work.prompt], StopRules(work.max_new), self._root, n=work.n,
            sampling=work.sampling,
        )  # fmt: skip
        self._order += work.n
        return Generation(request, self._vocabulary, self._order - work.n)


def _work(draw: random.Random, head: list[int]) -> Work:
    tail = [draw.randrange(random_models.VOCABULARY) for _ in range(draw.randint(1, TAIL))]
    aborted, forgotten = (draw.randrange(40) if draw.random() < 0.2 else None for _ in range(2))
    return Work(
        head[: draw.choice((0, 40, HEAD))] + tail, draw.choice((1, 1, 2, 3)), draw.randint(1, NEW),
        draw.choice(SAMPLINGS), draw.randrange(20), aborted, forgotten,
    )  # fmt: skip


def _now(work: Work) -> Work:
    return work._replace(arrives=0, forgotten=None)


def _scaled(points: OffloadPoints, draw: random.Random) -> OffloadPoints:
    """Return costs of another machine: weights that take longer to read, a host that attends faster or slower."""
    slow, host = draw.choice((1, 20)), draw.choice((0.1, 1, 10))
    return msgspec.structs.replace(
        points,
        linear=[(rows, slow * seconds) for rows, seconds in points.linear],
        host=[probe._replace(seconds=host * probe.seconds) for probe in points.host],
    )
