"""Work nobody waits for, kept and logged so that none of it is lost silently."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from common import log
from common.bus import BusDown

_log = log.get("router")


class Background:
    """Tasks nobody awaits, kept and logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` to its end; an error is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = _log.warning if isinstance(error, BusDown) else _log.error
            level("background_failed", error=repr(error))

    async def stop(self, timeout_s: float) -> None:
        """Wait for the tasks, then cancel what is left."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
