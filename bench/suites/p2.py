"""P2: the first token of a warm turn, by the tier its history is in, against computing it."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.document import BenchOptions, Body
from bench.engine.tiered import PagesRedis, Tiered, Turn
from bench.gpu import shapes
from common.config import WorkerConfig
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.kv import tiers
from loadgen import stats

TOKENS = {"S": 928, "M": 2048, "L": 2048}  # of history; S has no room for more
NEW_TOKENS = 7
ROUNDS, ROUNDS_OF_L = 500, 75
ASKS = 4  # warm turns from each tier in a round: their tails need more turns than there is time to compute
TIERS = ("device", "host", "redis")
# Shares of computing the history, and the p99 in medians.
GOALS = {
    "S": {"host": 0.08, "redis": 0.25},
    "M": {"host": 0.03, "redis": 0.06},
    "L": {"host": 0.03, "redis": 0.06},
}
MUSTS = {"host": 0.2, "redis": 0.5}
TAIL = 3.0
MEMORY = {"S": 256 << 20, "M": 512 << 20, "L": 1 << 30}
PAGES_BYTES = 1 << 30
SETTLE_S = 0.05
MODELS = {"S": ("spillway-demo", "fp32"), "M": ("llama-85m", "bf16"), "L": ("llama-1b", "bf16")}


def run(options: BenchOptions) -> Body:
    """Measure S, M and L (quick: S)."""
    tiers.SPARE = (
        1.0  # every idle page is copied to the host at once, so that each tier can be asked alone
    )
    body, rows = Body(), []
    for name in ("S",) if options.quick else MODELS:
        found = asyncio.run(_measure(name, model_of(name, options), options))
        body.samples[name] = found
        cold = median(found["computed"])
        for tier in TIERS:
            ratio = stats.paired_ratio(found[tier][::ASKS], found["computed"])
            p99 = _tail(found[tier])
            rows.append(
                [
                    name, str(TOKENS[name]), tier, f"{1e3 * median(found[tier]):.1f}", f"{1e3 * cold:.1f}",
                    f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
                    f"{p99['value']:.2f} [{p99['low']:.2f}, {p99['high']:.2f}]",
                    f"{1e3 * max(found[tier]):.0f}", str(len(found[tier])),
                ]
            )  # fmt: skip
            if tier != "device":
                goal, must = GOALS[name][tier], MUSTS[tier]
                body.met[f"{name}, from {tier}"] = stats.verdict(ratio, goal, must, higher=False)
                body.met[f"{name}, from {tier}, p99"] = stats.verdict(
                    p99, TAIL, TAIL, higher=False, width=stats.TAIL
                )
    columns = ["model", "history tokens", "from", "ms", "computed ms", "ratio [95 %]"]
    columns += ["p99 / p50 [95 %]", "slowest ms", "turns"]
    body.table("Time to the first token of a turn, in process", columns, rows)
    body.notes.append(
        "A turn of 7 new tokens after a history of full pages. Each round computes a new random history, then asks for "
        f"it again {ASKS} times from each tier alone, the others having forgotten it; the tokens are compared. Ratios "
        "are of the first of these turns to the computed one, medians and tails of all. Redis is on the same machine."
    )
    return body


def _tail(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the 99th percentile in medians, with its interval."""
    middle, p99 = median(seconds), stats.interval(seconds, 99)
    return p99 | {key: p99[key] / middle for key in ("value", "low", "high")}


def model_of(name: str, options: BenchOptions) -> tuple[str, str]:
    """Return where a reference model is, made if it is not there, and how its weights are kept."""
    model, kind = MODELS[name]
    if name == "S":
        return model, kind
    folder: Path = options.setup_dir / "models" / model
    shapes.write(folder, shapes.SHAPES[model], "cpu")
    return str(folder), kind


async def _measure(
    name: str, model: tuple[str, str], options: BenchOptions
) -> dict[str, list[float]]:
    """Return the seconds of each turn, by where its history came from."""
    path, kind = model
    runner = TorchExecutor.load(
        path, device="cpu", dtype=kind, kv_bytes=MEMORY[name], host_bytes=MEMORY[name]
    )
    found: dict[str, list[float]] = defaultdict(list)
    draw = random.Random(options.seed)
    with PagesRedis(2 * PAGES_BYTES) as redis:
        config = WorkerConfig(
            pages_url=redis.url, page_publish="through", pages_bytes=PAGES_BYTES, pages_ttl_s=60
        )
        async with Tiered(runner, config) as engine:
            rounds = options.rounds(ROUNDS, 10)
            rounds = min(rounds, ROUNDS_OF_L) if name == "L" else rounds
            for number in range(-3, rounds):  # the first ones warm
                length = TOKENS[name] + NEW_TOKENS
                prompt = [draw.randrange(runner.shape.vocabulary) for _ in range(length)]
                computed = await engine.turn(prompt)
                await engine.save(prompt)
                await engine.put(prompt)
                turns = {"computed": [computed]}
                for tier in TIERS:
                    turns[tier] = [await _ask(engine, prompt, tier, computed) for _ in range(ASKS)]
                if number >= 0:
                    for tier, asked in turns.items():
                        found[tier] += [turn.first_s for turn in asked]
                        found[f"{tier} tokens found"] += [turn.found for turn in asked]
                assert engine.store is not None
                await engine.tiering.forget(engine.ids(prompt))  # else it is put again
                await engine.store.remove(engine.keys(prompt))
    return found


async def _ask(engine: Tiered, prompt: list[int], tier: str, computed: Turn) -> Turn:
    """Ask for a turn whose history only `tier` and those below it have; RuntimeError if its tokens are others."""
    if tier != "device":
        engine.forget(prompt, "device")
    if tier == "redis":
        engine.forget(prompt, "host")
    await asyncio.sleep(SETTLE_S)  # what follows a turn is not part of the next
    turn = await engine.turn(prompt)
    if turn.tokens != computed.tokens:
        raise RuntimeError(f"from {tier} {turn}, computed {computed}")
    return turn
