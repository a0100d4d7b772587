"""Drive the engine without a bus: sequences through scheduler, executor and page tiers, greedily."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from common.pages.identity import root_id
from common.types.generation import SamplingParams
from engine.decoder.executor.interface import PageMove, SampledToken, SamplingRequest, SequenceInput
from engine.decoder.executor.step import run_step
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.kv.tiers import PLAIN, TierPolicy
from engine.decoder.scheduler import ScheduledRows, Scheduler, StepLimits
from engine.decoder.sequence import TokenSequence

GREEDY = SamplingParams(temperature=0.0)
_SAVES = 8


def rows_of(part: ScheduledRows) -> SequenceInput:
    """Return a part of a step as the runner takes it, to be drawn from greedily."""
    sequence = part.sequence
    draw = SamplingRequest(GREEDY, 0, sequence.length, sequence.prompt, sequence.output)
    tokens = sequence.at(part.positions)
    return SequenceInput(tokens, part.positions, sequence.pages, draw if part.draws else None)


class Driver:
    """Steps when told to; `drawn_s` is when each sequence's tokens were drawn, by `time.perf_counter`."""

    def __init__(
        self,
        runner: TorchExecutor,
        bounds: StepLimits,
        keeping: TierPolicy = PLAIN,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.scheduler = Scheduler(runner.shape, bounds, keeping)
        self.tiers = self.scheduler.table.tiers
        self.drawn_s: dict[int, list[float]] = {}
        self._now_s = now_s
        self._order = 0
        self._saved: list[tuple[PageMove, bool]] = []
        self._saving = 0
        self._changed = threading.Condition()

    def add(self, prompt: Sequence[int], new: int, scope: str = "") -> TokenSequence:
        """Let a sequence arrive; ValueError if it can never fit."""
        sequence = TokenSequence(
            str(self._order),
            0,
            self._order,
            prompt,
            root=root_id(self.runner.fingerprint, scope),
            most=len(prompt) + new,
        )
        if not self.scheduler.fits(sequence):
            raise ValueError(f"{sequence.most} tokens do not fit {self.runner.shape.pages} pages")
        self._order += 1
        self.scheduler.add(sequence)
        return sequence

    def run(self) -> None:
        """Step until nothing is left to generate; RuntimeError if a step fails."""
        while self.scheduler.waiting or self.scheduler.running:
            self.step()

    def step(self) -> None:
        """Run one step."""
        parts = self.scheduler.step(now_s=self._now_s())
        loads, copier = self.scheduler.loads, self.runner.copier
        loading = copier.load(loads) if copier is not None and loads else None
        jobs = [part.sequence.job for part in parts]
        compute = partial(self.runner.execute, loading=loading)
        ran = run_step(compute, [rows_of(part) for part in parts], jobs, loading)
        for move in loads:
            self.scheduler.moved(move, sound=loading is None or move not in loading.unsound)
        now = time.perf_counter()
        for part, outcome in zip(parts, ran.outcomes, strict=True):
            if outcome is not None and not isinstance(outcome, SampledToken):
                raise RuntimeError(f"{outcome.code}: {outcome.message}")
            if part.sequence.pages:  # else it got a damaged page, and begins again
                self._commit(part, outcome, now)
        self._save()

    def settle(self) -> None:
        """Wait until the pages on their way to the host are there, and no more are to go."""
        while True:
            self._save()
            with self._changed:
                if not self._saving and not self._saved:
                    return
                self._changed.wait_for(lambda: self._saved)

    def _commit(self, part: ScheduledRows, drawn: SampledToken | None, now: float) -> None:
        sequence = part.sequence
        self.scheduler.commit(part, None if drawn is None else drawn.token)
        if drawn is not None:
            self.drawn_s.setdefault(sequence.order, []).append(now)
        if sequence.length >= sequence.most:
            self.scheduler.drop([sequence])

    def _save(self) -> None:
        with self._changed:
            saved, self._saved = self._saved, []
            self._saving -= len(saved)
        for move, sound in saved:
            self.scheduler.moved(move, sound=sound)
        if self.runner.copier is None or self._saving:
            return
        for move in self.tiers.saves(_SAVES):
            self._saving += 1
            self.runner.copier.save(move, self._was_saved)

    def _was_saved(self, move: PageMove, sound: bool) -> None:
        with self._changed:
            self._saved.append((move, sound))
            self._changed.notify()
