"""The lease of the one kv_store that keeps the pages, renewed beside the work that needs it."""

from __future__ import annotations

import asyncio

from common import log
from common.redis.lock import RedisLock
from common.tasks import wait

_log = log.get("kv_store")


class LeaseLost(Exception):
    """The error once another kv_store may hold the keeper's lease: this one must not move or erase pages."""


class KeeperLease:
    """This process' right to keep the pages.

    `term` counts how often this process took the lease; `others` says that another process has it.
    """

    def __init__(self, lock: RedisLock, name: str) -> None:
        self._lock, self._name = lock, name
        self._mine = asyncio.Event()
        self.term = 0
        self.others = False  # by the last reply: another process has it

    @property
    def held(self) -> bool:
        """True while this process has the lease, so that no other process can have it."""
        return self._lock.held

    def require(self) -> None:
        """Raise LeaseLost unless the lease is held; called before every step that removes or overwrites a page."""
        if not self.held:
            raise LeaseLost("the lease of the pages' keeper has lapsed, or another has it")

    async def renew(self) -> None:
        """Take the lease if no process has it, or renew it. After TierDown it is held until it expires."""
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
        """Return once the lease was taken or renewed, or after so many seconds."""
        self._mine.clear()
        if not self.held:
            await wait(self._mine, seconds)

    async def release(self) -> None:
        """Give the lease up if it is held. After TierDown it expires by itself."""
        if self.held:
            await self._lock.release()
