"""How long a step takes, and what a generator may therefore hold: measured at the start, followed as it runs."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec

from common.cost.linear import Depth, LinearCost, Probe, fit
from common.messages import Sampling, WorkerRecord
from services.gpu_worker.decide.batch import PAGE, Draw, Rows, Runner

# Sequences that decode together where depth is computed: more hide in a busy hour, fewer in a quiet one.
_TYPICAL_BATCH = 32
_STREAMS = 1024  # short ones a worker always has room for in its depth
_SHORT_TOKENS = 32
_REPEATS = 3
_PROBE_S = 1.0
# Depth follows the measured speed when it has moved by this share, at most every so often.
_DRIFT = 0.2
_DRIFT_EVERY_S = 5.0
_MEMORY = 0.95


class Measured(NamedTuple):
    """Seconds of a step = beta_s + alpha_items_s * sequences + alpha_tokens_s * rows; and a lane token's seconds."""

    step: LinearCost
    token_s: float


def measure(runner: Runner, step_tokens: int, max_running: int) -> Measured:
    """Time a few steps on pages that hold nothing yet (this also warms the model)."""
    pages = runner.shape.pages
    longest = min(step_tokens, runner.shape.context - 1, pages * PAGE)
    batch = max(1, min(max_running, step_tokens, _TYPICAL_BATCH, pages))
    shapes = {(1, 1), (batch, 1), (max(1, batch // 4), 1), (1, longest), (1, max(1, longest // 4))}
    probes = [_probe(runner, count, rows) for count, rows in sorted(shapes)]
    step = fit(probes)
    # A lane's tokens are prompts and answers alike: half of them are taken to be of either kind.
    decode_s = step.seconds(batch, batch) / batch
    prompt_s = step.seconds(1, longest) / longest
    return Measured(step, (decode_s + prompt_s) / 2)


def _probe(runner: Runner, count: int, rows: int) -> Probe:
    """Return the best of a few steps of `count` sequences with `rows` rows each."""
    each = -(-rows // PAGE)
    groups = len(runner.shape.windows)
    batch = []
    for number in range(count):
        tokens = [(number * 31 + row * 7) % runner.shape.vocabulary for row in range(rows)]
        pages = [[number * each + page for page in range(each)] for _ in range(groups)]
        draw = Draw(Sampling(), 0, rows, tokens, [])
        batch.append(Rows(tokens, list(range(rows)), pages, draw))
    seconds, began = [], time.perf_counter()
    for turn in range(_REPEATS + 1):
        started = time.perf_counter()
        runner.execute(batch)
        took = time.perf_counter() - started
        if turn or took > _PROBE_S:  # the first one also warms
            seconds.append(took)
        if time.perf_counter() - began > _PROBE_S:
            break
    return Probe(count, count * rows, min(seconds or [took]))


class Pace:
    """A generator's depth and predictions.

    On the lanes of a generator an item is a choice (prompts * n), and the tokens of a job are those of its prompts
    plus n * max_new for each of them; whoever admits counts the same way. Depth in tokens is what can be computed
    within the deadline; in items it leaves room for a thousand short streams.
    """

    def __init__(
        self, measured: Measured, *, slo_s: float, context: int, fixed: bool = False
    ) -> None:
        self._measured, self._slo_s, self._context, self._fixed = measured, slo_s, context, fixed
        self.slowness = 1.0
        self._published = (1.0, time.monotonic())

    @property
    def depth(self) -> Depth:
        """What may be held, queued and running; always a few jobs of the longest kind."""
        tokens = int(self._slo_s / max(1e-9, self._measured.token_s * self.slowness))
        tokens = min(max(tokens, 4 * self._context), 10_000_000)
        return Depth(max(_STREAMS, tokens // _SHORT_TOKENS), tokens)

    def seconds(self, sequences: int, rows: int) -> float:
        """Predict a step."""
        return self.slowness * self._measured.step.seconds(sequences, rows)

    def observe(self, predicted_s: float, took_s: float) -> None:
        """Learn from a step that ran undisturbed."""
        if predicted_s > 0:
            now = self.slowness * took_s / predicted_s
            self.slowness += (1 - _MEMORY) * (min(max(now, 0.2), 10.0) - self.slowness)

    def record(self, record: WorkerRecord) -> WorkerRecord:
        """Return the record with this depth; predicted seconds of a job are those of its tokens, and one step's."""
        depth = self.depth
        return msgspec.structs.replace(
            record,
            depth_items=depth.items,
            depth_tokens=depth.tokens,
            alpha_items_s=0.0,
            alpha_tokens_s=self.slowness * self._measured.token_s,
            beta_s=self.seconds(1, 1),
        )

    def moved(self) -> bool:
        """True if the speed has moved so far, since the last time this said so, that a new depth is worth telling."""
        was, at = self._published
        now = time.monotonic()
        if self._fixed or abs(self.slowness / was - 1) <= _DRIFT or now - at < _DRIFT_EVERY_S:
            return False
        self._published = (self.slowness, now)
        return True
