"""Cache invalidation: forgets deleted sessions' pages on the device and on the host, and answers the deletions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common import log
from common.bus import BusDown, BusFull
from common.registry.cache_directory import CacheDirectory
from common.registry.deletion import KEEP_S, MOST, DeletedSession, Deletions, digest_of
from common.wire.registry import Forgot
from common.worker.worker import Worker
from engine.decoder.kv.offload import OffloadManager
from engine.decoder.kv.prefix_index import PrefixIndex

_RETRY_S = 0.5
_log = log.get("engine")


class CacheInvalidation:
    """Reads one family's deletions for one engine; `leave` drops the jobs of a session, named by its digest."""

    def __init__(
        self,
        worker: Worker,
        offload: OffloadManager,
        prefixes: PrefixIndex,
        leave: Callable[[bytes], None],
    ) -> None:
        self._worker, self._offload, self._prefixes = worker, offload, prefixes
        self._leave = leave

    async def run(self) -> None:
        """Forget the pages of deleted sessions until cancelled; forget all pages if deletions may have been missed."""
        clock = self._worker.bus.clock
        after, read_at = "0-0", clock.monotonic()
        while True:
            try:
                found = await Deletions(self._worker.bus).read(self._worker.family, after)
                if len(found) >= MOST or clock.monotonic() - read_at > KEEP_S:
                    _log.warning("pages_forgotten", why="deletions may have been missed")
                    await self._offload.forget()
                read_at = clock.monotonic()
                for forget in found:
                    if forget.session:
                        await self._do(forget)
                    after = forget.entry
            except (BusDown, BusFull):
                await asyncio.sleep(_RETRY_S)
            except Exception:  # noqa: BLE001 - a bad entry must not end the task
                _log.exception("pages_not_forgotten")
                await asyncio.sleep(_RETRY_S)

    async def _do(self, forget: DeletedSession) -> None:
        worker, bus = self._worker, self._worker.bus
        if not forget.goes_on:
            self._leave(forget.session)
        named = (name for name in self._prefixes.sessions if digest_of(name) == forget.session)
        ids = self._prefixes.delete(next(named, ""), forget.ids)
        device, host = await self._offload.forget(ids)
        answer = Forgot(worker=worker.name, looked=len(ids), device=device, host=host)
        await Deletions(bus).answer(worker.family, forget.entry, answer)
        await CacheDirectory(bus).publish_marks(worker.family, worker.name, (), ids)
        _log.info("session_forgotten", pages=len(ids), device=device, host=host)
