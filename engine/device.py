"""The queue of one device: tasks of every kind, each with a predicted cost and a deadline, run by one thread.

The thread lives as long as the worker, so the thread pools of the libraries that it calls stay warm.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from common.clock import SYSTEM, Clock

T = TypeVar("T")
_NICE = 10


class DeviceTask(NamedTuple):
    """A task that waits for the device: times in seconds, by the queue's monotonic clock."""

    kind: str
    deadline_s: float
    queued_s: float


class TaskTimes(NamedTuple):
    """Seconds of a task that has ended: how long other kinds of tasks delayed it, and how long it took.

    `idle_s` is how long the device's thread had run nothing when the task began.
    """

    waited_s: float
    took_s: float
    idle_s: float


class _Call(NamedTuple):
    task: DeviceTask
    function: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


def next_task(waiting: Sequence[DeviceTask]) -> int:
    """Return the index of the task that runs next; `waiting` is not empty and in the order of arrival.

    Tasks of one kind run in the order of their arrival. The candidates are the oldest tasks of each kind; the candidate
    with the earliest deadline runs next, and among equal deadlines the first to arrive.
    """
    oldest: dict[str, int] = {}
    for index, task in enumerate(waiting):
        oldest.setdefault(task.kind, index)
    return min(oldest.values(), key=lambda index: (waiting[index].deadline_s, index))


def _ignore(_kind: str, _times: TaskTimes) -> None:
    """Ignore a task's times."""


class DeviceQueue:
    """One device's queue: runs one task at a time, each to its end, and calls `ended` with each task's kind and times.

    The thread is a daemon: a device that hangs cannot keep the process from ending. With `yields` the thread, and the
    threads that its libraries start, run at lower priority, so that other threads of the machine get the cores first.
    """

    def __init__(
        self,
        *,
        clock: Clock = SYSTEM,
        ended: Callable[[str, TaskTimes], None] = _ignore,
        yields: bool = False,
    ) -> None:
        self._clock, self._note, self._yields = clock, ended, yields
        self._arriving: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # Tasks that have not begun. Both the event loop and the device's thread remove tasks; the remover owns the
        # task.
        self._unbegun: set[asyncio.Future[Any]] = set()
        self._ended: dict[str, float] = {}  # when the last task of each kind ended
        self._ended_s = clock.monotonic()  # when the last task of any kind ended
        self._closed = False
        threading.Thread(target=self._work, name="compute", daemon=True).start()

    async def run(
        self,
        function: Callable[..., T],
        *args: Any,
        kind: str = "",
        predicted_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> T:
        """Return what `function(*args)` returns, or raise what it raises, on the device's thread (see `submit`).

        A caller that is cancelled leaves its task in the queue.
        """
        future = self.submit(
            function, *args, kind=kind, predicted_s=predicted_s, deadline_s=deadline_s
        )
        return await asyncio.shield(future)

    def submit(
        self,
        function: Callable[..., T],
        *args: Any,
        kind: str = "",
        predicted_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> asyncio.Future[T]:
        """Queue a task at once and return the future of what `function(*args)` returns or raises.

        `deadline_s` is by the queue's monotonic clock; by default it is now + `predicted_s`: no task waits forever.
        """
        now_s = self._clock.monotonic()
        due_s = now_s + predicted_s if deadline_s is None else deadline_s
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        task = DeviceTask(kind, due_s, now_s)
        self._unbegun.add(future)
        self._arriving.put(_Call(task, lambda: function(*args), future, loop))
        return future

    def revoke(self, future: asyncio.Future[Any]) -> bool:
        """Take a submitted task back and cancel its future; False if the task has begun or is over."""
        try:
            self._unbegun.remove(future)
        except KeyError:
            return False
        future.cancel()
        return True

    def close(self) -> None:
        """End the thread after the tasks that are in the queue."""
        self._arriving.put(None)

    def _work(self) -> None:
        if self._yields:
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)  # on Linux: of this thread only
        waiting: list[_Call] = []
        while self._take(waiting):
            # A revoked task must not stay in front of other tasks of its kind.
            waiting = [call for call in waiting if call.future in self._unbegun]
            if waiting and not self._execute(
                waiting.pop(next_task([call.task for call in waiting]))
            ):
                return

    def _take(self, waiting: list[_Call]) -> bool:
        """Move the tasks that arrived to `waiting`, and wait for one if it is empty; False once closed and empty."""
        while not self._closed and (not waiting or not self._arriving.empty()):
            call = self._arriving.get()
            if call is None:
                self._closed = True
            else:
                waiting.append(call)
        return bool(waiting)

    def _execute(self, call: _Call) -> bool:
        """Run one task and settle its future; False if its loop is closed, since the process is ending."""
        try:
            self._unbegun.remove(call.future)
        except KeyError:
            return True  # revoked
        kind = call.task.kind
        began_s, before_s = self._clock.monotonic(), self._ended_s
        waited_s = began_s - max(call.task.queued_s, self._ended.get(kind, 0.0))
        result: Any = None
        error: BaseException | None = None
        try:
            result = call.function()
        except Exception as raised:  # noqa: BLE001 - the error is raised in the caller
            error = raised
        self._ended[kind] = self._ended_s = self._clock.monotonic()
        times = TaskTimes(waited_s, self._ended_s - began_s, began_s - before_s)
        try:
            call.loop.call_soon_threadsafe(self._settle, call, times, result, error)
        except RuntimeError:
            return False
        finally:
            del error  # the error's traceback refers to this frame
        return True

    def _settle(
        self, call: _Call, times: TaskTimes, result: Any, error: BaseException | None
    ) -> None:
        self._note(call.task.kind, times)
        if call.future.done():
            return
        if error is not None:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)
