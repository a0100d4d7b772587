"""The disk tier: runs its segments in a thread of their own. A disk that fails or is full refuses pages for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from common import log
from common.clock import Clock
from common.pages.identity import Owner
from common.pages.keys import PageKey
from services.kv_store import metrics
from services.kv_store.disk.segments import Damaged, KeptPage, Segments

AGAIN_S = 5.0  # the pause after a disk failed to take a page
_log = log.get("kv_store")
R = TypeVar("R")


class Disk:
    """Pages on this machine's disk; only one process may open a directory. `gone` are the pages that have left it."""

    def __init__(
        self, segments: Segments, executor: ThreadPoolExecutor, clock: Clock, identity: str
    ) -> None:
        self._segments, self._executor, self._clock = segments, executor, clock
        self.identity = identity  # the directory's name
        self._again_at = 0.0
        self._closed = False
        self.gone: set[PageKey] = set()  # pages that left since the set was last emptied

    @classmethod
    async def open(cls, directory: Path, budget_bytes: int, clock: Clock) -> Disk:
        """Open a directory and index its records; InUse if another process has it, OSError if the disk fails."""
        executor = ThreadPoolExecutor(1, "disk")
        loop = asyncio.get_running_loop()

        def opened() -> tuple[Segments, str]:
            segments = Segments(directory, budget_bytes)
            try:
                return segments, segments.identity
            except BaseException:
                segments.close()
                raise

        try:
            segments, identity = await loop.run_in_executor(executor, opened)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        if segments.skipped:
            metrics.CORRUPT.labels("disk").inc(segments.skipped)
            _log.warning("disk_pages_skipped", records=segments.skipped, directory=str(directory))
        _log.info("disk_opened", pages=len(segments), bytes=segments.used_bytes)
        return cls(segments, executor, clock, identity)

    async def usage(self) -> tuple[int, int]:
        """Return the number of pages, and the bytes of all files."""
        return await self._do(lambda: (len(self._segments), self._segments.used_bytes))

    async def limit(self, limits: Mapping[Owner, int]) -> None:
        """Set the byte limits of some owners; pages within such a limit are dropped last."""
        await self._do(lambda: setattr(self._segments.owners, "limits", limits))

    async def put(self, key: PageKey, value: bytes, ends_ms: int, owner: Owner = b"") -> bool:
        """Store a page, or renew its expiry; False if the disk does not take the page."""
        if self._clock.monotonic() < self._again_at:
            return False
        try:
            dropped = await self._do(lambda: self._segments.put(key, value, ends_ms, owner))
        except OSError as error:
            self._again_at = self._clock.monotonic() + AGAIN_S
            metrics.REFUSED.inc()
            _log.error("disk_refused", why=error.strerror, page=key.member, again_s=AGAIN_S)
            return False
        except ValueError as error:
            metrics.REFUSED.inc()
            _log.warning("disk_refused", why=str(error), page=key.member)
            return False
        self._drop(dropped, "room")
        self.gone.discard(key)
        return True

    async def renew(self, key: PageKey, ends_ms: int) -> bool:
        """Renew a page's expiry; False if the page is missing or the disk fails."""
        try:
            return await self._do(lambda: self._segments.renew(key, ends_ms))
        except OSError as error:
            _log.error("disk_write_failed", why=error.strerror, page=key.member)
            return False

    async def get(self, key: PageKey) -> KeptPage | None:
        """Return a page; None if it is not on the disk or damaged; damaged copies are counted."""
        try:
            return await self._do(lambda: self._segments.get(key))
        except Damaged as error:
            metrics.CORRUPT.labels("disk").inc()
            _log.warning("disk_page_damaged", where=str(error))
        except OSError as error:
            _log.error("disk_read_failed", why=error.strerror, page=key.member)
        self.gone.add(key)
        return None

    async def ends(self, keys: Iterable[PageKey] | None = None) -> dict[PageKey, int]:
        """Return the expiry (ms) of all pages, or of the existing ones among `keys`."""
        return await self._do(lambda: self._segments.ends(keys))

    async def expire(self, now_ms: int) -> None:
        """Erase the pages that have expired."""
        try:
            self._drop(await self._do(lambda: self._segments.expire(now_ms)), "expired")
        except OSError as error:
            _log.error("disk_erase_failed", why=error.strerror)

    async def erase(self, keys: Sequence[PageKey]) -> int:
        """Overwrite pages' bytes, sync and read back; return the number of pages. OSError if the disk fails."""
        erased = await self._do(lambda: self._segments.erase(keys, sync=True))
        metrics.DROPPED.labels("erased").inc(erased)
        self.gone.update(keys)
        return erased

    async def clear(self) -> None:
        """Forget all pages, and remove the files."""
        self.gone.update(await self._do(self._segments.clear))

    async def search(self, keys: Iterable[PageKey]) -> tuple[int, int]:
        """Return the number of records in the index, and how many of them have these keys."""
        return await self._do(lambda: self._segments.search(keys))

    async def close(self) -> None:
        """Close the files; other processes may open them."""
        if not self._closed:
            self._closed = True
            await self._do(self._segments.close)
            self._executor.shutdown(wait=False)

    def _drop(self, keys: Sequence[PageKey], why: str) -> None:
        metrics.DROPPED.labels(why).inc(len(keys))
        self.gone.update(keys)

    async def _do(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
