"""The tables and verdicts of H1, computed from what was measured in its cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from bench.document import Body
from bench.rivals.gguf_file import KINDS
from bench.suites.engine_pairs import told
from bench.workloads import divergence
from bench.workloads.chat_rounds import (
    LLAMA,
    NEW_TOKENS,
    OURS,
    BatchTimes,
    CellTimes,
    ChatCell,
    SideTimes,
    still,
)
from bench.workloads.divergence import Divergence
from loadgen import stats

MOST_CHUNK, MOST_GAP = 4, 2.0
WORST_FIRST = ("missed", "undecided", "must", "goal")
MODELS = ("L", "M", "S")
FIRST, LATER, GAPS = "first token", "a later token", "p99 gap"
CHUNKS = f"at most {MOST_CHUNK} tokens a chunk"
Measured = Sequence[tuple[ChatCell, CellTimes]]
Costs = Callable[[BatchTimes], float]
Divergences = Mapping[str, Divergence]


class Pairs(NamedTuple):
    """One cell against one rival: the batches of both sides in the rounds that count, and the blocks dropped."""

    cell: ChatCell
    rival: str
    ours: list[BatchTimes]
    theirs: list[BatchTimes]
    dropped: int

    def medians(self, cost: Costs) -> tuple[float, float]:
        """Return the median seconds of either side."""
        return median(map(cost, self.ours)), median(map(cost, self.theirs))

    def ratio(self, cost: Costs) -> dict[str, float]:
        """Return how many times theirs is of ours, with its interval."""
        return stats.paired_ratio([*map(cost, self.theirs)], [*map(cost, self.ours)])

    def where(self) -> list[str]:
        """Return what every row begins with."""
        cell = self.cell
        return [cell.model, KINDS[cell.kind], f"{cell.prompt} x {cell.streams}", self.rival]


def add(
    body: Body,
    measured: Measured,
    failed: Sequence[ChatCell] = (),
    costs: Divergences | None = None,
) -> None:
    """Add the tables of what was measured, and the worst verdict of each group of cells; failed ones have missed.

    `costs` has the KL divergence of each kind of rounded weights.
    """
    costs = costs or {}
    reached: dict[str, list[str]] = {name: [] for name in groups()}
    for cell in failed:
        reached[group_of(cell)].append("missed")
    pairs = [each for cell, found in measured for each in pairs_of(cell, found)]
    where = ["model", "weights", "prompt x streams", "rival"]
    rows = [_tokens(each, reached, costs) for each in pairs]
    columns = [*where, "ours tokens/s", "rival tokens/s", "ratio [95 %]", "reached"]
    columns += ["KL, ours / rival", "rounds (blocks dropped)"]
    body.table("Tokens a second of all streams", columns, rows)
    rows = [_latencies(each, reached, costs) for each in pairs]
    columns = [*where, "first token, ours / rival (ms)", "ratio [95 %]", "reached"]
    columns += ["a later token, ours / rival (ms)", "ratio [95 %]", "reached"]
    body.table("First and later tokens, p50", columns, rows)
    rows = [row for cell, found in measured for row in _gaps(cell, found, reached)]
    columns = ["model", "weights", "prompt x streams", "server", "p50 (ms)", "p99 (ms)"]
    columns += ["p99 / p50", "reached", "tokens a chunk, p99 / most"]
    body.table("Gaps between reads of a stream, and tokens in one event", columns, rows)
    body.met |= {what: worst(words) for what, words in reached.items()}


def pairs_of(cell: ChatCell, found: CellTimes) -> list[Pairs]:
    """Return a cell against each rival, without the blocks in which the machine's speed moved (if it ever held)."""
    counts = still(found)
    dropped = len({n // found.block for n, counted in enumerate(counts) if not counted})
    kept = [n for n, counted in enumerate(counts) if counted] or range(len(counts))

    def batches(name: str) -> list[BatchTimes]:
        return [found.sides[name].batches[n] for n in kept]

    rivals = [name for name in found.sides if name != OURS]
    return [Pairs(cell, name, batches(OURS), batches(name), dropped) for name in rivals]


def goal_of(cell: ChatCell) -> float:
    """Return how many times a rival's tokens a second are the goal."""
    if cell.streams == 1:
        return 1.0
    return 2.0 if cell.kind == "int8" else 1.5


def must_of(cell: ChatCell) -> float:
    """Return how many times a rival's figure must be reached."""
    return 1.0 if cell.model == "L" else 0.9


def group_of(cell: ChatCell) -> str:
    """Return the name of the verdict that a cell's tokens a second belong to."""
    if cell.streams == 1:
        return f"tokens/s, {cell.model}, one stream"
    kind = "int8" if cell.kind == "int8" else "bf16 and int4"
    return f"tokens/s, {cell.model}, 8 and 32 streams, {kind}"


def groups() -> list[str]:
    """Return the name of every verdict, in the order of the docs."""
    found = [GAPS, CHUNKS]
    for model in MODELS:
        cells = (ChatCell(model, kind, 128, streams) for streams in (1, 8) for kind in KINDS)
        found += [*dict.fromkeys(map(group_of, cells)), f"{FIRST}, {model}", f"{LATER}, {model}"]
    return found


def worst(words: Iterable[str]) -> str:
    """Return the lowest of some verdicts."""
    return min(words, key=WORST_FIRST.index, default="not measured")


def _cost(each: Pairs, costs: Divergences) -> Divergence | None:
    """Return what the rounding of a cell's weights costs, if the rival's cost is known, too."""
    return costs.get(each.cell.kind) if each.rival == LLAMA else None


def _tokens(each: Pairs, reached: dict[str, list[str]], costs: Divergences) -> list[str]:
    ratio, cost = each.ratio(_seconds), _cost(each, costs)
    word = stats.verdict(ratio, goal_of(each.cell), must_of(each.cell))
    word = divergence.judged(word, cost)
    reached[group_of(each.cell)].append(word)
    count = each.cell.streams * NEW_TOKENS
    speeds = [f"{count / seconds:.1f}" for seconds in each.medians(_seconds)]
    count_told = f"{len(each.ours)} ({each.dropped})"
    return [*each.where(), *speeds, told(ratio), word, cost.told() if cost else "-", count_told]


def _latencies(each: Pairs, reached: dict[str, list[str]], costs: Divergences) -> list[str]:
    row = each.where()
    for what, cost in ((FIRST, _first), (LATER, _later)):
        ratio = each.ratio(cost)
        word = stats.verdict(ratio, 1.0, must_of(each.cell))
        word = divergence.judged(word, _cost(each, costs))
        reached[f"{what}, {each.cell.model}"].append(word)
        ours, theirs = (1e3 * seconds for seconds in each.medians(cost))
        row += [f"{ours:.1f} / {theirs:.1f}", told(ratio), word]
    return row


def _gaps(cell: ChatCell, found: CellTimes, reached: dict[str, list[str]]) -> list[list[str]]:
    rows = []
    for name, side in found.sides.items():
        middle, late = (stats.quantile(side.gaps_us, share) for share in (0.5, 0.99))
        word = "goal" if late <= MOST_GAP * middle else "missed"
        if name == OURS:
            reached[GAPS].append(word)
            small = max(side.chunks) <= MOST_CHUNK
            reached[CHUNKS].append("goal" if small else "missed")
        where = [cell.model, KINDS[cell.kind], f"{cell.prompt} x {cell.streams}", name]
        times = [f"{middle / 1e3:.1f}", f"{late / 1e3:.1f}", f"{late / max(1, middle):.2f}"]
        rows.append([*where, *times, word, _chunks(side)])
    return rows


def _chunks(side: SideTimes) -> str:
    return f"{stats.quantile(side.chunks, 0.99)} / {max(side.chunks)}"


def _seconds(batch: BatchTimes) -> float:
    return batch.seconds


def _first(batch: BatchTimes) -> float:
    return median(batch.first_s)


def _later(batch: BatchTimes) -> float:
    return median(batch.token_s)
