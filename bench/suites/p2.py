"""P2: the first token of a warm turn, by the tier its history is in, against computing it."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path
from statistics import median

from bench.document import BenchOptions, Body
from bench.engine.tiered import PagesRedis, Tiered
from bench.gpu import shapes
from common.config import WorkerConfig
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.kv import tiers
from loadgen import stats

TOKENS = {"S": 928, "M": 2048, "L": 2048}  # of history; S has no room for more
NEW_TOKENS = 7
ROUNDS, ROUNDS_OF_L = 300, 30
TIERS = ("device", "host", "redis")
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
            ratio = stats.paired_ratio(found[tier], found["computed"])
            rows.append(
                [
                    name, str(TOKENS[name]), tier, f"{1e3 * median(found[tier]):.1f}", f"{1e3 * cold:.1f}",
                    f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]", str(len(found[tier])),
                ]
            )  # fmt: skip
            goal, must = (0.25, 0.5) if tier == "redis" else (0.1, 0.2)
            if tier != "device":
                body.met[f"{name}, from {tier}"] = stats.verdict(ratio, goal, must, higher=False)
    columns = ["model", "history tokens", "from", "ms", "computed ms", "ratio [95 %]", "turns"]
    body.table("Time to the first token of a turn, in process", columns, rows)
    body.notes.append(
        "A turn of 7 new tokens after a history of full pages. Each round computes a new random history, then asks for "
        "it again from each tier alone, the others having forgotten it; the tokens are compared. Redis is on the same "
        "machine."
    )
    return body


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
                turns = {"computed": computed}
                for tier in TIERS:
                    if tier != "device":
                        engine.forget(prompt, "device")
                    if tier == "redis":
                        engine.forget(prompt, "host")
                    await asyncio.sleep(SETTLE_S)  # what follows a turn is not part of the next
                    turns[tier] = await engine.turn(prompt)
                    if turns[tier].tokens != computed.tokens:
                        raise RuntimeError(
                            f"{name}: from {tier} {turns[tier]}, computed {computed}"
                        )
                if number >= 0:
                    for tier, turn in turns.items():
                        found[tier].append(turn.first_s)
                        found[f"{tier} tokens found"].append(turn.found)
                assert engine.store is not None
                await engine.tiering.forget(engine.ids(prompt))  # else it is put again
                await engine.store.remove(engine.keys(prompt))
    return found
