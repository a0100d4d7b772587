"""The choice among explored settings: what each is predicted to do at a collection's size, and which is the best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from common.wire.tuning import ExploredSetting, IndexSetting, TuningGoal
from services.vector_search.tuning.cost_lines import PARTS, CostLines, ListsSearch
from services.vector_search.tuning.stage_calibration import StageCalibration
from services.vector_search.tuning.trials import GraphOption, GraphTrial, K, ListsTrial, TimedWay


class Measurements(NamedTuple):
    """All that an exploration has measured; graphs of the same links follow one another by their rows."""

    calibration: StageCalibration
    lists: Sequence[ListsTrial] = ()
    graphs: Sequence[GraphTrial] = ()


def explored(found: Measurements, rows: int, rows_bytes: int) -> list[ExploredSetting]:
    """Return every setting with its predictions for so many rows, which take `rows_bytes`."""
    settings = [*_exact(found.calibration, rows, rows_bytes)]
    for trial in found.lists:
        settings += _lists(found.calibration, trial, rows, rows_bytes)
    for links in sorted({trial.links for trial in found.graphs}):
        own = sorted((each for each in found.graphs if each.links == links), key=lambda t: t.rows)
        settings += _graph(own, rows, rows_bytes)
    return settings


def _threads(most: int, speedup: float) -> Iterable[tuple[int, float]]:
    """Yield numbers of threads and how many times the searches of one they do: linear between what was measured."""
    count = 1
    while count < most:
        yield count, 1.0 + (speedup - 1.0) * (count - 1) / (most - 1)
        count *= 2
    yield most, speedup


def _exact(known: StageCalibration, rows: int, rows_bytes: int) -> Iterable[ExploredSetting]:
    mean_s = known.exact[0] + known.exact[1] * rows
    setting = IndexSetting("exact")
    yield ExploredSetting(setting, 1.0, 1.0, 1.0 / mean_s, mean_s * known.exact_tail, rows_bytes)


def _terms(known: StageCalibration, search: ListsSearch) -> tuple[float, ...]:
    """Return what the time of a search in lists is a sum of: its parts by the lines, and the root of its places.

    Places that are read first cost more than those after them: their lists are nearer, so more of their codes enter the
    queue, and they find the caches cold.
    """
    return *known.lists.parts_s(search.work()), math.sqrt(search.slots)


def _lines(known: StageCalibration, trial: ListsTrial) -> CostLines:
    """Return what a unit of each term took in these lists.

    Real codes cost more than made-up ones, and so do the rows of lists that lie apart.
    """
    if not trial.timed:
        return CostLines((*(1.0 for _ in PARTS), 0.0))
    measured = []
    for way in trial.timed:
        search = _search(trial, trial.rows, way.effort, way.depth)
        measured.append((_terms(known, search), way.mean_s))
    return CostLines.fit(measured)


def _tail(timed: Sequence[TimedWay], usual: float = 1.0) -> float:
    """Return how many times the mean one search in a hundred takes."""
    return statistics.median(each.p99_s / each.mean_s for each in timed) if timed else usual


def _search(trial: ListsTrial, rows: int, probes: int, depth: int) -> ListsSearch:
    grown, share = rows / trial.rows, min(probes / trial.lists, 1.0)
    codes = max(min(probes * trial.codes_each, float(trial.rows)), share * trial.rows)
    slots = max(min(probes * trial.slots_each, codes + 64.0 * trial.lists), codes)
    return ListsSearch(
        trial.dimension, trial.width, trial.subspaces, trial.lists, probes, slots * grown, codes * grown, depth * K,
        *trial.coding,
    )  # fmt: skip


def _lists(
    known: StageCalibration, trial: ListsTrial, rows: int, rows_bytes: int
) -> Iterable[ExploredSetting]:
    grown, lines = rows / trial.rows, _lines(known, trial)
    tail = _tail(trial.timed, known.lists_tail)
    for option in trial.options:
        search = _search(trial, rows, option.probes, option.depth)
        mean_s = lines.seconds(_terms(known, search))
        slow = search._replace(slots=max(option.slots_p99 * grown, search.slots))
        p99_s = tail * lines.seconds(_terms(known, slow))
        for threads, factor in _threads(known.threads, known.lists_speedup):
            setting = IndexSetting(
                "ivfpq",
                lists=trial.asked,
                effort=option.probes,
                depth=option.depth,
                threads=threads,
                code_bits=trial.coding.code_bits,
                rotate=trial.coding.rotate,
            )
            yield ExploredSetting(
                setting, option.recall, option.sure, factor / mean_s, p99_s, int(trial.bytes * grown) + rows_bytes
            )  # fmt: skip


def _graph(trials: Sequence[GraphTrial], rows: int, rows_bytes: int) -> Iterable[ExploredSetting]:
    """Return a graph's settings; one over fewer rows than there are goes on as it grew from a smaller one."""
    first, last = trials[0], trials[-1]
    (call_s, candidate_s), steps = _graph_line(last), 0.0
    if len(trials) > 1 and rows > last.rows:
        steps = math.log(rows / last.rows) / math.log(last.rows / first.rows)
        candidate_s += steps * max(candidate_s - _graph_line(first)[1], 0.0)
    tail = _tail(last.timed)
    for option in last.options:
        ef = option.ef + math.ceil(steps * max(option.ef - _ef_at(first, option), 0))
        mean_s = call_s + candidate_s * max(ef, K)
        for threads, factor in _threads(last.threads, last.speedup):
            setting = IndexSetting("graph", links=last.links, effort=ef, threads=threads)
            size = int(last.bytes * rows / last.rows) + rows_bytes
            yield ExploredSetting(
                setting, option.recall, option.sure, factor / mean_s, tail * mean_s, size
            )


def _graph_line(trial: GraphTrial) -> tuple[float, ...]:
    """Return the seconds of a search in a graph, and of each candidate that it keeps."""
    return CostLines.fit(
        [((1.0, max(each.effort, K)), each.mean_s) for each in trial.timed]
    ).units_s


def _ef_at(trial: GraphTrial, option: GraphOption) -> int:
    """Return the ef with which a smaller graph finds as much for sure as an option of a larger one."""
    enough = [each.ef for each in trial.options if each.sure >= option.sure]
    return min(enough, default=option.ef)


def judged(settings: Iterable[ExploredSetting], goal: TuningGoal) -> list[ExploredSetting]:
    """Return settings with the reason why each is out, "" where it keeps to the goal."""
    return [msgspec.structs.replace(each, why=_why(each, goal)) for each in settings]


def _why(each: ExploredSetting, goal: TuningGoal) -> str:
    if each.sure < goal.recall:
        return "recall"
    if goal.p99_s is not None and each.p99_s > goal.p99_s:
        return "p99"
    if goal.memory_bytes is not None and each.bytes > goal.memory_bytes:
        return "memory"
    return ""


def best(settings: Iterable[ExploredSetting]) -> ExploredSetting | None:
    """Return the setting with the most searches per second of those that keep to the goal; None if none does.

    Of equals the one with fewer threads, then with less memory.
    """
    kept = (each for each in settings if not each.why)
    return max(kept, key=lambda e: (e.qps, -e.setting.threads, -e.bytes, e.setting), default=None)


def front(settings: Iterable[ExploredSetting]) -> list[ExploredSetting]:
    """Return the settings that no other one beats or equals in recall, speed, p99 and memory; by recall, rising."""
    found: list[ExploredSetting] = []
    for each in sorted(settings, key=lambda e: (-e.recall, -e.qps, e.p99_s, e.bytes, e.setting)):
        if not any(_no_worse(other, each) for other in found):
            found.append(each)
    return found[::-1]


def _no_worse(one: ExploredSetting, other: ExploredSetting) -> bool:
    return (
        one.recall >= other.recall
        and one.qps >= other.qps
        and one.p99_s <= other.p99_s
        and one.bytes <= other.bytes
    )


def unreachable(settings: Sequence[ExploredSetting], goal: TuningGoal) -> str:
    """Say in a sentence what would be needed where no setting keeps to the goal."""
    able = [each for each in settings if each.sure >= goal.recall]
    if not able:
        most = max(settings, key=lambda each: each.sure)
        return f"no setting finds {goal.recall:.0%} for sure; the best finds {most.sure:.1%}"
    needs = []
    if goal.p99_s is not None:
        fits = [e for e in able if goal.memory_bytes is None or e.bytes <= goal.memory_bytes]
        if fits:
            needs.append(f"a p99 of {1000 * min(e.p99_s for e in fits):.3g} ms")
    if goal.memory_bytes is not None:
        fits = [e for e in able if goal.p99_s is None or e.p99_s <= goal.p99_s]
        if fits:
            needs.append(f"{min(e.bytes for e in fits) / (1 << 20):,.1f} MiB of memory")
    if not needs:
        p99_ms, size = 1000 * min(e.p99_s for e in able), min(e.bytes for e in able) / (1 << 20)
        needs = [f"a p99 of {p99_ms:.3g} ms and {size:,.1f} MiB of memory, of two settings"]
    return f"no setting finds {goal.recall:.0%} within the bounds; needed: {' or '.join(needs)}"
