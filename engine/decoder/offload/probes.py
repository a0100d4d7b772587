"""The probes of a step's stages, timed at the start on device and host: the costs for planning are fitted to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from common.clock import SYSTEM, Clock
from common.cost.linear import Probe
from common.pages.identity import PAGE
from common.types.generation import SamplingParams
from engine.decoder.capacity import probe_step
from engine.decoder.executor.interface import (
    HomeMoves,
    LocalTier,
    PageMove,
    SamplingRequest,
    SequenceInput,
    StagedExecutor,
)
from engine.decoder.offload.costs import OffloadPoints
from engine.decoder.offload.plan import pages_of

LIMIT_S = 8.0  # after this time only the probes that every cost needs are run
_REPEATS, _PROBE_S = 3, 0.5
_MOVED = 8
_NEEDED = 3  # the first shapes, without which a stage has no cost
_LEAST_S = 1e-9


class _Shape(NamedTuple):
    """A probe's sequences: each has `rows` rows, the last at position `end` - 1, in a home that attends to them."""

    tier: LocalTier
    sequences: int
    rows: int
    end: int


class _Timed(NamedTuple):
    """Seconds of a layer's stages by name, and of the step outside its stages."""

    layers: int
    stages: dict[str, float]
    besides_s: float


def measure_stages(
    executor: StagedExecutor, step_tokens: int, max_running: int, clock: Clock = SYSTEM
) -> OffloadPoints:
    """Time steps of rising sizes on empty pages, for a few seconds, and a copy of pages between the tiers."""
    linear: list[tuple[float, float]] = []
    attention: dict[Literal["device", "host", "prefill", "exchange"], list[Probe]] = {
        "device": [], "host": [], "prefill": [], "exchange": []
    }  # fmt: skip
    besides, layers, began = list[float](), 0, clock.perf_s()
    # On the CPU a step in one piece is the same kernels in the same order; on another device it is a graph.
    graphs, whole = executor.device != "cpu", list[Probe]()
    for number, shape in enumerate(_shapes(executor, step_tokens, max_running)):
        if number >= _NEEDED and clock.perf_s() - began > LIMIT_S:
            break
        timed = _time(executor, shape, clock)
        layers, stages = timed.layers, timed.stages
        rows, seen = shape.sequences * shape.rows, shape.sequences * shape.end
        linear.append((rows, stages["before"] + stages["after"]))
        if shape.tier == "host":
            attention["host"].append(Probe(shape.sequences, seen, stages["host"]))
            attention["exchange"].append(Probe(shape.sequences, 0, stages["exchange"]))
        elif shape.rows > 1:
            pairs = shape.rows * (shape.rows + 1) // 2
            attention["prefill"].append(Probe(shape.sequences, pairs, stages["device"]))
        else:
            attention["device"].append(Probe(shape.sequences, seen, stages["device"]))
            if graphs:
                step, seconds = probe_step(executor, clock, shape.sequences, 1, shape.end - 1)
                whole.append(Probe(step.sequences, round(step.attended), seconds))
        if shape.rows == 1:
            besides.append(timed.besides_s)
    return OffloadPoints(
        layers, linear, attention["device"], attention["host"], attention["prefill"],
        attention["exchange"], _page_s(executor, clock), sorted(besides)[len(besides) // 2],
        whole,
    )  # fmt: skip


def _shapes(executor: StagedExecutor, step_tokens: int, max_running: int) -> Iterator[_Shape]:
    """Yield shapes, the most useful first: each stage once, then rising numbers with short and long contexts."""
    shape = executor.shape
    pages: dict[LocalTier, int] = {"device": shape.pages, "host": shape.host_pages}
    longest = min(step_tokens, shape.context - 1, shape.pages * PAGE)
    yield _Shape("device", 1, 1, 1)
    yield _Shape("host", 1, 1, 1)
    yield _Shape("device", 1, min(PAGE, longest), min(PAGE, longest))
    count = 1
    while count <= max_running:
        for tier in ("host", "device"):
            for share in (1, 4):
                each = min((shape.context - 1), pages[tier] // share // count * PAGE)
                if each > 0:
                    yield _Shape(tier, count, 1, each)
        count *= 2
    rows = 2 * PAGE
    while rows < 2 * longest:
        yield _Shape("device", 1, min(rows, longest), min(rows, longest))
        rows *= 2


def _time(executor: StagedExecutor, shape: _Shape, clock: Clock) -> _Timed:
    """Return the times of the fastest of a few steps of a shape."""
    batch = [_input(executor, shape, number) for number in range(shape.sequences)]
    found: list[_Timed] = []
    began = clock.perf_s()
    for turn in range(_REPEATS + 1):
        started = clock.perf_s()
        executor.execute_staged(batch)
        took = clock.perf_s() - started
        if turn or took > _PROBE_S:  # the first step also warms the model
            found.append(_timed(executor, took))
        if clock.perf_s() - began > _PROBE_S:
            break
    found = found or [_timed(executor, took)]
    names = found[0].stages
    stages = {name: max(_LEAST_S, min(each.stages[name] for each in found)) for name in names}
    return _Timed(found[0].layers, stages, min(each.besides_s for each in found))


def _timed(executor: StagedExecutor, took: float) -> _Timed:
    times = executor.stage_times
    layers = 1 + max(each.layer for each in times)
    stages: dict[str, float] = {}
    for each in times:
        spent = (each.end_s - each.begin_s) / layers
        stages[each.stage] = stages.get(each.stage, 0.0) + spent
    if "host" in stages:
        # Here no stages overlap: the time between the linear stages is attention, or the transfer of rows both ways.
        ends = {(each.stage, each.layer): (each.begin_s, each.end_s) for each in times}
        between_s = [ends["after", at][0] - ends["before", at][1] for at in range(layers)]
        stages["exchange"] = max(0.0, sum(between_s) / layers - stages["host"])
    return _Timed(layers, stages, max(0.0, took - layers * sum(stages.values())))


def _input(executor: StagedExecutor, shape: _Shape, number: int) -> SequenceInput:
    """Return the rows of one sequence, on pages of its own."""
    each = pages_of(shape.end)
    first = shape.end - shape.rows
    tokens = [(number * 31 + at * 7) % executor.shape.vocabulary for at in range(shape.rows)]
    pages = [[number * each + page for page in range(each)] for _ in executor.shape.windows]
    draw = SamplingRequest(SamplingParams(temperature=0.0), 0, shape.end, tokens, [])
    positions = list(range(first, shape.end))
    return SequenceInput(tokens, positions, pages, draw, home=shape.tier, attended=shape.tier)


def _page_s(executor: StagedExecutor, clock: Clock) -> float:
    """Return the seconds that a step needs to copy a page of all layers to the host."""
    shape = executor.shape
    count = min(_MOVED, shape.pages, shape.host_pages)
    took = []
    for _ in range(_REPEATS):
        moves: Sequence[PageMove] = [
            PageMove("save", group, b"", page, page)
            for group in range(len(shape.windows))
            for page in range(count)
        ]
        began = clock.perf_s()
        executor.execute_staged([], moves=HomeMoves(moves))
        took.append((clock.perf_s() - began) / count)
    return min(took)
