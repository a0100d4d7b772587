"""The pool of text processes: parsing and tokenizing run there, so that they never hold the router's loop.

Chat templates run only there: a text process bounds their memory, and `bounded_time` their processor time.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from common import log
from common.errors import Unavailable
from services.router.text.templates import late

T = TypeVar("T")
INLINE_TEXT_BYTES = 2048
INLINE_BYTES = 65_536
MEMORY = 2 << 30  # bytes of address space for a process' calls
PATIENCE_S = 0.25
_SPARE = 2
_WAITING = 1024
_SPAWN = multiprocessing.get_context("spawn")
_log = log.get("router")


class _Died(Exception):
    """A text process ended during a call."""


class _Late(Exception):
    """A chat template used up its processor time, which ended its process."""


class TextProcess:
    """One spawned process that makes one call at a time, and ends when its parent ends.

    `memory` bounds the bytes of address space that its calls may take together.
    """

    def __init__(self, memory: int) -> None:
        self._ours, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, memory), daemon=True)
        self._process.start()
        theirs.close()
        self._thread = ThreadPoolExecutor(1, "text")

    async def run(self, call: Callable[[], T]) -> T:
        """Return call(), or raise its error. Never cancel a run: the next call would get this call's answer."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, call)

    def _call(self, call: Callable[[], T]) -> T:
        try:
            self._ours.send(call)
            error, value = self._ours.recv()
        except (EOFError, OSError):
            self._process.join()
            raise (_Late if self._process.exitcode == -signal.SIGPROF else _Died) from None
        if error is not None:
            raise error
        found: T = value
        return found

    def end(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._thread.shutdown(wait=False)


def _serve(theirs: Connection, memory: int) -> None:
    """Make the calls that arrive until the pipe closes; ignore SIGINT and SIGTERM, since the parent drains first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import services.router.text.collections  # noqa: F401, PLC0415 - loads what later calls need

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + memory, most))
    with contextlib.suppress(EOFError, OSError):
        while True:
            call = theirs.recv()
            answer: tuple[Exception | None, Any]
            try:
                answer = None, call()
            except Exception as error:  # noqa: BLE001 - the caller's to handle
                error.add_note(traceback.format_exc())
                answer = error, None
            theirs.send(answer)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class TextPool:
    """`processes` text processes; a process that dies is replaced, and its call is made once more.

    When a call has waited PATIENCE_S for a free process, up to two more are started, so that a slow call does not hold
    up others; the additional processes end when no call waits.
    """

    def __init__(self, processes: int, *, memory: int = MEMORY) -> None:
        self._processes, self._memory = processes, memory
        self._free: asyncio.Queue[TextProcess] = asyncio.Queue()
        self._all: set[TextProcess] = set()
        self._waiting = 0
        self.restarts = 0

    async def start(self) -> None:
        """Start the processes, so that the first request does not wait for them."""
        every = [self._started() for _ in range(self._processes)]
        async with asyncio.timeout(120):
            await asyncio.gather(*(process.run(bool) for process in every))
        for process in every:
            self._free.put_nowait(process)

    def stop(self) -> None:
        """End the processes without waiting for calls."""
        for process in self._all:
            process.end()
        self._all.clear()

    async def run(self, call: Callable[[], T], *, inline: bool = False) -> T:
        """Return call() (a picklable partial), computed here if `inline`, else in the pool; its errors pass through.

        Unavailable `text_pool_busy` if too many calls wait, `text_pool_broken` if a process died twice on this call,
        `template_broken` if a chat template took too long.
        """
        if inline:
            return call()
        if self._waiting >= _WAITING:
            raise Unavailable(
                "too many requests wait to be parsed; come back in a second",
                code="text_pool_busy",
                retry_after_s=1.0,
            )
        for _ in range(2):
            process = await self._taken()
            running = asyncio.ensure_future(process.run(call))
            running.add_done_callback(partial(self._give_back, process))
            try:
                return await asyncio.shield(running)
            except _Late:
                raise late() from None
            except _Died:
                continue
        raise Unavailable(
            "the process that reads texts died twice on this request", code="text_pool_broken"
        )

    async def _taken(self) -> TextProcess:
        self._waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    return await self._free.get()
            if len(self._all) < self._processes + _SPARE:
                return self._started()
            return await self._free.get()
        finally:
            self._waiting -= 1

    def _started(self) -> TextProcess:
        process = TextProcess(self._memory)
        self._all.add(process)
        return process

    def _give_back(self, process: TextProcess, done: asyncio.Future[object]) -> None:
        """Take a process back after its call; replace it if it died; end it if it is additional and no call waits."""
        if done.cancelled() or process not in self._all:  # the pool was stopped
            return
        dead = isinstance(done.exception(), _Died | _Late)
        if dead:
            self.restarts += 1
            _log.error("text_process_replaced", restarts=self.restarts)
        if dead or (len(self._all) > self._processes and not self._waiting):
            self._all.discard(process)
            process.end()
            if len(self._all) >= self._processes:
                return
            process = self._started()
        self._free.put_nowait(process)
