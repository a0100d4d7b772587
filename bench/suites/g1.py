"""G1: answers that retrieve at intervals, pipelined against sequential, each cell predicted before it is measured."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import compress
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import torch

from bench.document import BenchOptions, Body
from bench.engine.search_process import search_process
from bench.mesh import processes
from bench.mesh.interval_mesh import IntervalMesh, TimedAnswer, interval_mesh, spoken
from bench.pairs import rounds_within
from bench.partial import PartialResults
from bench.peak import Peak, Speed, counting, still_blocks
from bench.rivals.engine_process import EngineProcess
from bench.rounds import order
from bench.suites.engine_pairs import told
from bench.suites.p2 import model_of
from common.devices import detect
from common.errors import ConfigError
from engine.models.retro.files import save_retro
from engine.models.retro.network import RetroConfig, RetroNetwork
from loadgen import stats
from planner.pipelined_retrieval import (
    SearchTimes,
    beside_chunks,
    pipelined_s,
    sequential_s,
)

PIPELINED, SEQUENTIAL, BOTH = "pipelined", "sequential", "sequential, both cores"
RETRO = "RETRO"
MODELS = ("S", "M", RETRO)
INTERVALS = (16, 32)
Source = Literal["searched", "replayed", "HTTP"]
CHUNKS = 12
ROWS, REPEATS = 65_536, 128
CELL_S, MOST = 90.0, 300  # of measuring, and pairs
PROFILED = 5  # answers, and searches, for the profile of a cell
ALIKE = 0.2
# A profile as near to its share is kept; of another one the machine moved meanwhile, so it is made anew, at most twice.
CLOSE, TRIES = 0.1, 3
GOAL, MUST, OF_MODEL = 1.6, 1.3, 0.9
RIGHT = 1.05  # of the fastest mode: who is chosen may take so much longer


class IntervalCell(NamedTuple):
    """A model, its interval in tokens, where retrievals come from, and a search's seconds by a chunk's.

    Over HTTP a retrieval takes what it takes in the mesh, and `share` says nothing.
    """

    model: str
    interval: int
    share: float = 1.0
    source: Source = "searched"

    @property
    def name(self) -> str:
        """Return its key in the stored samples."""
        how = self.source if self.source == "HTTP" else f"{self.share:g} x, {self.source}"
        return f"{self.model}, every {self.interval}, {how}"

    @property
    def modes(self) -> Sequence[str]:
        """Return what is compared: both cores in each phase only where both sides are processes of the row's own."""
        return (PIPELINED, SEQUENTIAL, *([BOTH] if self.source == "searched" else []))


IN_PROCESS: tuple[tuple[float, Source], ...] = (
    (0.5, "searched"), (1.0, "searched"), (1.0, "replayed"), (2.0, "searched"),
)  # fmt: skip
CELLS = (
    *(
        IntervalCell(model, interval, *how)
        for model in MODELS
        for interval in INTERVALS
        for how in IN_PROCESS
    ),
    *(IntervalCell("S", interval, source="HTTP") for interval in (8, 16, 32)),
    *(IntervalCell("M", interval, source="HTTP") for interval in (8, 16)),
)
QUICK = (IntervalCell("S", 8), IntervalCell(RETRO, 8, source="replayed"))


class Profile(msgspec.Struct):
    """What was measured of a cell before any answer with retrieval: the lists that its searches read, and seconds.

    Of each chunk of an answer with nothing beside it, and of searches alone; `both_` on both cores. `first_s` passes
    before the first chunk, 0 where that is a search like the others.
    """

    lists: int
    chunks_s: list[float]
    searches_s: list[float]
    both_chunks_s: list[float] = []
    both_searches_s: list[float] = []
    first_s: float = 0.0

    @property
    def share(self) -> float:
        """Return a search's seconds by a chunk's."""
        return median(self.searches_s) / median(self.chunks_s)

    def predicted(self, modes: Sequence[str]) -> dict[str, float]:
        """Return the seconds of an answer in each mode, by the model of two lines."""
        each_s = [median(self.searches_s)] * len(self.chunks_s)
        first_s = self.first_s or each_s[0]
        found = {
            PIPELINED: pipelined_s(self.chunks_s, beside_chunks(each_s), first_s),
            SEQUENTIAL: sequential_s(self.chunks_s, [first_s, *each_s[1:]]),
        }
        if BOTH in modes:
            both_s = [median(self.both_searches_s)] * len(self.both_chunks_s)
            found[BOTH] = sequential_s(self.both_chunks_s, both_s)
        return found


class IntervalRound(msgspec.Struct):
    """Seconds of one answer in each mode, and the machine's speed before and after."""

    seconds: dict[str, float]
    before: Speed
    after: Speed


class IntervalKept(msgspec.Struct):
    """Profiles, then predictions, then rounds, by cell."""

    profiles: dict[str, Profile] = msgspec.field(default_factory=dict)
    predicted: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    rounds: dict[str, list[IntervalRound]] = msgspec.field(default_factory=dict)


def run(options: BenchOptions) -> Body:
    """Profile and predict every cell, then measure all in rounds; needs two cores."""
    cores = detect().cores
    if len(cores) < 2:
        raise ConfigError("G1: expected two cores, one for generation and one for retrieval")
    return asyncio.run(_run(options, cores[:2]))


async def _run(options: BenchOptions, cores: Sequence[int]) -> Body:
    partial_run = PartialResults(options, IntervalKept)
    kept = partial_run.kept
    cells = [cell for cell in (QUICK if options.quick else CELLS) if options.only in cell.name]
    async with AsyncExitStack() as stack:
        sides = _Sides(options, cores, stack)
        for cell in cells:  # all are predicted before any is measured
            if cell.name not in kept.profiles and partial_run.begins():
                kept.profiles[cell.name] = await sides.profile(cell)
                kept.predicted[cell.name] = kept.profiles[cell.name].predicted(cell.modes)
                partial_run.save()
        for cell in cells if not partial_run.left else ():
            await _measure(sides, cell, partial_run, options)
    body = _told(kept, cells, options)
    body.left = partial_run.left
    return body


async def _measure(
    sides: _Sides,
    cell: IntervalCell,
    partial_run: PartialResults[IntervalKept],
    options: BenchOptions,
) -> None:
    """Answer in rounds, until the cell has as many as were asked for or fit its time."""
    kept, peak = partial_run.kept, Peak()
    done = kept.rounds.setdefault(cell.name, [])
    round_s = sum(kept.predicted[cell.name].values())
    wanted = options.rounds(rounds_within(CELL_S, round_s, MOST), 1)
    if len(done) < wanted and partial_run.begins():
        for mode in cell.modes:  # what a process does first takes longer
            await sides.answer(cell, kept.profiles[cell.name], mode, seed=0)
        while len(done) < wanted and (not done or partial_run.begins()):
            before, seconds = peak.now(), {}
            for mode in order(list(cell.modes), len(done)):
                profile, seed = kept.profiles[cell.name], options.seed + len(done)
                seconds[mode] = await sides.answer(cell, profile, mode, seed)
            done.append(IntervalRound(seconds, before, peak.now()))
            partial_run.save()


class _Sides:
    """Models in processes of their own, each on one core or on both, beside the searching one on the other core."""

    def __init__(self, options: BenchOptions, cores: Sequence[int], stack: AsyncExitStack) -> None:
        """Processes begin when they are needed, and end with `stack`."""
        self._options, self._cores, self._stack = options, cores, stack
        self._place = ""
        self._chunks, self._profiled = options.pick(CHUNKS, 3), options.pick(PROFILED, 1)
        self._processes: dict[tuple[str, bool], EngineProcess] = {}
        self._meshes: dict[str, IntervalMesh] = {}

    async def profile(self, cell: IntervalCell) -> Profile:
        """Return a cell's profile, with as many lists as make a search take its share of a chunk."""
        if cell.source == "HTTP":
            return await self._over_http(cell)
        found, left = await self._profile_once(cell), self._options.pick(TRIES, 1) - 1
        while left and abs(found.share / cell.share - 1) > CLOSE:
            found, left = await self._profile_once(cell), left - 1
        if BOTH in cell.modes:
            found.both_chunks_s = await self._alone(cell, both=True)
            found.both_searches_s = await self._searches(
                cell, found.lists, 4 * self._profiled, both=True
            )
        return found

    async def _profile_once(self, cell: IntervalCell) -> Profile:
        chunks_s = await self._alone(cell, both=False)
        lists = await self._lists(cell, cell.share * median(chunks_s))
        return Profile(lists, chunks_s, await self._searches(cell, lists, 4 * self._profiled))

    async def answer(self, cell: IntervalCell, profile: Profile, mode: str, seed: int) -> float:
        """Return the seconds of an answer in a mode."""
        if cell.source == "HTTP":
            return (await self._asked(cell, pipelined=mode == PIPELINED)).seconds
        both = mode == BOTH
        process = await self._process(cell.model, both=both)
        return await process.ask(
            "write",
            seed=seed,
            chunks=self._chunks,
            interval=cell.interval,
            pipelined=mode == PIPELINED,
            how=self._how(profile.lists, both=both),
            waits_s=profile.searches_s if cell.source == "replayed" else [],
        )

    async def _over_http(self, cell: IntervalCell) -> Profile:
        """Return a profile from sequential answers, in which nothing runs beside a chunk or a retrieval."""
        answers = [await self._asked(cell, pipelined=False) for _ in range(self._profiled + 1)]
        chunks_s = [median(each) for each in zip(*(a.chunks_s for a in answers[1:]), strict=True)]
        searches_s = [each for answer in answers[1:] for each in answer.searches_s]
        # The first chunk is not seen apart from what comes before it: it is taken to last as long as the second one.
        first_s = median(answer.first_s for answer in answers[1:]) - chunks_s[0]
        return Profile(0, [chunks_s[0], *chunks_s], searches_s, first_s=first_s)

    async def _asked(self, cell: IntervalCell, *, pipelined: bool) -> TimedAnswer:
        mesh = self._meshes.get(cell.model)
        if mesh is None:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="spillway-g1-"))
            model = _chatting(cell.model, self._options)
            running = interval_mesh(model, Path(folder), self._cores)
            mesh = self._meshes[cell.model] = await self._stack.enter_async_context(running)
        return await mesh.answer(self._chunks, cell.interval, pipelined=pipelined)

    async def _alone(self, cell: IntervalCell, *, both: bool) -> list[float]:
        """Return the seconds of each chunk of an answer, the median of a few."""
        process = await self._process(cell.model, both=both)
        answers = []
        for number in range(self._profiled + 1):
            work = {"seed": number, "chunks": self._chunks, "interval": cell.interval}
            answers.append((await process.answer("alone", **work))["chunks_s"])
        return [median(each) for each in zip(*answers[1:], strict=True)]

    async def _searches(
        self, cell: IntervalCell, lists: int, count: int, *, both: bool = False
    ) -> list[float]:
        """Return the seconds of searches that read so many lists, with nothing beside them."""
        process = await self._process(cell.model, both=both)
        how = self._how(lists, both=both)
        found = await process.answer("searches", seed=lists, count=count + 1, how=how)
        return list(found["searches_s"])[1:]

    async def _lists(self, cell: IntervalCell, target_s: float) -> int:
        """Return how many lists a search reads that takes about so long: by a line first, then by trying twice."""
        process = await self._process(cell.model, both=False)
        most = int((await process.answer("searches", seed=0, count=0, how={}))["lists"])
        tried = [max(1, most // 8), max(2, most // 2)]
        points = [(each, median(await self._searches(cell, each, 4))) for each in tried]
        lists = SearchTimes(tuple(points)).line().largest(target_s, most)
        for _ in range(2):
            took_s = median(await self._searches(cell, lists, 8))
            lists = min(max(round(lists * target_s / took_s), 1), most)
        return lists

    def _how(self, lists: int, *, both: bool) -> dict[str, Any]:
        return {"lists": lists, "cores": list(self._cores if both else self._cores[1:])}

    async def _process(self, model: str, *, both: bool) -> EngineProcess:
        """Return a model's process, started if there is none yet."""
        found = self._processes.get((model, both))
        if not self._place:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="spillway-g1-"))
            size = (2048, 1) if self._options.quick else (ROWS, REPEATS)
            self._place = self._stack.enter_context(search_process(Path(folder) / "search", *size))
        if found is None:
            path, kind = _model(model, self._options)
            own = ",".join(map(str, self._cores if both else self._cores[:1]))
            words = [sys.executable, "-m", "bench.engine.interval_process", path, kind, own]
            found = await self._stack.enter_async_context(EngineProcess([*words, self._place]))
            self._processes[model, both] = found
        return found


def _model(name: str, options: BenchOptions) -> tuple[str, str]:
    """Return where a model lies, made if it is not there, and its kind; that of RETRO has random weights."""
    if name != RETRO:
        return model_of(name, options)
    folder = options.setup_dir / "models" / "retro-random"
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(options.seed)
        save_retro(RetroNetwork(RetroConfig()), folder)
    return str(folder), "retro"


def _chatting(name: str, options: BenchOptions) -> tuple[str, str]:
    """Return where a chat model lies, and its kind: M's shape with the tokens and templates of S."""
    if name == "S":
        return str(processes.DEMO), "fp32"
    return spoken("llama-85m", options.setup_dir / "models" / "llama-85m-chat"), "bf16"


# -- tables ----------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A cell with its profile, its predictions, and the rounds that count."""

    cell: IntervalCell
    profile: Profile
    predicted: Mapping[str, float]
    rounds: Sequence[IntervalRound]

    @property
    def gain(self) -> dict[str, float]:
        """Return the seconds of the sequential answer by the pipelined one's."""
        return self.by(SEQUENTIAL, PIPELINED)

    @property
    def expected(self) -> float:
        """Return the gain by the model of two lines."""
        return self.predicted[SEQUENTIAL] / self.predicted[PIPELINED]

    @property
    def of_model(self) -> dict[str, float]:
        """Return the gain by the expected one."""
        scaled = {key: self.gain[key] / self.expected for key in ("value", "low", "high")}
        return {**self.gain, **scaled}

    @property
    def alike(self) -> bool:
        """Tell whether a search and a chunk take about the same time."""
        return abs(self.profile.share - 1) <= ALIKE

    @property
    def chosen(self) -> str:
        """Return the mode that is predicted to be the fastest."""
        return min(self.predicted, key=self.predicted.__getitem__)

    def middle(self, mode: str) -> float:
        """Return the median seconds of a mode."""
        return median(each.seconds[mode] for each in self.rounds)

    def by(self, mode: str, other: str) -> dict[str, float]:
        """Return the seconds of a mode by those of another one, pair by pair."""
        ours = [each.seconds[mode] for each in self.rounds]
        return stats.paired_ratio(ours, [each.seconds[other] for each in self.rounds])


COLUMNS = [
    "model", "every", "search", "search / chunk", "pipelined, s: predicted", "measured", "sequential, s: predicted",
    "measured", "sequential / pipelined: predicted", "measured [95 %]", "of the prediction", "pairs", "dropped",
]  # fmt: skip
BESIDE = [
    "model", "every", "search / chunk", "both cores, s: predicted", "measured", "both cores / pipelined [95 %]",
    "chosen by prediction", "the fastest / chosen",
]  # fmt: skip


def _told(kept: IntervalKept, cells: Sequence[IntervalCell], options: BenchOptions) -> Body:
    body, lines, main, beside = Body(), list[_Line](), list[list[str]](), list[list[str]]()
    for cell in cells:
        done = kept.rounds.get(cell.name, [])
        flags = counting(all(still_blocks([each.before, each.after])) for each in done)
        still = list(compress(done, flags))
        if done:
            line = _Line(cell, kept.profiles[cell.name], kept.predicted[cell.name], still)
            lines.append(line)
            main.append(_cells(line, len(done) - len(still)))
            if BOTH in cell.modes:
                beside.append(_beside(line))
    chunks = options.pick(CHUNKS, 3)
    body.table(
        f"Answers of {chunks} chunks, generation and retrieval on a core each", COLUMNS, main
    )
    body.table("Both cores in each phase of a sequential answer", BESIDE, beside)
    body.samples |= {"profiles": msgspec.to_builtins(kept.profiles), "predicted": kept.predicted}
    body.samples["rounds"] = msgspec.to_builtins(kept.rounds)
    body.met |= _judged(lines)
    body.notes.append(
        "Predicted: the model of two lines, from the chunks of an answer whose retrievals take no time and from "
        "searches with nothing beside them, all before anything else was measured. Replayed: the other process waits "
        "as long as those searches took, and computes nothing, as if it were another machine's. Both sides read the "
        f"same number of lists. With {chunks} chunks the model's own limit is {2 * chunks / (chunks + 1):.2f}."
    )
    if not options.quick and any(len(line.rounds) < MOST for line in lines):
        body.notes.append(
            f"Fewer than {MOST} pairs a cell: each has {CELL_S:g} s, or as many as --count says."
        )
    if options.quick:
        body.notes.append("Short answers, few lists: the figures mean nothing.")
    return body


def _cells(line: _Line, dropped: int) -> list[str]:
    cell, predicted = line.cell, line.predicted
    how = f"{line.profile.lists} lists" if cell.source == "searched" else cell.source
    return [
        cell.model, str(cell.interval), how, f"{line.profile.share:.2f}",
        f"{predicted[PIPELINED]:.3f}", f"{line.middle(PIPELINED):.3f}",
        f"{predicted[SEQUENTIAL]:.3f}", f"{line.middle(SEQUENTIAL):.3f}",
        f"{line.expected:.2f}", told(line.gain), f"{line.of_model['value']:.2f}",
        str(len(line.rounds)), str(dropped),
    ]  # fmt: skip


def _beside(line: _Line) -> list[str]:
    fastest = min(line.middle(mode) for mode in line.predicted)
    return [
        line.cell.model, str(line.cell.interval), f"{line.profile.share:.2f}", f"{line.predicted[BOTH]:.3f}",
        f"{line.middle(BOTH):.3f}", told(line.by(BOTH, PIPELINED)), line.chosen,
        f"{fastest / line.middle(line.chosen):.2f}",
    ]  # fmt: skip


def _judged(lines: Sequence[_Line]) -> dict[str, str]:
    """Return the verdicts of the worst cells."""
    met = {}
    for source in get_args(Source):
        own = [line for line in lines if line.cell.source == source]
        if not own:
            continue
        slowest = min((line.gain for line in own), key=lambda gain: gain["value"])
        met[f"never slower, {source}"] = stats.verdict(slowest, 1.0, 1.0)
        alike = [line.gain for line in own if line.alike]
        worst = min(alike, key=lambda gain: gain["value"], default=None)
        what = f"search and chunk alike, {source}"
        met[what] = "undecided" if worst is None else stats.verdict(worst, GOAL, MUST)
    if lines:
        least = min((line.of_model for line in lines), key=lambda gain: gain["value"])
        met["the model of two lines"] = stats.verdict(least, OF_MODEL, OF_MODEL)
        chosen = max(
            line.middle(line.chosen) / min(map(line.middle, line.predicted)) for line in lines
        )
        met["the fastest mode is chosen"] = "goal" if chosen <= RIGHT else "missed"
    return met
