"""An event loop in a thread of its own, which runs coroutines for blocking code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from . import errors
from ._transport import CANCEL_TASK

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
T = TypeVar("T")
STOP_S = 10.0
WAIT_S = 0.5  # the longest until a waiting call sees an interrupt


class _LoopThread:
    """An event loop and the daemon thread that runs it; both begin at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.closed = False

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop; RuntimeError once closed, or in the loop's own thread."""
        with self._lock:
            if self.closed:
                raise RuntimeError("this client is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="spillway-client", daemon=True
                )
                self._thread.start()
            if threading.current_thread() is self._thread:
                raise RuntimeError(
                    "a blocking call of the client in its own thread would wait for itself"
                )
            return self._loop

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last`, then end the loop and its thread; idempotent, and safe at the interpreter's end."""
        with self._lock:
            loop, thread, self.closed = self._loop, self._thread, True
            self._loop = self._thread = None
        if loop is None or thread is None or not thread.is_alive():
            return
        if threading.current_thread() is thread:
            raise RuntimeError("the client cannot be closed in its own thread")
        try:
            asyncio.run_coroutine_threadsafe(_ended(last), loop).result(STOP_S)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            pass  # a server that does not answer must not delay the program's end
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(STOP_S)
            if not thread.is_alive():
                loop.close()


class Portal:
    """Runs coroutines in its own thread; callers of any thread wait for them, an event loop's thread included.

    The client and all objects made from it hold the portal. It closes, and runs `last`, when the last of these is gone,
    or at `close`. The thread is a daemon and starts at the first use, so a program without a `close` can end.
    """

    def __init__(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._running = _LoopThread()
        self._finalizer = weakref.finalize(self, self._running.close, last)

    @property
    def closed(self) -> bool:
        """Whether calls are refused."""
        return self._running.closed

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine to its end and return its result; an interrupt in the caller cancels it there."""
        try:
            loop = self._running.loop()
        except RuntimeError:
            work.close()
            raise
        begun: list[asyncio.Task[R]] = []
        # A queue in C: an interrupt in a future's or a condition's Python code can leave their locks held.
        done: queue.SimpleQueue[asyncio.Task[R]] = queue.SimpleQueue()

        def begin() -> None:
            begun.append(loop.create_task(work))
            begun[0].add_done_callback(end)

        def end(task: asyncio.Task[R]) -> None:
            if not task.cancelled():
                task.exception()  # read here, since an interrupted caller reads it no more
            done.put(task)

        def cancel() -> None:
            if begun:
                begun[0].cancel()
            else:
                work.close()

        try:
            loop.call_soon_threadsafe(begin)
            return _first(done).result()
        except asyncio.CancelledError:
            raise errors.APIConnectionError("the client was closed during the call") from None
        except BaseException:
            # Raised in this thread by an interrupt or a signal's handler, maybe before the work has begun.
            if not (begun and begun[0].done()):
                loop.call_soon_threadsafe(cancel)
            raise

    def close(self) -> None:
        """Run `last`, then end the loop and its thread; idempotent."""
        self._finalizer()


def _first(items: queue.SimpleQueue[T]) -> T:
    """Wait for a queue's first item. A signal that comes just before a wait begins is handled at that wait's end."""
    while True:
        try:
            return items.get(timeout=WAIT_S)
        except queue.Empty:
            pass


async def _ended(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Cancel the coroutines for which other threads wait, then run `last`."""
    own = asyncio.current_task()
    left = [task for task in asyncio.all_tasks() if task is not own]
    waiting = [task for task in left if task.get_name() != CANCEL_TASK]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await last()
    await asyncio.get_running_loop().shutdown_asyncgens()


class Bound(Generic[A]):
    """The blocking face of an async object."""

    def __init__(self, portal: Portal, inner: A) -> None:
        self._portal = portal
        self._inner = inner


def call(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Bound[A], P], R]:
    """Return the blocking form of an async method."""

    @functools.wraps(method)
    def run(bound: Bound[A], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return bound._portal.run(method(bound._inner, *args, **kwargs))

    return run


def each(
    method: Callable[Concatenate[A, P], AsyncIterator[R]],
) -> Callable[Concatenate[Bound[A], P], Iterator[R]]:
    """Return the blocking form of a method that is an async generator."""

    @functools.wraps(method)
    def run(bound: Bound[A], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        return iterated(bound._portal, method(bound._inner, *args, **kwargs))

    return run


def iterated(portal: Portal, source: AsyncIterator[R]) -> Iterator[R]:
    """Yield the items of an async iterator; an async generator left early is closed."""
    nothing = object()
    step: asyncio.Task[Any] | None = None

    async def following() -> R | object:
        nonlocal step
        step = asyncio.current_task()
        return await anext(source, nothing)

    async def closed() -> None:
        if step is not None:
            await asyncio.wait({step})  # an interrupted step is still ending
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()

    try:
        while (item := portal.run(following())) is not nothing:
            yield item  # type: ignore[misc]
    finally:
        if not portal.closed:
            portal.run(closed())
