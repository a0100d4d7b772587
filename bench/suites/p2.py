"""P2: the first token of a warm turn, by the tier its history is in, against computing it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from bench.document import BenchOptions, Body
from bench.engine.tiered import PagesRedis, Tiered, Turn
from bench.gpu import shapes
from bench.partial import PartialResults
from bench.peak import Peak, Speed, counting, still_blocks
from bench.workloads.warm_turns import GOALS, MUSTS, TAIL, TIERS
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
MEMORY = {"S": 256 << 20, "M": 512 << 20, "L": 1 << 30}
PAGES_BYTES = 1 << 30
SETTLE_S = 0.05
MODELS = {"S": ("spillway-demo", "fp32"), "M": ("llama-85m", "bf16"), "L": ("llama-1b", "bf16")}


class AskedTurn(NamedTuple):
    """A turn's seconds to its first token, and how many of the prompt's tokens were found."""

    first_s: float
    found: int


class RoundsBlock(msgspec.Struct):
    """Some rounds, and the machine's speed before and after them; a round holds its turns by tier.

    One turn of a round was computed, and ASKS are from each tier.
    """

    before: Speed
    after: Speed
    rounds: list[dict[str, list[AskedTurn]]]


class TurnsKept(msgspec.Struct):
    """What was measured so far, by model."""

    blocks: dict[str, list[RoundsBlock]] = {}


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
    for name, blocks in kept.blocks.items():
        if not blocks:
            continue
        body.samples[name] = msgspec.to_builtins(blocks)
        still = counting(all(still_blocks([each.before, each.after])) for each in blocks)
        rounds = [each for block in compress(blocks, still) for each in block.rounds]
        dropped.append(f"{_rounds(blocks) - len(rounds)} of {_rounds(blocks)} of {name}")
        computed = [each["computed"][0].first_s for each in rounds]
        for tier in TIERS:
            turns = [turn.first_s for each in rounds for turn in each[tier]]
            ratio = stats.paired_ratio([each[tier][0].first_s for each in rounds], computed)
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


def _rounds(blocks: Sequence[RoundsBlock]) -> int:
    return sum(len(block.rounds) for block in blocks)


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
    kept = partial.kept.blocks.setdefault(name, [])
    left = rounds - _rounds(kept)
    if left <= 0 or not partial.begins(left):
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
            while (left := rounds - (done := _rounds(kept))) > 0 and partial.begins(left):
                before = peak.now()
                block = [
                    await _round(engine, name, random.Random(f"{options.seed} {name} {number}"))
                    for number in range(done, done + min(left, BLOCK[name]))
                ]
                kept.append(RoundsBlock(before, peak.now(), block))
                partial.save()


async def _round(engine: Tiered, name: str, draw: random.Random) -> dict[str, list[AskedTurn]]:
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
    return {
        tier: [AskedTurn(turn.first_s, turn.found) for turn in asked]
        for tier, asked in turns.items()
    }


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
