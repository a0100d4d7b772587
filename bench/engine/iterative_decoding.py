"""Sequences of a real engine that stop at retrieval points, and go on in batches (RAGO, section 3.5.3 of the thesis).

A sequence stops by ending. Once its retrieval has come it goes on as a new generation, whose prompt is all that was
written and the passage: the pages of what was written are found again, and the step that computes the rest gives a
token, as any other step does.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from bench.engine.driver import GREEDY
from common.cost.step import Step
from common.pages.identity import root_id
from engine.decoder.capacity import DecoderCapacity
from engine.decoder.engine import DecoderEngine
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.output.choice import StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.scheduler import StepLimits
from engine.device import DeviceQueue
from planner.iterative_batches import Idleness, IterativeLoad, RetrievalBatches, gaps

PROMPT, PASSAGE = 16, 8  # tokens
_FIXED = [(Step(1, 1, 1), 1e-3), (Step(1, 64, 2048), 2e-3)]  # what a step takes bounds nothing here
_FOREVER_S = 3600.0


class CountedDecoding(NamedTuple):
    """What was counted in steps, how many steps there were, and the seconds of all."""

    idleness: Idleness
    steps: int
    seconds: float


@dataclass(slots=True)
class _Slot:
    """A sequence: all its tokens, how many it writes between its stops from now on, and the step it began in."""

    tokens: list[int]
    gaps: deque[int]
    began: int


class IterativeDecoding:
    """Decodes a load in the engine; `points` gives each new sequence's stops, as `IterativeLoad.drawn` does."""

    def __init__(
        self,
        executor: TorchExecutor,
        load: IterativeLoad,
        points: Callable[[], list[int]],
        seed: int,
    ) -> None:
        self._executor, self._load, self._points = executor, load, points
        self._draw = random.Random(seed)
        self._vocabulary = Vocabulary(executor.tokenizer_json())
        self._root = root_id(executor.fingerprint, f"iterative {seed}")
        self._order = self._steps = 0
        self._waiting = RetrievalBatches[int](load.batch, load.longest)
        self._slots: list[_Slot] = []
        self._slot_of: dict[str, int] = {}  # by id of a generation

    async def run(self, finished: int) -> CountedDecoding:
        """Decode until so many sequences have ended; RuntimeError if the engine fails one."""
        load, device = self._load, DeviceQueue()
        capacity = DecoderCapacity(
            _FIXED, slo_s=_FOREVER_S, context=self._executor.shape.context, itl_s=_FOREVER_S, fixed=True
        )  # fmt: skip
        # Room in every step for the rows of all sequences, however many begin or go on in it.
        rows = load.sequences * self._executor.shape.context
        engine = DecoderEngine(self._executor, capacity, StepLimits(rows, load.sequences), device)
        ended, taken, batches, began_s = list[int](), 0, 0, time.perf_counter()
        try:
            for slot in range(load.sequences):
                self._slots.append(self._fresh())
                self._go_on(engine, slot)
            while len(ended) < finished:
                stopped = await self._step(engine)
                for slot in stopped:
                    each = self._slots[slot]
                    if each.gaps:
                        self._waiting.add(slot, self._steps)
                        continue
                    ended.append(self._steps - each.began)
                    self._slots[slot] = self._fresh()
                    self._go_on(engine, slot)
                while batch := self._waiting.take(self._steps):
                    taken, batches = taken + len(batch), batches + 1
                    for slot in batch:
                        self._slots[slot].tokens += self._random(PASSAGE)
                        self._go_on(engine, slot)
            seconds = time.perf_counter() - began_s
        finally:
            device.close()
        mean = sum(ended[:finished]) / finished
        idleness = Idleness(mean / load.tokens, taken / batches if batches else 0.0)
        return CountedDecoding(idleness, self._steps, seconds)

    async def _step(self, engine: DecoderEngine) -> list[int]:
        """Let the engine compute a step; return the slots that stopped, in their order."""
        progress = await engine.step()
        self._steps += 1
        stopped = []
        for generation, choice, _ in progress:
            if choice is None:
                raise RuntimeError(f"a generation failed: {generation.failure}")
            if choice.finish is not None:
                slot = self._slot_of.pop(generation.id)
                self._slots[slot].tokens += choice.tokens
                stopped.append(slot)
        return sorted(stopped)

    def _go_on(self, engine: DecoderEngine, slot: int) -> None:
        each = self._slots[slot]
        request = GenerationRequest(
            str(self._order), [each.tokens], StopRules(each.gaps.popleft()), self._root, sampling=GREEDY
        )  # fmt: skip
        generation = Generation(request, self._vocabulary, self._order)
        self._slot_of[generation.id] = slot
        self._order += 1
        engine.add(generation)

    def _fresh(self) -> _Slot:
        return _Slot(self._random(PROMPT), deque(gaps(self._points())), self._steps)

    def _random(self, count: int) -> list[int]:
        return [self._draw.randrange(3, self._executor.shape.vocabulary) for _ in range(count)]
