"""The capacity of a decoder: the measured seconds of its steps, and the depth that they allow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.clock import SYSTEM, Clock
from common.cost.linear import Depth
from common.cost.step import Step, StepCost, attended
from common.pages.identity import PAGE
from common.types.generation import SamplingParams
from engine.decoder.executor.interface import Executor, SamplingRequest, SequenceInput
from engine.decoder.sequence import TokenSequence

# Depth is computed for this many sequences that decode together, with this context.
_TYPICAL_BATCH, _TYPICAL_CONTEXT = 32, 512
_STREAMS = 1024  # a worker's depth has room for this many short streams
_SHORT_TOKENS = 32
_REPEATS = 3
_PROBE_S = 1.0
# A new depth is published when the measured speed has changed by this share, and not more often than this.
_DRIFT = 0.2
_DRIFT_EVERY_S = 5.0
# Prompts may make a step of running streams this many times as long, even if a stream's pace then suffers.
_STRETCH = 2.5
# A step of prompts alone may have so many times the rows of one beside running streams, if it takes no longer than this
# at a typical context.
PROMPTS, PROMPTS_S = 4, 0.04


def size_of(rows: Sequence[SequenceInput], windows: Sequence[int | None]) -> Step:
    """Return the size of a step; a passage counts as computed where its first part is placed."""
    seen, count = 0.0, 0
    for each in rows:
        positions = each.positions
        count += len(positions)
        if positions:
            seen += attended(positions[0], positions[-1], len(positions), windows)
        for place in each.places:
            if place.start == place.begin:
                alone = len(place.tokens)
                count += alone
                seen += attended(0, alone - 1, alone, windows)
    return Step(len(rows), count, seen)


def decoding_of(running: Sequence[TokenSequence], windows: Sequence[int | None]) -> Step:
    """Return the size of a step in which each decoding sequence gets one token."""
    last = [sequence.length - 1 for sequence in running if sequence.decodes]
    return Step(len(last), len(last), sum(attended(at, at, 1, windows) for at in last))


def prompts_beside(
    running: Sequence[TokenSequence], waiting: Sequence[TokenSequence], slots: int
) -> int:
    """Count the sequences whose prompts are still to be computed; of those that wait, as many as have a slot.

    Those of low priority count only if no other sequence decodes.
    """
    urgent = not all(sequence.low_priority for sequence in running if sequence.decodes)
    begun = sum(not (each.decodes or (urgent and each.low_priority)) for each in running)
    coming = sum(not (urgent and each.low_priority) for each in waiting)
    return begun + min(coming, max(0, slots - len(running)))


def measure(
    runner: Executor, step_tokens: int, max_running: int, clock: Clock = SYSTEM
) -> list[tuple[Step, float]]:
    """Time a few steps on empty pages; the first step also warms the model."""
    pages = runner.shape.pages
    longest = min(step_tokens, runner.shape.context - 1, pages * PAGE)
    batch = max(1, min(max_running, step_tokens, _TYPICAL_BATCH, pages))
    far = max(0, min(runner.shape.context, pages * PAGE) - 1)
    # sequences, rows of each, first position
    shapes = {(1, 1, 0), (batch, 1, 0), (max(1, batch // 4), 1, 0), (1, longest, 0)}
    shapes |= {(1, max(1, longest // 4), 0), (1, 1, far), (1, min(longest, 64), max(0, far - 64))}
    return [probe_step(runner, clock, *shape) for shape in sorted(shapes)]


def probe_step(
    runner: Executor, clock: Clock, count: int, rows: int, first: int
) -> tuple[Step, float]:
    """Return the shortest of a few steps of `count` sequences with `rows` rows each, from position `first` on."""
    each = (first + rows - 1) // PAGE + 1
    groups = len(runner.shape.windows)
    batch = []
    for number in range(count):
        tokens = [(number * 31 + row * 7) % runner.shape.vocabulary for row in range(rows)]
        pages = [[number * each + page for page in range(each)] for _ in range(groups)]
        draw = SamplingRequest(SamplingParams(), 0, first + rows, tokens, [])
        batch.append(SequenceInput(tokens, list(range(first, first + rows)), pages, draw))
    seconds, began = [], clock.perf_s()
    for turn in range(_REPEATS + 1):
        started = clock.perf_s()
        runner.execute(batch)
        took = clock.perf_s() - started
        if turn or took > _PROBE_S:  # the first run also warms the model
            seconds.append(took)
        if clock.perf_s() - began > _PROBE_S:
            break
    return size_of(batch, runner.shape.windows), min(seconds or [took])


class DecoderCapacity:
    """The depth and the predicted seconds of a generator.

    On the lanes of a generator an item is a choice (prompts * n); the tokens of a job are its prompts' tokens plus
    n * max_new for each prompt. Admission counts the same way. Depth in tokens is the number of tokens that can be
    computed within the deadline; depth in items leaves room for a thousand short streams.
    """

    def __init__(
        self,
        probes: Sequence[tuple[Step, float]],
        *,
        slo_s: float,
        context: int,
        itl_s: float = 0.1,
        fixed: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        """Begin with measured steps; `itl_s` is a stream's longest wait for a token while a prompt is computed."""
        self.cost = StepCost(probes, fixed=fixed)
        self._slo_s, self._itl_s, self._context, self._fixed = slo_s, itl_s, context, fixed
        self._longest = max(step.rows for step, _ in probes)
        self._now_s = clock.monotonic
        self._published = (self.token_s, self._now_s())

    @property
    def token_s(self) -> float:
        """Seconds per token of a lane, if half of its tokens belong to prompts and half to answers."""
        batch, longest = _TYPICAL_BATCH, self._longest
        decode = Step(batch, batch, batch * _TYPICAL_CONTEXT)
        prompt = Step(1, longest, longest * longest / 2)
        return self.cost.seconds(decode) / batch / 2 + self.cost.seconds(prompt) / longest / 2

    @property
    def step_s(self) -> float:
        """Seconds of the shortest step."""
        return self.cost.seconds(Step(1, 1, 1))

    @property
    def depth(self) -> Depth:
        """The items and tokens that a lane may hold, queued and running: at least a few of the longest jobs."""
        tokens = int(self._slo_s / max(1e-9, self.token_s))
        tokens = min(max(tokens, 4 * self._context), 10_000_000)
        return Depth(max(_STREAMS, tokens // _SHORT_TOKENS), tokens)

    def recompute_s(self, depth: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds to recompute pages in a batch, by their positions in the sequence (Pensieve, 3.2)."""
        _, _, row, each = self.cost.parts
        seconds: NDArray[np.float64] = PAGE * (row + each * PAGE * (depth + 0.5))
        return np.maximum(seconds, 1e-9)

    def budget(self, decoding: Step, prompts: int, most: int) -> int:
        """Return the number of rows that a step may have without slowing decoding streams too much.

        The step may take `itl_s`, or _STRETCH times as long as the streams need alone, whichever is longer. That time
        grows with the number of `prompts` for each stream: where many prompts wait beside few streams, a short step is
        good for few and keeps many waiting. The step has room for at least one page of prompt rows, so that prompts
        make progress, and for at most `most` rows.

        Without decoding streams it has `most` rows, or as many as take PROMPTS_S at a typical context, but at most
        PROMPTS times as many.
        """
        _, _, row, each = self.cost.parts
        per_row = row + each * _TYPICAL_CONTEXT
        if not decoding.sequences:
            return max(most, min(PROMPTS * most, int(PROMPTS_S / per_row))) if per_row > 0 else most
        alone = self.cost.seconds(decoding)
        stretch = _STRETCH * (1 + prompts / decoding.sequences)
        spare = max(self._itl_s, stretch * alone) - alone
        rows = int(spare / per_row) if per_row > 0 else most
        return min(most, decoding.rows + max(PAGE, rows))

    def moved(self) -> bool:
        """Return whether the speed has changed enough since this last returned True to publish a new depth."""
        was, at = self._published
        now = self._now_s()
        if self._fixed or now - at < _DRIFT_EVERY_S:
            return False
        if abs(self.token_s / max(was, 1e-12) - 1) <= _DRIFT:
            return False
        self._published = (self.token_s, now)
        return True
