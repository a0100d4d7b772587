"""P3: never slower: first tokens with a tier of any speed and any share of the pages, against computing everything."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from bench import ROOT
from bench.document import BenchOptions, Body
from bench.engine.tiered import PagesRedis, Tiered
from bench.mesh import proc
from bench.simulation import never_slower
from bench.suites.p2 import model_of
from common.config import WorkerConfig
from engine.decoder.executor.torch_executor import TorchExecutor
from loadgen import stats

TOKENS = 935
HITS = (0.0, 0.5, 1.0)
SPEEDS = ("full", "100 MB/s", "30 MB/s", "5 MB/s", "hung", "dead")
ROUNDS = 100
MEMORY, PAGES_BYTES = 256 << 20, 3 << 30
SETTLE_S = 0.03
# On the virtual clock: the seconds of a page, where computing one takes 0.033 to 0.1.
VIRTUAL = {
    "0.5 ms": never_slower.Speed(),
    "5 ms": never_slower.Speed(page_s=0.005),
    "20 ms": never_slower.Speed(page_s=0.02),
    "50 ms": never_slower.Speed(page_s=0.05),
    "1 s": never_slower.Speed(page_s=1.0),
    "hung": never_slower.Speed(answers=0),
    "hangs after 10 answers": never_slower.Speed(answers=10),
    "dead": never_slower.Speed(dead=True),
}
VIRTUAL_TOKENS = (65, 300, 2055)


def run(options: BenchOptions) -> Body:
    """Sweep on S in process, and exactly on the virtual clock (quick: few turns)."""
    body = Body()
    _virtual(body, options)
    cells: list[list[Any]] = []
    for speed in ("full", "dead") if options.quick else SPEEDS:
        cells += asyncio.run(_measure(speed, options))
    rows = []
    for speed, share, ours, theirs, fetched in cells:
        ratio = stats.paired_ratio(ours, theirs)
        worst = float(np.percentile(np.array(ours) / median(theirs), 99))
        usual = float(np.percentile(np.array(theirs) / median(theirs), 99))
        rows.append(
            [
                speed, f"{share:.0%}", f"{1e3 * median(ours):.1f}", f"{1e3 * median(theirs):.1f}",
                f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
                f"{worst:.2f} / {usual:.2f}", f"{fetched:.1f}", str(len(ours)),
            ]
        )  # fmt: skip
        body.samples[f"{speed}, {share:.0%}"] = {"ours": ours, "theirs": theirs}
        body.met[f"p50, {speed}, {share:.0%}"] = stats.verdict(ratio, 1.03, 1.05, higher=False)
    columns = ["tier", "pages there", "ms", "computed ms", "ratio [95 %]", "p99 with / without"]
    body.table(
        f"First token after {TOKENS} tokens of S, in process",
        [*columns, "pages fetched", "pairs"],
        rows,
    )
    return body


def _virtual(body: Body, options: BenchOptions) -> None:
    rows, worst, middle = [], 0.0, 0.0
    for name, speed in VIRTUAL.items():
        for share in HITS:
            told = [name, f"{share:.0%}"]
            for tokens in VIRTUAL_TOKENS:
                turns = options.pick(200, 20)
                found = never_slower.compare([speed], share, tokens, seed=1, turns=turns)
                ratios = [ours / theirs for ours, theirs, _ in found]
                told.append(f"{median(ratios):.3f} / {max(ratios):.3f}")
                worst, middle = max(worst, *ratios), max(middle, median(ratios))
                body.samples[f"virtual, {name}, {share:.0%}, {tokens}"] = ratios
            rows.append(told)
    body.table(
        "On the virtual clock: median / worst ratio of a turn to computing it",
        ["seconds of a page", "pages there", *(f"{tokens} tokens" for tokens in VIRTUAL_TOKENS)],
        rows,
    )
    body.met["virtual, p50"] = "goal" if middle <= 1.03 else "must" if middle <= 1.05 else "missed"
    body.met["virtual, worst"] = "goal" if worst <= 1.10 else "must" if worst <= 1.15 else "missed"


@contextlib.contextmanager
def _way(redis: PagesRedis, speed: str) -> Iterator[str]:
    """Yield a URL by which Redis is as fast as it should be."""
    if not speed.endswith("MB/s"):
        yield redis.url
        return
    listen = redis.folder / "slow.sock"
    words = [listen, redis.url.removeprefix("unix://"), 1e6 * float(speed.split(maxsplit=1)[0])]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.workloads.throttle", *map(str, words)],
        cwd=ROOT,
        preexec_fn=proc.die_with_parent,  # noqa: PLW1509 - nothing else runs yet
    )
    try:
        yield f"unix://{listen}"
    finally:
        process.kill()
        process.wait()


async def _measure(speed: str, options: BenchOptions) -> list[list[Any]]:
    """Return (speed, share, seconds with the tier, without, pages fetched) of each share of pages."""
    path, kind = model_of("S", options)
    runner = TorchExecutor.load(path, device="cpu", dtype=kind, kv_bytes=MEMORY, host_bytes=MEMORY)
    found = []
    with PagesRedis(2 * PAGES_BYTES) as redis, _way(redis, speed) as url:
        fast = WorkerConfig(pages_url=redis.url, page_publish="through", pages_bytes=PAGES_BYTES)
        slow = WorkerConfig(pages_url=url, page_publish="back", pages_bytes=PAGES_BYTES)
        none = WorkerConfig(pages_url="none")
        async with Tiered(runner, none) as alone, Tiered(runner, slow) as ours:
            for share in HITS:
                prompts = []
                async with Tiered(runner, fast, pace=alone.pace) as writer:
                    prompts = await _prepare(writer, share, options)
                if speed in {"hung", "dead"} and share == HITS[0]:
                    redis.signal(signal.SIGSTOP if speed == "hung" else signal.SIGKILL)
                found.append([speed, share, *await _pairs(ours, alone, prompts)])
                if speed in {"hung", "dead"}:
                    break  # what it holds makes no difference
    return found


async def _prepare(writer: Tiered, share: float, options: BenchOptions) -> list[list[int]]:
    """Compute prompts and leave a share of their pages in Redis."""
    draw = random.Random(options.seed + math.ceil(10 * share))
    prompts = []
    assert writer.store is not None
    await writer.store.server.call("FLUSHALL")
    for _ in range(options.rounds(ROUNDS, 6) + 3):
        prompt = [draw.randrange(writer.runner.shape.vocabulary) for _ in range(TOKENS)]
        await writer.turn(prompt)
        await writer.put(prompt)
        writer.forget(prompt, "device")
        writer.forget(prompt, "host")
        gone = [key for key in writer.keys(prompt) if draw.random() >= share]
        await writer.store.remove(gone)
        prompts.append(prompt)
    return prompts


async def _pairs(
    ours: Tiered, alone: Tiered, prompts: list[list[int]]
) -> tuple[list[float], list[float], float]:
    sides: tuple[list[float], list[float]] = ([], [])
    fetched = 0
    for number, prompt in enumerate(prompts):
        order = ((ours, sides[0]), (alone, sides[1]))
        for engine, seconds in order if number % 2 else reversed(order):
            await asyncio.sleep(SETTLE_S)
            turn = await engine.turn(prompt)
            for tier in ("device", "host"):
                engine.forget(prompt, tier)
            if number >= 3:  # the first ones warm
                seconds.append(turn.first_s)
                fetched += turn.found
    return *sides, fetched / 32 / max(1, len(sides[0]))
