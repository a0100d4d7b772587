"""The pool of text processes: parsing and tokenizing run there, so that they never hold the router's loop."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from common import log
from common.errors import Unavailable

T = TypeVar("T")
INLINE_TEXT_BYTES = 2048
INLINE_BYTES = 65_536
_WAITING = 1024
_log = log.get("router")


def _begin() -> None:
    """Leave signals to the parent, which drains and then ends the pool; end when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class TextPool:
    """`processes` spawned processes; a pool broken by a crash is replaced and the call made once more."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._executor: ProcessPoolExecutor | None = None
        self._waiting = 0
        self.restarts = 0

    async def start(self) -> None:
        """Start the processes, so that the first request does not pay for it."""
        executor = self._replace(None)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(120):
            await asyncio.gather(
                *(loop.run_in_executor(executor, _warm) for _ in range(self._processes))
            )

    def stop(self) -> None:
        """End the processes without waiting for queued calls."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _replace(self, broken: ProcessPoolExecutor | None) -> ProcessPoolExecutor:
        if self._executor is None or self._executor is broken:
            if broken is not None:
                self.restarts += 1
                _log.error("text_pool_replaced", restarts=self.restarts)
                broken.shutdown(wait=False, cancel_futures=True)
            self._executor = ProcessPoolExecutor(
                self._processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
            )
        return self._executor

    async def run(self, call: Callable[[], T], *, inline: bool = False) -> T:
        """Return call() (a picklable partial), computed here if `inline`, else in the pool; its errors pass through.

        Unavailable `text_pool_busy` if too many calls wait, `text_pool_broken` if the pool died twice on this call.
        """
        if inline:
            return call()
        if self._waiting >= _WAITING:
            raise Unavailable(
                "too many requests wait to be parsed; come back in a second",
                code="text_pool_busy",
                retry_after_s=1.0,
            )
        self._waiting += 1
        try:
            return await self._in_pool(call)
        finally:
            self._waiting -= 1

    async def _in_pool(self, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        executor = self._replace(None)
        for _ in range(2):
            try:
                return await loop.run_in_executor(executor, call)
            except BrokenProcessPool:
                executor = self._replace(executor)
        raise Unavailable(
            "the process that reads texts died twice on this request", code="text_pool_broken"
        )


def _warm() -> bool:
    import services.router.text.collections  # noqa: F401, PLC0415 - loads what later calls need

    return True
