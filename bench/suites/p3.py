"""P3: never slower: first tokens with a tier of any speed and any share of the pages, against computing everything."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import msgspec

from bench import ROOT
from bench.document import BenchOptions, Body
from bench.engine.tiered import PagesRedis, Tiered
from bench.mesh import proc
from bench.partial import PartialResults
from bench.peak import Peak, Speed, counting, still_blocks
from bench.simulation import never_slower
from bench.suites.p2 import model_of
from common.config import WorkerConfig
from engine.decoder.executor.torch_executor import TorchExecutor
from loadgen import stats

TOKENS = 935
HITS = (0.0, 0.5, 1.0)
SPEEDS = ("full", "100 MB/s", "30 MB/s", "5 MB/s")
BROKEN = ("hung", "dead")  # what such a tier holds makes no difference
QUADS, BLOCK = 1000, 20
WARMING = 3  # turns that an engine has had before it counts as warm
MEMORY, PAGES_BYTES = 256 << 20, 3 << 30
SETTLE_S = 0.03
# On the virtual clock: the seconds of a page, where computing one takes 0.033 to 0.1.
VIRTUAL = {
    "0.5 ms": never_slower.TierSpeed(),
    "5 ms": never_slower.TierSpeed(page_s=0.005),
    "20 ms": never_slower.TierSpeed(page_s=0.02),
    "50 ms": never_slower.TierSpeed(page_s=0.05),
    "1 s": never_slower.TierSpeed(page_s=1.0),
    "hung": never_slower.TierSpeed(answers=0),
    "hangs after 10 answers": never_slower.TierSpeed(answers=10),
    "dead": never_slower.TierSpeed(dead=True),
}
VIRTUAL_TOKENS = (65, 300, 2055)


class TierCell(NamedTuple):
    """A tier of a speed that has a share of the pages."""

    speed: str
    share: float

    @property
    def name(self) -> str:
        """Return its key in the stored samples."""
        return f"{self.speed}, {self.share:.0%}"


CELLS = (*(TierCell(s, h) for s in SPEEDS for h in HITS), *(TierCell(s, 0.0) for s in BROKEN))


class CellQuads(msgspec.Struct):
    """All quads of a cell: seconds of two turns with the tier and of two without, and the pages fetched."""

    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    fetched: int = 0


class QuadsKept(msgspec.Struct):
    """What was measured so far: by cell, and the machine's speed before and after each block of rounds."""

    cells: dict[str, CellQuads] = {}
    blocks: list[tuple[Speed, Speed]] = []
    rounds: int = 0


def run(options: BenchOptions) -> Body:
    """Measure quads of turns on S in process, and the virtual clock exactly (quick: two cells, few quads)."""
    partial = PartialResults(options, QuadsKept)
    asyncio.run(_measure(partial, options))
    body = describe(partial.kept, partial.left)
    _virtual(body, options)
    return body


def cells(options: BenchOptions) -> list[TierCell]:
    """Return the cells of this kind of run whose names hold `options.only`."""
    chosen = (CELLS[0], CELLS[-1]) if options.quick else CELLS
    return [cell for cell in chosen if options.only in cell.name]


def describe(kept: QuadsKept, left: int = 0) -> Body:
    """Turn quads into a table and verdicts; those of blocks in which the machine's speed moved do not count."""
    body = Body(
        samples={"cells": msgspec.to_builtins(kept.cells), "blocks": kept.blocks}, left=left
    )
    still = counting(still_blocks(pair)[0] for pair in kept.blocks)
    rows = []
    for cell in CELLS:
        if cell.name not in kept.cells:
            continue
        found = kept.cells[cell.name]
        quads = list(zip(found.ours, found.theirs, strict=True))
        quads = [quad for number, quad in enumerate(quads) if still[number // BLOCK]]
        ours = [value for mine, _ in quads for value in mine]
        theirs = [value for _, other in quads for value in other]
        ratio = stats.interval([_ratio(*quad) for quad in quads])
        tail = stats.ratio_of(ours, theirs, 99.0)
        rows.append([
            cell.speed, f"{cell.share:.0%}", f"{1e3 * median(ours):.1f}", f"{1e3 * median(theirs):.1f}",
            _said(ratio), _said(tail), f"{found.fetched / 2 / len(found.ours):.1f}", str(len(quads)),
        ])  # fmt: skip
        body.met[f"p50, {cell.name}"] = stats.verdict(ratio, 1.03, 1.05, higher=False)
        word = stats.verdict(tail, 1.10, 1.15, higher=False, width=stats.TAIL)
        body.met[f"p99, {cell.name}"] = word
    columns = ["tier", "pages there", "ms", "computed ms", "p50: ratio [95 %]", "p99: ratio [95 %]"]
    body.table(
        f"First token after {TOKENS} tokens of S, in process",
        [*columns, "pages fetched", "quads"],
        rows,
    )
    body.notes.append(
        "A quad: two new prompts, each computed by an engine with the tier and by one without; with, without, without, "
        "with, or the other way round. Its ratio is the geometric mean of both prompts', so that who came first or "
        "later cancels out. Every round visits all cells in an order of its own; in every other quad the engine with "
        "the tier is a new one that has learned nothing of it."
    )
    body.notes.append(f"{still.count(False)} of {len(still)} blocks of {BLOCK} rounds dropped.")
    return body


def _ratio(ours: tuple[float, float], theirs: tuple[float, float]) -> float:
    return math.sqrt(math.prod(ours) / math.prod(theirs))


def _said(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


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


# -- quads -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Engines:
    """The engine without a tier, the one that leaves pages in Redis, and a warm one for each cell, on one runner."""

    runner: TorchExecutor
    alone: Tiered
    writer: Tiered
    urls: dict[str, str]
    warm: dict[str, Tiered]

    @contextlib.asynccontextmanager
    async def of(self, cell: TierCell, *, cold: bool) -> AsyncIterator[Tiered]:
        """Yield an engine of a cell: a new one that ends with the block, or the warm one."""
        if not cold:
            yield self.warm[cell.name]
            return
        async with Tiered(self.runner, _config(self.urls[cell.speed]), pace=self.alone.pace) as new:
            yield new


def _config(url: str) -> WorkerConfig:
    return WorkerConfig(pages_url=url, page_publish="back", pages_bytes=PAGES_BYTES)


async def _measure(partial: PartialResults[QuadsKept], options: BenchOptions) -> None:
    rounds, kept, chosen = options.rounds(QUADS, 4), partial.kept, cells(options)
    if kept.rounds >= rounds:
        return
    async with contextlib.AsyncExitStack() as stack:
        engines = await _start(stack, chosen, options)
        peak = Peak()
        while kept.rounds < rounds:
            if not partial.begins():
                return
            before = peak.now()
            end = min(rounds, kept.rounds + BLOCK)
            for number in range(kept.rounds, end):
                draw = random.Random(f"{options.seed} {number}")
                for cell in draw.sample(chosen, len(chosen)):
                    found = kept.cells.setdefault(cell.name, CellQuads())
                    await _quad(engines, cell, number, draw, found)
            kept.blocks.append((before, peak.now()))
            kept.rounds = end
            partial.save()


async def _start(
    stack: contextlib.AsyncExitStack, chosen: list[TierCell], options: BenchOptions
) -> _Engines:
    path, kind = model_of("S", options)
    runner = TorchExecutor.load(path, device="cpu", dtype=kind, kv_bytes=MEMORY, host_bytes=MEMORY)
    redis = stack.enter_context(PagesRedis(2 * PAGES_BYTES))
    urls = {speed: stack.enter_context(_way(redis, speed)) for speed in SPEEDS}
    for speed in BROKEN:
        server = stack.enter_context(PagesRedis(PAGES_BYTES))
        server.signal(signal.SIGSTOP if speed == "hung" else signal.SIGKILL)
        urls[speed] = server.url
    alone = await stack.enter_async_context(Tiered(runner, WorkerConfig(pages_url="none")))
    through = WorkerConfig(pages_url=redis.url, page_publish="through", pages_bytes=PAGES_BYTES)
    writer = await stack.enter_async_context(Tiered(runner, through, pace=alone.pace))
    engines = _Engines(runner, alone, writer, urls, {})
    for cell in chosen:
        engine = Tiered(runner, _config(urls[cell.speed]), pace=alone.pace)
        engines.warm[cell.name] = await stack.enter_async_context(engine)
        draw = random.Random(f"{options.seed} {cell.name}")
        for _ in range(WARMING):
            prompt = await _prepare(engines, cell, draw)
            await _turn(engine, prompt)
            await _tidy(engines, cell, prompt)
    return engines


@contextlib.contextmanager
def _way(redis: PagesRedis, speed: str) -> Iterator[str]:
    """Yield a URL by which Redis is as fast as it should be."""
    if not speed.endswith("MB/s"):
        yield redis.url
        return
    rate = speed.split(maxsplit=1)[0]
    listen = redis.folder / f"slow-{rate}.sock"
    words = [listen, redis.url.removeprefix("unix://"), 1e6 * float(rate)]
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


async def _quad(
    engines: _Engines, cell: TierCell, number: int, draw: random.Random, found: CellQuads
) -> None:
    """Measure two new prompts on either side; every other quad begins without the tier, every other pair is cold."""
    cold = number // 2 % 2 == 0
    ours, theirs, order = list[float](), list[float](), (True, False, False, True)
    prompts = [await _prepare(engines, cell, draw) for _ in range(2)]
    for place, first in enumerate(order):
        prompt = prompts[place // 2]
        if first == (number % 2 == 0):
            async with engines.of(cell, cold=cold) as engine:
                turn = await _turn(engine, prompt)
            ours.append(turn[0])
            found.fetched += turn[1]
        else:
            theirs.append((await _turn(engines.alone, prompt))[0])
    for prompt in prompts:
        await _tidy(engines, cell, prompt)
    found.ours.append((ours[0], ours[1]))
    found.theirs.append((theirs[0], theirs[1]))


async def _turn(engine: Tiered, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to a prompt's first token, and the pages fetched; the engine then forgets it."""
    await asyncio.sleep(SETTLE_S)
    turn = await engine.turn(prompt)
    for tier in ("device", "host"):
        engine.forget(prompt, tier)
    return turn.first_s, turn.found // 32


async def _prepare(engines: _Engines, cell: TierCell, draw: random.Random) -> list[int]:
    """Return a new prompt of which Redis has the cell's share of pages."""
    writer = engines.writer
    prompt = [draw.randrange(writer.runner.shape.vocabulary) for _ in range(TOKENS)]
    if cell.speed in BROKEN:
        return prompt
    assert writer.store is not None
    await writer.turn(prompt)
    await writer.put(prompt)
    for tier in ("device", "host"):
        writer.forget(prompt, tier)
    await writer.store.remove([key for key in writer.keys(prompt) if draw.random() >= cell.share])
    return prompt


async def _tidy(engines: _Engines, cell: TierCell, prompt: list[int]) -> None:
    writer = engines.writer
    if cell.speed not in BROKEN:
        assert writer.store is not None
        await writer.tiering.forget(writer.ids(prompt))  # else it is put again
        await writer.store.remove(writer.keys(prompt))
