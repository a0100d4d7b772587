"""The keeper's lease: held by the one kv_store that keeps the pages, and renewed beside the work that needs it."""

from __future__ import annotations

import asyncio

from common import log
from common.redis.lock import RedisLock
from common.tasks import wait

_log = log.get("kv_store")


class LeaseLost(Exception):
    """The error once another kv_store may hold the keeper's lease, so that this one must not move or erase pages."""


class KeeperLease:
    """The right of this process to keep the pages.

    `term` counts how often this process took the lease; `others` is true while another process has the lease.
    """

    def __init__(self, lock: RedisLock, name: str) -> None:
        self._lock, self._name = lock, name
        self._mine = asyncio.Event()
        self.term = 0
        self.others = False  # the last reply: another process has the lease

    @property
    def held(self) -> bool:
        """True while this process surely has the lease."""
        return self._lock.held

    def require(self) -> None:
        """Raise LeaseLost unless the lease is held; called before every step that removes or overwrites a page."""
        if not self.held:
            raise LeaseLost("the lease of the pages' keeper has lapsed, or another has it")

    async def renew(self) -> None:
        """Take the lease if no process has it, or renew it. After TierDown a held lease lasts until it expires."""
        got = await self._lock.acquire()
        self.others = got == "other"
        if self.others:
            self._mine.clear()
            return
        if got == "taken":
            self.term += 1
            _log.info("pages_kept", keeper=self._name)
        self._mine.set()

    async def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until the lease was taken or renewed."""
        self._mine.clear()
        if not self.held:
            await wait(self._mine, seconds)

    async def release(self) -> None:
        """Give up the lease if it is held. After TierDown it expires."""
        if self.held:
            await self._lock.release()
