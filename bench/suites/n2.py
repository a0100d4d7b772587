"""N2: how well the seconds of a step are predicted, and where they go: a worker's scheduler and costs on a model."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.document import BenchOptions, Body
from bench.engine.driver import rows_of
from bench.gpu import shapes
from common.pages.identity import root_id
from engine.decoder.capacity import DecoderCapacity, decoding_of, measure, prompts_beside, size_of
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.scheduler import ScheduledRows, Scheduler, StepLimits
from engine.decoder.sequence import TokenSequence

WARM, STREAMS, STEP_TOKENS = 200, 32, 512


class Timed:
    """The kernels' library, with the seconds spent in it."""

    def __init__(self, library: Any) -> None:
        self._library, self.seconds = library, 0.0

    def __getattr__(self, name: str) -> Any:
        """Return a function of the library that is timed."""
        function = getattr(self._library, name)

        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            found = function(*arguments)
            self.seconds += time.perf_counter() - began
            return found

        return call


class JoiningRequests:
    """A runner, its costs, and requests that come as others end."""

    def __init__(self, model: str, kind: str, seed: int) -> None:
        self.runner = TorchExecutor.load(model, device="cpu", dtype=kind, kv_bytes=2 << 30)
        self.pace = DecoderCapacity(
            measure(self.runner, STEP_TOKENS, STREAMS),
            slo_s=120.0,
            context=self.runner.shape.context,
        )
        self.kernels = Timed(self.runner._decoder._kernels)  # type: ignore[union-attr]
        self.runner._decoder._kernels = self.kernels  # type: ignore[union-attr]
        self.spent: Counter[str] = Counter()
        self._scheduler = Scheduler(self.runner.shape, StepLimits(STEP_TOKENS, STREAMS))
        self._draw, self._order = random.Random(seed), 0

    def add(self, prompt: tuple[int, int], new: tuple[int, int]) -> None:
        """Let a request come, of random length within bounds."""
        draw = self._draw
        tokens = [
            draw.randrange(self.runner.shape.vocabulary) for _ in range(draw.randint(*prompt))
        ]
        self._scheduler.add(
            TokenSequence(
                str(self._order), 0, self._order, tokens, root=root_id("n2", str(self._order)),
                most=len(tokens) + draw.randint(*new),
            )
        )  # fmt: skip
        self._order += 1

    @property
    def held(self) -> int:
        """How many requests there are."""
        return len(self._scheduler.waiting) + len(self._scheduler.running)

    def step(self) -> tuple[float, float]:
        """Run one step; return the predicted and the measured seconds of it."""
        marks = [time.perf_counter()]
        windows = self.runner.shape.windows
        scheduler = self._scheduler
        decoding = decoding_of(scheduler.running, windows)
        prompts = prompts_beside(scheduler.running, scheduler.waiting, scheduler.bounds.running)
        parts = scheduler.step(self.pace.budget(decoding, prompts, STEP_TOKENS))
        marks.append(time.perf_counter())
        rows = [rows_of(part) for part in parts]
        size = size_of(rows, windows)
        predicted = self.pace.cost.seconds(size)
        marks.append(time.perf_counter())
        before = self.kernels.seconds
        drawn = self.runner.execute(rows)
        marks.append(time.perf_counter())
        self._commit(parts, drawn)
        took = marks[3] - marks[2]
        self.pace.cost.observe(size, took)
        marks.append(time.perf_counter())
        inside = self.kernels.seconds - before
        self.spent += Counter(
            {
                "scheduling": marks[1] - marks[0],
                "rows and prediction": marks[2] - marks[1],
                "model": inside,
                "checks, page tables, drawing": took - inside,
                "commit and costs": marks[4] - marks[3],
            }
        )
        return predicted, took

    def _commit(self, parts: Sequence[ScheduledRows], drawn: Sequence[Any]) -> None:
        for part, found in zip(parts, drawn, strict=True):
            self._scheduler.commit(part, found.token if found else None)
            if part.sequence.length >= part.sequence.most:
                self._scheduler.drop([part.sequence])


def run(options: BenchOptions) -> Body:
    """Predict steps of a mixed load on S and M; then 32 streams that only decode on M (quick: few steps)."""
    body = Body()
    folder = options.setup_dir / "models" / "llama-85m"
    shapes.write(folder, shapes.SHAPES["llama-85m"], "cpu")
    rows, steps = [], options.rounds(1000, 60)
    warm = min(WARM, steps // 2)
    for name, model, kind in (("S", "spillway-demo", "fp32"), ("M", str(folder), "bf16")):
        bench, errors = JoiningRequests(model, kind, options.seed), []
        draw = random.Random(options.seed)
        for number in range(steps):
            while bench.held < draw.choice((1, 4, 16, 40)):
                bench.add((5, 900), (5, 120))
            predicted, took = bench.step()
            if number >= warm:
                errors.append(abs(predicted / took - 1))
        off = median(errors)
        parts = " / ".join(f"{1e6 * part:.3g}" for part in bench.pace.cost.parts)
        rows.append([name, kind, str(len(errors)), f"{off:.1%}", parts])
        body.samples[name] = errors
        body.met[f"prediction, {name}"] = (
            "goal" if off <= 0.1 else "must" if off <= 0.15 else "missed"
        )
    columns = ["model", "weights", "steps", "median error", "us a step / sequence / row / attended"]
    body.table(f"Predicted and measured steps of a mixed load, after {warm}", columns, rows)
    _shares(body, str(folder), options)
    return body


def _shares(body: Body, model: str, options: BenchOptions) -> None:
    bench = JoiningRequests(model, "bf16", options.seed)
    for _ in range(STREAMS):
        bench.add((100, 300), (400, 400))
    for _ in range(options.pick(60, 30)):  # until all decode
        bench.step()
    bench.spent.clear()
    count = options.pick(200, 20)
    for _ in range(count):
        bench.step()
    total = sum(bench.spent.values())
    rows = [
        [what, f"{1e3 * spent / count:.3f}", f"{spent / total:.1%}"]
        for what, spent in bench.spent.most_common()
    ]
    outside = 1 - bench.spent["model"] / total
    body.table(f"Where a step of {STREAMS} streams goes, M in bf16", ["part", "ms", "share"], rows)
    body.samples["shares"] = dict(bench.spent)
    body.met["outside the model"] = "goal" if outside <= 0.05 else "missed"
