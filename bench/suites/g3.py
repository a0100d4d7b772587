"""G3: iterative retrieval in batches (RAGO): figure 3.8b simulated, a limit of the wait, and the engine in steps."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path

from bench.document import BenchOptions, Body
from bench.engine.iterative_decoding import IterativeDecoding
from bench.gpu import shapes
from bench.simulation.piperag_published import FIGURE_3_8B
from common.devices import detect
from engine.decoder.executor.torch_executor import TorchExecutor
from planner.iterative_batches import Idleness, IterativeLoad, simulate

NEAR = 0.07  # steps a token
SIZES = sorted({sequences for _, sequences in FIGURE_3_8B})
LIMITS = (math.inf, 64, 32, 16, 8)
LIMITED = ((64, 64), (16, 16), (16, 64))  # batch, sequences
DECODED = 16
ENGINE = (IterativeLoad(DECODED, 1), IterativeLoad(DECODED, 4), IterativeLoad(DECODED, 8),
          IterativeLoad(DECODED, 16), IterativeLoad(DECODED, 16, longest=16))  # fmt: skip
QUICK = (IterativeLoad(4, 1, tokens=24), IterativeLoad(4, 4, tokens=24),
         IterativeLoad(4, 4, tokens=24, longest=4))  # fmt: skip


def run(options: BenchOptions) -> Body:
    """Simulate every cell of the figure, then let the engine decode some (quick: few sequences, short ones)."""
    body = Body()
    _figure(body, options)
    _limits(body, options)
    _engine(body, options)
    return body


def _simulated(load: IterativeLoad, options: BenchOptions) -> Idleness:
    """Return the idleness of many sequences: the more, the more of them wait for each other."""
    turns = options.pick(200, 60) if load.sequences == load.batch else options.pick(20, 10)
    finished = max(turns * load.sequences, 2000)
    points = load.drawn(f"{options.seed} {load.batch} {load.sequences}")
    return simulate(load, finished, points, warm=finished // 4)


def _figure(body: Body, options: BenchOptions) -> None:
    found = {
        (batch, sequences): _simulated(IterativeLoad(sequences, batch), options).steps_a_token
        for batch, sequences in FIGURE_3_8B
    }
    rows = []
    for batch in sorted({batch for batch, _ in FIGURE_3_8B}, reverse=True):
        cells = []
        for sequences in SIZES:
            steps = found.get((batch, sequences))
            cells.append(
                "-" if steps is None else f"{steps:.2f} ({FIGURE_3_8B[batch, sequences]:.2f})"
            )
        rows.append([str(batch), *cells])
    columns = ["batch of retrievals", *(f"{sequences} sequences" for sequences in SIZES)]
    body.table("Figure 3.8b: steps a token, and the thesis' in brackets", columns, rows)
    worst = max(abs(steps - FIGURE_3_8B[cell]) for cell, steps in found.items())
    body.samples["figure 3.8b"] = {f"{batch}/{n}": steps for (batch, n), steps in found.items()}
    body.samples["furthest"] = worst
    body.met["cells of figure 3.8b"] = "goal" if worst <= NEAR else "missed"
    body.notes.append(
        "Figure 3.8b: sequences of 256 tokens, each replaced at once when it ends; retrieval and the prompt after it "
        "take no time. Four retrievals are the first one and three at random places: no other number fits the figure."
    )


def _limits(body: Body, options: BenchOptions) -> None:
    rows = []
    for batch, sequences in LIMITED:
        for limit in LIMITS:
            found = _simulated(IterativeLoad(sequences, batch, longest=limit), options)
            name = "none" if math.isinf(limit) else f"{limit:g} steps"
            rows.append([
                str(batch), str(sequences), name, f"{found.steps_a_token:.2f}", f"{found.mean_batch:.1f}",
            ])  # fmt: skip
            body.samples[f"limit/{batch}/{sequences}/{name}"] = list(found)
    columns = ["batch of retrievals", "sequences", "longest wait", "steps a token", "mean batch"]
    body.table("A limit of the wait, simulated", columns, rows)


def _engine(body: Body, options: BenchOptions) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, detect().cores[:1])
    try:
        executor = _executor(options.setup_dir / "models" / "tiny")
        try:
            rows, worst = list[list[str]](), 0.0
            for load in QUICK if options.quick else ENGINE:
                worst = max(worst, _decoded(body, executor, load, options, rows))
        finally:
            executor.close()
    finally:
        os.sched_setaffinity(0, allowed)
    columns = ["batch of retrievals", "sequences", "longest wait", "steps a token: simulated"]
    columns += [
        "engine",
        "mean batch: simulated",
        "engine",
        "sequences ended",
        "ms a step",
        "tokens/s",
    ]
    body.table("The engine, counted in steps", columns, rows)
    body.samples["engine furthest"] = worst
    body.met["the engine beside the simulation"] = "goal" if worst <= NEAR else "missed"
    body.notes.append(
        "Engine: a model of random weights, hidden 64, two layers, on one core. A sequence that stops ends; it goes on "
        "as a new generation of all its tokens and a passage of 8. The simulation knows each sequence's stops, and "
        "nothing of the engine. Seconds are those of so small a model: they show the order, not a size."
    )


def _decoded(
    body: Body,
    executor: TorchExecutor,
    load: IterativeLoad,
    options: BenchOptions,
    rows: list[list[str]],
) -> float:
    """Let the engine decode a load; return how far its steps a token are from the simulated ones."""
    finished = options.rounds(4, 2) * load.sequences
    seed = f"{options.seed} engine {load.batch}"
    expected = simulate(load, finished, load.drawn(seed))
    decoding = IterativeDecoding(executor, load, load.drawn(seed), options.seed + load.batch)
    found = asyncio.run(decoding.run(finished))
    limit = "none" if math.isinf(load.longest) else f"{load.longest:g} steps"
    rows.append([
        str(load.batch), str(load.sequences), limit, f"{expected.steps_a_token:.3f}",
        f"{found.idleness.steps_a_token:.3f}", f"{expected.mean_batch:.2f}", f"{found.idleness.mean_batch:.2f}",
        str(finished), f"{1e3 * found.seconds / found.steps:.2f}",
        f"{finished * load.tokens / found.seconds:,.0f}",
    ])  # fmt: skip
    body.samples[f"engine/{load.batch}/{load.sequences}/{limit}"] = {
        "simulated": list(expected), "engine": list(found.idleness), "steps": found.steps, "seconds": found.seconds,
    }  # fmt: skip
    return abs(found.idleness.steps_a_token - expected.steps_a_token)


def _executor(place: Path) -> TorchExecutor:
    shapes.write(place, shapes.SHAPES["tiny"], "cpu")
    return TorchExecutor.load(str(place), device="cpu", dtype="bf16", threads=1, kv_bytes=32 << 20)
