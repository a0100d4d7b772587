"""P4: conversations split at random, whose pages are evicted, dropped, damaged and restored between their turns.

Every page that lies on the device has the bits that its id always had, computed or restored; every answer is the one
of the whole prompt computed alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from bench.engine import random_models
from bench.engine.driver import Driver
from bench.engine.tiered import Tiered
from common.pages.identity import PAGE, PageId
from engine.decoder.executor.page_copier import TorchPageCopier
from engine.decoder.executor.torch_executor import TorchExecutor
from engine.decoder.kv.eviction.policy import NAMES
from engine.decoder.kv.tiers import PageTiers, TierPolicy
from engine.decoder.scheduler import StepLimits

DEVICE, HOST = (
    16,
    60,
)  # pages: the device has too few for all histories, so that they come back from the host
NEW, TURNS, STREAMS = 24, 3, 5
# With windows in no layer, in some, and in all; the last one in torch's own operations.
COMPILED = ("llama fp32", "qwen2 bf16", "mistral int8")
PLAIN = "llama torch"


class SplitSides(NamedTuple):
    """The same model twice: with few pages in two tiers, and with many in one, to compare with."""

    runner: TorchExecutor
    oracle: TorchExecutor


class SplitCounts(msgspec.Struct):
    """What was split and compared; `wrong` says, by seed, what was not as it should be.

    `splits`: turns that came after a history; `multiples`: those whose history or prompt ends a page; `pages`: how many
    came from each tier, and were computed; `compared`: pages whose bits were compared with those their id had before;
    `damaged` copies, and `unsound` ones that were found so.
    """

    splits: int = 0
    multiples: int = 0
    pages: dict[str, int] = {}
    compared: int = 0
    damaged: int = 0
    unsound: int = 0
    wrong: list[str] = []

    def add(self, other: SplitCounts) -> None:
        """Add what another run counted."""
        for name in self.__struct_fields__:
            if name != "pages":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.pages = dict(Counter(self.pages) + Counter(other.pages))

    def split(self, history: int, prompt: int) -> None:
        """Count a turn whose prompt of so many tokens begins with a history of so many."""
        self.splits += 1
        self.multiples += history % PAGE == 0 or prompt % PAGE == 0


class PageBits:
    """What every page that ever had an id held: an id names its bytes, computed or restored, in any tier."""

    def __init__(self, runner: TorchExecutor, tiers: PageTiers) -> None:
        assert isinstance(runner.copier, TorchPageCopier)
        self._tiers, self._copier = tiers, runner.copier
        self._known: dict[tuple[int, PageId], bytes] = {}

    def look(self, counts: SplitCounts, what: object) -> None:
        """Compare what lies on the device now with what the same ids held before."""
        for group, pool in enumerate(self._tiers.device):
            data = self._copier._device[group].raw()
            for page_id, page in pool._by_id.items():
                held = data[page].tobytes()
                before = self._known.setdefault((group, page_id), held)
                counts.compared += before is not held
                if before != held:
                    counts.wrong.append(f"{what}: page {page_id.hex()} has other bits")

    def flip(self, rng: random.Random) -> bool:
        """Flip one bit of a page of the host; False if it has none that rests there."""
        group = rng.randrange(len(self._tiers.host))
        pool = self._tiers.host[group]
        resting = [page for page in pool._by_id.values() if not pool.references(page)]
        if not resting:
            return False
        memory = self._copier._bytes[group][rng.choice(resting)]
        memory[rng.randrange(len(memory)), rng.randrange(memory.shape[1])] ^= np.uint8(
            1 << rng.randrange(8)
        )
        return True

    def drop(self, rng: random.Random) -> None:
        """Evict pages anywhere, leading, middle or last, from a tier."""
        group = rng.randrange(len(self._tiers.device))
        pool = rng.choice((self._tiers.device, self._tiers.host))[group]
        resting = [name for name, page in pool._by_id.items() if not pool.references(page)]
        for page_id in rng.sample(resting, rng.randint(0, len(resting))):
            pool.forget(page_id)


def sides(kind: str, folder: Path, threads: int = 2) -> SplitSides:
    """Return both sides of a model such as "llama fp32", a family and its weights' bits, written to `folder`."""
    family, weights = kind.split()
    random_models.write(folder, family, random_models.windowed(family, 1))
    compiled = weights != "torch"
    load = partial(
        TorchExecutor.load,
        str(folder),
        device="cpu",
        dtype=weights if compiled else "fp32",
        compiled=compiled,
        threads=threads,
    )
    oracle = load(kv_bytes=8 << 20)
    each = sum(oracle.shape.page_bytes)
    return SplitSides(load(kv_bytes=DEVICE * each, host_bytes=HOST * each), oracle)


def converse(sides: SplitSides, seed: int, chunk: int) -> SplitCounts:
    """Hold conversations in steps of `chunk` tokens, split at random, exact page multiples among them.

    Between turns pages are evicted, dropped, and one on the host is damaged.
    """
    rng, counts = random.Random(seed), SplitCounts()
    driver = Driver(sides.runner, StepLimits(chunk, STREAMS), TierPolicy(rng.choice(NAMES)))
    bits = PageBits(sides.runner, driver.tiers)
    lengths = (rng.choice((PAGE, 2 * PAGE, rng.randint(1, 130))) for _ in range(STREAMS))
    histories = [text(rng, length) for length in lengths]
    for turn in range(TURNS):
        past = [len(history) for history in histories]
        asked = []
        for history in histories:
            if turn and rng.random() < 0.8:  # else the same again, answer included, and nothing new
                history.extend(text(rng, rng.randint(1, 40)))
            if len(history) % PAGE and rng.random() < 0.5:
                history.extend(text(rng, PAGE - len(history) % PAGE))  # a prompt that ends a page
            left = PAGE - len(history) % PAGE
            new = left if left <= NEW and rng.random() < 0.3 else rng.randint(1, NEW)
            asked.append(driver.add(history, new))
        driver.run()
        driver.settle()
        if sides.runner.exact:
            bits.look(counts, f"seed {seed}, turn {turn}")
        expected = _alone(sides, [(sequence.prompt, len(sequence.output)) for sequence in asked])
        for sequence, history, answer, before in zip(asked, histories, expected, past, strict=True):
            if turn:
                counts.split(before, len(sequence.prompt))
            if sequence.output != answer:
                counts.wrong.append(f"seed {seed}, turn {turn}: {sequence.output} is not {answer}")
            history.extend(answer)
        counts.damaged += bits.flip(rng)
        bits.drop(rng)
    counts.unsound, counts.pages = driver.tiers.corrupt, dict(driver.tiers.found)
    if counts.unsound > counts.damaged:
        counts.wrong.append(f"seed {seed}: {counts.unsound} unsound, {counts.damaged} were damaged")
    driver.scheduler.check()
    return counts


def _alone(sides: SplitSides, asked: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    """Return what is generated where nothing was kept: every prompt is computed whole."""
    driver = Driver(sides.oracle, StepLimits(512, 8))
    sequences = [driver.add(prompt, new, str(n)) for n, (prompt, new) in enumerate(asked)]
    driver.run()
    assert not any(sequence.cached for sequence in sequences)
    return [sequence.output for sequence in sequences]


def text(rng: random.Random, length: int) -> list[int]:
    """Return random tokens of a random model's vocabulary."""
    return [rng.randrange(random_models.VOCABULARY) for _ in range(length)]


async def from_redis(engine: Tiered, alone: Tiered, bits: PageBits, seed: int) -> SplitCounts:
    """Split one conversation whose pages come back from Redis, some of which are missing or damaged there.

    The engines have runners of their own; `alone` has no tier and computes everything.
    """
    rng, counts = random.Random(seed), SplitCounts()
    vocabulary, store = engine.runner.shape.vocabulary, engine.store
    assert store is not None
    # Shorter histories are computed before the first page has come.
    length = rng.choice((PAGE * rng.randint(16, 27), rng.randint(16 * PAGE, 27 * PAGE)))
    history = [rng.randrange(vocabulary) for _ in range(length)]
    await engine.turn(history)
    await engine.put(history)
    bits.look(counts, f"seed {seed}")
    for tier in ("device", "host"):
        engine.forget(history, tier)
    missing = rng.choice((0.0, 0.2, 0.5))
    await store.remove([key for key in engine.keys(history) if rng.random() < missing])
    prompt = [*history, *(rng.randrange(vocabulary) for _ in range(rng.randint(1, 40)))]
    new = rng.randint(1, 4)
    before = Counter(engine.tiers.found)
    turn, expected = await engine.turn(prompt, new), await alone.turn(prompt, new)
    bits.look(counts, f"seed {seed}")
    counts.split(length, len(prompt))
    counts.pages = dict(Counter(engine.tiers.found) - before)
    if turn.tokens != expected.tokens:
        counts.wrong.append(f"seed {seed}: {turn.tokens} is not {expected.tokens}")
    for each in (engine, alone):
        for tier in ("device", "host"):
            each.forget(prompt, tier)
    await engine.tiering.forget(engine.ids(prompt))  # else it is put again
    await store.remove(engine.keys(prompt))
    return counts
