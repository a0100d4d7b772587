"""The tiers of pages around one engine's loop: loads for a step, saves beside it, and the tiers below the host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from common.config import WorkerConfig
from common.pages.identity import PageId
from common.pages.store import PageStore
from engine.decoder.executor.interface import Executor, PageCopier, PageLoads, PageMove
from engine.decoder.kv.prefetcher import Prefetcher
from engine.decoder.kv.tiers import Price, TierPolicy
from engine.decoder.kv.write_back import WriteBack
from engine.decoder.schedule import StepLimits
from engine.decoder.scheduler import Scheduler
from engine.decoder.sequence import TokenSequence

_LEAST_S, _MOST_S = 0.0005, 0.01  # between two looks at what has come
SAVES = 8  # pages of a layer group on their way to the host at once: what is on its way cannot be given away


class OffloadManager:
    """Makes the moves that a scheduler decides; it has no tiers where the runner has no host pages."""

    def __init__(
        self,
        runner: Executor,
        bounds: StepLimits,
        price: Price,
        config: WorkerConfig,
        store: PageStore | None,
        wake: Callable[[], None],
    ) -> None:
        """`price` is what computing costs; `wake` is called when a step may find more than before."""
        self.mover: PageCopier | None = runner.mover if runner.shape.host_pages else None
        keeping = TierPolicy(config.eviction, price, self._load_s, self._fetch_s)
        self.scheduler = Scheduler(runner.shape, bounds, keeping)
        self.tiers = self.scheduler.table.tiers
        self.fetcher: Prefetcher | None = None
        self.publisher: WriteBack | None = None
        self.store = store
        if store is not None and self.mover is not None:
            self.fetcher = Prefetcher(store, self.scheduler, self.mover, price, wake)
            self.publisher = WriteBack(
                store,
                self.tiers,
                self.mover,
                runner.shape,
                config.page_publish,
                config.pages_ttl_s,
            )
        self._wake = wake
        self._saving = 0

    def _load_s(self) -> float:
        return 0.0 if self.mover is None else self.mover.load_s

    def _fetch_s(self) -> float:
        return 0.0 if self.fetcher is None else self.fetcher.trust["redis"].page_s

    async def run(self) -> None:
        """Put pages into the tiers below until cancelled; then close what is open to them."""
        try:
            if self.publisher is not None:
                await self.publisher.run()
            await asyncio.Event().wait()
        finally:
            if self.fetcher is not None:
                await self.fetcher.close()
            if self.store is not None:
                await self.store.close()

    def begin(self, sequences: Iterable[TokenSequence]) -> None:
        """Sequences wait now: look for their pages in the tiers below."""
        if self.fetcher is not None:
            for sequence in sequences:
                self.fetcher.begin(sequence)

    def drop(self, sequences: Sequence[TokenSequence]) -> None:
        """Let sequences go; their full pages stay where they are, and may go down."""
        if self.publisher is not None:
            for sequence in sequences:
                if sequence.pages:
                    self.publisher.ended(sequence)
        self.scheduler.drop(sequences)

    async def drain(self, seconds: float) -> None:
        """Put what would be lost with this worker, for at most so long."""
        if self.publisher is not None:
            await self.publisher.drain(seconds)

    async def forget(self, ids: Sequence[PageId] | None = None) -> tuple[int, int]:
        """Find pages no more, or (None) none at all, nor put them; return how many the device had, and the host.

        Returns when none is on its way for a sequence that has left.
        """
        if ids is None:
            ids = [page_id for pool in (*self.tiers.device, *self.tiers.host) for page_id in pool]
        if self.fetcher is not None:
            await self.fetcher.let_end()
        if self.publisher is not None:
            await self.publisher.forget(ids)
        return self.tiers.forget(ids)

    def patience_s(self) -> float:
        """Return how long the sequences that wait may wait on for pages that are on their way."""
        until_s = min((one.hold_until_s for one in self.scheduler.waiting), default=0.0)
        return min(max(until_s - time.monotonic(), _LEAST_S), _MOST_S)

    def load(self) -> PageLoads | None:
        """Begin to copy what the step planned last will see."""
        loads = self.scheduler.loads
        return self.mover.load(loads) if self.mover is not None and loads else None

    def loaded(self, loading: PageLoads | None) -> None:
        """The step has ended: pages that are not sound are computed anew."""
        for move in self.scheduler.loads:
            self.scheduler.moved(move, sound=loading is None or move not in loading.unsound)

    def save(self) -> None:
        """Have idle pages copied to the host, beside the steps to come."""
        if self.mover is None or self._saving:
            return
        loop = asyncio.get_running_loop()
        for move in self.tiers.saves(SAVES):
            self._saving += 1
            self.mover.save(move, lambda *ended: loop.call_soon_threadsafe(self._saved, *ended))

    def _saved(self, move: PageMove, sound: bool) -> None:
        self._saving -= 1
        self.scheduler.moved(move, sound=sound)
        if not self._saving:
            self.save()  # while nothing is computed, too
            self._wake()
