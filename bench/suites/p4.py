"""P4: restored pages are exact: conversations split at random, pages fetched or computed again, in every tier."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

import msgspec

from bench.document import BenchOptions, Body
from bench.engine import page_splits
from bench.engine.page_splits import COMPILED, PLAIN, STREAMS, TURNS, PageBits, SplitCounts
from bench.engine.tiered import PagesRedis, Tiered
from bench.partial import PartialResults
from bench.suites.p2 import MEMORY, model_of
from common.config import WorkerConfig
from engine.decoder.executor.torch_executor import TorchExecutor

SPLITS, OF_PLAIN, OF_REDIS = 10_000, 600, 2_000
RUN = STREAMS * (TURNS - 1)  # splits
BLOCK = 60  # runs between which the counts are stored
CHUNKS = (7, 32, 64, 200)
PAGES_BYTES = 256 << 20
REDIS = "spillway-demo fp32, Redis"


class SplitsKept(msgspec.Struct):
    """Counts by model, and how many runs they are of."""

    counts: dict[str, SplitCounts] = {}
    runs: dict[str, int] = {}


def run(options: BenchOptions) -> Body:
    """Split 10,000 times between device and host, 600 times in plain torch, 2,000 times from Redis (quick: 12 each)."""
    partial = PartialResults(options, SplitsKept)
    for kind in (*COMPILED, PLAIN):
        splits = SPLITS // len(COMPILED) if kind != PLAIN else OF_PLAIN
        with tempfile.TemporaryDirectory() as folder:
            _between_tiers(
                kind, Path(folder), -(-options.rounds(splits, 12) // RUN), partial, options
            )
    asyncio.run(_from_redis(options.rounds(OF_REDIS, 12), partial, options))
    return describe(partial.kept, partial.left)


def describe(kept: SplitsKept, left: int = 0) -> Body:
    """Turn counts into a table and verdicts."""
    body = Body(samples=msgspec.to_builtins(kept), left=left)
    rows = []
    for kind, counts in kept.counts.items():
        pages = (
            f"{counts.pages.get(tier, 0):,}" for tier in ("device", "host", "redis", "computed")
        )
        rows.append([
            kind, f"{counts.splits:,}", f"{counts.multiples:,}", *pages, f"{counts.compared:,}",
            f"{counts.damaged} / {counts.unsound}", str(len(counts.wrong)),
        ])  # fmt: skip
    columns = [
        "model",
        "splits",
        "at exact pages",
        "pages from device",
        "host",
        "redis",
        "computed",
    ]
    columns += ["compared bit by bit", "damaged / found so", "wrong"]
    body.table("", columns, rows)
    several = kept.counts.values()
    wrong = [line for counts in several for line in counts.wrong]
    whole = sum(counts.splits for counts in several) >= SPLITS
    multiples = all(counts.multiples for counts in several)
    read = {tier for counts in several for tier, count in counts.pages.items() if count}
    body.met["every split exact"] = "missed" if wrong else "goal"
    body.met[f"{SPLITS:,} splits"] = "goal" if whole else "missed"
    body.met["exact pages, and every tier, among them"] = (
        "goal" if multiples and read >= {"device", "host", "redis", "computed"} else "missed"
    )
    body.notes.append(
        "A split: a turn after a history of random length; before it pages anywhere in the history were evicted, "
        "dropped from a tier, or damaged. Every page on the device, fetched or computed again in other steps, has the "
        "bits that its id had first; greedy tokens are those of the whole prompt computed alone, without exception."
    )
    body.notes.append(
        f"Random models without windows, with windows in some layers, and in all; {PLAIN}: tokens only, since torch's "
        "products depend on the batch. From Redis: the shipped model, up to half of the pages missing there."
    )
    body.notes += [f"WRONG: {line}" for line in wrong[:10]]
    return body


def _between_tiers(
    kind: str, folder: Path, runs: int, partial: PartialResults[SplitsKept], options: BenchOptions
) -> None:
    sides = None
    while (done := partial.kept.runs.get(kind, 0)) < runs:
        if not partial.begins():
            return
        sides = sides or page_splits.sides(kind, folder)
        counts = partial.kept.counts.setdefault(kind, SplitCounts())
        for number in range(done, min(runs, done + BLOCK)):
            seed = options.seed + number
            counts.add(page_splits.converse(sides, seed, random.Random(seed).choice(CHUNKS)))
        partial.kept.runs[kind] = min(runs, done + BLOCK)
        partial.save()


async def _from_redis(
    splits: int, partial: PartialResults[SplitsKept], options: BenchOptions
) -> None:
    path, weights = model_of("S", options)

    def load() -> TorchExecutor:
        return TorchExecutor.load(
            path, device="cpu", dtype=weights, kv_bytes=MEMORY["S"], host_bytes=MEMORY["S"]
        )

    if partial.kept.runs.get(REDIS, 0) >= splits:
        return
    with PagesRedis(2 * PAGES_BYTES) as redis:
        config = WorkerConfig(
            pages_url=redis.url, page_publish="through", pages_bytes=PAGES_BYTES, pages_ttl_s=60
        )
        async with (
            Tiered(load(), config) as engine,
            Tiered(load(), WorkerConfig(pages_url="none"), pace=engine.pace) as alone,
        ):
            while (done := partial.kept.runs.get(REDIS, 0)) < splits:
                if not partial.begins():
                    return
                counts = partial.kept.counts.setdefault(REDIS, SplitCounts())
                for number in range(done, min(splits, done + BLOCK)):
                    bits = PageBits(engine.runner, engine.tiers)
                    found = await page_splits.from_redis(engine, alone, bits, options.seed + number)
                    counts.add(found)
                partial.kept.runs[REDIS] = min(splits, done + BLOCK)
                partial.save()
