"""Processes below a benchmark: their CPU seconds and memory, their end with their parent, and free ports for them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import threading
from collections.abc import Iterable, Iterator

import psutil

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Make this process get SIGKILL when its parent ends; for `preexec_fn`."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def cpu_seconds(pid: int) -> float:
    """Return user + system CPU seconds of `pid` and its reaped children; 0.0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def rss_bytes(pid: int) -> int:
    """Return the resident bytes of `pid`; 0 if it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def own_bytes(pid: int) -> int:
    """Return the resident bytes of `pid` that are not pages of files; 0 if it is gone."""
    try:
        info = psutil.Process(pid).memory_info()
    except psutil.NoSuchProcess:
        return 0
    return int(info.rss - info.shared)


@contextlib.contextmanager
def own_peak() -> Iterator[list[int]]:
    """Keep the most bytes of its own that this process had meanwhile in a list of one, looked at ten times a second."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            peak[0] = max(peak[0], own_bytes(os.getpid()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def children(pid: int) -> list[int]:
    """Return the pids of all living processes below `pid`, however deep."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def tree_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of `pid` and of all living processes below it."""
    return sum(map(cpu_seconds, (pid, *children(pid))))


def tree_rss_bytes(pid: int) -> int:
    """Return the resident bytes of `pid` and of all living processes below it."""
    return sum(map(rss_bytes, (pid, *children(pid))))


def send_trees(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes and to all living processes below them."""
    for pid in pids:
        for each in (pid, *children(pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(each).send_signal(number)


def free_port() -> int:
    """Return a free TCP port of the loopback interface, below those that outgoing connections are given.

    It may be taken some seconds later, so no connection of another process must be able to get it meanwhile.
    """
    for _ in range(200):
        port = random.SystemRandom().randint(23000, 29999)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port between 23000 and 29999")
