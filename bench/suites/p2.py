"""P2: the first token of a warm turn, by the tier its history is in, against computing it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from bench.document import BenchOptions, Body
from bench.engine.tiered import PagesRedis, Tiered, Turn
from bench.gpu import shapes
from bench.partial import PartialResults
from bench.peak import Peak, Speed, still_blocks
from common.config import WorkerConfig
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.kv import tiers
from loadgen import stats

TOKENS = {"S": 928, "M": 2048, "L": 2048}  # of history; S has no room for more
NEW_TOKENS = 7
ROUNDS, ROUNDS_OF_L = 500, 75
BLOCK = {"S": 20, "M": 10, "L": 2}  # rounds between two measurements of the machine's speed
WARMING = 3  # rounds
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


class RoundsBlock(NamedTuple):
    """Some rounds, and the machine's speed before and after them."""

    rounds: int
    before: Speed
    after: Speed


class ModelTurns(msgspec.Struct):
    """All turns of a model: seconds to the first token and tokens found, by tier, and the blocks they were measured in.

    A round holds one turn that was computed and ASKS from each tier.
    """

    first_s: dict[str, list[float]] = {}
    found: dict[str, list[int]] = {}
    blocks: list[RoundsBlock] = []

    @property
    def rounds(self) -> int:
        """Return how many rounds were measured."""
        return sum(block.rounds for block in self.blocks)

    def add(self, turns: Mapping[str, Sequence[Turn]]) -> None:
        """Add the turns of a round, by tier."""
        for tier, some in turns.items():
            self.first_s.setdefault(tier, []).extend(turn.first_s for turn in some)
            self.found.setdefault(tier, []).extend(turn.found for turn in some)

    def still(self) -> list[bool]:
        """Say of each round whether the machine was still during its block; of all, if it never was."""
        kept = [still_blocks([each.before, each.after])[0] for each in self.blocks]
        if not any(kept):
            kept = [True] * len(kept)
        found = zip(kept, self.blocks, strict=True)
        return [still for still, block in found for _ in range(block.rounds)]


class TurnsKept(msgspec.Struct):
    """What was measured so far, by model."""

    models: dict[str, ModelTurns] = {}


def run(options: BenchOptions) -> Body:
    """Measure S, M and L (quick: S), or those whose names hold `options.only`."""
    tiers.SPARE = (
        1.0  # every idle page is copied to the host at once, so that each tier can be asked alone
    )
    partial = PartialResults(options, TurnsKept)
    for name in ("S",) if options.quick else MODELS:
        if options.only in name:
            rounds = options.rounds(ROUNDS, 10)
            rounds = min(rounds, ROUNDS_OF_L) if name == "L" else rounds
            asyncio.run(_measure(name, rounds, partial, options))
    return describe(partial.kept, partial.left)


def describe(kept: TurnsKept, left: int = 0) -> Body:
    """Turn rounds into a table and verdicts; those of blocks in which the machine's speed moved do not count."""
    body, rows, dropped = Body(left=left), [], []
    for name, model in kept.models.items():
        if not model.rounds:
            continue
        body.samples[name] = msgspec.to_builtins(model)
        still = model.still()
        dropped.append(f"{still.count(False)} of {len(still)} of {name}")
        computed = list(compress(model.first_s["computed"], still))
        for tier in TIERS:
            asked = list(compress(_by_round(model.first_s[tier]), still))
            turns = [seconds for each in asked for seconds in each]
            ratio = stats.paired_ratio([each[0] for each in asked], computed)
            p99 = _tail(turns)
            rows.append(
                [
                    name, str(TOKENS[name]), tier, f"{1e3 * median(turns):.1f}", f"{1e3 * median(computed):.1f}",
                    f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
                    f"{p99['value']:.2f} [{p99['low']:.2f}, {p99['high']:.2f}]",
                    f"{1e3 * max(turns):.0f}", str(len(turns)),
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
    body.notes.append(f"Rounds dropped, since the machine's speed moved: {', '.join(dropped)}.")
    return body


def _by_round(seconds: Sequence[float]) -> list[Sequence[float]]:
    """Return a tier's turns in groups of a round."""
    return [seconds[start : start + ASKS] for start in range(0, len(seconds), ASKS)]


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
    name: str, rounds: int, partial: PartialResults[TurnsKept], options: BenchOptions
) -> None:
    """Measure a model's rounds that are not kept yet, in blocks."""
    kept = partial.kept.models.setdefault(name, ModelTurns())
    if kept.rounds >= rounds or not partial.begins(rounds - kept.rounds):
        return
    path, kind = model_of(name, options)
    runner = TorchExecutor.load(
        path, device="cpu", dtype=kind, kv_bytes=MEMORY[name], host_bytes=MEMORY[name]
    )
    with PagesRedis(2 * PAGES_BYTES) as redis:
        config = WorkerConfig(
            pages_url=redis.url, page_publish="through", pages_bytes=PAGES_BYTES, pages_ttl_s=60
        )
        async with Tiered(runner, config) as engine:
            for number in range(WARMING):
                await _round(engine, name, random.Random(f"{options.seed} {name} warm {number}"))
            peak = Peak()
            while kept.rounds < rounds and partial.begins(rounds - kept.rounds):
                before, block = peak.now(), []
                for number in range(kept.rounds, min(rounds, kept.rounds + BLOCK[name])):
                    draw = random.Random(f"{options.seed} {name} {number}")
                    block.append(await _round(engine, name, draw))
                kept.blocks.append(RoundsBlock(len(block), before, peak.now()))
                for each in block:
                    kept.add(each)
                partial.save()


async def _round(engine: Tiered, name: str, draw: random.Random) -> dict[str, list[Turn]]:
    """Compute a new history, then ask for it from each tier; the engine and Redis have forgotten it afterwards."""
    length = TOKENS[name] + NEW_TOKENS
    prompt = [draw.randrange(engine.runner.shape.vocabulary) for _ in range(length)]
    computed = await engine.turn(prompt)
    await engine.save(prompt)
    await engine.put(prompt)
    turns = {"computed": [computed]}
    for tier in TIERS:
        turns[tier] = [await _ask(engine, prompt, tier, computed) for _ in range(ASKS)]
    assert engine.store is not None
    await engine.tiering.forget(engine.ids(prompt))  # else it is put again
    await engine.store.remove(engine.keys(prompt))
    return turns


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
