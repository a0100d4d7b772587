"""The offload manager: loads pages for a step, saves pages beside steps, and reaches the tiers below the host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import NamedTuple

from common.clock import SYSTEM, Clock
from common.pages.identity import PageId
from common.pages.store import PageStore
from common.types.pages import Eviction, PagePublish
from engine.decoder.executor.interface import Executor, PageCopier, PageLoads, PageMove
from engine.decoder.kv.prefetcher import Prefetcher
from engine.decoder.kv.tiers import Price, TierPolicy
from engine.decoder.kv.write_back import WriteBack
from engine.decoder.offload.homes import HomePlanner
from engine.decoder.scheduler import Scheduler, StepLimits
from engine.decoder.sequence import TokenSequence

# A wait for pages ends when they arrive. These bounds are for pages that a reader frees, which sends no notice.
_LEAST_S, _MOST_S = 0.0005, 0.01
LOOK_S = 0.2  # between two looks for pages to save, while these take time of cores that compute
SAVES = 32  # pages of a layer group being saved at once; such a page cannot be evicted


class CachePolicy(NamedTuple):
    """Rules for keeping pages: the eviction policy, the write-back policy, and the seconds that written pages live."""

    eviction: Eviction = "spillway"
    publish: PagePublish = "selective"
    ttl_s: float = 24 * 3600


class OffloadManager:
    """Copies the pages that a scheduler decides to move; an executor without host pages has no lower tiers."""

    def __init__(
        self,
        executor: Executor,
        limits: StepLimits,
        price: Price,
        cache: CachePolicy,
        store: PageStore | None,
        wake: Callable[[], None],
        clock: Clock = SYSTEM,
        homes: HomePlanner | None = None,
    ) -> None:
        """`price` are the seconds to compute pages; `wake` is called when a step may find more pages than before.

        With `homes` sequences may be at home on the host.
        """
        self.copier: PageCopier | None = executor.copier if executor.shape.host_pages else None
        keeping = TierPolicy(
            cache.eviction,
            price,
            self._save_s,
            self._load_s,
            self._put_s,
            self._fetch_s,
            self._competes,
        )
        self.scheduler = Scheduler(executor.shape, limits, keeping, homes)
        self.tiers = self.scheduler.table.tiers
        self.prefetcher: Prefetcher | None = None
        self.write_back: WriteBack | None = None
        self.store = store
        if store is not None and self.copier is not None:
            self.prefetcher = Prefetcher(store, self.scheduler, self.copier, price, wake, clock)
            self.write_back = WriteBack(
                store,
                self.tiers,
                self.copier,
                executor.shape,
                cache.publish,
                cache.ttl_s,
                self._competes,
                clock,
            )
        self._passages = executor.passages
        self._page_bytes = mean(executor.shape.page_bytes)
        self._on_cpu = executor.device == "cpu"
        self._wake, self._clock = wake, clock
        self._saving = 0
        self._next_save_s = 0.0

    def _competes(self) -> bool:
        """Return whether copies to lower tiers take time of cores that compute."""
        return self._on_cpu and bool(self.scheduler.running or self.scheduler.waiting)

    def _save_s(self) -> float:
        """Return the mean seconds that saving a page has taken."""
        saved = 0 if self.copier is None else self.copier.moved_bytes["save"]
        if self.copier is None or not saved:
            return 0.0
        return self.copier.moved_s["save"] / saved * self._page_bytes

    def _load_s(self) -> float:
        return 0.0 if self.copier is None else self.copier.load_s

    def _put_s(self) -> float:
        return 0.0 if self.write_back is None else self.write_back.put_s

    def _fetch_s(self) -> float:
        return 0.0 if self.prefetcher is None else self.prefetcher.breakers["redis"].page_s

    async def run(self) -> None:
        """Write pages back to the tiers below the host until cancelled; then close the connections to these tiers."""
        try:
            if self.write_back is not None:
                await self.write_back.run()
            await asyncio.Event().wait()
        finally:
            if self.prefetcher is not None:
                await self.prefetcher.close()
            if self.store is not None:
                await self.store.close()

    def begin(self, sequences: Iterable[TokenSequence]) -> None:
        """Begin to fetch the pages of waiting sequences from the tiers below the host."""
        if self.prefetcher is not None:
            for sequence in sequences:
                self.prefetcher.begin(sequence)

    def drop(self, sequences: Sequence[TokenSequence]) -> None:
        """Remove sequences; their full pages stay cached and may be written back."""
        if self.write_back is not None:
            for sequence in sequences:
                if sequence.pages:
                    self.write_back.ended(sequence)
        self.scheduler.drop(sequences)
        if not self._competes():
            self.save()  # now the copies take no time of computing cores

    async def drain(self, seconds: float) -> None:
        """Write back, for at most `seconds`, the pages that would be lost with this worker."""
        if self.write_back is not None:
            await self.write_back.drain(seconds)

    async def forget(self, ids: Sequence[PageId] | None = None) -> tuple[int, int]:
        """Forget pages, or (None) all pages; return how many pages the device had, and how many the host had.

        With all pages go all passages that were computed alone.

        Returns once no fetch for sequences that have left and no write of these pages is in progress.
        """
        if ids is None:
            if self._passages is not None:
                self._passages.clear()
            ids = [page_id for pool in (*self.tiers.device, *self.tiers.host) for page_id in pool]
        if self.prefetcher is not None:
            await self.prefetcher.let_end()
        if self.write_back is not None:
            await self.write_back.forget(ids)
        return self.tiers.forget(ids)

    def patience_s(self) -> float:
        """Return the seconds until a sequence that waits for pages may be scheduled without these pages."""
        left_s = self.scheduler.held_until_s() - self._clock.monotonic()
        return min(max(left_s, _LEAST_S), _MOST_S)

    def load(self) -> PageLoads | None:
        """Start copying the pages that the last planned step needs to the device."""
        loads = self.scheduler.loads
        return self.copier.load(loads) if self.copier is not None and loads else None

    def loaded(self, loading: PageLoads | None) -> None:
        """Report the loads of an ended step to the scheduler; damaged pages are recomputed."""
        for move in self.scheduler.loads:
            self.scheduler.moved(move, sound=loading is None or move not in loading.unsound)

    def ended(self) -> None:
        """Report the end of the last planned step; make the checksums of host pages that it filled."""
        self.scheduler.ended()
        if self.copier is not None and self.tiers.written:
            self.copier.written(self.tiers.written)
            self.tiers.written = []

    def save(self) -> None:
        """Start copying idle pages to the host, beside the next steps."""
        now_s = self._clock.monotonic()
        if self.copier is None or self._saving or (now_s < self._next_save_s and self._competes()):
            return
        self._next_save_s = now_s + LOOK_S
        loop = asyncio.get_running_loop()
        for move in self.tiers.saves(SAVES):
            self._saving += 1
            self.copier.save(move, lambda *ended: loop.call_soon_threadsafe(self._saved, *ended))

    def _saved(self, move: PageMove, sound: bool) -> None:
        self._saving -= 1
        self.scheduler.moved(move, sound=sound)
        if not self._saving:
            self.save()  # saving continues even without steps
            self._wake()
