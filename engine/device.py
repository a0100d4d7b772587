"""The one thread that owns the device: it lives as long as the worker, so its thread pools stay warm."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_Call = tuple[Callable[[], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class ComputeThread:
    """Runs calls one after another; a daemon, so a device that hangs cannot keep the process from ending."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return what `function(*args)` returns, or raise what it raises, on the compute thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.put((lambda: function(*args), future, loop))
        return await asyncio.shield(future)

    def close(self) -> None:
        """Let the thread end after the call it is in."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future, loop = call
            result: Any = None
            error: BaseException | None = None
            try:
                result = function()
            except Exception as raised:  # noqa: BLE001 - it is the caller's, and is raised there
                error = raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed: the process is ending
            del function, future, result, error, call


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
