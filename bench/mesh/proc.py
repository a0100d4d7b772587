"""What Linux tells about a process: CPU seconds and memory, read from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Make this process get SIGKILL when its parent ends; for `preexec_fn`."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def cpu_seconds(pid: int) -> float:
    """Return user + system CPU seconds of `pid` and its reaped children; 0.0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / _TICKS


def memory_bytes(pid: int) -> dict[str, int]:
    """Return resident bytes now (`rss`) and at most ever (`peak`); empty if the process is gone."""
    names = {"VmRSS": "rss", "VmHWM": "peak"}
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    parts = (line.split() for line in lines)
    return {names[p[0][:-1]]: int(p[1]) * 1024 for p in parts if p and p[0][:-1] in names}


def children(pid: int) -> list[int]:
    """Return the pids of all living processes below `pid`, however deep."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(child) for child in task.read_text(encoding="ascii").split()]
        except OSError:
            continue
        for child in direct:
            found += [child, *children(child)]
    return found


def tree_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of `pid` and of all living processes below it."""
    return cpu_seconds(pid) + sum(cpu_seconds(child) for child in children(pid))


def tree_rss_bytes(pid: int) -> int:
    """Return the resident bytes of `pid` and of all living processes below it."""
    return sum(memory_bytes(each).get("rss", 0) for each in (pid, *children(pid)))


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
