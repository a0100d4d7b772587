"""An exploration: calibrate, try lists and graphs over a sample, leave out what cannot win, time the rest together.

What was measured is written to a file at once, so that an exploration that was killed goes on where it was. It runs
in a process of its own: `python -m services.vector_search.tuning.exploration DIRECTORY`; it prints its steps.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from common.clock import SYSTEM, Clock
from common.wire.tuning import ExploredSetting, TuningGoal
from services.vector_search.index.inverted_lists import InvertedLists, lists_bytes
from services.vector_search.index.native_graph import SearchGraph, graph_bytes
from services.vector_search.index.quantizer import USUAL, Coding, subspaces_of
from services.vector_search.index.quantizer_training import SAMPLE_BYTES as TRAINED_BYTES
from services.vector_search.index.rows import Floats, Metric, VectorRows
from services.vector_search.tuning import choice, space
from services.vector_search.tuning.choice import Measurements
from services.vector_search.tuning.cost_lines import ListsSearch
from services.vector_search.tuning.search_timer import SearchTimer, Side
from services.vector_search.tuning.stage_calibration import StageCalibration, calibrate, reference
from services.vector_search.tuning.trials import (
    GraphTrial,
    K,
    ListsTrial,
    Sample,
    StructureKey,
    TimedWay,
    graph_sides,
    lists_sides,
    made_graph,
    made_lists,
    timed_ways,
    try_graph,
    try_lists,
)

# Rows of the sample that lists are made over, and graphs, and bytes of it at most.
LISTS_ROWS, GRAPH_ROWS, SAMPLE_BYTES = 1_000_000, 200_000, 1 << 30
# A graph over fewer rows than there are is built over this share of them too, to see how it grows.
_SMALLER = 4
# What is at no recall this share as quick as the best does not take part in the last timing.
_CLOSE = 0.7
QUERIES = 256
_WORK, _ROWS, _QUERIES = "work.json", "rows.f32", "queries.f32"
_MEASURED, _RESULT = "measured.jsonl", "result.json"
_NICENESS = 10
Say = Callable[[str], object]


class ExplorationWork(msgspec.Struct, frozen=True):
    """What is to be explored: a sample of `rows` rows, which take `rows_bytes` in memory, by queries beside it."""

    metric: Metric
    dimension: int
    rows: int
    rows_bytes: int
    sample: int
    queries: int
    goal: TuningGoal
    threads: int


class Exploration(msgspec.Struct, frozen=True):
    """What was found for so many rows: how many settings, those that none beats, the best for the goal, or why none is.

    `notes` say what was left out, and what was measured on a part of the rows only.
    """

    rows: int
    explored: int
    front: list[ExploredSetting]
    chosen: ExploredSetting | None
    notes: list[str]
    why: str = ""


class _Measured(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the file of measurements."""

    calibration: StageCalibration | None = None
    lists: ListsTrial | None = None
    graph: GraphTrial | None = None
    finalists: list[tuple[StructureKey, list[TimedWay]]] | None = None


class _Built(NamedTuple):
    """A structure in memory, with the rows that it is over."""

    sample: Sample
    made: InvertedLists | SearchGraph


class Known:
    """The measurements of an exploration so far, which a file in its directory holds too."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _MEASURED
        self.calibration: StageCalibration | None = None
        self.trials: dict[StructureKey, ListsTrial | GraphTrial] = {}
        self.settled = False  # the finalists were timed together
        for each in _lines(self._path):
            self._take(each)

    def _take(self, each: _Measured) -> None:
        self.calibration = each.calibration or self.calibration
        for trial in (each.lists, each.graph):
            if trial is not None:
                self.trials[trial.key] = trial
                self.settled = False
        for key, timed in each.finalists or ():
            self.trials[key] = msgspec.structs.replace(self.trials[key], timed=timed)
        self.settled |= each.finalists is not None

    def add(self, each: _Measured) -> None:
        """Keep a measurement."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(each) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(each)

    def all(self) -> Measurements:
        """Return them."""
        assert self.calibration is not None
        trials = self.trials.values()
        return Measurements(
            self.calibration,
            [each for each in trials if isinstance(each, ListsTrial)],
            [each for each in trials if isinstance(each, GraphTrial)],
        )


def _lines(path: Path) -> Iterator[_Measured]:
    """Yield the measurements of a file, as far as it is whole; what a kill left of the last line is cut off."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    for line in whole.splitlines():
        yield msgspec.json.decode(line, type=_Measured)


class Explorer:
    """Explores settings over a sample; `say` hears of every step."""

    def __init__(
        self,
        sample: Sample,
        work: ExplorationWork,
        directory: Path,
        *,
        say: Say,
        clock: Clock = SYSTEM,
    ) -> None:
        self._sample, self._work, self._clock = sample, work, clock
        self._say = say
        self.known = Known(directory)
        self._levels = sorted({*space.LEVELS, work.goal.recall})
        self._notes: list[str] = []
        self._rotations: dict[Coding, Floats] = {}
        self._built: dict[StructureKey, _Built] = {}
        base_s = self.known.calibration.reference_s if self.known.calibration else 0.0
        self._timer = SearchTimer(reference(sample, clock), clock, base_s)

    def run(self) -> Exploration:
        """Explore what was not explored before, and choose."""
        work = self._work
        if self.known.calibration is None:
            measured = calibrate(self._sample, work.threads, self._clock, self._timer)
            self.known.add(_Measured(measured))
        known = self.known.calibration
        assert known is not None
        self._say(f"calibrated: the lines of lists are off by {known.fit_error:.1%} (median)")
        if work.goal.recall < 1.0:
            self._try_all_lists(known)
            self._try_graphs()
            self._settle()
        return self.result()

    def result(self) -> Exploration:
        """Return what was found so far."""
        work = self._work
        settings = choice.judged(
            choice.explored(self.known.all(), work.rows, work.rows_bytes), work.goal
        )
        chosen = choice.best(settings)
        return Exploration(
            work.rows,
            len(settings),
            choice.front(settings),
            chosen,
            [*self._sampled(), *self._notes],
            "" if chosen else choice.unreachable(settings, work.goal),
        )

    def _sampled(self) -> Iterator[str]:
        work = self._work
        size = self._sample.rows.view.size
        yield f"recall is of {len(self._sample.queries)} rows that were held out as queries"
        if size < work.rows:
            yield f"lists were made over a sample of {size:,} of {work.rows:,} rows"
        if min(size, GRAPH_ROWS) < work.rows:
            yield (
                f"graphs were built over {min(size, GRAPH_ROWS):,} of {work.rows:,} rows and a quarter of these, and "
                "their ef and time carried on from there"
            )
        yield (
            "codes of 4 bits, and rows that are not rotated (OPQ), were tried with the best number of lists and "
            "those beside it"
        )

    # -- lists

    def _try_all_lists(self, known: StageCalibration) -> None:
        work, rows = self._work, self._sample.rows.view.size
        trained = TRAINED_BYTES // (4 * work.dimension)
        counts = space.numbers_of_lists(rows, trained)
        if trained < rows:
            self._notes.append(
                f"lists are trained from {trained:,} rows at most, so more than {max(counts, default=0)} were not tried"
            )
        if not counts:
            self._notes.append(f"{rows:,} rows are too few for lists")
        for coding in space.CODINGS:
            best = self._best_lists()
            for count in counts if coding == USUAL else space.beside(counts, best):
                self._try_lists(known, StructureKey("ivfpq", count, rows, coding))

    def _try_lists(self, known: StageCalibration, key: StructureKey) -> None:
        """Make lists and try them, unless that was done, or they cannot win."""
        work, coding = self._work, key.coding
        told = f"{key.number} lists of codes of {coding.code_bits} bits"
        if not coding.rotate:
            told += ", rows not rotated"
        if key in self.known.trials:
            return
        if self._too_large(lists_bytes(work.rows, work.dimension, key.number, coding.code_bits)):
            self._notes.append(f"{told}: more than the memory")
            return
        least_s = _least_lists_s(known, self._sample, key.number, work.rows, coding)
        if space.hopeless(least_s, self._best_s()):
            self._notes.append(
                f"{told}: left out, a search would take at least {1000 * least_s:.3g} ms"
            )
            return
        self._try(key)
        self._say(f"tried {told}{self._so_far()}")

    def _best_lists(self) -> int | None:
        """Return the number of lists of the quickest that reach the goal so far, None if none do."""
        own = [each for each in self._of_one_thread() if each.setting.kind == "ivfpq"]
        found = choice.best(choice.judged(own, self._work.goal))
        return None if found is None else found.setting.lists

    # -- graphs

    def _try_graphs(self) -> None:
        work = self._work
        for links in space.LINKS:
            if self._too_large(work.rows_bytes + graph_bytes(work.rows, work.dimension)):
                self._notes.append("a graph takes more than the memory")
                return
            if not space.worth_trying(links, self._efforts()):
                self._notes.append(
                    f"{links} links were left out: ef is {self._efforts()[space.LINKS[0]]} with {space.LINKS[0]}"
                )
                continue
            for rows in self._graph_sizes():
                key = StructureKey("graph", links, rows)
                if key not in self.known.trials:
                    self._try(key)
                    self._say(f"tried a graph of {links} links over {rows:,} rows{self._so_far()}")

    def _graph_sizes(self) -> list[int]:
        most = min(self._sample.rows.view.size, GRAPH_ROWS)
        return [most] if most >= self._work.rows else [most // _SMALLER, most]

    def _efforts(self) -> dict[int, int]:
        """Return, of each number of links, the ef that the goal needs."""
        most = self._graph_sizes()[-1]
        found = {}
        for trial in self.known.all().graphs:
            enough = [each.ef for each in trial.options if each.sure >= self._work.goal.recall]
            if trial.rows == most:
                found[trial.links] = min(enough, default=1 << 20)
        return found

    # -- structures in memory

    def _try(self, key: StructureKey) -> None:
        """Build a structure, and keep what it finds and takes; of those that were built only contenders stay."""
        built, threads = self._build(key), self._work.threads
        trial: ListsTrial | GraphTrial
        if isinstance(built.made, InvertedLists):
            trial = try_lists(built.sample, built.made, key.number, self._levels, threads)
        else:
            trial = try_graph(built.sample, built.made, self._levels, threads, self._clock)
        sides = self._sides(built, trial)
        timed = timed_ways(sides, self._timer.time(list(sides.values())))
        trial = msgspec.structs.replace(trial, timed=timed)
        if isinstance(trial, ListsTrial):
            self.known.add(_Measured(lists=trial))
        else:
            self.known.add(_Measured(graph=trial))
        contenders = self._contenders()
        self._built = {each: made for each, made in self._built.items() if each in contenders}

    def _build(self, key: StructureKey) -> _Built:
        """Return a structure, built unless that was done."""
        if key not in self._built:
            whole, threads = key.rows == self._sample.rows.view.size, self._work.threads
            sample = self._sample if whole else self._sample.part(key.rows)
            made: InvertedLists | SearchGraph
            if key.kind == "ivfpq":
                known = self._rotations.get(key.coding)
                made = made_lists(sample, key.number, threads, known, key.coding)
                self._rotations[key.coding] = made.quantizer.rotation
            else:
                made = made_graph(sample, key.number, threads)
            self._built[key] = _Built(sample, made)
        return self._built[key]

    def _sides(self, built: _Built, trial: ListsTrial | GraphTrial) -> dict[tuple[int, int], Side]:
        sample, made = built
        if isinstance(made, InvertedLists):
            assert isinstance(trial, ListsTrial)
            return lists_sides(sample, made, trial, self._clock)
        return graph_sides(sample, made, self._clock)

    def _contenders(self) -> set[StructureKey]:
        """Return the structures that at some recall are not far behind the best, as far as is known."""
        speeds: dict[tuple[str, int, Coding], list[ExploredSetting]] = {}
        for each in self._of_one_thread():
            setting = each.setting
            key = setting.kind, setting.lists or setting.links, Coding.of(setting)
            speeds.setdefault(key, []).append(each)
        found = set()
        for level in self._levels:
            best = {
                kind: max((each.qps for each in settings if each.sure >= level), default=0.0)
                for kind, settings in speeds.items()
            }
            least = _CLOSE * max(best.values(), default=0.0)
            found |= {kind for kind, qps in best.items() if qps and qps >= least}
        return {key for key in self.known.trials if (key.kind, key.number, key.coding) in found}

    def _settle(self) -> None:
        """Time the contenders once more, all by turns, so that what decides between them was measured together."""
        if self.known.settled:
            return
        contenders, timed = self._contenders(), []
        finalists = [key for key in self.known.trials if key in contenders]
        sides = [self._sides(self._build(key), self.known.trials[key]) for key in finalists]
        times = iter(self._timer.time([side for each in sides for side in each.values()]))
        for key, own in zip(finalists, sides, strict=True):
            timed.append((key, timed_ways(own, list(itertools.islice(times, len(own))))))
        self.known.add(_Measured(finalists=timed))
        self._say(f"timed {len(finalists)} structures together{self._so_far()}")

    # -- what is known so far

    def _too_large(self, size: int) -> bool:
        limit = self._work.goal.memory_bytes
        return limit is not None and size > limit

    def _best_s(self) -> float:
        """Return the seconds that a search of the best setting so far takes one thread."""
        found = choice.best(choice.judged(self._of_one_thread(), self._work.goal))
        return float("inf") if found is None else 1.0 / found.qps

    def _of_one_thread(self) -> list[ExploredSetting]:
        work = self._work
        settings = choice.explored(self.known.all(), work.rows, work.rows_bytes)
        return [each for each in settings if each.setting.threads == 1]

    def _so_far(self) -> str:
        best_s = self._best_s()
        return (
            "" if best_s == float("inf") else f"; best so far {1 / best_s:,.0f} searches/s a thread"
        )


def _least_lists_s(
    known: StageCalibration, sample: Sample, lists: int, rows: int, coding: Coding
) -> float:
    """Return what a search takes at least in so many lists: one of them is read, and K rows are compared."""
    dimension, one = sample.rows.dimension, rows / lists
    subspaces, part = subspaces_of(dimension, coding.code_bits)
    return known.lists.seconds(
        ListsSearch(dimension, subspaces * part, subspaces, lists, 1, one, one, K, *coding).work()
    )


# -- in a process of its own


class ExplorationFiles(NamedTuple):
    """The files of an exploration in a directory."""

    directory: Path

    def write(self, work: ExplorationWork, parts: Iterator[Floats], queries: Floats) -> None:
        """Write what is to be explored, the rows in parts; last the file that says that all is there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / _ROWS).open("wb") as file:
            for part in parts:
                np.ascontiguousarray(part, np.float32).tofile(file)
        np.ascontiguousarray(queries, np.float32).tofile(self.directory / _QUERIES)
        self._put(_WORK, msgspec.json.encode(work))

    def work(self) -> ExplorationWork | None:
        """Return what was written, None if that is not whole."""
        try:
            return msgspec.json.decode((self.directory / _WORK).read_bytes(), type=ExplorationWork)
        except (OSError, msgspec.MsgspecError):
            return None

    def result(self) -> Exploration | None:
        """Return what was found, None if that is not known yet."""
        try:
            return msgspec.json.decode((self.directory / _RESULT).read_bytes(), type=Exploration)
        except (OSError, msgspec.MsgspecError):
            return None

    def explore(self, say: Say, clock: Clock = SYSTEM) -> Exploration:
        """Explore here, or go on; the result is written too."""
        work = self.work()
        if work is None:
            raise ValueError(f"{self.directory} holds no work to explore")
        matrix = np.memmap(self.directory / _ROWS, np.float32, "r", shape=(work.sample, work.dimension))  # fmt: skip
        queries = np.fromfile(self.directory / _QUERIES, np.float32).reshape(-1, work.dimension)
        rows = VectorRows(work.dimension, work.sample, self.directory)
        numbers = np.arange(work.sample)
        rows.append(matrix, numbers, numbers)
        sample = Sample.of(work.metric, rows, queries)
        explorer = Explorer(sample, work, self.directory, say=say, clock=clock)
        found = explorer.run()
        self._put(_RESULT, msgspec.json.encode(found))
        return found

    def _put(self, name: str, data: bytes) -> None:
        path = self.directory / f"{name}.new"
        path.write_bytes(data)
        path.replace(self.directory / name)


def _end_with_parent() -> None:
    """End this process once the one that started it has: its end of the pipe is closed then."""
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Explore what lies in the directory that is named, with low priority."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    ExplorationFiles(Path(sys.argv[1])).explore(lambda step: print(step, flush=True))


if __name__ == "__main__":
    main()
