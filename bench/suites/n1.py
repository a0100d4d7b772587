"""N1: attention on the host (NEO) in the engine, against the device alone on the same core, beside the simulation."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import torch

from bench.document import BenchOptions, Body
from bench.engine.home_serving import HomeService, serve
from bench.engine.part_time_attention import PartTimeAttention
from bench.gpu import shapes
from bench.partial import PartialResults
from bench.rounds import order
from bench.simulation.host_offload import OffloadRequest, OffloadSimulation
from bench.suites.engine_pairs import told
from common.cost.step import Step
from common.cost.table import CostTable
from common.devices import detect
from common.errors import ConfigError
from engine.decoder.capacity import DecoderCapacity, measure
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.offload.costs import OffloadPoints, OffloadProfile
from engine.decoder.offload.homes import HomePlanner
from engine.decoder.offload.plan import OffloadLimits, OffloadMode
from engine.decoder.offload.probes import measure_stages
from engine.models.decoders.compiled_decoder import load_kernels
from loadgen import stats

ALONE = "device alone"  # the engine as it is without attention on the host
MODES = (ALONE, *(mode.value for mode in OffloadMode if mode is not OffloadMode.DEVICE))
NEO, FULL = OffloadMode.ASYMMETRIC.value, OffloadMode.FULL.value
STREAMS, LONGEST, PROMPT, STEP_TOKENS = 32, 512, 96, 512
FEW = 4  # sequences of the longest kind for which the device has pages where much is to be gained
ROUNDS = 5
READ_BYTES = 128 << 20
_FOREVER_S = 3600.0


class HomeCell(NamedTuple):
    """How many sequences of the longest kind the device's pages hold, tokens of an answer, and who is compared.

    The helper that attends on the host has a `share` of its core.
    """

    sequences: int
    output: int
    modes: Sequence[str] = (ALONE, NEO)
    share: float = 1.0

    @property
    def name(self) -> str:
        """Return its key in the stored samples."""
        helper = f", helper at {self.share:.0%}" if self.share < 1 else ""
        return f"{self.sequences} x {LONGEST}, answer {self.output}{helper}"


CELLS = (
    HomeCell(FEW, 32),
    HomeCell(FEW, 128, MODES),
    HomeCell(FEW, 416, (ALONE, NEO, FULL)),
    HomeCell(8, 32),
    HomeCell(8, 128),
    HomeCell(8, 416),
    HomeCell(STREAMS, 32),
    HomeCell(STREAMS, 128),
    HomeCell(STREAMS, 416),
    *(HomeCell(FEW, output, share=share) for share in (0.5, 0.25) for output in (32, 128)),
)


class ServedHomes(msgspec.Struct):
    """One run of a mode: tokens of answers a second, shares of rows attended on the host and of steps without it.

    `predicted_s` and `measured_s` are the seconds of the steps in stages.
    """

    rate: float
    host_share: float = 0.0
    device_only: float = 1.0
    predicted_s: float = 0.0
    measured_s: float = 0.0


class Prediction(msgspec.Struct):
    """What the simulation says of a mode before it is measured: tokens a second, alone and in the mode, and the share.

    `at_worst` is the rate if reading memory is always as slow as while both cores read.
    """

    alone: float
    rate: float
    at_worst: float
    host_share: float


class HomeMachine(msgspec.Struct):
    """What is measured before anything is served: bytes/s of reading on either core, alone and together, and costs.

    `points` are the costs of a step's stages, by the share that the helper has of its core.
    """

    alone: list[float] = msgspec.field(default_factory=list)
    together: list[float] = msgspec.field(default_factory=list)
    points: dict[str, OffloadPoints] = msgspec.field(default_factory=dict)

    def costs(self, cell: HomeCell) -> OffloadPoints:
        """Return the costs with a cell's helper."""
        return self.points[str(cell.share)]


class HomeKept(msgspec.Struct):
    """The machine, then predictions by cell and mode, then all runs by cell and mode."""

    machine: HomeMachine = msgspec.field(default_factory=HomeMachine)
    predicted: dict[str, dict[str, Prediction]] = msgspec.field(default_factory=dict)
    runs: dict[str, dict[str, list[ServedHomes]]] = msgspec.field(default_factory=dict)


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
    partial_run = PartialResults(options, HomeKept)
    kept = partial_run.kept
    model = _Model(options.setup_dir / "models", "tiny" if options.quick else "llama-85m", cores)
    cells = [_small(cell) if options.quick else cell for cell in CELLS if options.only in cell.name]
    if _prepare(kept, cells, model, partial_run):
        for number in range(options.rounds(ROUNDS, 1)):
            for cell in cells:
                done = kept.runs.setdefault(cell.name, {mode: [] for mode in cell.modes})
                if len(done[cell.modes[-1]]) > number or not partial_run.begins():
                    continue
                seed = f"{options.seed} {number}"
                for mode, served in _round(model, cell, kept.machine.costs(cell), seed, number):
                    done[mode].append(served)
                partial_run.save()
    body = _told(kept, cells, options)
    body.left = partial_run.left
    return body


def _small(cell: HomeCell) -> HomeCell:
    return cell._replace(output=max(2, cell.output // 16))


def _prepare(
    kept: HomeKept, cells: Sequence[HomeCell], model: _Model, partial_run: PartialResults[HomeKept]
) -> bool:
    """Measure the machine and predict all cells, as far as that is not done; False if there is no time for it."""
    machine = kept.machine
    if not machine.alone:
        if not partial_run.begins(len(cells)):
            return False
        machine.alone, machine.together = _bandwidths(model.cores[:2])
        partial_run.save()
    for cell in cells:
        if str(cell.share) not in machine.points:
            if not partial_run.begins(len(cells)):
                return False
            executor = model.executor(cell)
            try:
                machine.points[str(cell.share)] = measure_stages(executor, STEP_TOKENS, STREAMS)
            finally:
                executor.close()
            partial_run.save()
    for cell in cells:
        if cell.name not in kept.predicted:
            kept.predicted[cell.name] = _predictions(cell, machine)
    partial_run.save()
    return True


class _Model(NamedTuple):
    """A model on disk, and the cores of the device and of the host."""

    folder: Path
    name: str
    cores: Sequence[int]

    def executor(self, cell: HomeCell) -> TorchExecutor:
        """Load the model with pages for a cell's sequences, and pages for all streams on the host."""
        place, config = self.folder / self.name, shapes.SHAPES[self.name]
        shapes.write(place, config, "cpu")
        dim = config["hidden_size"] // config["num_attention_heads"]
        token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim
        executor = TorchExecutor.load(
            str(place), device="cpu", dtype="bf16", threads=1, host_threads=1,
            host_cores=self.cores[1:2], kv_bytes=cell.sequences * LONGEST * token,
            host_bytes=(STREAMS + 4) * LONGEST * token,
        )  # fmt: skip
        stages = executor.stages
        if cell.share < 1 and stages is not None:
            stages.attention = PartTimeAttention(stages.attention, cell.share, self.cores[1:2])
        return executor


def _round(
    model: _Model, cell: HomeCell, points: OffloadPoints, seed: str, number: int
) -> list[tuple[str, ServedHomes]]:
    """Serve a cell in all its modes, in an order that turns."""
    executor = model.executor(cell)
    try:
        probes = measure(executor, STEP_TOKENS, STREAMS)
        return [
            (mode, asyncio.run(_serve(executor, probes, cell, mode, points, seed)))
            for mode in order(list(cell.modes), number)
        ]
    finally:
        executor.close()


async def _serve(
    executor: TorchExecutor,
    probes: Sequence[tuple[Step, float]],
    cell: HomeCell,
    mode: str,
    points: OffloadPoints,
    seed: str,
) -> ServedHomes:
    """Serve one request a stream, all there at once, from the first step to the last token."""
    capacity = DecoderCapacity(
        probes, slo_s=120.0, context=executor.shape.context, itl_s=_FOREVER_S
    )
    homes = (
        None if mode == ALONE else HomePlanner(executor, OffloadProfile(points), OffloadMode(mode))
    )
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(executor.shape.vocabulary) for _ in range(PROMPT)] for _ in range(STREAMS)
    ]
    service = HomeService(prompts, cell.output, STEP_TOKENS, f"{mode} {seed}")
    served = await serve(executor, capacity, service, homes)
    rate = STREAMS * cell.output / served.seconds
    if homes is None:
        return ServedHomes(rate)
    return ServedHomes(
        rate,
        homes.on_host / max(1, homes.decoded),
        homes.choices["device only"] / max(1, homes.choices.total()),
        homes.predicted_s,
        homes.measured_s,
    )


# -- predictions and the machine -----------------------------------------------------------------------


def _predictions(cell: HomeCell, machine: HomeMachine) -> dict[str, Prediction]:
    """Return what the simulation says of a cell's modes with the costs that were measured."""
    points = machine.costs(cell)
    requests = [OffloadRequest(0.0, PROMPT, cell.output) for _ in range(STREAMS)]
    tokens = cell.sequences * LONGEST, (STREAMS + 4) * LONGEST
    limits = OffloadLimits(STEP_TOKENS, STREAMS)

    def simulated(mode: str, costs: OffloadPoints) -> OffloadSimulation:
        found = OffloadSimulation(
            requests, limits, OffloadProfile(costs).costs, tokens, OffloadMode(mode)
        )
        found.run()
        return found

    def rate(simulation: OffloadSimulation) -> float:
        return STREAMS * cell.output / simulation.served.seconds

    alone, found = rate(simulated(OffloadMode.DEVICE.value, points)), {}
    for mode in cell.modes[1:]:
        ours = simulated(mode, points)
        worst = rate(simulated(mode, _shared(points, machine)))
        found[mode] = Prediction(alone, rate(ours), worst, ours.served.host_share)
    return found


def _shared(points: OffloadPoints, machine: HomeMachine) -> OffloadPoints:
    """Return costs as they are if each core always reads memory as slowly as while the other one reads too."""
    device, host = (
        alone / both for alone, both in zip(machine.alone, machine.together, strict=True)
    )
    read_s = CostTable(points.linear).seconds(1)
    return msgspec.structs.replace(
        points,
        linear=[(rows, seconds + (device - 1) * read_s) for rows, seconds in points.linear],
        device=[probe._replace(seconds=device * probe.seconds) for probe in points.device],
        host=[probe._replace(seconds=host * probe.seconds) for probe in points.host],
    )


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


# -- tables --------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A mode in a cell: its rate by that of the device alone, its runs, those of the device alone, the prediction."""

    cell: HomeCell
    mode: str
    gain: dict[str, float]
    served: Sequence[ServedHomes]
    alone: Sequence[ServedHomes]
    predicted: Prediction

    def middle(self, value: Callable[[ServedHomes], float]) -> float:
        """Return the median over the runs."""
        return median(map(value, self.served))

    def cells(self) -> list[str]:
        """Return the cells of its line in the tables."""
        predicted = self.predicted
        ratios = [each.measured_s / each.predicted_s for each in self.served if each.predicted_s]
        return [
            self.cell.name, self.mode,
            f"{predicted.alone:.1f}", f"{median(each.rate for each in self.alone):.1f}",
            f"{predicted.rate / predicted.alone:.2f}", f"{predicted.at_worst / predicted.alone:.2f}",
            told(self.gain),
            f"{predicted.host_share:.2f}", f"{self.middle(lambda each: each.host_share):.2f}",
            f"{self.middle(lambda each: each.device_only):.2f}",
            f"{median(ratios):.2f}" if ratios else "-", str(len(self.served)),
        ]  # fmt: skip


COLUMNS = [
    "pages for", "mode", "alone, tokens/s: simulated", "measured", "mode / alone: simulated", "memory always shared",
    "mode / alone [95 %]", "host share: simulated", "host share", "steps on the device only",
    "step: measured / predicted", "rounds",
]  # fmt: skip


def _told(kept: HomeKept, cells: Sequence[HomeCell], options: BenchOptions) -> Body:
    body, lines = Body(), _lines(kept, cells)
    main = [line.cells() for line in lines if line.cell.share == 1]
    title = f"{STREAMS} streams, prompts of {PROMPT} tokens, device and host on one core each"
    body.table(title, COLUMNS, main)
    helpers = [line.cells() for line in lines if line.cell.share < 1]
    body.table("The helper has a share of its core", COLUMNS, helpers)
    machine = kept.machine
    if machine.points:
        points = next(iter(machine.points.values()))
        linear = CostTable(points.linear)
        body.table(
            "What this machine gives",
            [
                "linear(1), ms a layer", "linear(32) / linear(1)",
                *(f"core {at}, GB/s: alone, both" for at in range(2)),
            ],
            [
                [
                    f"{1e3 * linear.seconds(1):.3f}",
                    f"{linear.seconds(32) / linear.seconds(1):.2f}",
                    *(
                        f"{alone / 1e9:.1f}, {both / 1e9:.1f}"
                        for alone, both in zip(machine.alone, machine.together, strict=True)
                    ),
                ]
            ],
        )  # fmt: skip
    body.samples["machine"] = msgspec.to_builtins(machine)
    body.samples["predicted"] = msgspec.to_builtins(kept.predicted)
    body.samples["runs"] = msgspec.to_builtins(kept.runs)
    body.met |= _judged(lines)
    if options.quick:
        body.notes.append("A tiny model and short answers: the figures mean nothing.")
    return body


def _lines(kept: HomeKept, cells: Sequence[HomeCell]) -> list[_Line]:
    found = []
    for cell in cells:
        runs = kept.runs.get(cell.name, {})
        for mode in cell.modes[1:]:
            served, alone = runs.get(mode, []), runs.get(ALONE, [])
            if served:
                gain = stats.paired_ratio(
                    [each.rate for each in served], [each.rate for each in alone]
                )
                predicted = kept.predicted[cell.name][mode]
                found.append(_Line(cell, mode, gain, served, alone, predicted))
    return found


def _judged(lines: Sequence[_Line]) -> dict[str, str]:
    """Return the verdicts on few pages, on pages for all, on FastDecode, and on a helper with a share of its core."""
    met = {}
    ours = [line for line in lines if line.mode == NEO]
    few = [line for line in ours if line.cell.sequences == FEW and line.cell.share == 1]
    if few:
        best = max(few, key=lambda line: line.gain["value"])
        share = best.middle(lambda each: each.host_share)
        met["few pages ≥ 1.3"] = stats.verdict(best.gain, 1.3, 1.3)
        met["host share ≥ 0.3"] = "goal" if share >= 0.3 else "missed"
    ample = [line for line in ours if line.cell.sequences == STREAMS]
    if ample:
        worst = min(ample, key=lambda line: line.gain["value"])
        met["nothing to gain ≥ 0.98"] = stats.verdict(worst.gain, 0.98, 0.95)
        alone = min(line.middle(lambda each: each.device_only) for line in ample)
        met["nothing to gain: device only"] = "goal" if alone >= 0.98 else "missed"
    full = [line for line in lines if line.mode == FULL]
    if full:
        longest = max(full, key=lambda line: line.cell.output)
        below = longest.gain["value"] < 1
        met["FastDecode below 1, long answers"] = "goal" if below else "missed"
    helped = {line.cell.output for line in ours if line.cell.share < 1}
    peaks: dict[float, float] = {}
    for line in ours:
        if line.cell.sequences == FEW and line.cell.output in helped:
            peak = peaks.get(line.cell.share, 0.0)
            peaks[line.cell.share] = max(peak, line.gain["value"])
    if len(peaks) > 1:
        rising = [peak for _, peak in sorted(peaks.items())]
        met["more of a core gains more"] = "goal" if rising == sorted(rising) else "missed"
    return met
