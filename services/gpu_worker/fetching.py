"""Brings a sequence's missing pages from lower tiers to the host, from its last page down, until computing meets them.

Fetching begins when a job is accepted. Computing never waits for it, but for a few hundredths of what it would take to
compute all that is missing: within that time the pages may come that save it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from common import log
from common.pages.codec import CorruptPage
from common.pages.store import PageKey, PageStore, Tier, TierDown
from services.gpu_worker.decide.batch import Mover
from services.gpu_worker.decide.scheduler import Scheduler
from services.gpu_worker.decide.sequence import TokenSequence
from services.gpu_worker.decide.tiers import Price
from services.gpu_worker.decide.trust import Trust

HOLD = 0.03  # of the seconds that all missing pages take to compute: so long a sequence may wait for them
MARGIN = 1.5  # times the predicted seconds of a fetch
AT_ONCE = 4
RECALL_S = 2.0  # how long a page on disk is waited for
_POLL_S = 0.004
_log = log.get("engine")
Wanted = deque[tuple[int, PageKey]]


class Fetcher:
    """Fetches for one scheduler; `wake` is called when something has come that a step may wait for."""

    def __init__(
        self,
        store: PageStore,
        scheduler: Scheduler,
        mover: Mover,
        price: Price,
        wake: Callable[[], None],
    ) -> None:
        self._store, self._scheduler, self._mover = store, scheduler, mover
        self._price, self._wake = price, wake
        self.trust: dict[Tier, Trust] = {"redis": Trust(), "disk": Trust()}
        self.fetched: Counter[str] = Counter()  # pages by tier
        self.corrupt = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, sequence: TokenSequence) -> None:
        """Look for a waiting sequence's missing pages, and bring what comes faster than it is computed."""
        missing = self._scheduler.table.lacks(sequence)
        now = time.monotonic()
        if not missing or not any(trust.allows(1, now) for trust in self.trust.values()):
            return
        compute_s = float(self._price(np.array([float(page) for page, _ in missing])).sum())
        sequence.hold_until_s = now + min(HOLD * compute_s, self._patience_s(len(missing)))
        task = asyncio.create_task(self._fetch(sequence, missing), name="fetch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _patience_s(self, pages: int) -> float:
        slowest = max(trust.predicted_s(pages) for trust in self.trust.values())
        return MARGIN * slowest + AT_ONCE * _POLL_S

    async def close(self) -> None:
        """Stop fetching."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _fetch(self, sequence: TokenSequence, missing: list[tuple[int, int]]) -> None:
        ids = sequence.ids
        keys = [(page, PageKey(ids[page], group)) for page, group in missing]
        try:
            found = await self._store.where([key for _, key in keys])
            for tier in ("redis", "disk"):
                there = [each for each, at in zip(keys, found, strict=True) if at == tier]
                await self._from(tier, sequence, there)
        except TierDown as error:
            self.trust["redis"].failed(time.monotonic())
            _log.warning("pages_not_fetched", job=sequence.job, error=str(error))
        finally:
            sequence.hold_until_s = 0.0
            self._wake()

    async def _from(
        self, tier: Tier, sequence: TokenSequence, there: list[tuple[int, PageKey]]
    ) -> None:
        """Bring pages of one tier, those first that are the dearest to compute."""
        trust, began = self.trust[tier], time.monotonic()
        worth = [
            each for each in there if trust.page_s < self._price(np.array([float(each[0])]))[0]
        ]
        wanted: Wanted = deque(worth[: trust.allows(len(worth), began)])
        if not wanted:
            return
        if tier == "disk":
            await self._store.recall([key for _, key in wanted])
        before = self.fetched[tier]
        await asyncio.gather(*(self._some(tier, sequence, wanted) for _ in range(AT_ONCE)))
        if came := self.fetched[tier] - before:
            now = time.monotonic()
            trust.came(came, now - began, now)

    async def _some(self, tier: Tier, sequence: TokenSequence, wanted: Wanted) -> None:
        tiers = self._scheduler.table.tiers
        while wanted:
            page, key = wanted.popleft()
            if not self._scheduler.table.awaits(sequence, page):
                continue  # computing has come here first
            target = tiers.bring(key.group, key.id)
            if target is None:
                continue
            origin = None
            try:
                value = await self._value(tier, sequence, page, key)
                if value is not None:
                    await self._mover.fill(key, target, value)
                    origin = tier
                    self.fetched[tier] += 1
            except CorruptPage as error:
                self.corrupt += 1
                _log.warning("page_corrupt", tier=tier, page=key.member, error=str(error))
                await self._store.drop([key])
            finally:
                tiers.brought(key.group, key.id, target, origin)

    async def _value(
        self, tier: Tier, sequence: TokenSequence, page: int, key: PageKey
    ) -> bytes | None:
        give_up = time.monotonic() + (RECALL_S if tier == "disk" else 0.0)
        while True:
            value = await self._store.get(key)
            if value is not None or time.monotonic() >= give_up:
                return value
            if not self._scheduler.table.awaits(sequence, page):
                return None
            await asyncio.sleep(_POLL_S)
