"""P3 on the virtual clock: first tokens with a tier of any speed, beside computing everything, without noise."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.simulation import virtual_loop
from common.pages.identity import PAGE, PageId, root_id
from common.pages.keys import PageKey
from common.pages.store import TierDown
from engine.decoder.executor.interface import ModelShape
from engine.decoder.kv.prefetcher import Prefetcher
from engine.decoder.kv.tiers import TierPolicy
from engine.decoder.scheduler import Scheduler, StepLimits
from engine.decoder.sequence import TokenSequence

TIMEOUT_S = 2.0
ROW_S, SEEN_S, STEP_S = 1e-3, 1e-6, 5e-3  # of a row, of a position it sees, of a step
TOKENS = 512
_WAIT_S = 0.01


class TierSpeed(NamedTuple):
    """A tier: seconds to an answer, and of a page; how many answers come before it hangs or is dead."""

    latency_s: float = 0.0005
    page_s: float = 0.0005
    answers: float = float("inf")
    dead: bool = False


class FirstToken(NamedTuple):
    """Seconds to the first token, and pages that came from the tier."""

    first_s: float
    fetched: int


def price(depth: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what computing a page costs."""
    seconds: NDArray[np.float64] = PAGE * (ROW_S + SEEN_S * PAGE * (depth + 0.5))
    return seconds


class _Store:
    """A tier of pages behind one line, which answers as fast as it is told to."""

    def __init__(self, held: set[PageId], speed: TierSpeed) -> None:
        self._held, self._speed, self._left = held, speed, speed.answers
        self._line = asyncio.Lock()

    async def _answer(self, seconds: float) -> None:
        if self._speed.dead:
            raise TierDown("dead")
        self._left -= 1
        if self._left < 0:
            await asyncio.sleep(TIMEOUT_S)
            raise TierDown("hung")
        async with self._line:
            await asyncio.sleep(seconds)

    async def where(self, keys: Sequence[PageKey]) -> list[str | None]:
        await self._answer(self._speed.latency_s)
        return ["redis" if key.id in self._held else None for key in keys]

    async def get_many(self, keys: Sequence[PageKey]) -> list[bytes | None]:
        await self._answer(self._speed.latency_s + self._speed.page_s * len(keys))
        return [key.id for key in keys]


class _LoopClock:
    """The virtual clock of the running event loop."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


class _Copier:
    async def fill(self, _pages: Sequence[tuple[PageKey, int, bytes]]) -> dict[PageKey, str]:
        """Nothing is to be copied, and all is sound."""
        return {}


class TierTurns:
    """A scheduler and a prefetcher that go through turns one by one; what a prefetcher learns, it keeps."""

    def __init__(self, speed: TierSpeed, *, fetches: bool = True) -> None:
        shape = ModelShape([None], [1], 4096, 1 << 20, 50, 4096)
        self._scheduler = Scheduler(shape, StepLimits(TOKENS, 8), TierPolicy("lru", price))
        self._held: set[PageId] = set()
        self._order = 0
        self.prefetcher: Prefetcher | None = None
        if fetches:
            store: Any = _Store(self._held, speed)
            copier: Any = _Copier()
            clock: Any = _LoopClock()
            self.prefetcher = Prefetcher(store, self._scheduler, copier, price, lambda: None, clock)

    async def turn(self, prompt: Sequence[int], hits: float, seed: int) -> FirstToken:
        """Compute one token after a prompt of which the tier has a share of the pages."""
        loop = asyncio.get_running_loop()
        sequence = TokenSequence(
            "", 0, self._order, prompt, root=root_id("0f", str(self._order)), most=len(prompt) + 1
        )
        self._order += 1
        rng = random.Random(seed)
        self._held.clear()
        self._held.update(page for page in sequence.ids if rng.random() < hits)
        began = loop.time()
        before = 0 if self.prefetcher is None else self.prefetcher.fetched["redis"]
        self._scheduler.add(sequence)
        if self.prefetcher is not None:
            self.prefetcher.begin(sequence)
        while not sequence.over:
            parts = self._scheduler.step(now_s=loop.time())
            for move in self._scheduler.loads:
                self._scheduler.moved(move, sound=True)
            if not parts:
                left = sequence.hold_until_s - loop.time()
                await asyncio.sleep(min(_WAIT_S, max(left, 1e-6)))
                continue
            (part,) = parts
            await asyncio.sleep(STEP_S + sum(ROW_S + SEEN_S * at for at in part.positions))
            self._scheduler.commit(part, 1 if part.draws else None)
            if part.draws:
                self._scheduler.drop([sequence])
        after = 0 if self.prefetcher is None else self.prefetcher.fetched["redis"]
        return FirstToken(loop.time() - began, after - before)


def compare(
    speeds: Sequence[TierSpeed], hits: float, tokens: int, *, seed: int, turns: int
) -> list[tuple[float, float, int]]:
    """Return (with the tier, without, pages fetched) of each turn; the tier's speed changes from turn to turn."""

    async def sides() -> list[tuple[float, float, int]]:
        rng = random.Random(seed)
        alone = TierTurns(TierSpeed(), fetches=False)
        with_tier = TierTurns(speeds[0])
        assert with_tier.prefetcher is not None
        found = []
        for turn in range(turns):
            prompt = [rng.randrange(50) for _ in range(tokens)]
            with_tier.prefetcher._store._speed = speeds[turn % len(speeds)]  # type: ignore[attr-defined]
            ours = await with_tier.turn(prompt, hits, seed + turn)
            theirs = await alone.turn(prompt, hits, seed + turn)
            found.append((ours.first_s, theirs.first_s, ours.fetched))
        await with_tier.prefetcher.close()
        return found

    return virtual_loop.run(sides())
