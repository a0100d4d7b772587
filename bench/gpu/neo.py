"""Attention on the host (NEO) beside an accelerator: every mode against the device alone, and one step's timeline.

    python -m bench.gpu.neo --device cuda --json neo.json          # on the machine with the accelerator
    python -m bench.gpu.neo --device cpu --tiny --json tiny.json   # a rehearsal

The device has pages for as many tokens, by its weights, as the paper's T4, A10G and H100s have; every line says how
many. Device alone are steps as graphs, those in stages are launched kernel by kernel. Resumable as `bench.gpu.chat`:
three runs are enough.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch

from bench.engine import home_runs
from bench.engine.exactness import EXCUSED
from bench.engine.home_serving import HomeServed, HomeService, serve
from bench.gpu import shapes
from bench.gpu.chat import prompts
from bench.gpu.record import Record, arguments
from bench.simulation.rooflines import (
    A10G,
    H100,
    LLAMA_7B,
    LLAMA_8B,
    LLAMA_70B,
    T4,
    ModelSize,
    RooflineMachine,
)
from common.devices import detect
from common.errors import ConfigError
from common.pages.identity import PAGE
from engine.decoder.capacity import DecoderCapacity, measure
from engine.decoder.executor.host_attention import HostAttentionThread
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.offload.computed_step import ComputedStep
from engine.decoder.offload.costs import OffloadPoints, OffloadProfile
from engine.decoder.offload.homes import HomePlanner
from engine.decoder.offload.plan import OffloadMode
from engine.decoder.offload.probes import measure_stages
from engine.models.decoders.compiled_decoder import load_kernels

ALONE = "device alone"
NEO = OffloadMode.ASYMMETRIC.value
RIVALS = tuple(
    mode.value for mode in OffloadMode if mode not in {OffloadMode.DEVICE, OffloadMode.ASYMMETRIC}
)
FAMILIES = ("llama", "qwen2", "mistral", "gemma3_text")
WORKS = 4  # random schedules of each family in each mode
STEP_TOKENS = 2048
DRAWN_LAYERS, DRAWN = (1, 2, 3), 96  # layers of a timeline, and its width
_FOREVER_S = 3600.0


class Size(NamedTuple):
    """What is served: streams with prompts of so many tokens, answers, and cores that attend on the host."""

    shape: str
    streams: int
    prompt: int
    outputs: Sequence[int]
    cores: Sequence[int]
    capacities: dict[str, int]  # tokens of keys and values for which the device has pages
    read_bytes: int


class NeoCell(NamedTuple):
    """A mode, the capacity whose pages the device has, tokens of an answer, and cores that attend on the host."""

    capacity: str
    output: int
    mode: str = ALONE
    cores: int = 0

    @property
    def name(self) -> str:
        """Return its key in the record."""
        host = f"/{self.cores} cores" if self.cores else ""
        return f"serve/{self.capacity}/{self.output}{host}/{self.mode}"


def _tokens(machine: RooflineMachine, model: ModelSize) -> int:
    """Return the tokens of an 8B shape whose keys and values are the share of its weights that a machine's are."""
    share = machine.device_tokens * model.kv_bytes * model.layers / model.weight_bytes
    return int(share * LLAMA_8B.weight_bytes / (LLAMA_8B.kv_bytes * LLAMA_8B.layers))


BIG = Size(
    "llama-8b", 48, 1000, (32, 128, 256), (16, 8, 4),
    {
        "T4": _tokens(T4[1024], LLAMA_7B),
        "H100": _tokens(H100, LLAMA_70B),
        "A10G": _tokens(A10G["g5.4xlarge"], LLAMA_8B),
    },
    1 << 30,
)  # fmt: skip
TINY = Size("tiny", 6, 40, (4, 12), (1,), {"T4": 128, "A10G": 256}, 1 << 24)


def cells(size: Size, cores: Sequence[int]) -> list[NeoCell]:
    """Return all cells, what matters most first: the device alone, NEO everywhere, rivals at one length of answers."""
    middle = size.outputs[len(size.outputs) // 2]
    first = next(iter(size.capacities))
    alone = [NeoCell(name, output) for name in size.capacities for output in size.outputs]
    ours = [each._replace(mode=NEO, cores=count) for count in cores for each in alone]
    rivals = [
        NeoCell(name, middle, mode, count)
        for count in cores
        for name in size.capacities
        for mode in RIVALS
        if name == first or count == cores[0]
    ]
    return [*alone, *ours, *rivals]


class _Server:
    """A loaded model; the pages of its device and the cores of its host are chosen anew for each cell."""

    def __init__(self, directory: Path, size: Size, device: str) -> None:
        config = shapes.SHAPES[size.shape]
        shapes.write(directory, config, device)
        dim = config["hidden_size"] // config["num_attention_heads"]
        token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim
        longest = -(-(size.prompt + max(size.outputs)) // PAGE) * PAGE
        self.executor = TorchExecutor.load(
            str(directory), device=device, dtype="bf16", host_threads=1,
            kv_bytes=max(size.capacities.values()) * token,
            host_bytes=(size.streams + 4) * longest * token,
        )  # fmt: skip
        self._size, self._whole = size, self.executor.shape
        self._probes = measure(self.executor, STEP_TOKENS, size.streams)

    def use_cores(self, count: int) -> tuple[int, ...]:
        """Let the last so many cores attend on the host; return them."""
        stages, kernels = self.executor.stages, load_kernels()
        assert stages is not None
        assert kernels is not None
        stages.attention.close()
        cores = detect().cores[-count:]
        stages.attention = HostAttentionThread(
            kernels, stages.decoder.spec, stages.host, threads=count, cores=cores
        )
        return cores

    def costs(self, count: int) -> dict[str, Any]:
        """Time the stages of steps with so many cores on the host, and reading memory by these cores."""
        cores = self.use_cores(count)
        self.executor.shape = self._whole
        points = measure_stages(self.executor, STEP_TOKENS, self._size.streams)
        return {
            "points": msgspec.to_builtins(points),
            "read_bytes_per_s": _read_rate(cores, self._size.read_bytes),
        }

    def device_tokens(self, cell: NeoCell) -> int:
        """Return the tokens for which the device has pages in a cell."""
        return self._size.capacities[cell.capacity] // PAGE * PAGE

    def serve(
        self, cell: NeoCell, points: OffloadPoints | None, *, streams: int | None = None
    ) -> HomeServed:
        """Serve all streams, or so many; the prompts are the same in every cell."""
        pages = self.device_tokens(cell) // PAGE
        context = min(self._whole.context, pages * PAGE)
        self.executor.shape = self._whole._replace(pages=pages, context=context)
        homes = None
        if points is not None:
            self.use_cores(cell.cores)
            homes = HomePlanner(self.executor, OffloadProfile(points), OffloadMode(cell.mode))
        given = prompts(self.executor, streams or self._size.streams, self._size.prompt, seed=11)
        capacity = DecoderCapacity(
            self._probes, slo_s=120.0, context=self.executor.shape.context, itl_s=_FOREVER_S
        )
        service = HomeService(given, cell.output, STEP_TOKENS, cell.name)
        return asyncio.run(serve(self.executor, capacity, service, homes))

    def warm(self, points: OffloadPoints) -> None:
        """Serve a few short answers alone and with the host, so that kernels are compiled and graphs captured."""
        cell = NeoCell(next(iter(self._size.capacities)), min(self._size.outputs))
        self.serve(cell, None, streams=4)
        full = cell._replace(mode=OffloadMode.FULL.value, cores=self._size.cores[-1])
        self.serve(full, points, streams=4)


def alone(server: _Server, cell: NeoCell) -> dict[str, Any]:
    """Measure the device alone; keeps the tokens, with which those of all modes are compared."""
    served = server.serve(cell, None)
    told = [" ".join(map(str, tokens)) for tokens in served.tokens]
    return {
        "device_tokens": server.device_tokens(cell),
        "tokens_per_s": _rate(served),
        "tokens": told,
    }


def mode(server: _Server, cell: NeoCell, record: Record) -> dict[str, Any]:
    """Measure a mode beside the device alone: speed, share attended on the host, predictions, tokens that agree."""
    served = server.serve(cell, _points(record, f"costs/{cell.cores} cores"))
    beside = record.cells[NeoCell(cell.capacity, cell.output).name]
    theirs = [[int(token) for token in text.split()] for text in beside["tokens"]]
    decoded = sum(step.decoded for step in served.steps)
    device_only = sum(step.why == "device only" for step in served.steps)
    off = [
        abs(step.predicted_s / step.measured_s - 1)
        for step in served.steps
        if step.decoded and step.measured_s
    ]
    total = sum(map(len, served.tokens))
    span_s = sum(step.span_s for step in served.steps)
    chosen = _chosen(served.steps)
    return {
        "device_tokens": server.device_tokens(cell),
        "tokens_per_s": _rate(served),
        "gain": _rate(served) / beside["tokens_per_s"],
        "host_share": sum(step.on_host for step in served.steps) / total,
        "steps_in_stages": len(served.steps),
        "steps_in_stages_device_only": device_only,
        "decoded_in_stages": decoded / total,
        "predicted_s": sum(step.predicted_s for step in served.steps),
        "measured_s": sum(step.measured_s for step in served.steps),
        "step_off_by": median(off) if off else None,
        "device_idle": sum(step.device_idle_s for step in served.steps) / max(1e-9, span_s),
        "host_idle": sum(step.host_idle_s for step in served.steps) / max(1e-9, span_s),
        "same_texts": sum(map(list.__eq__, served.tokens, theirs)) / len(theirs),
        "same_tokens": sum(map(_common, served.tokens, theirs)) / total,
        "timeline": [] if chosen is None else timeline(chosen),
    }


def exact(directory: Path, family: str, device: str, works: int) -> dict[str, Any]:
    """Compare greedy texts of a small fp32 model in all modes with those of the device alone: rule (c)."""
    sides = home_runs.sides(f"{family} fp32", directory, device=device)
    found: dict[str, dict[str, Any]] = {}
    try:
        for name in (NEO, *RIVALS):
            runs = [
                asyncio.run(home_runs.compare(sides, seed, OffloadMode(name)))
                for seed in range(works)
            ]
            found[name] = {
                "compared": sum(run.compared for run in runs),
                "different": sum(len(run.wrong) for run in runs),
                "excused": sum(run.excused for run in runs),
                "device_rows": sum(run.device for run in runs),
                "host_rows": sum(run.host for run in runs),
                "wrong": [text for run in runs for text in run.wrong][:5],
            }
    finally:
        sides.executor.close()
    compared, different, excused = (
        sum(each[name] for each in found.values()) for name in ("compared", "different", "excused")
    )
    return {"modes": found, "met": not different and excused <= EXCUSED * compared}


def timeline(step: ComputedStep) -> list[str]:
    """Return the stages of a few layers of a step, one a line: name, batch, layer, begin and end in milliseconds."""
    some = [each for each in step.stages if each.layer in DRAWN_LAYERS]
    origin = min((each.begin_s for each in some), default=0.0)
    return [
        f"{each.stage} {each.part} {each.layer} {1e3 * (each.begin_s - origin):.4f} {1e3 * (each.end_s - origin):.4f}"
        for each in sorted(some, key=lambda each: each.begin_s)
    ]


def draw(lines: Sequence[str]) -> list[str]:
    """Draw a timeline: who computes when, by batch; letters are attention on the device."""
    stages = [line.split() for line in lines]
    end = max((float(stage[4]) for stage in stages), default=0.0)
    sides = {"device": [" "] * DRAWN, "host": [" "] * DRAWN}
    for name, part, _, begin, until in stages:
        side = sides["host" if name == "host" else "device"]
        mark = "ab"[int(part)] if name in {"device", "staged"} else part
        first, last = (int(float(at) / end * DRAWN) for at in (begin, until))
        side[first : max(first + 1, last)] = mark * (max(first + 1, last) - first)
    return [f"    {name:6} |{''.join(side[:DRAWN])}| {end:.2f} ms" for name, side in sides.items()]


def show(found: dict[str, Any]) -> None:
    """Print a line a cell, and the timeline of NEO's steps."""
    for name, cell in found.items():
        kind, *rest = name.split("/")
        if kind == "exact":
            for told, each in cell["modes"].items():
                print(
                    f"{name:20} {told:10} {each['compared']} texts, {each['different']} differ, {each['excused']} "
                    f"excused; rows: device {each['device_rows']}, host {each['host_rows']}"
                )
        elif kind == "costs":
            print(f"{name:20} host memory {cell['read_bytes_per_s'] / 1e9:.1f} GB/s")
        else:
            where = f"{rest[0]}, {cell['device_tokens']} tokens, answer {', '.join(rest[1:])}"
            if "gain" not in cell:
                print(f"{where}: {cell['tokens_per_s']:.1f} tokens/s")
                continue
            took = cell["measured_s"] / cell["predicted_s"] if cell["predicted_s"] else float("nan")
            print(
                f"{where}: {cell['tokens_per_s']:.1f} tokens/s, {cell['gain']:.2f} x alone, host share "
                f"{cell['host_share']:.2f}, steps measured / predicted {took:.2f}, idle: device "
                f"{cell['device_idle']:.0%}, host {cell['host_idle']:.0%}; texts that agree {cell['same_texts']:.0%}"
            )
            if cell["timeline"] and rest[-1] == NEO:
                print("\n".join(draw(cell["timeline"])))


def _chosen(steps: Sequence[ComputedStep]) -> ComputedStep | None:
    """Return a step in the middle of those of two batches, or else of all with rows on the host."""
    hosted = [step for step in steps if step.on_host]
    several = [step for step in hosted if step.why == "two batches"] or hosted
    return several[len(several) // 2] if several else None


def _common(ours: list[int], theirs: list[int]) -> int:
    """Return how many tokens two texts have in common from their beginnings."""
    pairs = zip(ours, theirs, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _points(record: Record, name: str) -> OffloadPoints:
    return msgspec.convert(record.cells[name]["points"], OffloadPoints)


def _rate(served: HomeServed) -> float:
    return sum(map(len, served.tokens)) / served.seconds


def _read_rate(cores: Sequence[int], size: int) -> float:
    """Return the bytes/s at which some cores read memory together."""
    kernels = load_kernels()
    if kernels is None:
        raise ConfigError("attention on the host: there are no compiled kernels here")
    memory, took = torch.ones(size // 4), []
    where, count = ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(memory.numel())

    def read() -> None:
        os.sched_setaffinity(0, cores)
        for _ in range(5):
            began = time.perf_counter()
            kernels.spillway_read(where, count, len(cores))
            took.append(time.perf_counter() - began)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(read).result()
    return size / median(took)


def main(argv: list[str] | None = None) -> int:
    """Measure what is not measured yet: 0 done and exact, 1 not exact, 3 cells are left for another run."""
    args = arguments(__doc__, argv, models="16 GB")
    record, size = Record(args.json, args.device, args.minutes), TINY if args.tiny else BIG
    cores = [count for count in size.cores if count <= len(detect().cores)]
    for count in sorted(set(size.cores) - set(cores)):
        print(f"{count} cores on the host: there are only {len(detect().cores)} here")
    families, works = (FAMILIES[:1], 1) if args.tiny else (FAMILIES, WORKS)
    with tempfile.TemporaryDirectory() as folder:
        for family in families:
            there = Path(folder) / family
            record.fill(f"exact/{family}", partial(exact, there, family, args.device, works))
        served = cells(size, cores)
        costs = {f"costs/{count} cores": count for count in cores}
        if record.wants(*costs, *(cell.name for cell in served)):
            where = (args.models or Path(folder)) / size.shape
            server = _Server(where, size, args.device)
            try:
                for name, count in costs.items():
                    record.fill(name, partial(server.costs, count))
                if not record.wants(*costs):
                    server.warm(_points(record, next(iter(costs))))
                for cell in served:
                    compute = (
                        partial(alone, server, cell)
                        if cell.mode == ALONE
                        else partial(mode, server, cell, record)
                    )
                    record.fill(cell.name, compute)
            finally:
                server.executor.close()
    show(record.cells)
    return record.status()


if __name__ == "__main__":
    sys.exit(main())
