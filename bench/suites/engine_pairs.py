"""The engine beside another: the same weights, threads and work, each in a process of its own, in pairs."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from bench import ROOT
from bench.document import BenchOptions, Body, Rival, origin
from bench.engine.peaks_process import PRODUCT, READ_BYTES
from bench.gpu import shapes
from bench.pairs import PairBlocks, measure_sides, rounds_within
from bench.partial import PartialResults
from bench.rivals import gguf_file, llama_cpp_engine, llama_server, other_engines
from bench.rivals.engine_process import LLAMA, VLLM, EngineError, EngineProcess, llama_argv, python
from bench.rivals.sweep import Setting, Swept, best, distinct, joined, sweep
from bench.rivals.sweep import told as said
from bench.workloads import divergence
from bench.workloads.divergence import Divergence
from common.devices import detect
from loadgen import stats

PEAK = "the machine"
VERSIONS = {
    LLAMA: f"{llama_server.VERSION}, its library", VLLM: "0.32.0", "transformers": "5.23.0", "ctranslate2": "4.8.5",
}  # fmt: skip
SETTINGS = other_engines.SETTINGS | {LLAMA: (llama_cpp_engine.BASE, *llama_cpp_engine.TRIED)}
SHAPES = {"L": "llama-1b", "M": "llama-85m"}
KINDS = gguf_file.KINDS
BITS = {"bf16": 16.0, "int8": 8.5, "int4": 4.5}  # of a weight, with its scale's part
PAIRS, CELL_S, BLOCKS = 300, 1200.0, 6
TRIES, TRY_S = 2, 6.0  # a setting of a sweep: so often, unless so long has passed


class EngineCell(NamedTuple):
    """One piece of work on a shape with weights of a kind, ours and a rival's: streams at a context, or a prompt.

    `steps` is 0 for a prompt of `tokens`. The rival PEAK is what the processor can read or multiply at the most. A kind
    that is a type of ggml's means one GGUF file of that type, which both sides read.
    """

    shape: str
    kind: str
    rival: str
    streams: int
    tokens: int
    steps: int = 0

    @property
    def name(self) -> str:
        """Return its key in the stored samples."""
        what = f"{self.streams} x {self.tokens}" if self.steps else f"prompt {self.tokens}"
        return f"{self.shape}/{self.kind}/{self.rival}/{what}"

    @property
    def of_a_file(self) -> bool:
        """True if both sides read the same GGUF file."""
        return self.kind not in KINDS

    @property
    def group(self) -> str:
        """Return the key of its sweep: vLLM's, which starts slowly, is that of the smaller number of streams."""
        if self.rival == VLLM and self.streams > 8:
            return self._replace(streams=8).name
        return self.name

    @property
    def work(self) -> tuple[str, dict[str, int]]:
        """Return what an engine is asked."""
        if not self.steps:
            return "prefill", {"tokens": self.tokens}
        return "decode", {"streams": self.streams, "context": self.tokens, "steps": self.steps}

    @property
    def computed(self) -> int:
        """Return the tokens that one side computes in a pair."""
        return self.streams * self.steps if self.steps else self.tokens

    def where(self) -> list[str]:
        """Return what every row begins with: shape, and weights here and there."""
        if self.of_a_file:
            return [self.shape, f"the same file, {self.kind}"]
        theirs = KINDS[self.kind] if self.rival == LLAMA else self.kind
        return [self.shape, f"{self.kind} / {theirs}"]


class EngineFound(msgspec.Struct):
    """One cell as measured: its pairs, and of ours and theirs the bytes of memory and the seconds of the start."""

    blocks: PairBlocks
    memory: list[int] = []
    start_s: list[float] = []
    commit: str = ""

    def ratio(self) -> dict[str, float]:
        """Return how many times theirs took as long as ours, with its interval."""
        return stats.paired_ratio(self.blocks.theirs, self.blocks.ours)

    def rates(self, cell: EngineCell) -> list[str]:
        """Return tokens a second, ours and theirs."""
        return [
            f"{cell.computed / median(side):.1f}" for side in (self.blocks.ours, self.blocks.theirs)
        ]

    def count(self) -> str:
        """Return how many pairs count, and how many blocks were dropped."""
        return f"{len(self.blocks.ours)} ({self.blocks.dropped})"


class EngineKept(msgspec.Struct):
    """All that was measured, by names of cells and sweeps; the divergence of each kind; why a rival is absent."""

    cells: dict[str, EngineFound] = {}
    swept: dict[str, list[Swept]] = {}
    divergence: dict[str, Divergence] = {}
    absent: dict[str, str] = {}


class EngineCells:
    """Measures one cell after another, the rival at the best setting of a sweep; a run that was cut short goes on."""

    def __init__(self, options: BenchOptions, pairs: int = PAIRS) -> None:
        self._options, self._pairs = options, options.rounds(pairs, 2)
        self.partial = PartialResults(options, EngineKept, ("swept",))
        self.kept = self.partial.kept

    async def measure(self, cell: EngineCell) -> None:
        """Sweep the rival's settings unless its group has been, then measure the cell in pairs."""
        if cell.name in self.kept.cells or not self.partial.begins():
            return
        if cell.rival != PEAK and python(cell.rival, self._options) is None:
            self.kept.absent[cell.rival] = "it is not set up"
            return
        if cell.rival != PEAK and cell.group not in self.kept.swept:
            base, *tried = SETTINGS[cell.rival]
            some = (
                tried[: cell.rival != VLLM] if self._options.quick else tried
            )  # vLLM starts slowly
            rate = partial(
                self._rate,
                cell._replace(streams=min(8, cell.streams)) if cell.rival == VLLM else cell,
            )
            self.kept.swept[cell.group] = await sweep(rate, base, some, (EngineError, TimeoutError))
            self.partial.save()
        setting = {} if cell.rival == PEAK else best(self.kept.swept[cell.group])
        self.kept.cells[cell.name] = await self._compare(cell, setting)
        self.kept.absent.pop(cell.rival, None)
        self.partial.save()

    async def diverge(self) -> None:
        """Measure what int8 and int4 cost the shipped model, here and in llama.cpp's formats, unless it has been."""
        if not self.kept.divergence:
            texts = divergence.held_out(self._options.pick(divergence.TEXTS, 8))
            self.kept.divergence = await divergence.measure(texts, ["int8", "int4"], self._options)
            self.partial.save()

    async def _rate(self, cell: EngineCell, setting: Setting) -> float:
        """Return the rival's tokens a second with a setting, at its best of a few tries."""
        what, work = cell.work
        found, began = list[float](), time.monotonic()
        async with EngineProcess(await rival_argv(cell, setting, self._options)) as engine:
            await engine.ask(what, **(work if cell.steps else {"tokens": 128}))
            while len(found) < TRIES and (not found or time.monotonic() < began + TRY_S):
                found.append(await engine.ask(what, **work))
        return cell.computed / min(found)

    async def _compare(self, cell: EngineCell, setting: Setting) -> EngineFound:
        what, work = cell.work
        if cell.rival == PEAK:
            argv = [sys.executable, "-m", "bench.engine.peaks_process", str(detect().usable_cores)]
            asked = (
                ("read", {})
                if cell.steps
                else ("product", {"bits": 16 if cell.kind == "bf16" else 8})
            )
        else:
            argv, asked = await rival_argv(cell, setting, self._options), cell.work
        async with (
            EngineProcess(await our_argv(cell, self._options)) as ours,
            EngineProcess(argv) as theirs,
        ):
            sides = [ours.side(what, work), theirs.side(*asked)]
            for side in sides:  # a context is computed once
                await side(0)
            began = time.monotonic()
            for side in sides:
                await side(0)
            pairs = rounds_within(CELL_S, time.monotonic() - began, self._pairs)
            blocks = await measure_sides(*sides, pairs=pairs, block=max(2, pairs // BLOCKS))
            memory = [engine.rss_bytes() for engine in (ours, theirs)]
            return EngineFound(blocks, memory, [ours.started_s, theirs.started_s], origin().commit)


def _weights(cell: EngineCell, options: BenchOptions) -> Path:
    directory = options.setup_dir / "models" / SHAPES[cell.shape]
    shapes.write(directory, shapes.SHAPES[SHAPES[cell.shape]], "cpu")
    return directory


async def our_argv(cell: EngineCell, options: BenchOptions) -> list[str]:
    """Return what starts our engine, with its weights written; a file is computed as it is stored."""
    directory, kind = _weights(cell, options), cell.kind
    if cell.of_a_file:
        directory, kind = await _file(cell, directory, options), "auto"
    words = [str(directory), kind, str(detect().usable_cores)]
    return [sys.executable, "-m", "bench.engine.decoder_process", *words]


async def rival_argv(cell: EngineCell, setting: Setting, options: BenchOptions) -> list[str]:
    """Return what starts the rival, with its file of weights written."""
    found, directory = python(cell.rival, options), _weights(cell, options)
    assert found is not None
    if cell.rival == LLAMA:
        file = await _file(cell, directory, options)
        return llama_argv(found, file, setting, max(1, cell.streams), cell.tokens + cell.steps + 1)
    script = ROOT / "bench" / "rivals" / "other_engines.py"
    words = [
        cell.rival,
        str(directory),
        cell.kind,
        str(detect().usable_cores),
        json.dumps(dict(setting)),
    ]
    return [str(found), "-P", str(script), *words]


async def _file(cell: EngineCell, directory: Path, options: BenchOptions) -> Path:
    """Return the GGUF file of a cell's weights, which llama.cpp's environment writes."""
    found = python(LLAMA, options)
    assert found is not None
    return await asyncio.to_thread(gguf_file.of, directory, cell.kind, found)


async def measured(
    cells: Sequence[EngineCell], options: BenchOptions, pairs: int = PAIRS
) -> EngineCells:
    """Measure all cells whose name holds `options.only`, and what smaller weights cost."""
    found = EngineCells(options, pairs)
    await found.diverge()
    for cell in cells:
        if options.only in cell.name:
            await found.measure(cell)
    return found


def describe(body: Body, cells: Sequence[EngineCell], kept: EngineKept) -> None:
    """Add the samples, rivals and sweeps of what was measured, and what a reader must know of the models."""
    there = [cell for cell in cells if cell.name in kept.cells]
    body.samples |= {cell.name: kept.cells[cell.name].blocks.samples() for cell in there}
    body.samples |= {"swept": msgspec.to_builtins(kept.swept)}
    for name in dict.fromkeys(cell.rival for cell in cells if cell.rival != PEAK):
        swept = [kept.swept[cell.group] for cell in there if cell.rival == name]
        tried = distinct([each.setting for some in swept for each in some])
        chosen = joined(distinct([best(some) for some in swept]))
        body.rivals.append(Rival(name, VERSIONS[name], tried, chosen, bool(swept)))
    rows = [row for group, some in kept.swept.items() for row in _swept(group, some)]
    columns = ["cell", "setting, tried on the best one before it", "tokens/s", ""]
    body.table("Settings of the rivals", columns, rows)
    body.notes.append(
        "L: hidden 2048, 16 layers, 32 heads on 8, inner 8192, vocabulary 32,000; M: hidden 768, 12 layers, 12 heads "
        "on 4, inner 2048, vocabulary 8,192; random weights. In process: no server on either side. Every engine takes "
        "the likeliest token of every stream after every step, with as many threads as cores."
    )
    if any(cell.rival == LLAMA for cell in cells):
        body.notes.append(
            "int8 and int4: 32 inputs share a scale, here in int4 a shift, too, in 16 bits as in Q8_0 and Q4_0: 8.5 "
            "and 4.5 bits a weight. The same file: both sides read a GGUF of that type, and ours computes it as it "
            "is stored. KL: the mean divergence of the shipped model's next tokens on its held-out text from "
            "those of its bf16 weights computed in fp32; where ours is the larger one, the cell counts as missed."
        )
    body.notes.append(
        f"{PAIRS} pairs a cell, fewer where they would take longer than {CELL_S / 60:g} minutes or were asked for."
    )
    if len(commits := {kept.cells[cell.name].commit[:12]: None for cell in there}) > 1:
        body.notes.append(f"Cells were measured at the commits {', '.join(commits)}.")
    body.notes += [f"{name} was not measured: {why}" for name, why in kept.absent.items()]


def _swept(group: str, tried: Sequence[Swept]) -> list[list[str]]:
    chosen = best(tried)
    return [
        [group, said(each.setting), f"{each.rate:.1f}" if each.rate else "-",
         "best" if each.setting == chosen else each.why[:60]]
        for each in tried
    ]  # fmt: skip


def told(ratio: Mapping[str, float]) -> str:
    """Return a ratio with its interval, as tables show it."""
    return f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def judged(cell: EngineCell, kept: EngineKept, goal: float, must: float) -> str:
    """Return which level a cell reached, the rounding of its weights considered."""
    word = stats.verdict(kept.cells[cell.name].ratio(), goal, must)
    found = kept.divergence.get(cell.kind) if cell.rival == LLAMA else None
    return divergence.judged(word, found)


def divergence_cell(cell: EngineCell, kept: EngineKept) -> str:
    """Return the KL divergence of a cell's weights, ours and the rival's."""
    found = kept.divergence.get(cell.kind)
    return "-" if found is None or cell.rival != LLAMA else found.told()


def share_of_bandwidth(cell: EngineCell, found: EngineFound) -> dict[str, float]:
    """Return the bytes of weights that decoding read a second, as a share of those that reading memory did."""
    moved = cell.steps * weight_bytes(cell.kind, shapes.SHAPES[SHAPES[cell.shape]]) / READ_BYTES
    return stats.interval([moved * peak / ours for ours, peak in _pairs(found)])


def share_of_products(cell: EngineCell, found: EngineFound) -> dict[str, float]:
    """Return the operations of a prompt a second, as a share of those of a matrix product of the same bits."""
    work = prompt_operations(cell.tokens, shapes.SHAPES[SHAPES[cell.shape]]) / PRODUCT
    return stats.interval([work * peak / ours for ours, peak in _pairs(found)])


def _pairs(found: EngineFound) -> list[tuple[float, float]]:
    return list(zip(found.blocks.ours, found.blocks.theirs, strict=True))


def _layers(config: Mapping[str, int]) -> int:
    """Return how many weights the matrices of all layers have."""
    hidden, inner, layers = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    wide = hidden + 2 * hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    return layers * hidden * (wide + hidden + 3 * inner)


def weight_bytes(kind: str, config: Mapping[str, int]) -> float:
    """Return the bytes of all weights that one token reads."""
    return (_layers(config) + config["hidden_size"] * config["vocab_size"]) * BITS[kind] / 8


def prompt_operations(tokens: int, config: Mapping[str, int]) -> float:
    """Return the multiplications and additions of a prompt: its layers' matrices, and attention to what is before."""
    attention = 2 * tokens**2 * config["hidden_size"] * config["num_hidden_layers"]
    return 2.0 * tokens * _layers(config) + attention
