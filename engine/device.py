"""The queue of one device: tasks of every kind, each with a predicted cost and a deadline, run one after another.

A task whose own threads have nothing left to do, but for the last ones, calls `spare`: then the next task of its kind
begins, so that no core waits for the last part of a batch. The queue's threads live as long as the worker, so the
thread pools of the libraries that they call stay warm.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
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

    `idle_s` is how long the device had run nothing when the task began.
    """

    waited_s: float
    took_s: float
    idle_s: float


class _Call(NamedTuple):
    task: DeviceTask
    function: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    on_spare: Callable[[], None] | None


# Of a device's thread: the function that `spare` calls, and whether the thread has passed its turn to the other one.
_running = threading.local()


def spare() -> None:
    """Let the device begin its next task of the same kind: the calling task leaves cores without work until it ends.

    Called by a task on the device's thread; elsewhere, and again in the same task, it does nothing.
    """
    pass_turn: Callable[[], None] | None = getattr(_running, "pass_turn", None)
    if pass_turn is not None:
        _running.pass_turn, _running.passed = None, True
        pass_turn()


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
    """One device's queue: runs one task after another, each to its end, and calls `ended` with each kind and times.

    Two threads take turns: a task's `spare` gives the other thread the turn to begin a task, which waits for the end of
    a task of another kind. The threads are daemons: a device that hangs cannot keep the process from ending. With
    `yields` they, and the threads that their libraries start, run at lower priority, so that other threads of the
    machine get the cores first.
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
        # Tasks that have not begun. Both the event loop and the device's threads remove tasks; the remover owns the
        # task.
        self._unbegun: set[asyncio.Future[Any]] = set()
        self._ended: dict[str, float] = {}  # when the last task of each kind ended
        self._ended_s = clock.monotonic()  # when the last task of any kind ended
        self._closed = False
        self._turn = threading.Lock()  # held by the thread that takes the next task
        self._waiting: list[_Call] = []  # tasks that the holder of the turn has seen
        self._begun = threading.Condition()
        self._kinds: list[str] = []  # of the tasks that run
        for name in ("compute", "compute-next"):
            threading.Thread(target=self._work, name=name, daemon=True).start()

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
        on_spare: Callable[[], None] | None = None,
    ) -> asyncio.Future[T]:
        """Queue a task at once and return the future of what `function(*args)` returns or raises.

        `deadline_s` is by the queue's monotonic clock; by default it is now + `predicted_s`: no task waits forever.
        `on_spare` is called on the event loop when the task lets the next one begin.
        """
        now_s = self._clock.monotonic()
        due_s = now_s + predicted_s if deadline_s is None else deadline_s
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        task = DeviceTask(kind, due_s, now_s)
        self._unbegun.add(future)
        self._arriving.put(_Call(task, lambda: function(*args), future, loop, on_spare))
        return future

    def revoke(self, future: asyncio.Future[Any]) -> bool:
        """Take a submitted task back and cancel its future; False if the task has begun or is over."""
        try:
            self._unbegun.remove(future)
        except KeyError:
            return False
        future.cancel()
        return True

    def begun(self, future: asyncio.Future[Any]) -> bool:
        """Return whether a submitted task has begun; it may be over."""
        return future not in self._unbegun

    def close(self) -> None:
        """End the threads after the tasks that are in the queue."""
        self._arriving.put(None)

    def _work(self) -> None:
        if self._yields:
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)  # on Linux: of this thread only
        self._turn.acquire()
        going = True
        while going:
            going = self._run_next()
            if _running.passed:
                self._turn.acquire()  # waits until the other thread's task is spare, too, or that thread ends
        self._turn.release()

    def _run_next(self) -> bool:
        """Run the next task; False if there will be none. A thread that waits refers to no task that has ended."""
        _running.passed = False
        call = self._take()
        if call is None:
            return False
        _running.pass_turn = partial(self._pass_turn, call)
        try:
            return self._execute(call)
        finally:
            _running.pass_turn = None

    def _take(self) -> _Call | None:
        """Return the next task, waiting for one if there is none; None once closed and empty."""
        while True:
            while not self._closed and (not self._waiting or not self._arriving.empty()):
                call = self._arriving.get()
                if call is None:
                    self._closed = True
                else:
                    self._waiting.append(call)
            # A revoked task must not stay in front of other tasks of its kind.
            self._waiting = [call for call in self._waiting if call.future in self._unbegun]
            if self._waiting:
                return self._waiting.pop(next_task([call.task for call in self._waiting]))
            if self._closed:
                return None

    def _execute(self, call: _Call) -> bool:
        """Run one task and settle its future; False if its loop is closed, since the process is ending."""
        kind = call.task.kind
        with self._begun:
            self._begun.wait_for(lambda: all(other == kind for other in self._kinds))
            try:
                self._unbegun.remove(call.future)
            except KeyError:
                return True  # revoked
            alone = not self._kinds
            self._kinds.append(kind)
        began_s, before_s = self._clock.monotonic(), self._ended_s
        waited_s = began_s - max(call.task.queued_s, self._ended.get(kind, 0.0))
        result: Any = None
        error: BaseException | None = None
        try:
            result = call.function()
        except Exception as raised:  # noqa: BLE001 - the error is raised in the caller
            error = raised
        with self._begun:
            self._kinds.remove(kind)
            ended_s = self._ended[kind] = self._ended_s = self._clock.monotonic()
            self._begun.notify()
        times = TaskTimes(waited_s, ended_s - began_s, began_s - before_s if alone else 0.0)
        try:
            call.loop.call_soon_threadsafe(self._settle, call, times, result, error)
        except RuntimeError:
            return False
        finally:
            del error  # the error's traceback refers to this frame
        return True

    def _pass_turn(self, call: _Call) -> None:
        """Let the other thread begin a task, and tell the caller of the one that this thread runs."""
        self._turn.release()
        if call.on_spare is not None:
            # A closed loop: the process is ending.
            with contextlib.suppress(RuntimeError):
                call.loop.call_soon_threadsafe(call.on_spare)

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
