"""The prefetcher: fetches a sequence's missing pages to the host, from the last page down, until computing meets them.

Fetching begins when a job is accepted. Computing waits for fetching at most a small share of the time that computing
all missing pages would take.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from common import log
from common.clock import SYSTEM, Clock
from common.pages.store import PageKey, PageStore, Tier, TierDown, Value
from engine.decoder.executor.interface import PageCopier
from engine.decoder.kv import patience
from engine.decoder.kv.patience import Wait
from engine.decoder.kv.tier_breaker import TierBreaker
from engine.decoder.kv.tiers import Price
from engine.decoder.scheduler import Scheduler
from engine.decoder.sequence import TokenSequence

RISE = 1.25  # the largest factor by which one look-up raises the expected seconds
AT_ONCE, TOGETHER = 3, 4  # concurrent calls, and pages in each call
RECALL_S = 2.0  # the longest wait for a page on disk
# The pause between two reads of pages that kv_store brings from its disk: kv_store sends no notice, so these reads
# poll, for at most RECALL_S.
_POLL_S = 0.004
_log = log.get("engine")


@dataclass(slots=True)
class _Fetch:
    """A fetch of `count` pages for one sequence from one tier: `left` have not arrived yet, `came` have.

    `wanted` are the pages that were not requested yet. `compute_s` are the seconds to compute all the pages; `began_s`
    is the time at which the sequence began to wait.
    """

    tier: Tier
    sequence: TokenSequence
    wanted: deque[tuple[int, PageKey]]
    compute_s: float
    began_s: float
    count: int
    left: int
    came: int = 0
    held: bool = False


class Prefetcher:
    """Fetches pages for one scheduler and reports to it; `wake` is called when a step may use arrived pages."""

    def __init__(
        self,
        store: PageStore,
        scheduler: Scheduler,
        copier: PageCopier,
        price: Price,
        wake: Callable[[], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._store, self._scheduler, self._copier = store, scheduler, copier
        self._price, self._wake, self._now_s = price, wake, clock.monotonic
        self.breakers: dict[Tier, TierBreaker] = {"redis": TierBreaker(), "disk": TierBreaker()}
        self.fetched: Counter[str] = Counter()  # pages by tier
        self.corrupt = 0
        self._asking_s = _POLL_S / 4  # expected seconds of an undelayed look-up
        self._tasks: dict[asyncio.Task[None], TokenSequence] = {}

    def begin(self, sequence: TokenSequence) -> None:
        """Look up a waiting sequence's missing pages, and fetch the pages that arrive faster than they are computed."""
        missing = self._scheduler.table.lacks(sequence)
        prices, now = self._prices([page for page, _ in missing]), self._now_s()
        asked = max(breaker.asks(prices, now) for breaker in self.breakers.values())
        if not asked:
            return
        self._wait(sequence, patience.for_look_up(now, self._asking_s, sum(prices), len(missing)))
        task = asyncio.create_task(self._fetch(sequence, missing), name="fetch")
        self._tasks[task] = sequence
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("pages_not_fetched", exc_info=error)  # the sequence computes them

    def _prices(self, pages: Sequence[int]) -> list[float]:
        prices: list[float] = self._price(np.array(pages, dtype=np.float64)).tolist()
        return prices

    def _wait(self, sequence: TokenSequence, wait: Wait) -> None:
        self._scheduler.hold(sequence, wait.hold_until_s)
        self._scheduler.slow(sequence, wait.slow_until_s, wait.rows)

    def _wait_for(self, fetch: _Fetch) -> None:
        """Hold a sequence until its missing pages arrive, or limit its steps to few rows meanwhile.

        A sequence does not wait for a tier that was late, but its steps beside the fetch are small.
        """
        breaker = self.breakers[fetch.tier]
        if not fetch.left:
            return
        takes_s, now = breaker.predicted_s(fetch.left), self._now_s()
        wait = patience.for_fetch(now, fetch.began_s, takes_s, fetch.compute_s, fetch.count)
        if breaker.misses:
            wait = wait._replace(hold_until_s=0.0)
        if not fetch.came:
            fetch.held = bool(wait.hold_until_s)
        elif not fetch.held:
            return  # computing has begun, in small steps until the fetch ends
        self._wait(fetch.sequence, wait)

    async def let_end(self) -> None:
        """Wait for the end of all fetches for sequences that have left."""
        over = [task for task, sequence in self._tasks.items() if sequence.over]
        await asyncio.gather(*over, return_exceptions=True)

    async def close(self) -> None:
        """Stop fetching."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _fetch(self, sequence: TokenSequence, missing: list[tuple[int, int]]) -> None:
        ids = sequence.ids
        keys = [(page, PageKey(ids[page], group)) for page, group in missing]
        began = self._now_s()
        try:
            found = await self._store.where([key for _, key in keys])
            self._asking_s = min(self._now_s() - began, RISE * self._asking_s)
            self._scheduler.resume(sequence)
            for tier in ("redis", "disk"):
                there = [each for each, at in zip(keys, found, strict=True) if at == tier]
                await self._from(tier, sequence, there, began)
        except TierDown as error:
            breaker = self.breakers["redis"]
            if not breaker.misses:  # logged once per outage
                _log.warning("pages_not_fetched", error=str(error))
            breaker.failed(self._now_s())
        finally:
            self._scheduler.resume(sequence)
            self._wake()

    async def _from(
        self, tier: Tier, sequence: TokenSequence, there: list[tuple[int, PageKey]], began_s: float
    ) -> None:
        """Fetch pages from one tier, the most expensive to compute first."""
        breaker = self.breakers[tier]
        while there:
            began, prices = self._now_s(), self._prices([page for page, _ in there])
            count = breaker.asks(prices, began)
            if not count:
                return
            wanted, there = deque(there[:count]), there[count:]
            fetch = _Fetch(tier, sequence, wanted, sum(prices), began_s, count, count)
            self._wait_for(fetch)
            if tier == "disk":
                await self._store.recall([key for _, key in wanted])
            await asyncio.gather(*(self._some(fetch) for _ in range(AT_ONCE)))
            if fetch.came:
                now = self._now_s()
                breaker.came(fetch.came, now - began, now)

    async def _some(self, fetch: _Fetch) -> None:
        """Fetch a few pages at a time until all have arrived or are computed."""
        tiers, table = self._scheduler.table.tiers, self._scheduler.table
        tier, sequence, wanted = fetch.tier, fetch.sequence, fetch.wanted
        while wanted:
            targets: dict[PageKey, int] = {}
            while wanted and len(targets) < TOGETHER:
                page, key = wanted.popleft()
                if not table.awaits(sequence, page):
                    fetch.left -= 1
                    continue  # computing was faster
                if (target := tiers.bring(key.group, key.id)) is not None:
                    targets[key] = target
                else:
                    fetch.left -= 1
            came: set[PageKey] = set()
            try:
                values = await self._values(tier, sequence, list(targets))
                came = await self._keep(tier, targets, values)
            finally:
                for key, target in targets.items():
                    tiers.brought(key.group, key.id, target, tier if key in came else None)
                self.fetched[tier] += len(came)
                fetch.came += len(came)
                fetch.left -= len(targets)
            if came:
                self._wait_for(fetch)

    async def _keep(
        self, tier: Tier, targets: dict[PageKey, int], values: dict[PageKey, Value]
    ) -> set[PageKey]:
        """Write values to their host pages; return the pages with sound values."""
        pages = [(key, targets[key], value) for key, value in values.items()]
        wrong = await self._copier.fill(pages) if pages else {}
        for key, error in wrong.items():
            self.corrupt += 1
            _log.warning("page_corrupt", tier=tier, page=key.member, error=error)
        if wrong:
            await self._store.drop(list(wrong))
        return values.keys() - wrong.keys()

    async def _values(
        self, tier: Tier, sequence: TokenSequence, keys: list[PageKey]
    ) -> dict[PageKey, Value]:
        """Return the values of existing pages; wait for pages that kv_store brings from its disk."""
        give_up = self._now_s() + (RECALL_S if tier == "disk" else 0.0)
        found: dict[PageKey, Value] = {}
        while keys and not sequence.over:
            values = await self._store.get_many(keys)
            found |= {key: value for key, value in zip(keys, values, strict=True) if value}
            keys = [key for key in keys if key not in found]
            if not keys or self._now_s() >= give_up:
                break
            await asyncio.sleep(_POLL_S)
        return found
