"""Background tasks of a process, whose ends are never missed.

A task of the whole process must run until the stop: if it ends earlier, the process drains and ends with status 1. A
scoped task, for one family or collection, is begun again after an error and a pause, and affects nothing else. A
spawned task runs once, for one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from types import TracebackType
from typing import Any, Self, TypeVar

from prometheus_client import Counter

from common import log
from common.clock import Clock, SystemClock
from common.errors import Unavailable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
HEALTHY_S = 60.0  # after this run time a task begins again after the first pause
RESTARTS = Counter(
    "spillway_task_restarts_total",
    "Times a background task of one thing, such as a family's journal, failed and was begun again.",
)
T = TypeVar("T")
_log = log.get("lifecycle")


class TaskEnded(Exception):
    """A task of the whole process ended before the stop."""


class Supervisor:
    """Owns background tasks; leaving its context ends them, and raises TaskEnded if one had ended by itself.

    With a `stopping` event, the end of a task sets it; without one, the end is only logged. All methods belong to one
    event loop.
    """

    def __init__(
        self,
        stopping: asyncio.Event | None = None,
        *,
        clock: Clock | None = None,
        pause: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        """`pause(seconds)` waits before a task is begun again."""
        self._stopping = stopping or asyncio.Event()
        self._clock, self._pause = clock or SystemClock(), pause
        self._tasks: set[asyncio.Task[Any]] = set()
        self._released: set[asyncio.Task[Any]] = set()
        self._spawned: set[asyncio.Task[Any]] = set()
        self._failure: TaskEnded | None = None

    def process(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a task of the whole process: if it returns or raises before the stop, the process ends."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._process_done)
        return task

    def scoped(self, work: Callable[[], Coroutine[Any, Any, Any]], name: str) -> asyncio.Task[Any]:
        """Run a task of one family or collection until it returns; after an error, pause and begin it again."""
        task = asyncio.create_task(self._again(work, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        """Run a task once, to its end, without an awaiting caller; an error is logged."""
        task = asyncio.create_task(work, name=name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned_done)

    async def settle(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the spawned tasks, then cancel those that still run."""
        if self._spawned:
            await asyncio.wait(self._spawned, timeout=timeout_s)
        await cancel(*self._spawned)

    async def end(self, *tasks: asyncio.Task[Any]) -> None:
        """Cancel tasks that their owner no longer needs, and wait for their end; their errors are logged."""
        for task in tasks:
            if not task.done():
                self._released.add(task)
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.end(*self._tasks)
        await self.settle(0.0)
        if error is None and self._failure is not None:
            raise self._failure

    async def _again(self, work: Callable[[], Coroutine[Any, Any, Any]], name: str) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began = self._clock.monotonic()
            try:
                await work()
            except Exception:  # noqa: BLE001 - after any error the task is begun again
                if self._clock.monotonic() - began >= HEALTHY_S:
                    pause_s = FIRST_PAUSE_S
                RESTARTS.inc()
                _log.exception("task_failed", task=name, again_s=pause_s)
            else:
                return
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _forget(self, task: asyncio.Task[Any]) -> bool:
        """Forget a task that is over; return whether its owner had ended it."""
        self._tasks.discard(task)
        released = task in self._released
        self._released.discard(task)
        return released

    def _spawned_done(self, task: asyncio.Task[Any]) -> None:
        self._spawned.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = _log.warning if isinstance(error, Unavailable) else _log.error
            level("background_failed", task=task.get_name(), error=repr(error))

    def _process_done(self, task: asyncio.Task[Any]) -> None:
        released = self._forget(task)
        error = None if task.cancelled() else task.exception()
        if error is None and (released or self._stopping.is_set()):
            return
        how = "was cancelled" if task.cancelled() else "returned" if error is None else "failed"
        _log.error("task_ended", task=task.get_name(), how=how, exc_info=error)
        if self._failure is None:
            self._failure = TaskEnded(f"the task {task.get_name()!r} {how} before the stop")
            self._failure.__cause__ = error
        self._stopping.set()


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and return once they have ended; their errors are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def stop_or_end(stopping: asyncio.Event, *tasks: asyncio.Task[Any]) -> set[asyncio.Task[Any]]:
    """Wait for the stop or the end of a task, whichever comes first; return the tasks that have ended."""
    stop: asyncio.Task[Any] = asyncio.create_task(stopping.wait(), name="stopping")
    try:
        done, _ = await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
    return done - {stop}


async def in_pool(pool: Executor, function: Callable[..., T], *args: Any) -> T:
    """Return the result of a function on a pool of threads; the function goes on after its caller is cancelled."""
    return await asyncio.shield(asyncio.get_running_loop().run_in_executor(pool, function, *args))


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Return once `event` is set, or after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
