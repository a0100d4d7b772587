"""N1: attention on the host (NEO) in the engine, against the device alone on the same core, beside the simulation."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import NamedTuple

import msgspec
import torch

from bench.document import BenchOptions, Body
from bench.engine.driver import GREEDY
from bench.gpu import shapes
from bench.partial import Partial
from bench.rounds import order
from bench.simulation.host_offload import OffloadSimulation, SimulatedRequest
from bench.suites.engine_pairs import told
from common.cost.step import Step
from common.cost.table import CostTable
from common.devices import detect
from common.errors import ConfigError
from common.pages.identity import root_id
from engine.decoder.capacity import DecoderCapacity, measure
from engine.decoder.engine import SEVERAL, DecoderEngine
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.generation import Generation, GenerationRequest
from engine.decoder.offload.costs import OffloadPoints, OffloadProfile
from engine.decoder.offload.homes import HomePlanner
from engine.decoder.offload.plan import OffloadLimits, OffloadMode
from engine.decoder.offload.probes import measure_stages
from engine.decoder.output.choice import StopRules
from engine.decoder.output.detokenizer import Vocabulary
from engine.decoder.scheduler import StepLimits
from engine.device import DeviceQueue
from engine.models.decoders.compiled_decoder import load_kernels
from loadgen import stats

ALONE = "device alone"  # the engine as it is without attention on the host
MODES = (ALONE, *(mode.value for mode in OffloadMode if mode is not OffloadMode.DEVICE))
NEO, FULL = OffloadMode.ASYMMETRIC.value, OffloadMode.FULL.value
STREAMS, LONGEST, PROMPT, STEP_TOKENS = 32, 512, 96, 512
ROUNDS = 7
READ_BYTES = 128 << 20
_FOREVER_S = 3600.0


class Cell(NamedTuple):
    """How many sequences of the longest kind the device's pages hold, tokens of an answer, and who is compared."""

    sequences: int
    output: int
    modes: Sequence[str]

    @property
    def name(self) -> str:
        """Return its key in the stored samples."""
        return f"{self.sequences} x {LONGEST}, answer {self.output}"


CELLS = (
    Cell(4, 32, (ALONE, NEO)),
    Cell(4, 128, MODES),
    Cell(4, 416, (ALONE, NEO, FULL)),
    Cell(8, 128, (ALONE, NEO)),
    Cell(32, 128, (ALONE, NEO)),
)


class Served(msgspec.Struct):
    """One run of a mode: requests a second, the share of rows attended on the host, predicted and measured seconds."""

    rate: float
    host_share: float
    predicted_s: float
    measured_s: float


class Kept(msgspec.Struct):
    """All runs by cell and mode; costs measured before, and bytes/s of reading on either core: alone, and together."""

    runs: dict[str, dict[str, list[Served]]] = msgspec.field(default_factory=dict)
    points: OffloadPoints | None = None
    alone: list[float] = msgspec.field(default_factory=list)
    together: list[float] = msgspec.field(default_factory=list)


def run(options: BenchOptions) -> Body:
    """Measure every cell in rounds; needs two cores, since device and host have one each."""
    cores = detect().cores
    if len(cores) < 2:
        raise ConfigError("N1: expected two cores, one for the device and one for the host")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores[:1])
    try:
        return _run(options, cores)
    finally:
        os.sched_setaffinity(0, allowed)


def _run(options: BenchOptions, cores: Sequence[int]) -> Body:
    partial_run = Partial(options, Kept)
    kept = partial_run.kept
    name = "tiny" if options.quick else "llama-85m"
    folder = options.setup_dir / "models" / name
    shapes.write(folder, shapes.SHAPES[name], "cpu")
    cells = [_small(cell) if options.quick else cell for cell in CELLS if options.only in cell.name]
    if not kept.alone and partial_run.begins():
        kept.alone, kept.together = _bandwidths(cores[:2])
        partial_run.save()
    for cell in cells:
        for number in range(options.rounds(ROUNDS, 1)):
            done = kept.runs.setdefault(cell.name, {mode: [] for mode in cell.modes})
            if len(done[cell.modes[-1]]) > number or not partial_run.begins():
                continue
            executor = _executor(str(folder), cell, cores)
            try:
                if kept.points is None:
                    kept.points = measure_stages(executor, STEP_TOKENS, STREAMS)
                probes = measure(executor, STEP_TOKENS, STREAMS)
                seed = f"{options.seed} {number}"
                found = {
                    mode: asyncio.run(_serve(executor, probes, cell, mode, kept.points, seed))
                    for mode in order(list(cell.modes), number)
                }
            finally:
                executor.close()
            for mode, served in found.items():
                done[mode].append(served)
            partial_run.save()
    body = _told(kept, cells, options)
    body.left = partial_run.left
    return body


def _small(cell: Cell) -> Cell:
    return cell._replace(output=max(2, cell.output // 16))


def _executor(folder: str, cell: Cell, cores: Sequence[int]) -> TorchExecutor:
    """Load the model with pages for a cell's sequences, and pages for all streams on the host."""
    made = partial(
        TorchExecutor.load, folder, device="cpu", dtype="bf16", threads=1, host_threads=1,
        host_cores=cores[1:2],
    )  # fmt: skip
    config = shapes.SHAPES["tiny" if folder.endswith("tiny") else "llama-85m"]
    dim = config["hidden_size"] // config["num_attention_heads"]
    token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim
    return made(
        kv_bytes=cell.sequences * LONGEST * token,
        host_bytes=(STREAMS + 4) * LONGEST * token,
    )


async def _serve(
    executor: TorchExecutor,
    probes: Sequence[tuple[Step, float]],
    cell: Cell,
    mode: str,
    points: OffloadPoints,
    seed: str,
) -> Served:
    """Serve one request a stream, all there at once, from the first step to the last token."""
    capacity = DecoderCapacity(
        probes, slo_s=120.0, context=executor.shape.context, itl_s=_FOREVER_S
    )
    homes = (
        None if mode == ALONE else HomePlanner(executor, OffloadProfile(points), OffloadMode(mode))
    )
    device = DeviceQueue()
    try:
        engine = DecoderEngine(
            executor, capacity, StepLimits(STEP_TOKENS, STREAMS), device, several=SEVERAL, homes=homes
        )  # fmt: skip
        draw, vocabulary = random.Random(seed), Vocabulary(executor.tokenizer_json())
        for stream in range(STREAMS):
            tokens = [draw.randrange(executor.shape.vocabulary) for _ in range(PROMPT)]
            request = GenerationRequest(
                str(stream), [tokens], StopRules(cell.output), root_id(mode, seed), sampling=GREEDY
            )  # fmt: skip
            engine.add(Generation(request, vocabulary, stream))
        began = time.perf_counter()
        while not engine.idle or engine.running:
            step = engine.running
            if step is None:
                parts = engine.plan()
                step = None if parts is None else engine.submit(parts)
            if step is None:
                await engine.wait(1.0)
                continue
            engine.submit_ahead()
            engine.commit(step, await step.handle.result())
        seconds = time.perf_counter() - began
    finally:
        device.close()
    if homes is None:
        return Served(STREAMS / seconds, 0.0, 0.0, 0.0)
    share = homes.on_host / max(1, homes.decoded)
    return Served(STREAMS / seconds, share, homes.predicted_s, homes.measured_s)


def _simulated(cell: Cell, mode: str, points: OffloadPoints) -> float:
    """Return a mode's requests a second by the device's alone, as the simulation has it with the measured costs."""
    costs, limits = OffloadProfile(points).costs, OffloadLimits(STEP_TOKENS, STREAMS)
    requests = [SimulatedRequest(0.0, PROMPT, cell.output) for _ in range(STREAMS)]
    tokens = cell.sequences * LONGEST, (STREAMS + 4) * LONGEST
    alone, ours = (
        OffloadSimulation(requests, limits, costs, tokens, each).run()
        for each in (OffloadMode.DEVICE, OffloadMode(mode))
    )
    return ours.throughput / alone.throughput


def _bandwidths(cores: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return the bytes/s of reading memory on each core, alone and while the other one reads, too."""
    kernels = load_kernels()
    if kernels is None:
        raise ConfigError("N1: there are no compiled kernels here; expected a C++ compiler")
    threads = [
        ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, {core}))
        for core in cores
    ]
    memory = [torch.ones(READ_BYTES // 4) for _ in cores]

    def read(at: int) -> float:
        took = []
        for _ in range(5):
            began = time.perf_counter()
            kernels.spillway_read(
                ctypes.c_void_p(memory[at].data_ptr()), ctypes.c_int64(memory[at].numel()), 1
            )
            took.append(time.perf_counter() - began)
        return READ_BYTES / median(took)

    alone = [threads[at].submit(read, at).result() for at in range(len(cores))]
    both = [threads[at].submit(read, at) for at in range(len(cores))]
    together = [each.result() for each in both]
    for each in threads:
        each.shutdown()
    return alone, together


def _told(kept: Kept, cells: Sequence[Cell], options: BenchOptions) -> Body:
    body, rows, gains = Body(), [], dict[tuple[str, str], dict[str, float]]()
    for cell in cells:
        runs = kept.runs.get(cell.name, {})
        for mode in cell.modes[1:]:
            served = runs.get(mode, [])
            if not served or kept.points is None:
                continue
            gain = stats.paired_ratio(
                [each.rate for each in served], [each.rate for each in runs[ALONE]]
            )
            gains[cell.name, mode] = gain
            ratios = [each.measured_s / each.predicted_s for each in served if each.predicted_s]
            rows.append(
                [
                    cell.name, mode, f"{median(each.rate for each in runs[ALONE]) * cell.output:.1f}",
                    told(gain), f"{_simulated(cell, mode, kept.points):.2f}",
                    f"{median(each.host_share for each in served):.2f}",
                    f"{median(ratios):.2f}" if ratios else "-", str(len(served)),
                ]
            )  # fmt: skip
            body.samples[f"{cell.name}, {mode}"] = [msgspec.to_builtins(each) for each in served]
        body.samples[f"{cell.name}, {ALONE}"] = [each.rate for each in runs.get(ALONE, [])]
    columns = [
        "pages for", "mode", "alone, tokens/s", "mode / alone [95 %]", "simulated", "host share",
        "step: measured / predicted", "rounds",
    ]  # fmt: skip
    title = f"{STREAMS} streams, prompts of {PROMPT} tokens, device and host on one core each"
    body.table(title, columns, rows)
    if kept.points is not None:
        linear = CostTable(kept.points.linear)
        body.table(
            "What this machine gives",
            ["linear(32) / linear(1)", *(f"core {at}, GB/s: alone, both" for at in range(2))],
            [
                [
                    f"{linear.seconds(32) / linear.seconds(1):.2f}",
                    *(
                        f"{alone / 1e9:.1f}, {both / 1e9:.1f}"
                        for alone, both in zip(kept.alone, kept.together, strict=True)
                    ),
                ]
            ],
        )
        body.samples["points"] = msgspec.to_builtins(kept.points)
    body.met |= _judged(kept, cells, gains)
    if options.quick:
        body.notes.append("A tiny model and short answers: the figures mean nothing.")
    return body


def _judged(
    kept: Kept, cells: Sequence[Cell], gains: dict[tuple[str, str], dict[str, float]]
) -> dict[str, str]:
    """Return the verdicts: the best cell of few pages, its host share, all pages on the device, FastDecode's end."""
    met = {}
    few = [cell for cell in cells if cell.sequences == 4 and (cell.name, NEO) in gains]
    if few:
        best = max(few, key=lambda cell: gains[cell.name, NEO]["value"])
        share = median(each.host_share for each in kept.runs[best.name][NEO])
        met["few pages ≥ 1.3"] = stats.verdict(gains[best.name, NEO], 1.3, 1.3)
        met["host share ≥ 0.3"] = "goal" if share >= 0.3 else "missed"
    for cell in cells:
        if cell.sequences == STREAMS and (cell.name, NEO) in gains:
            met["nothing to gain ≥ 0.98"] = stats.verdict(gains[cell.name, NEO], 0.98, 0.95)
    if few and (few[-1].name, FULL) in gains:
        value = gains[few[-1].name, FULL]["value"]
        met["FastDecode below 1, long answers"] = "goal" if value < 1 else "missed"
    return met
